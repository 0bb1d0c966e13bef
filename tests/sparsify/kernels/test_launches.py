"""Kept kernels are launched as Triton would launch them: recorded where there is no GPU, in a process of its
own, for a GPU that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsify.core import host_sync
from sparsify.types import Sparse
from tests.sparsify.kernels.test_machine_code import of_own_process

N = 40_000  # larger than a sample
STREAM = 7  # of the GPU that is not there, in the end


@pytest.fixture(scope="module")
def report() -> Any:
    return of_own_process("test_launches.compare_launches")


def test_every_kept_launch_is_what_triton_would_launch(report: Any) -> None:
    """Whatever was launched before, and whatever changes between two steps."""
    for name, (kept, ordinary) in report["launches"].items():
        assert kept, name
        assert kept == ordinary, name


def test_a_kept_kernel_is_used_for_what_it_was_compiled_for_only(report: Any) -> None:
    steps = {name: kept for name, (kept, _) in report["launches"].items()}
    compiled = {name: [launch[0] for launch in kept] for name, kept in steps.items()}
    for name in ("another k", "another gradient", "another stream"):
        assert compiled[name] == compiled["first"], name
        assert steps[name] != steps["first"], name
    for name in ("gradient off by one", "residual off by one", "strided", "bfloat16", "no gradient"):
        assert compiled[name] != compiled["first"], name


def test_a_factor_is_a_number_of_floating_point_whatever_was_given(report: Any) -> None:
    for name, factor in ("added", 1.0), ("subtracted", -0.25):
        (launch,) = report["launches"][name][0]
        assert launch[0] == report["launches"]["added"][0][0][0]
        assert factor in launch[3]


def test_triton_is_not_asked_again_unless_a_profiler_listens(report: Any) -> None:
    assert report["asked"]["second time"] == []
    assert len(report["asked"]["while a profiler listens"]) == len(report["launches"]["first"][0])


@pytest.mark.parametrize("hooks", ["none", "absent", "plain functions", "a chain and none"])
def test_hooks_of_any_kind_are_heard_where_there_are_some(report: Any, hooks: str) -> None:
    """Triton takes None for a hook that nobody listens to, and any function for one."""
    steps = len(report["launches"]["first"][0])
    heard = hooks in ("plain functions", "a chain and none")
    assert len(report["hooks"][hooks]) == (steps if heard else 0)


def test_an_unknown_triton_is_left_to_launch_by_itself_and_that_is_said_once() -> None:
    said = of_own_process("test_launches.with_an_unknown_triton")
    assert said["keep"] == [False, False]
    (line,) = said["warnings"]
    assert "Triton 99.0.0" in line
    assert "its own launches" in line


class Recorder:
    """A launcher that starts nothing: (compiled kernel, programs, stream, arguments) of every launch."""

    def __init__(self) -> None:
        self.launches, self.num_compiled = list[Any](), 0

    def __call__(self, kernel: str) -> Callable[..., None]:
        self.num_compiled += 1
        name = f"{kernel} {self.num_compiled}"

        def start(*given: Any) -> None:
            addresses = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in given[9:]]
            self.launches.append((name, given[:3], given[3], addresses))

        return start

    def of(self, call: Callable[[], Sparse]) -> list[Any]:
        """What a call launches; its result is new at each call, so instead of its addresses: its names."""
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

    from experiments.bench.launch import replace_gpu
    from sparsify.kernels import gpu, launches, segments

    recorder, asked = Recorder(), list[str]()
    replace_gpu(launcher=recorder)
    run: Callable[..., Any] = triton.runtime.JITFunction.run

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(self.fn.__name__)
        return run(self, *args, **options)

    triton.runtime.JITFunction.run = counted
    acc, grad, another = (torch.zeros(2 * N + 1) for _ in range(3))
    kernel = gpu.Gpu(acc[:N])
    together = segments.GpuSegments([acc[:N], acc[N : 2 * N]])
    part = Sparse(torch.arange(N + 5, dtype=torch.int32), torch.ones(N + 5))

    def add(alpha: float) -> Sparse:
        together.add([another[: 2 * N]], [part], alpha)
        return part

    def step(acc: Tensor, grad: Tensor | None, k: int = 400) -> Callable[[], Sparse]:
        return lambda: kernel.topk(acc, grad, k)

    steps: dict[str, Callable[[], Sparse]] = {
        "first": step(acc[:N], grad[:N]),
        "another k": step(acc[:N], grad[:N], 40),
        "another gradient": step(acc[:N], another[:N]),
        "gradient off by one": step(acc[:N], grad[1 : N + 1]),
        "residual off by one": step(acc[1 : N + 1], grad[:N]),
        "both off by one": step(acc[1 : N + 1], grad[1 : N + 1]),
        "strided": step(acc[:N], grad[: 2 * N : 2]),
        "bfloat16": step(acc[:N], grad[:N].bfloat16()),
        "no gradient": step(acc[:N], None),
        "shorter": step(acc[: N // 2 + 1], grad[: N // 2 + 1], 41),
        "too dense for a sample": step(acc[:N], grad[:N], N - 1),
        "another stream": step(acc[:N], grad[:N]),
        "added": lambda: add(1),
        "subtracted": lambda: add(-0.25),
        "above": lambda: kernel.above(acc[:N], grad[:N], 0.0),
        "above, strictly": lambda: kernel.above(acc[:N], None, 0.0, strict=True),
    }
    host_sync.to_host = lambda tensor: 5  # what is above, since nothing counts
    taken: dict[str, list[Any]] = {name: [] for name in steps}
    for keep in (True, True, False):  # the first time they are kept
        kernel.launch.keep = together.launch.keep = keep
        for name, call in steps.items():
            driver.active.get_current_stream = lambda device, name=name: STREAM * (name == "another stream")
            taken[name].append(recorder.of(call))
    kernel.launch.keep = True
    when = {}
    for name in ("second time", "while a profiler listens"):
        asked.clear()
        steps["first"]()
        when[name] = list(asked)
        triton.knobs.runtime.launch_enter_hook.calls.append(print)
    listening = triton.knobs.HookChain()
    listening.add(print)
    runtime, hooked = triton.knobs.runtime, dict[str, list[str]]()
    names = "launch_enter_hook", "launch_exit_hook"
    for name, (enter, leave) in {
        "none": (None, None),
        "absent": (None, None),
        "plain functions": (print, print),
        "a chain and none": (listening, None),
    }.items():
        for hook, found in zip(names, (enter, leave), strict=True):
            setattr(runtime, hook, found)  # Triton itself asks for both
        with pytest.MonkeyPatch.context() as patch:
            if name == "absent":
                patch.setattr(launches, "knobs", SimpleNamespace(runtime=SimpleNamespace()))
            asked.clear()
            steps["first"]()
            hooked[name] = list(asked)
    found_launches = {name: found[1:] for name, found in taken.items()}
    print(json.dumps({"launches": found_launches, "asked": when, "hooks": hooked}))


def with_an_unknown_triton() -> None:
    import logging

    import triton

    triton.__version__ = "99.0.0"
    from sparsify.kernels.launches import Launcher

    warnings = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign] # a listener
    logging.getLogger("sparsify").addHandler(handler)
    print(json.dumps({"keep": [Launcher().keep, Launcher().keep], "warnings": warnings}))
