"""An NVIDIA GPU that is not there: Triton compiles for it, on any machine, and nothing runs.

It replaces Triton's driver in the whole process, so it belongs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from sparsify.kernels import gpu

Start = Callable[..., None]  # what Triton calls to start a kernel
SHARED_BYTES, THREADS = 232_448, 1024  # that a block may have on compute capability 9.0


def nothing(*given: object) -> None:
    """A launcher that does nothing."""


def replace_gpu(capability: int = 90, launcher: Callable[[str], Start] = lambda kernel: nothing) -> None:
    """From now on `gpu.Gpu` takes tensors on the CPU, as if they were on such a GPU.

    Args:
        launcher: called once for each compiled kernel, by its name; the result, at every launch of it.
    """
    driver.set_active(AbsentGpu(capability, launcher))
    gpu.INTERPRETED = True


class AbsentGpu:
    """As much of a driver as Triton asks for when it compiles, loads and starts kernels."""

    def __init__(self, capability: int, launcher: Callable[[str], Start]) -> None:
        self.capability, self.utils = capability, Utils()
        self.launcher_cls = lambda source, metadata: launcher(source.fn.__name__)

    def get_current_device(self) -> int:
        return self.capability  # for each another device, since Triton keeps what it compiled by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Module, function, registers, spilled bytes, threads that a block may have."""
        return object(), 0, 0, 0, THREADS

    def unload_module(self, module: object) -> None: ...
