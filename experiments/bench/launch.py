"""The launches of a fused step on CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from experiments.bench._runner import Bench, Record, ratio, spread
from experiments.bench._timing import Clock, device_of, facts, in_turn
from sparsify.ranges import PositiveInt

DENSITY = 0.01
WARM_UP = 20  # the first steps compile, and keep
TARGET_US = 30
HOST, RATIO = {"ordinary": "ordinary_host_us", "kept": "host_us"}, "ordinary_over_kept"
SHARED_BYTES, THREADS = 232_448, 1024  # that a block may have on compute capability 9.0

Start = Callable[..., None]  # what Triton calls to start a kernel


def launch(*, n: PositiveInt = 100_010, repeats: PositiveInt = 1000) -> Bench:
    """Host time of one fused step on CUDA: acc += grad and its k largest, launched in two ways, side by side.

    *ordinary*: every launch is Triton's own, kernel[grid](...). *kept*: compiled kernels are kept and
    launched directly, as `select=fused` does (sparsify/kernels/triton_launcher.py). Both take a step in every
    repetition, in random order. Without a GPU, kernels are compiled for compute capability 9.0 and the
    launcher does nothing, so that what is timed is Python alone; with one, kernels are started, and the
    device is idle when a step begins.

    Args:
        n: elements; they hardly matter to the host.
        repeats: steps of each kind that are timed.
    """
    import triton  # takes its time

    device = device_of(None, threads=1)
    versions = {
        "launcher": "the driver's" if device.type == "cuda" else "does nothing; no GPU",
        "python": ".".join(map(str, sys.version_info[:3])),
        "triton": triton.__version__,
    }
    return Bench(
        about=facts(device),
        head=", ".join(f"{name}: {value}" for name, value in versions.items()),
        cases=[{"n": n, "k": int(DENSITY * n)}],
        setting={"repeats": repeats, **versions},
        measure=lambda case: [versions | measure(case, repeats, device)],
        heading="host time of a step, us | ordinary | kept | ordinary / kept | repetitions",
        row="n = {n:,}, k = {k:,} | {ordinary_host_us:.1f} | {host_us:.1f} | {ordinary_over_kept:.1f} | "
        "{host_us[n]}",
        last=lambda rows: {
            "target_us": TARGET_US,
            **{name: rows[0][name] for name in ("torch", "n", "k", *versions, *HOST.values(), RATIO)},
        },
    )


def measure(case: Record, repeats: int, device: torch.device) -> Record:
    """Microseconds of the host for each step of each kind."""
    from sparsify.kernels import triton_search

    if device.type == "cpu":
        replace_gpu()
    acc, grad = torch.zeros(case["n"], device=device), torch.zeros(case["n"], device=device)
    kernels = {name: triton_search.TritonKernel(acc) for name in HOST}
    for name, kernel in kernels.items():
        kernel.launch.keeps_compiled = name == "kept"
    calls = {name: lambda each=each: each.topk(acc, grad, case["k"]) for name, each in kernels.items()}
    took = in_turn(calls, Clock(device, "call"), repeats, warm_up=WARM_UP)
    found = {HOST[name]: spread([1e3 * ms for ms in samples.values()]) for name, samples in took.items()}
    return found | {RATIO: ratio(took["ordinary"], took["kept"])}


def replace_gpu(
    capability: int = 90, launcher: Callable[[str], Start] = lambda kernel: lambda *given: None
) -> None:
    """Make `TritonKernel` take tensors on the CPU from now on, as if they were on such a GPU.

    The GPU is not there: Triton compiles for it, on any machine, and nothing runs. It replaces Triton's
    driver in the whole process, so it belongs in a process of its own.

    Args:
        launcher: called once for each compiled kernel, by its name; the result, at every launch of it.
    """
    from triton.runtime.driver import driver

    from sparsify.kernels import triton_search

    driver.set_active(AbsentGpu(capability, launcher))
    triton_search.INTERPRETED = True


class AbsentGpu:
    """The part of a driver that Triton asks for when it compiles, loads and starts kernels."""

    def __init__(self, capability: int, launcher: Callable[[str], Start]) -> None:
        self.capability, self.utils = capability, self
        self.launcher_cls = lambda source, metadata: launcher(source.fn.__name__)

    def get_current_device(self) -> int:
        return self.capability  # for each another device, since Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    # Of `utils`:

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers, spilled bytes, threads that a block may have."""
        return object(), 0, 0, 0, THREADS

    def unload_module(self, module: object) -> None: ...
