"""The launches of a fused step on CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.bench._runner import Benchmark, Record, summarise_turn_ratios, summarise_turn_times
from experiments.bench._timing import (
    CallTimer,
    choose_device_and_set_threads,
    describe_machine_and_code,
    time_calls_in_turns,
)
from sparsify.ranges import PositiveInt

DENSITY = 0.01
WARM_UP_TURNS = 20  # the first steps compile, and keep
TARGET_US = 30
HOST_FIELDS = {"ordinary": "ordinary_host_us", "kept": "host_us"}
RATIO_FIELD = "ordinary_over_kept"
SHARED_MEMORY_BYTES = 232_448  # that a block may have on compute capability 9.0
MAX_THREADS = 1024

StartKernel = Callable[..., None]  # what Triton calls to start a kernel


def launch(*, n: PositiveInt = 100_010, repeats: PositiveInt = 1000) -> Benchmark:
    """Time the host in one fused step on CUDA, acc += grad and its k largest, launched in two ways.

    *ordinary*: every launch is Triton's own, kernel[grid](...). *kept*: compiled kernels are kept and
    launched directly, as `select=fused` does (sparsify/kernels/triton_launcher.py). Both take a step in every
    repetition, in random order. Without a GPU, kernels are compiled for compute capability 9.0 and the
    launcher does nothing, so that what is timed is Python alone; with one, kernels are started, and the
    device is idle when a step begins.

    Args:
        n: number of elements; it hardly matters to the host.
        repeats: number of timed steps of each kind.
    """
    import triton  # takes its time

    device = choose_device_and_set_threads(None, threads=1)
    versions = {
        "launcher": "the driver's" if device.type == "cuda" else "does nothing; no GPU",
        "python": ".".join(map(str, sys.version_info[:3])),
        "triton": triton.__version__,
    }
    return Benchmark(
        machine=describe_machine_and_code(device),
        description=", ".join(f"{name}: {value}" for name, value in versions.items()),
        cases=[{"n": n, "k": int(DENSITY * n)}],
        settings={"repeats": repeats, **versions},
        measure=lambda case: [versions | time_host(case, repeats, device)],
        header="host time of a step, us | ordinary | kept | ordinary / kept | repetitions",
        row_format="n = {n:,}, k = {k:,} | {ordinary_host_us:.1f} | {host_us:.1f} | "
        "{ordinary_over_kept:.1f} | {host_us[n]}",
        summarise=lambda rows: {
            "target_us": TARGET_US,
            **{
                field: rows[0][field]
                for field in ("torch", "n", "k", *versions, *HOST_FIELDS.values(), RATIO_FIELD)
            },
        },
    )


def time_host(case: Record, repeats: int, device: torch.device) -> Record:
    """Return the microseconds of the host for each kind of step."""
    from sparsify.kernels import triton_search

    if device.type == "cpu":
        install_compile_only_driver()
    acc = torch.zeros(case["n"], device=device)
    grad = torch.zeros(case["n"], device=device)
    calls = dict[str, Callable[[], object]]()
    for name in HOST_FIELDS:
        kernel = triton_search.TritonKernel(acc)
        kernel.launch.keeps_compiled = name == "kept"
        calls[name] = partial(kernel.topk, acc, grad, case["k"])
    times = time_calls_in_turns(
        calls, CallTimer(device, "call"), repeats, warm_up=WARM_UP_TURNS
    ).wall_ms_by_call
    row: Record = {HOST_FIELDS[name]: summarise_turn_times(times[name], 1e3) for name in HOST_FIELDS}
    return row | {RATIO_FIELD: summarise_turn_ratios(times["ordinary"], times["kept"])}


def install_compile_only_driver(
    capability: int = 90,
    make_start: Callable[[str], StartKernel] = lambda kernel: lambda *arguments: None,
) -> None:
    """Make `TritonKernel` take tensors on the CPU from now on, as if they were on such a GPU.

    The GPU is not there: Triton compiles for it, on any machine, and nothing runs. It replaces Triton's
    driver in the whole process, so it belongs in a process of its own.

    Args:
        make_start: called once for each compiled kernel, by its name; the result, at every launch of it.
    """
    from triton.runtime.driver import driver

    from sparsify.kernels import triton_search

    driver.set_active(CompileOnlyDriver(capability, make_start))
    triton_search.INTERPRETED = True


class CompileOnlyDriver:
    """A driver of Triton for a GPU that is not there: kernels are compiled, and their launches do nothing."""

    def __init__(self, capability: int, make_start: Callable[[str], StartKernel]) -> None:
        self.capability = capability
        self.utils = self
        self.launcher_cls = lambda source, metadata: make_start(source.fn.__name__)

    def get_current_device(self) -> int:
        return self.capability  # for each another device, since Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    # Of `utils`:

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY_BYTES}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return module, function, registers, spilled bytes, threads that a block may have."""
        return object(), 0, 0, 0, MAX_THREADS

    def unload_module(self, module: object) -> None: ...
