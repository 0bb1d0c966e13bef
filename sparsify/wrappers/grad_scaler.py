"""What a GradScaler must be told: an overflow on one worker is one on all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState

from sparsify.comm import Comm
from sparsify.core import host_sync
from sparsify.core.gradients import finite_norms


def unscale_and_find_overflows(scaler: GradScaler, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Unscale the gradients, if nobody has; then what the scaler noted of infinities, one number a device."""
    states = scaler._per_optimizer_states
    if id(getattr(optimizer, "inner_optimizer", None)) in states:
        raise ValueError(
            "the scaler was given the inner optimizer; give it what sparsify.distribute returned"
        )
    if states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    return list(scaler._found_inf_per_device(optimizer).values())


def check_scale_known(told: float | None, scale: Tensor | None) -> None:
    """Refuse a scaler that steps and was not handed over, unless `aggregate` was told its scale.

    Args:
        scale: that the scaler has not divided by yet.
    """
    if told is None:
        why = "a GradScaler steps this optimizer, and does not know of overflows on other workers"
    elif scale is None:
        why = "unscale_ and aggregate(scale) both divide by the scale"
    else:
        return
    raise ValueError(f"{why}; hand the scaler over: sparsify.distribute(..., scaler=scaler)")


def all_reduce_overflow(
    comm: Comm, grads: Sequence[Tensor], used: Sequence[bool], infinite: Sequence[Tensor] | None
) -> tuple[list[bool], bool]:
    """Of each gradient, has any worker used it? And does any worker's overflow? One small sum.

    Args:
        used: of each gradient, has this worker used it?
        infinite: what a scaler noted of infinities, see `infinities`, and is told here of all workers'; None:
            nobody noted, so gradients are looked at.
    """
    if infinite is None:
        overflow = ~finite_norms(grads).all()
    else:
        overflow = torch.stack([number.to(grads[0].device) for number in infinite]).sum()
    used_here = host_sync.to_device(used, grads[0], torch.float32)
    facts = torch.cat([overflow.float().reshape(1), used_here])
    overflows, *used_anywhere = host_sync.to_host(comm.all_reduce(facts))
    for number in infinite or ():
        number.fill_(min(overflows, 1.0))  # so every worker's scaler lowers its scale
    return [bool(number) for number in used_anywhere], overflows > 0
