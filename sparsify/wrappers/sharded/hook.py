"""A hook that sparsifies the gradients of a sharded model between the replicas of each shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sparsify.comm import broadcast_tensors
from sparsify.core.bucket import Bucket, bucket_ranges, local_shard
from sparsify.method import Dense, Method
from sparsify.ranges import repr_without_addresses
from sparsify.wrappers.checks import resolve_process_group
from sparsify.wrappers.engine import Engine, NonFiniteGradientError, weak_callback
from sparsify.wrappers.grad_scaler import find_scalers, is_stepped_by_scaler
from sparsify.wrappers.handshake import (
    check_arguments_agree,
    wrapping_facts,
)
from sparsify.wrappers.overhead import AveragingOverheadMonitor
from sparsify.wrappers.sharded.checks import (
    NamedParameters,
    OptimizerGroup,
    check_is_unwrapped_optimizer,
    check_shard_arguments,
    reduce_scatter_of,
    unwrap_optimizer,
)
from sparsify.wrappers.sharded.grid import ShardGrid
from sparsify.wrappers.sharded.optimizer_state import OptimizerStateExtension
from sparsify.wrappers.sharded.units import ShardedUnit, find_units
from sparsify.wrappers.wrapper_base import HookBase


class NonFiniteShardError(NonFiniteGradientError):
    """A NaN or Inf in a gradient. Units before it in the backward pass were delivered."""

    consequence = (
        "; it reached no residual, but gradients of the units before it were delivered: go on from a "
        "checkpoint"
    )


class ShardHook(HookBase):
    """A hook that lets `method` average the gradients of a sharded model between its replicas.

    Users call it `sparsify.shard`.

    Within a replica gradients are reduced as ever, so that each worker gets the gradients of its shard, unit
    by unit, while backpropagation goes on. A unit is what one call of `fully_shard` made. The method then
    averages the shard's gradients over the workers that have the same shard, with a residual for each: the
    all-reduce of HSDP, sparsified. Weights of all replicas remain equal.

    After backward gradients are the average: clip them as ever (`clip_grad_norm_` knows DTensors). Within
    `set_requires_gradient_sync(False)` they accumulate, and are compressed once; with
    `set_requires_all_reduce(False)` they are reduced within replicas, and wait. Mixed precision: the method
    sees the type in which gradients are reduced; it keeps its residual in single precision or better.

    The optimizer's `state_dict` has this worker's residuals and other states as DTensors, so that
    `torch.distributed.checkpoint` saves and loads them with everything else, and training resumes to the bit.

    Args:
        model: all of it sharded by `fully_shard`, over a mesh of shards or of replicas and shards (HSDP).
            Replica 0's parameters and buffers are broadcast.
        optimizer: of the model's parameters; or several, which have all of them together, and of which the
            first one's state has the residuals. They are stepped as ever, and steps are counted. A GradScaler
            that steps one is refused, if it was made before this, or the optimizer is fused.
        method: with scope='layer', a size in MB (tensors that follow each other in a unit), or 'bucket'
            (a unit). dense takes units.
        replicas: the mesh, of one dimension, or the group, of the workers that have the same shard; by
            default that of an HSDP mesh.
        check: look for NaN and Inf in each unit, by a small all-gather of all workers and one host
            synchronisation; all raise `NonFiniteShardError`. Not for dense.
        within: how gradients are reduced within a replica: None, as torch does; or a `qgz` without feedback,
            of which the reduce-scatter is taken: 4 or 8 bits an element.
        seed: as for `sparsify.distribute`.
        select: as for `sparsify.distribute`.
        steps_per_epoch: as for `sparsify.distribute`; `epoch` is set on what this returns.
        debug: as for `sparsify.distribute`.

    Attributes:
        last_report: what this worker sent to other replicas in the last step, see
            `sparsify.wrappers.engine.StepReport`.

    Raises:
        ValueError: the model is not sharded, or by something else; there is one replica; the method must see
            the whole gradient; torch's version is unknown.
        WorkerMismatch: on all workers, where their arguments differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        method: Method,
        replicas: dist.ProcessGroup | DeviceMesh | None = None,
        seed: int = 0,
        check: bool = True,
        select: str = "auto",
        *,
        within: Method | None = None,
        steps_per_epoch: int | None = None,
        debug: bool = False,
    ) -> None:
        self.units = find_units(model)
        several: Any = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        optimizers = [unwrap_optimizer(part) for part in several]
        together: Any = optimizers[0] if len(optimizers) == 1 else OptimizerGroup(optimizers)
        grid = make_grid(self.units, resolve_process_group(replicas))
        self._all_workers = grid.all_workers_comm()
        parameters = named_trained_parameters_of_units(self.units)

        def collect_facts() -> dict[str, Any]:
            for part in optimizers:
                check_is_unwrapped_optimizer(part)
            check_shard_arguments(method, together, parameters)
            if reduce_scatter_of(within) is not None:
                for unit in self.units:
                    unit.check_reduce_scatter_is_torchs()
            unit_facts = {f"unit {unit.name}": f"{unit.names} in {unit.dtype}" for unit in self.units}
            options = wrapping_facts(
                model,
                together,
                method,
                within=repr_without_addresses(within),
                seed=seed,
                check=check,
                debug=debug,
                steps_per_epoch=steps_per_epoch,
            )
            return {**options, **unit_facts}

        check_arguments_agree(self._all_workers, [local_shard(p) for _, p in parameters], collect_facts)
        super().__init__(method, together, grid.replica_comm, steps_per_epoch, None, check, debug)
        broadcast_first_replica(model, grid)
        buckets, self._buckets_by_unit = _make_unit_buckets(self.units, method)
        self.engine = Engine(method, buckets, grid.replica_comm, None, seed, select)
        self._parameters = parameters
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._deferred_by_unit = dict[int, Tensor]()  # gradients that are exchanged with the next ones
        self._overhead = AveragingOverheadMonitor(self.engine.comm, "")
        if self._all_workers.rank > 0:
            self._overhead.samples = None  # another worker logs
        self._state_extension = OptimizerStateExtension(
            self, optimizers, dict(parameters), grid, self.check_between_steps
        )
        self.scatter = reduce_scatter_of(within)
        for index, unit in enumerate(self.units):
            unit.replace_all_reduce(partial(self._on_unit_gradient, index), grid.replica_comm.size)
            if self.scatter is not None:
                unit.replace_reduce_scatter(self.scatter)
        self._unknown_scalers = find_scalers()
        for part in optimizers:
            finalize(self, part.register_step_pre_hook(weak_callback(self._check_before_step)).remove)
            finalize(self, part.register_step_post_hook(weak_callback(self._end_step)).remove)

    def _on_unit_gradient(self, index: int, grad: Tensor) -> None:
        """Average the gradients of a unit on this worker, (n,), in place, unless they only accumulate."""
        unit = self.units[index]
        unit.check_gradient_complete(grad)
        deferred = self._deferred_by_unit.pop(index, None)
        if deferred is not None:
            grad.add_(deferred)
        if unit.is_all_reduce_deferred:
            self._deferred_by_unit[index] = grad.clone()
            grad.zero_()
            return
        with self._overhead.measure_averaging():
            self._average(index, grad)

    def _average(self, index: int, grad: Tensor) -> None:
        """Average the gradients of a unit between the replicas."""
        if not self._reports:
            self._begin_step()
        if self.check_finite and not isinstance(self.method, Dense):
            self.engine.check_finite_and_find_used(
                [grad],
                [self.units[index].name],
                [grad.numel()],
                None,
                error=NonFiniteShardError,
                comm=self._all_workers,
                unit=index,
            )
        numbers = self._buckets_by_unit[index]
        steps = [self._steps[number] for number in numbers]
        # A residual is of averages, not of sums: the next step's divisor may be another.
        divisor = 1.0 if isinstance(self.method, Dense) else self.units[index].find_late_divisor(grad.dtype)
        if divisor != 1:
            grad.div_(divisor)
        self._reports.append(self.engine.average(self.engine.bucket_gradients([grad], steps, numbers)))
        if divisor != 1:
            grad.mul_(divisor)

    def _begin_step(self) -> None:
        """Begin a step: check it, and set each bucket's density and learning rate."""
        self._check_model()
        self.check_momentum_and_epoch(self.optimizer)
        if self.debug:
            self.check_workers_agree_on_step(self._all_workers, {}, self.engine.buckets[0].flat)
        self.set_step_settings(self._parameters)

    def _end_step(self, *_: Any) -> None:
        """Count and report a step that the optimizer, or the first of several, has made.

        A step without gradients, as torch.distributed.checkpoint makes, does not count.
        """
        if not self._reports:
            return
        self.count_step_if_averaged()
        self._reports = []
        self._overhead.end_step(self.last_report)

    def check_between_steps(self, call: str) -> None:
        """Refuse a call that must not come between backward and step."""
        if self._reports or self._deferred_by_unit:
            raise ValueError(
                f"{call} came between backward and step, when part of this step is in the residuals already; "
                "call it after the step"
            )

    def _check_model(self) -> None:
        """Refuse parameters that something else averages, or nothing.

        Raises:
            ValueError: a parameter was frozen when the model was sharded and is trained now, or a unit has
                another all-reduce hook or reduce-scatter.
        """
        for name, p in self._frozen:
            if p.requires_grad:
                raise ValueError(
                    f"{name} was frozen when sparsify.shard was called, and is trained now, so that it would "
                    "not be exchanged by the method; unfreeze it first, then make the optimizer and call "
                    "sparsify.shard"
                )
        for unit in self.units:
            unit.check_hooks_not_replaced()

    def _check_before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse a GradScaler, which hides the scale, and skips steps that have been delivered."""
        self._check_model()
        if self._reports and is_stepped_by_scaler(optimizer, self._unknown_scalers):
            raise ValueError(
                "a GradScaler steps the optimizer, so residuals would hold gradients of different scales; "
                "reduce in bfloat16 or float32, MixedPrecisionPolicy(reduce_dtype=...), which need no scaler"
            )


def named_trained_parameters_of_units(units: Sequence[ShardedUnit]) -> NamedParameters:
    """Return the trained parameters, unit by unit, with their names."""
    return [named for unit in units for named in zip(unit.names, unit.parameters, strict=True)]


def broadcast_first_replica(model: nn.Module, grid: ShardGrid) -> None:
    """Broadcast the parameters and buffers of the first replica. All travel on one device."""
    tensors = map(local_shard, (*model.parameters(), *model.buffers()))
    broadcast_tensors(grid.replica_comm, [tensor for tensor in tensors if tensor.numel()], grid.device)


def make_grid(units: Sequence[ShardedUnit], replicas: dist.ProcessGroup | None) -> ShardGrid:
    """Return the grid of the workers of these units, with their own replicas or the given ones.

    Raises:
        ValueError: the units are not all on one mesh, or there are no replicas.
    """
    first = units[0]
    first_ranks = dist.get_process_group_ranks(first.shard_group)
    for unit in units:
        ranks = dist.get_process_group_ranks(unit.shard_group)
        if ranks != first_ranks or (unit.replica_group is None) != (first.replica_group is None):
            raise ValueError(
                f"{unit.name} is sharded over the workers {ranks}, and {first.name} over {first_ranks}, or "
                "not on the same mesh; shard exchanges all units between the same replicas: give fully_shard "
                "one mesh for all"
            )
    own_replicas = first.replica_group
    used_replicas = own_replicas or replicas
    if used_replicas is None:
        raise ValueError(
            "the model is sharded over one dimension of a mesh, which says nothing of replicas; hand over "
            "the other one: sparsify.shard(..., replicas=mesh['replicate'])"
        )
    if own_replicas is not None and replicas is not None:
        own_ranks = dist.get_process_group_ranks(own_replicas)
        given_ranks = dist.get_process_group_ranks(replicas)
        if given_ranks != own_ranks:
            raise ValueError(
                f"the model's own mesh has the replicas {own_ranks}, and replicas= has {given_ranks}; leave "
                "it out"
            )
    return ShardGrid.from_groups(used_replicas, first.shard_group, first.device)


def _make_unit_buckets(units: Sequence[ShardedUnit], method: Method) -> tuple[list[Bucket], list[list[int]]]:
    """Return the buckets of all units, without memory behind them, and the numbers of each unit's buckets."""
    buckets = list[Bucket]()
    numbers_by_unit = list[list[int]]()
    is_whole = isinstance(method, Dense) or method.scope == "bucket"
    scope = "global" if is_whole else method.scope
    for unit in units:
        first = len(buckets)
        like = torch.zeros(1, dtype=unit.dtype, device=unit.device)
        for group in bucket_ranges(unit.sizes, unit.dtype.itemsize, scope):
            inside = slice(group.start, group.stop)
            n = sum(unit.sizes[inside])
            buckets.append(Bucket(like.expand(n), tuple(unit.names[inside]), tuple(unit.shapes[inside])))
        numbers_by_unit.append([*range(first, len(buckets))])
    return buckets, numbers_by_unit
