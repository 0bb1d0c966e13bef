"""The function `sparsify.distribute`, which wraps the optimizer of a plain training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from sparsify.comm import Comm
from sparsify.local.local_optimizer import LocalOptimizer
from sparsify.local.strategy import LocalSteps
from sparsify.method import Method
from sparsify.wrappers.distributed_optimizer import DistributedOptimizer


@overload
def distribute(
    optimizer: torch.optim.Optimizer, model: nn.Module, method: Method, *values: Any, **options: Any
) -> DistributedOptimizer: ...
@overload
def distribute(
    optimizer: torch.optim.Optimizer, model: nn.Module, method: LocalSteps, *values: Any, **options: Any
) -> LocalOptimizer: ...
def distribute(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    method: Method | LocalSteps,
    comm: Comm | None = None,
    seed: int = 0,
    check: bool = True,
    debug: bool = False,
    select: str = "auto",
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    steps_per_epoch: int | None = None,
    scaler: GradScaler | None = None,
    overlap: bool = False,
) -> DistributedOptimizer | LocalOptimizer:
    """Wrap an optimizer so that all workers train one model, and return the wrapper.

    Args:
        method: a method averages each step's gradients, and then `DistributedOptimizer` says what the options
            mean and what is refused. A strategy of local steps averages every H steps how far the workers
            have moved, and then `LocalOptimizer` does.
    """
    wrapper: Callable[..., DistributedOptimizer | LocalOptimizer] = (
        LocalOptimizer if isinstance(method, LocalSteps) else DistributedOptimizer
    )
    return wrapper(
        optimizer,
        model,
        method,
        comm,
        seed,
        check,
        debug,
        select,
        group=group,
        steps_per_epoch=steps_per_epoch,
        scaler=scaler,
        overlap=overlap,
    )
