"""Triton's kernels launched without asking Triton each time which compiled one is meant.

An ordinary launch binds its arguments, reads their types, alignments and strides, and looks up what was
compiled for such: that takes the host longer than most of these kernels take the device. Here it is done once
for every kind of arguments; later launches hand the compiled kernel, addresses and numbers to the driver.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

# Versions whose compiled kernels are started as `start` does: read in their compiler/compiler.py.
VERIFIED = ((3, 5), (3, 9))
ALIGNMENT = 16  # bytes; Triton compiles another kernel for addresses that are no multiple
log = logging.getLogger(__name__)


class Launch(NamedTuple):
    """A kernel, and the name of the number of programs that run it. Its arguments are found by their names in
    its signature, where constants come last.
    """

    kernel: Any
    programs: str
    num_warps: int
    constants: Mapping[str, Any]


Launches = Sequence[Launch]


class Kept(NamedTuple):
    """A launch with its compiled kernel, which is held so that the driver does not unload it."""

    compiled: Any
    programs: str
    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    constants: tuple[Any, ...]

    def start(self, values: Mapping[str, Any], stream: Any) -> None:
        """Launch the kernel on a stream."""
        compiled = self.compiled
        compiled.run(
            values[self.programs], 1, 1, stream, compiled.function, compiled.packed_metadata,
            None, None, None,  # launch metadata and hooks: for profilers, see `is_watched`
            *self.arguments(values), *self.constants,
        )  # fmt: skip


class Launcher:
    """Launches on one device, which whoever calls has made the current one; without `keep` Triton's own."""

    def __init__(self, keep: bool = True) -> None:
        self.keep = keep and can_keep()
        self.kept: dict[Hashable, list[Kept]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.addresses: dict[str, int] = {}

    def hold(self, **buffers: Tensor) -> None:
        """Buffers given to kernels at every launch, allocated and so aligned, until it is replaced."""
        self.buffers |= buffers
        self.addresses |= {name: buffer.data_ptr() for name, buffer in buffers.items()}

    def __call__(
        self,
        plan: Callable[..., Launches],
        choices: tuple[Hashable, ...],
        tensors: Mapping[str, Tensor],
        numbers: Mapping[str, int | float],
    ) -> None:
        """Launch plan(*choices), in order. `tensors` are 1-D, others at each call; the stride of `acc` is
        given to kernels as `acc_stride`. For no value of `numbers` Triton compiles a kernel of its own:
        do_not_specialize.
        """
        strides = {f"{name}_stride": tensor.stride(0) for name, tensor in tensors.items()}
        if not self.keep or is_watched():
            ask(plan(*choices), {**self.buffers, **tensors, **strides, **numbers})
            return
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        types = [tensor.dtype for tensor in tensors.values()]
        aligned = [address % ALIGNMENT == 0 for address in addresses.values()]
        kind = (plan.__name__, choices, *types, *aligned, *strides.values())
        kept = self.kept.get(kind)
        if kept is None:
            self.kept[kind] = ask(plan(*choices), {**self.buffers, **tensors, **strides, **numbers})
            return
        values = {**self.addresses, **addresses, **strides, **numbers}
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        for launch in kept:
            launch.start(values, stream)


def ask(launches: Launches, values: Mapping[str, Any]) -> list[Kept]:
    """Launch as Triton does; what it compiled for such arguments."""
    kept = []
    for launch in launches:
        names = launch.kernel.arg_names
        num_given = len(names) - len(launch.constants)
        arguments = itemgetter(*names[:num_given])
        compiled = launch.kernel[(values[launch.programs],)](
            *arguments(values),
            **launch.constants,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,  # a product is rounded before it is added, as torch rounds it
        )
        constants = tuple(launch.constants[name] for name in names[num_given:])
        kept.append(Kept(compiled, launch.programs, arguments, constants))
    return kept


def is_watched() -> bool:
    """True if a profiler wants to hear of launches. Only Triton's own tell it. A hook is a chain of calls, a
    function that somebody put in its place, or None, which Triton allows as well.
    """
    hooks = (getattr(knobs.runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook"))
    return any(hook is not None and bool(getattr(hook, "calls", True)) for hook in hooks)


@cache
def can_keep() -> bool:
    """Not in Triton's interpreter, which compiles nothing, nor in versions that may start kernels otherwise:
    that is told once.
    """
    if knobs.runtime.interpret:
        return False
    version = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
    if VERIFIED[0] <= version <= VERIFIED[1]:
        return True
    log.warning(
        "Triton %s: kept kernels are launched directly in 3.5 to 3.9 only; its own launches, which cost the "
        "host more, are taken instead",
        triton.__version__,
    )
    return False
