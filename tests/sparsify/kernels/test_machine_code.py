"""Machine code of the Triton kernels: registers, spills and the width of loads, for three kinds of GPU.

Compiled here, without any of them, in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import python

CAPABILITIES = (80, 90, 100)  # A100, H200, B200
N = 3_000_010  # so large that a bound is guessed
# Before 3.8, Triton keeps the histograms of a whole warp in registers.
LEAN_SINCE = (3, 8)
# At most so many registers for a thread. Of the pass over memory it decides how many blocks share a
# multiprocessor, and so how many loads are on their way at a time.
AT_MOST = {
    "guess_bound": 64,  # 1024 threads can have no more
    "accumulate_and_mark": 56,
    "gather_candidates": 80,
    "count_middle_bits": 64,
    "count_low_bits": 64,
    "emit_largest": 100,
    "accumulate_and_mark_above": 56,
    "gather_marked": 40,
    "accumulate_and_count": 72,
    "count_group_middle_bits": 56,
    "count_group_low_bits": 64,
    "emit_group_largest": 128,
    "add_selection": 32,
}
SEGMENTS = (
    "accumulate_and_count",
    "count_group_middle_bits",
    "count_group_low_bits",
    "emit_group_largest",
)  # of many buckets
WIDE_LOADS = {
    "float32": 4, "no gradient": 2, "bfloat16": 3, "gradient not aligned": 2, "neither aligned": 0,
}  # fmt: skip
HISTOGRAMS = ("gather_candidates", "count_middle_bits", "count_low_bits", "emit_largest", *SEGMENTS)

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not made for this system"
    ),
]


def call_in_own_process(function: str) -> Any:
    """Return what a function of these tests prints as JSON, in a process that does not interpret kernels."""
    module, _, name = function.partition(".")
    program = f"from tests.sparsify.kernels import {module}; {module}.{name}()"
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = python("-c", program, env=surroundings)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_are_compiled_for_every_generation_to_lean_machine_code() -> None:
    """The interpreter forgives what the compiler does not. To machine code, with what Triton brings."""
    compiled = call_in_own_process("test_machine_code.check_all")
    assert sorted(compiled) == sorted(AT_MOST)


def check_all() -> None:
    """Print the names of the kernels, whose machine code is checked for each generation."""
    from experiments.bench.launch import install_compile_only_driver
    from sparsify.core import host_sync
    from sparsify.kernels import triton_group_search, triton_search

    host_sync.to_host = lambda tensor: 5  # what is above, since nothing counts
    acc, grad = torch.zeros(N + 1), torch.zeros(N + 1)
    inputs = {
        "float32": (acc[:N], grad[:N]),
        "no gradient": (acc[:N], None),
        "bfloat16": (acc[:N], grad[:N].bfloat16()),
        "gradient not aligned": (acc[:N], grad[1:]),
        "neither aligned": (acc[1:], grad[1:]),
    }
    for capability in CAPABILITIES:
        install_compile_only_driver(capability)
        names = set[str]()
        for case, (own, added) in inputs.items():
            if case == "float32" or capability == 90:
                kernel = triton_search.TritonKernel(own)
                kernel.topk(own, added, N // 10)  # so many that they are refined
                if case == "float32":
                    kernel.above_threshold(own, added, 1.0)
                names |= check_launches(kernel, case)
        for case, at in {"buckets": 0, "buckets not aligned": 1}.items():
            if case == "buckets" or capability == 90:
                likes = acc[at : at + 5000], acc[at + 8192 : at + 8292]
                together = triton_group_search.TritonGroupKernel(likes)
                together.add(likes, [together.topk(likes, likes, [5, 1])], -0.5)
                names |= check_launches(together, case)
        assert names == set(AT_MOST), capability
    print(json.dumps(list(names)))


def check_launches(kernel: Any, case: str) -> set[str]:
    """Check what a kernel has compiled; return the names."""
    names = set[str]()
    for launch in chain(*kernel.launch.compiled_by_kind.values()):
        name = launch.compiled.name
        if case in ("float32", "buckets", "buckets not aligned") or name == "accumulate_and_mark":
            print(case, name)
            check_code(launch.compiled, name, case)
            names.add(name)
    return names


def check_code(compiled: Any, name: str, case: str) -> None:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as code:
        code.write(compiled.asm["cubin"])
        code.flush()
        words = [str(tool), "-res-usage", "-sass", code.name]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert usage, said
    registers, *spilled = map(int, usage.groups())
    if name not in HISTOGRAMS or version_of(triton) >= LEAN_SINCE:
        assert registers <= AT_MOST[name] or case in ("neither aligned", "buckets not aligned"), registers
        assert spilled == [0, 0]
    loads = re.findall(r"ld\.global[.\w]*\.v(\d)\.b(\d+)", compiled.asm["ptx"])
    num_wide = sum(int(number) * int(bits) == 128 for number, bits in loads)
    if name == "accumulate_and_mark":
        # What it counts is added on the way (RED); an addition that returned something would be waited for,
        # in nearly every tile. 8 elements a thread: of float32, two loads of 16 bytes; of bfloat16, one.
        assert len(re.findall(r"\bREDG?\.", said)) == 1
        assert not re.search(r"\bATOMG?\.", said)
        assert num_wide == WIDE_LOADS[case]
    if name in SEGMENTS:
        assert (num_wide > 0) == (case == "buckets")
    if name == "add_selection":
        # A product is rounded before it is added, as torch's index_add_ does it: workers that add by either
        # agree.
        assert not re.search(r"\bfma\.rn\.f32", compiled.asm["ptx"])


def version_of(triton: Any) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
