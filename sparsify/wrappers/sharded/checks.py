"""Checks of the arguments of `sparsify.shard`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sparsify.method import Dense, Method
from sparsify.wrappers.checks import check_is_method, check_momentum_applied_once, is_wrapped, parameters_of

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class OptimizerGroup:
    """The parameter groups of several optimizers that train one model together."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All groups, which schedulers may have changed."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer whose steps hooks see, which Accelerate and Lightning hide in their own."""
    for name in ("optimizer", "_optimizer"):
        inner = getattr(optimizer, name, None)
        if isinstance(inner, torch.optim.Optimizer):
            return unwrap_optimizer(inner)
    return optimizer


def reduce_scatter_of(within: Method | None) -> Any:
    """Return the reduce-scatter of a method; None where there is no method.

    Raises:
        ValueError: the method has no reduce-scatter, or one that would keep a residual.
    """
    if within is None:
        return None
    reduce_scatter = within.make_fsdp_reduce_scatter() if isinstance(within, Method) else None
    if reduce_scatter is None:
        raise ValueError(
            f"within={within!r} has no reduce-scatter; within a replica take sparsify.qgz(bits=8), or None "
            "for torch's own"
        )
    return reduce_scatter


def check_is_unwrapped_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an object that is no optimizer, or averages by itself.

    Raises:
        ValueError: says what to hand over.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} is no optimizer; sparsify.shard takes a model, its optimizer, and a "
            "method, in this order"
        )
    if is_wrapped(optimizer):
        raise ValueError(
            "this optimizer averages by itself; hand over the one inside (`optimizer.inner_optimizer`)"
        )


def check_shard_arguments(
    method: Method, optimizer: torch.optim.Optimizer, parameters: NamedParameters
) -> None:
    """Refuse a method that can't average unit by unit, or does not fit the optimizer or the model."""
    check_is_method(method)
    check_momentum_applied_once(optimizer, method)
    optimized_ids = set(map(id, parameters_of(optimizer)))
    for name, p in parameters:
        if id(p) not in optimized_ids:
            raise ValueError(
                f"{name} is not the optimizer's, with whose state its residual is saved; make one optimizer "
                "of all that is trained, after fully_shard, which replaces the parameters, or hand over "
                "several: sparsify.shard(model, [muon, adamw], method)"
            )
    if isinstance(method, Dense):
        return
    if method.needs_pass_over_all_gradients:
        raise ValueError(
            "clip_norm needs the norm of the whole gradient, and units are exchanged one after the other; "
            "leave it out, and clip the average after backward (clip_grad_norm_)"
        )
    if method.scope == "global":
        raise ValueError(
            "scope='global' chooses from the gradient of the whole model, and FSDP reduces it unit by unit; "
            "take scope='layer', a size in MB, or, for Top-k, 'bucket': a unit"
        )
