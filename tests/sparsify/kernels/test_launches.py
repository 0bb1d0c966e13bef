"""Kept kernels are launched as Triton would launch them.

Where there is no GPU, launches are recorded in a process of their own, for a GPU that is not there.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sparsify.core import host_sync
from sparsify.types import SparseVector
from tests.sparsify.kernels.test_machine_code import call_in_own_process

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton")
N = 40_000  # larger than a sample
STREAM = 7  # of the GPU that is not there, in the end


@pytest.fixture(scope="module")
def report() -> Any:
    return call_in_own_process("test_launches.compare_launches")


def test_every_kept_launch_is_what_triton_would_launch(report: Any) -> None:
    """The compiled kernel is the same, whatever was launched before and whatever changes between steps."""
    launches = report["launches"]
    for name, (kept, ordinary) in launches.items():
        assert kept, name
        assert kept == ordinary, name
    assert len({launch[0] for kept, _ in launches.values() for launch in kept}) > 20
    assert -0.25 in launches["subtracted"][0][0][3]


def test_triton_is_not_asked_again_unless_a_profiler_listens(report: Any) -> None:
    """Triton takes None for a hook that nobody listens to, and any function for one."""
    steps = len(report["launches"]["first"][0])
    asked = report["asked"]
    assert asked["second time"] == asked["none"] == 0
    assert asked["plain functions"] == asked["a chain and none"] == steps


def test_an_unknown_triton_is_left_to_launch_by_itself_and_that_is_said_once(report: Any) -> None:
    assert report["keep"] == [False, False]
    (line,) = report["warnings"]
    assert "Triton 99.0.0" in line
    assert "its own launches" in line


class Recorder:
    """A launcher that starts nothing: (compiled kernel, programs, stream, arguments) of every launch."""

    def __init__(self) -> None:
        self.launches = list[Any]()
        self.num_compiled = 0

    def __call__(self, kernel: str) -> Callable[..., None]:
        self.num_compiled += 1
        name = f"{kernel} {self.num_compiled}"

        def start(*given: Any) -> None:
            addresses = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in given[9:]]
            self.launches.append((name, given[:3], given[3], addresses))

        return start

    def record(self, call: Callable[[], SparseVector]) -> list[Any]:
        """Return what a call launches; its result is new at each call, so instead of its addresses: names."""
        self.launches = []
        indices, values = call()
        new = {indices.data_ptr(): "indices", values.data_ptr(): "values"}
        return [
            (name, programs, stream, [new.get(arg, arg) for arg in args])
            for name, programs, stream, args in self.launches
        ]


def compare_launches() -> None:
    """Print what some steps launch as kept kernels and as Triton's own, and when Triton was asked."""
    import triton
    from triton.runtime.driver import driver

    from experiments.bench.launch import install_compile_only_driver
    from sparsify.kernels import triton_group_search, triton_launcher, triton_search

    recorder = Recorder()
    install_compile_only_driver(make_start=recorder)
    acc, grad, another = (torch.zeros(2 * N + 1) for _ in range(3))
    kernel = triton_search.TritonKernel(acc[:N])
    together = triton_group_search.TritonGroupKernel([acc[:N], acc[N : 2 * N]])
    part = SparseVector(torch.arange(N + 5, dtype=torch.int32), torch.ones(N + 5))

    def add(alpha: float) -> SparseVector:
        together.add([another[: 2 * N]], [part], alpha)
        return part

    def step(acc: Tensor, grad: Tensor | None, k: int = 400) -> Callable[[], SparseVector]:
        return lambda: kernel.topk(acc, grad, k)

    own = acc[:N]
    added = grad[:N]
    steps: dict[str, Callable[[], SparseVector]] = {
        "first": step(own, added),
        "another k": step(own, added, 40),
        "gradient off by one": step(own, grad[1 : N + 1]),
        "residual off by one": step(acc[1 : N + 1], added),
        "strided": step(own, grad[: 2 * N : 2]),
        "bfloat16": step(own, added.bfloat16()),
        "no gradient": step(own, None),
        "shorter": step(own[:20_001], added[:20_001], 41),
        "too dense for a sample": step(own, added, N - 1),
        "another stream": step(own, added),
        "added": lambda: add(1),
        "subtracted": lambda: add(-0.25),
        "above": lambda: kernel.above_threshold(own, added, 0.0),
        "above, strictly": lambda: kernel.above_threshold(own, None, 0.0, strict=True),
    }
    host_sync.to_host = lambda tensor: 5  # what is above, since nothing counts
    recorded: dict[str, list[Any]] = {name: [] for name in steps}
    for keep in (True, True, False):  # the first time they are kept
        kernel.launch.keeps_compiled = keep
        together.launch.keeps_compiled = keep
        for name, call in steps.items():
            driver.active.get_current_stream = lambda device, name=name: STREAM * (name == "another stream")
            recorded[name].append(recorder.record(call))
    kernel.launch.keeps_compiled = True

    run: Callable[..., Any] = triton.runtime.JITFunction.run
    runtime = triton.knobs.runtime
    chain = triton.knobs.HookChain()
    chain.add(print)
    asked = list[str]()

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(self.fn.__name__)
        return run(self, *args, **options)

    def count_asked(enter: Any, leave: Any) -> int:
        runtime.launch_enter_hook = enter  # Triton itself asks for both
        runtime.launch_exit_hook = leave
        asked.clear()
        steps["first"]()
        return len(asked)

    with mock.patch.object(triton.runtime.JITFunction, "run", noted):
        num_asked = {
            "second time": count_asked(runtime.launch_enter_hook, runtime.launch_exit_hook),
            "plain functions": count_asked(print, print),
            "a chain and none": count_asked(chain, None),
            "none": count_asked(None, None),
        }

    triton_launcher.can_launch_compiled_directly.cache_clear()
    triton.__version__ = "99.0.0"
    with mock.patch.object(logging.getLogger("sparsify.kernels.triton_launcher"), "warning") as warning:
        are_kept = [triton_launcher.KernelLauncher().keeps_compiled for _ in range(2)]
    warnings = [call.args[0] % call.args[1:] for call in warning.call_args_list]
    both = {name: found[1:] for name, found in recorded.items()}
    print(json.dumps({"launches": both, "asked": num_asked, "keep": are_kept, "warnings": warnings}))
