"""Launches of Triton's kernels that keep what Triton compiled.

An ordinary launch binds its arguments, reads their types, alignments and strides, and looks up which compiled
kernel they need: that takes the host longer than most of these kernels take the device. Here it is done once
    for
every kind of arguments; later launches hand the compiled kernel, addresses and numbers to the driver.
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

# Versions whose compiled kernels are started as `CompiledLaunch.start` does: read in their
# compiler/compiler.py.
VERIFIED_VERSIONS = ((3, 5), (3, 9))
ALIGNMENT = 16  # bytes; Triton compiles another kernel for addresses that are no multiple
log = logging.getLogger(__name__)


class LaunchSpec(NamedTuple):
    """A kernel to launch, and the constants that it is compiled for.

    Its arguments are found by their names in its signature, where constants come last.
    """

    kernel: Any
    num_programs: str  # name of the argument that says how many programs run it
    num_warps: int
    constants: Mapping[str, Any]


LaunchPlan = Sequence[LaunchSpec]


class CompiledLaunch(NamedTuple):
    """A launch with its compiled kernel, which is held so that the driver does not unload it."""

    compiled: Any
    num_programs: str
    arguments: Callable[[Mapping[str, Any]], tuple[Any, ...]]
    constants: tuple[Any, ...]

    def start(self, values: Mapping[str, Any], stream: Any) -> None:
        """Launch the kernel on a stream."""
        compiled = self.compiled
        compiled.run(
            values[self.num_programs],
            1,
            1,
            stream,
            compiled.function,
            compiled.packed_metadata,
            None,
            None,
            None,  # launch metadata and hooks: for profilers, see `has_profiler_hook`
            *self.arguments(values),
            *self.constants,
        )


class KernelLauncher:
    """A launcher of kernels on one device, which the caller has made the current one."""

    def __init__(self) -> None:
        self.keeps_compiled = can_launch_compiled_directly()
        self.compiled_by_kind: dict[Hashable, list[CompiledLaunch]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.addresses: dict[str, int] = {}

    def set_buffers(self, **buffers: Tensor) -> None:
        """Set buffers that kernels are given at every launch, allocated and so aligned, until replaced."""
        self.buffers |= buffers
        self.addresses |= {name: buffer.data_ptr() for name, buffer in buffers.items()}

    def __call__(
        self,
        plan: Callable[..., LaunchPlan],
        choices: tuple[Hashable, ...],
        tensors: Mapping[str, Tensor],
        numbers: Mapping[str, int | float],
    ) -> None:
        """Launch the kernels of plan(*choices), in order.

        Args:
            tensors: 1-D, others at each call; the stride of `acc` is given to kernels as `acc_stride`.
            numbers: for none of their values Triton compiles a kernel of its own: do_not_specialize.
        """
        strides = {f"{name}_stride": tensor.stride(0) for name, tensor in tensors.items()}
        addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        types = [tensor.dtype for tensor in tensors.values()]
        are_aligned = [address % ALIGNMENT == 0 for address in addresses.values()]
        kind = (plan.__name__, choices, *types, *are_aligned, *strides.values())
        launches = self.compiled_by_kind.get(kind)
        if launches is None or not self.keeps_compiled or has_profiler_hook():
            values = {**self.buffers, **tensors, **strides, **numbers}
            self.compiled_by_kind[kind] = launch_by_triton(plan(*choices), values)
            return
        values = {**self.addresses, **addresses, **strides, **numbers}
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        for launch in launches:
            launch.start(values, stream)


def launch_by_triton(plan: LaunchPlan, values: Mapping[str, Any]) -> list[CompiledLaunch]:
    """Launch kernels as Triton does, and return what it compiled for such arguments."""
    launches = []
    for spec in plan:
        names = spec.kernel.arg_names
        num_given = len(names) - len(spec.constants)
        arguments = itemgetter(*names[:num_given])
        compiled = spec.kernel[(values[spec.num_programs],)](
            *arguments(values),
            **spec.constants,
            num_warps=spec.num_warps,
            enable_fp_fusion=False,  # a product is rounded before it is added, as torch rounds it
        )
        constants = tuple(spec.constants[name] for name in names[num_given:])
        launches.append(CompiledLaunch(compiled, spec.num_programs, arguments, constants))
    return launches


def has_profiler_hook() -> bool:
    """Tell whether a profiler wants to hear of launches, of which only Triton's own tell it.

    A hook is a chain of calls, a function that somebody put in its place, or None, which Triton allows as
    well.
    """
    hooks = [getattr(knobs.runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook")]
    return any(hook is not None and bool(getattr(hook, "calls", True)) for hook in hooks)


@cache
def can_launch_compiled_directly() -> bool:
    """Tell whether compiled kernels can be launched directly.

    They can't in Triton's interpreter, which compiles nothing, nor in versions that may start kernels
    otherwise: that is logged once.
    """
    if knobs.runtime.interpret:
        return False
    version = tuple(int(number) for number in re.findall(r"\d+", triton.__version__)[:2])
    if VERIFIED_VERSIONS[0] <= version <= VERIFIED_VERSIONS[1]:
        return True
    log.warning(
        "Triton %s: kept kernels are launched directly in 3.5 to 3.9 only; its own launches, which cost the "
        "host more, are taken instead",
        triton.__version__,
    )
    return False
