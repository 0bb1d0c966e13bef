"""The function `sparsify.shard`, which averages between replicas of a model sharded by `fully_shard`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparsify.local.sharded_optimizer import ShardedLocalOptimizer
from sparsify.local.strategy import LocalSteps
from sparsify.method import Method
from sparsify.wrappers.sharded.hook import ShardHook

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@overload
def shard(
    model: nn.Module, optimizer: Optimizers, method: Method, *values: Any, **options: Any
) -> ShardHook: ...
@overload
def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer, method: LocalSteps, *values: Any, **options: Any
) -> ShardedLocalOptimizer: ...
def shard(
    model: nn.Module,
    optimizer: Optimizers,
    method: Method | LocalSteps,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    seed: int = 0,
    check: bool = True,
    select: str = "auto",
    *,
    within: Method | None = None,
    steps_per_epoch: int | None = None,
    debug: bool = False,
) -> ShardHook | ShardedLocalOptimizer:
    """Average between replicas of a model that `fully_shard` has sharded.

    Args:
        method: a method averages each step's gradients between replicas: `optimizer` is stepped as ever, and
            `ShardHook` says what the options mean and what is refused. With a strategy of local steps the
            returned optimizer is stepped in the place of `optimizer`, see `ShardedLocalOptimizer`.
    """
    options: dict[str, Any] = {"steps_per_epoch": steps_per_epoch, "debug": debug}
    if isinstance(method, LocalSteps):
        if within is not None:
            raise ValueError("within= is for methods of every step; with local steps leave it out")
        if isinstance(optimizer, list | tuple):
            raise ValueError(
                "with local steps each optimizer is wrapped by a call of its own; call sparsify.shard for "
                "each, with its part of the parameters"
            )
        inner: Any = optimizer  # what is none is refused there
        return ShardedLocalOptimizer(model, inner, method, replicas, seed, check, select, **options)
    return ShardHook(model, optimizer, method, replicas, seed, check, select, within=within, **options)
