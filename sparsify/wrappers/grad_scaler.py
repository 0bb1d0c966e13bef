"""GradScalers: overflows that all workers must know of, and scalers that were not handed over."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from sparsify.comm import Comm
from sparsify.core import host_sync
from sparsify.core.gradients import are_norms_finite


def find_scalers() -> WeakSet[GradScaler]:
    """Return the GradScalers of this process.

    Torch lists them nowhere, so the objects of the garbage collector are searched: for constructors only.
    """
    return WeakSet(scaler for scaler in gc.get_objects() if issubclass(type(scaler), GradScaler))


def is_stepped_by_scaler(optimizer: torch.optim.Optimizer, scalers: Iterable[GradScaler]) -> bool:
    """Return True if a GradScaler makes the optimizer's present step; for hooks on a step.

    Seen are any of `scalers`, and every scaler of an optimizer that divides by the scale itself (fused=True).
    Others leave no trace: a GradScaler made later, of an optimizer that is not fused.
    """
    # A scaler that is disabled has no such states.
    states = [getattr(scaler, "_per_optimizer_states", ()) for scaler in scalers]
    return hasattr(optimizer, "found_inf") or any(id(optimizer) in state for state in states)


def unscale_and_find_overflows(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Unscale the gradients, unless the user has, and return the scaler's overflow flag of each device."""
    states = scaler._per_optimizer_states
    if id(getattr(optimizer, "inner_optimizer", None)) in states:
        raise ValueError(
            "the scaler was given the inner optimizer; give it what sparsify.distribute returned"
        )
    if states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    return list(scaler._found_inf_per_device(optimizer).values())


def check_scale_known(aggregated_scale: float | None, scaler_scale: Tensor | None) -> None:
    """Refuse a step by a GradScaler that was not handed over, unless `aggregate` was given its scale.

    Args:
        aggregated_scale: as given to `aggregate`.
        scaler_scale: by which the scaler has not divided yet.
    """
    if aggregated_scale is None:
        why = "a GradScaler steps this optimizer, and does not know of overflows on other workers"
    elif scaler_scale is None:
        why = "unscale_ and aggregate(scale) both divide by the scale"
    else:
        return
    raise ValueError(f"{why}; hand the scaler over: sparsify.distribute(..., scaler=scaler)")


def all_reduce_used_and_overflow(
    comm: Comm, grads: Sequence[Tensor], used_here: Sequence[bool], overflow_flags: Sequence[Tensor] | None
) -> tuple[list[bool], bool]:
    """Return, of each gradient, whether any worker used it; and whether any worker's overflows.

    Costs one all-reduce of a few numbers.

    Args:
        used_here: of each gradient, has this worker used it?
        overflow_flags: a scaler's, see `unscale_and_find_overflows`, which are set to those of all workers;
            None: the gradients are searched.
    """
    if overflow_flags is None:
        overflow = ~are_norms_finite(grads).all()
    else:
        overflow = torch.stack([flag.to(grads[0].device) for flag in overflow_flags]).sum()
    is_used = host_sync.to_device(used_here, grads[0], torch.float32)
    facts = torch.cat([overflow.float().reshape(1), is_used])
    num_overflows, *num_users = host_sync.to_host(comm.all_reduce(facts))
    for flag in overflow_flags or ():
        flag.fill_(min(num_overflows, 1.0))  # so every worker's scaler lowers its scale
    return [bool(number) for number in num_users], num_overflows > 0
