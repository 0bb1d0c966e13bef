"""The optimizer of local steps for models that `fully_shard` has sharded within each replica."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sparsify.comm import Comm
from sparsify.core.bucket import local_shard
from sparsify.local.guards import check_steps_locally
from sparsify.local.local_optimizer import LIVE_OPTIMIZERS, LocalOptimizer
from sparsify.local.strategy import LocalSteps
from sparsify.wrappers.checks import check_parameters_in_model, resolve_process_group
from sparsify.wrappers.handshake import check_arguments_agree
from sparsify.wrappers.saved_states import check_no_wrapper_state_loaded
from sparsify.wrappers.sharded.checks import (
    NamedParameters,
    check_is_unwrapped_optimizer,
    unwrap_optimizer,
)
from sparsify.wrappers.sharded.grid import ShardGrid
from sparsify.wrappers.sharded.hook import (
    broadcast_first_replica,
    make_grid,
    named_trained_parameters_of_units,
)
from sparsify.wrappers.sharded.units import find_units, move_grads_and_optimizer_state_to_mesh

# Of each model with an optimizer of local steps, its workers.
GRID_BY_MODEL: WeakKeyDictionary[nn.Module, ShardGrid] = WeakKeyDictionary()


class ShardedLocalOptimizer(LocalOptimizer):
    """An optimizer of local steps whose replicas are each sharded over several workers by `fully_shard`.

    Every H steps the workers that have the same shard average its drift. As `LocalOptimizer` in everything
    else; a method's buckets are those of the shards.

    Within a round replicas differ, so nothing may average between them: of a model on a mesh of replicas and
    shards (HSDP) the all-reduce is taken away, and its parameters become DTensors on the mesh of shards. So
    every trained parameter must belong to an optimizer of local steps: this one, or another of the model.

    `skip()` is called by all workers of a replica, or by none.

    Raises:
        ValueError: as `sparsify.shard`; or an overlap is asked for.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: LocalSteps,
        replicas: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        check: bool = True,
        select: str = "auto",
        *,
        steps_per_epoch: int | None = None,
        debug: bool = False,
    ) -> None:
        earlier_grid = GRID_BY_MODEL.get(model)
        self.units = find_units(model, allow_library_hooks=earlier_grid is not None)
        self.grid = earlier_grid or make_grid(self.units, resolve_process_group(replicas))
        super().__init__(
            unwrap_optimizer(optimizer),
            model,
            strategy,
            self.grid.replica_comm,
            seed,
            check,
            debug,
            select,
            steps_per_epoch=steps_per_epoch,
        )
        for unit in self.units:
            if unit.hook is None:
                unit.move_to_shard_mesh(self.grid.mesh["shard"], self.grid.replica_comm.size)
        move_grads_and_optimizer_state_to_mesh(self.inner_optimizer, self.grid.mesh["shard"])
        GRID_BY_MODEL[model] = self.grid
        self._frozen_of_others = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]

    def _check_wrapped(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        check_is_unwrapped_optimizer(optimizer)
        check_steps_locally(optimizer)
        advice = "make the optimizer after fully_shard, which replaces the parameters"
        check_parameters_in_model(optimizer, model, advice)
        check_no_wrapper_state_loaded(optimizer)

    def _check_arguments_agree(
        self, comm: Comm, model: nn.Module, collect_facts: Callable[[], Mapping[str, Any]]
    ) -> None:
        shards = [local_shard(p) for _, p in named_trained_parameters_of_units(self.units)]
        check_arguments_agree(self.grid.all_workers_comm(), shards, collect_facts)

    def _broadcast_model(self, model: nn.Module) -> None:
        broadcast_first_replica(model, self.grid)

    def _check_unchanged(self) -> None:
        super()._check_unchanged()
        self._check_averaged(
            [(name, p) for name, p in named_trained_parameters_of_units(self.units) if p.requires_grad]
        )

    def _check_frozen(self) -> None:
        super()._check_frozen()
        # A unit that nobody trained when it was wrapped has torch's all-reduce still, if it had one.
        unfrozen = [
            (name, p)
            for name, p in self._frozen_of_others
            if p.requires_grad and getattr(getattr(p, "device_mesh", None), "ndim", 1) == 1
        ]
        if unfrozen:
            self._check_averaged(unfrozen)

    def _check_averaged(self, trained: NamedParameters) -> None:
        """Refuse trained parameters that no optimizer of local steps has."""
        live = [optimizer for optimizer in [*LIVE_OPTIMIZERS] if not optimizer._claim.is_superseded]
        averaged_ids = {id(p) for optimizer in live for p in optimizer._wrapped_parameters}
        for name, p in trained:
            if id(p) not in averaged_ids:
                raise ValueError(
                    f"{name} is trained, and no optimizer of local steps has it, so that its replicas would "
                    "drift apart; call sparsify.shard for its optimizer, too, before its first step, or "
                    "freeze it"
                )

    def _global_rank(self, replica: int) -> int:
        return replica * self.grid.shard_comm.size + self.grid.shard_comm.rank

    def _make_nan_check_comm(self) -> Comm:
        return self.grid.all_workers_comm()

    def _reshard(self) -> None:
        for unit in self.units:
            unit.check_hooks_not_replaced()
            unit.module.reshard()
