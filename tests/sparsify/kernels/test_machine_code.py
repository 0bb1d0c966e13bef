"""What the Triton kernels become: registers, spills and the width of loads, for three generations of GPUs.

Compiled here, without any of them, in a process of its own; pytest -s prints the table.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import python

CAPABILITIES = (80, 90, 100)  # A100, H200, B200
N = 3_000_010  # so large that a bound is guessed
REGISTERS = 65_536  # of a multiprocessor, of each generation
# Before 3.8, Triton keeps the histograms of a whole warp in registers.
LEAN_SINCE = (3, 8)
# At most so many registers for a thread. Of the pass over memory it decides how many blocks share a
# multiprocessor, and so how many loads are on their way at a time.
AT_MOST = {
    "guess": 64,  # 1024 threads can have no more
    "stream": 56,
    "gather": 80,
    "count_next": 64,
    "count_last": 64,
    "emit": 100,
    "stream_above": 56,
    "gather_in_order": 40,
    "add_and_count": 72,
    "count_middle": 56,
    "count_low": 64,
    "emit_all": 120,
    "add_part": 32,
}
SEGMENTS = ("add_and_count", "count_middle", "count_low", "emit_all")  # of many buckets
HISTOGRAMS = ("gather", "count_next", "count_last", "emit", *SEGMENTS)

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not made for this system"
    ),
]
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def table() -> Rows:
    rows: Rows = call_in_own_process("test_machine_code.describe_all")
    for row in rows:
        print({name: value for name, value in row.items() if value})
    return rows


def call_in_own_process(function: str) -> Any:
    """Return what a function of these tests prints as JSON, in a process that does not interpret kernels."""
    module, _, name = function.partition(".")
    program = f"from tests.sparsify.kernels import {module}; {module}.{name}()"
    surroundings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = python("-c", program, env=surroundings)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kernel_is_compiled_for_every_generation_with_few_registers(table: Rows) -> None:
    """The interpreter forgives what the compiler does not. To machine code, with what Triton brings."""
    compiled = {(row["capability"], row["kernel"]) for row in table}
    assert compiled == set(product(CAPABILITIES, AT_MOST))
    for row in table:
        if row["kernel"] not in HISTOGRAMS or tuple(row["triton"]) >= LEAN_SINCE:
            is_lean = row["registers"] <= AT_MOST[row["kernel"]]
            assert is_lean or row["case"] in ("neither aligned", "buckets not aligned"), row
            assert row["spilled"] == 0, row
        if row["kernel"] in ("stream", "stream_above") and row["case"] != "neither aligned":
            # Four blocks of the pass share a multiprocessor.
            assert REGISTERS // (row["registers"] * row["threads"]) >= 4, row


def test_the_pass_waits_for_no_atomic_and_its_loads_are_as_wide_as_they_can_be(table: Rows) -> None:
    """What it counts is added on the way (RED); an addition that returned something would be waited for, in
    nearly every tile. 8 elements a thread: of float32, two loads of 16 bytes; of bfloat16, one.
    """
    wide_loads = {"float32": 4, "no gradient": 2, "bfloat16": 3, "gradient not aligned": 2}
    for row in table:
        if row["kernel"] == "stream":
            assert (row["added"], row["returned"]) == (1, 0), row
            assert row["wide_loads"].get("16", 0) == wide_loads.get(row["case"], 0), row


def test_loads_of_many_buckets_are_wide_where_all_are_aligned(table: Rows) -> None:
    """And a product is rounded before it is added, as torch's index_add_ does it: workers that add by either
    agree.
    """
    for row in table:
        if row["kernel"] in SEGMENTS:
            assert (row["wide_loads"].get("16", 0) > 0) == (row["case"] == "buckets"), row
        if row["kernel"] == "add_part":
            assert row["fused"] == 0, row


def describe_all() -> None:
    """Print a row for each compiled kernel, as one line of JSON."""
    from experiments.bench.launch import replace_gpu
    from sparsify.core import host_sync
    from sparsify.kernels import gpu, segments

    host_sync.to_host = lambda tensor: 5  # what is above, since nothing counts
    acc, grad = torch.zeros(N + 1), torch.zeros(N + 1)
    cases = {
        "float32": (acc[:N], grad[:N]),
        "no gradient": (acc[:N], None),
        "bfloat16": (acc[:N], grad[:N].bfloat16()),
        "gradient not aligned": (acc[:N], grad[1:]),
        "neither aligned": (acc[1:], grad[1:]),
    }
    rows = []
    for capability in CAPABILITIES:
        replace_gpu(capability)
        for case, (own, added) in cases.items():
            if case != "float32" and capability != 90:
                continue
            kernel = gpu.Gpu(own)
            kernel.topk(own, added, N // 10)  # so many that they are refined
            if case == "float32":
                kernel.above(own, added, 1.0)
            for launch in chain(*kernel.launch.kept.values()):
                if case == "float32" or launch.compiled.name == "stream":
                    rows.append({"case": case, **facts(launch.compiled, capability)})
        for case, at in {"buckets": 0, "buckets not aligned": 1}.items():
            if at and capability != 90:
                continue
            likes = acc[at : at + 5000], acc[at + 8192 : at + 8292]
            together = segments.GpuSegments(likes)
            found = together.topk(likes, likes, [5, 1])
            together.add(likes, [found], -0.5)
            for launch in chain(*together.launch.kept.values()):
                rows.append({"case": case, **facts(launch.compiled, capability)})
    print(json.dumps(rows))


def facts(compiled: Any, capability: int) -> dict[str, Any]:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as code:
        code.write(compiled.asm["cubin"])
        code.flush()
        words = [str(tool), "-res-usage", "-sass", code.name]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert usage, said
    registers, stack, local = map(int, usage.groups())
    loads = re.findall(r"ld\.global[.\w]*\.v(\d)\.b(\d+)", compiled.asm["ptx"])
    return {
        "kernel": compiled.name,
        "capability": capability,
        "triton": [int(number) for number in re.findall(r"\d+", triton.__version__)[:2]],
        "threads": 32 * compiled.metadata.num_warps,
        "registers": registers,
        "spilled": stack + local,
        "added": len(re.findall(r"\bREDG?\.", said)),
        "returned": len(re.findall(r"\bATOMG?\.", said)),
        "fused": len(re.findall(r"\bfma\.rn\.f32", compiled.asm["ptx"])),
        "wide_loads": Counter(str(int(number) * int(bits) // 8) for number, bits in loads),
    }
