"""Sparsified gradients of a sharded model: what is exchanged between the replicas of each shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from sparsify.comm import broadcast_all
from sparsify.core.bucket import Bucket, grouped, local_part
from sparsify.method import Dense, Method
from sparsify.ranges import stable_repr
from sparsify.types import StepSettings
from sparsify.wrappers.checks import (
    bucket_learning_rates,
    resolve_process_group,
    stepped_by_scaler,
)
from sparsify.wrappers.engine import Engine, NonFinite, StepReport, while_alive
from sparsify.wrappers.handshake import (
    check_arguments_agree,
    check_workers_agree,
    optimizer_facts,
    wrapping_facts,
)
from sparsify.wrappers.overhead import AveragingOverhead
from sparsify.wrappers.sharded.checks import (
    Named,
    check_optimizer,
    check_shardable,
    reduce_scatter_of,
    unwrap_optimizer,
)
from sparsify.wrappers.sharded.grid import ShardGrid
from sparsify.wrappers.sharded.optimizer_state import OptimizerStateExtension
from sparsify.wrappers.sharded.units import ShardedUnit, find_units
from sparsify.wrappers.wrapper_base import WrapperBase


class NonFiniteShard(NonFinite):
    """A gradient is NaN or infinite. Units that came before it in the backward pass were delivered."""

    def __init__(self, rank: int, step: int, layer: str) -> None:
        super().__init__(rank, step, layer)
        self.args = (
            f"{self}; it reached no residual, but gradients of the units before it were delivered: go on "
            "from a checkpoint",
        )


class ShardHook(WrapperBase):
    """Lets `method` average the gradients of a sharded model between its replicas: `sparsify.shard`.

    Within a replica gradients are reduced as ever, so that each worker has those of its shard, unit by unit,
    while backpropagation goes on. The method then averages them over the workers that have the same shard,
    with a residual for each: the all-reduce of HSDP, sparsified. Weights of all replicas remain the same.
    A unit is what one call of `fully_shard` made.

    After backward gradients are the average: clip them as ever (`clip_grad_norm_` knows DTensors). Within
    `set_requires_gradient_sync(False)` they accumulate, and are compressed once; with
    `set_requires_all_reduce(False)` they are reduced within replicas, and wait. Mixed precision: the method
    sees the type in which gradients are reduced; it keeps its residual in single precision or better.

    The optimizer's `state_dict` has what this worker remembers, each part of it as a DTensor, so that
    `torch.distributed.checkpoint` saves and loads it with everything else, and training resumes to the bit.

    Args:
        model: all of it sharded by `fully_shard`, over a mesh of shards or of replicas and shards (HSDP).
            Replica 0's parameters and buffers are broadcast.
        optimizer: of the model's parameters. It is stepped as ever; its steps are counted here.
        method: with scope='layer', a size in MB (tensors that follow each other in a unit), or 'bucket'
            (a unit). dense takes units.
        replicas: the mesh, of one dimension, or the group, of the workers that have the same shard; by
            default that of an HSDP mesh.
        check: look for NaN and Inf in each unit, by a small all-gather of all workers and one host
            synchronisation; all raise `NonFiniteShard`. Not for dense.
        within: how gradients are reduced within a replica: None, as torch does; or a `qgz` without feedback,
            of which the reduce-scatter is taken: 4 or 8 bits an element.
        seed, select, steps_per_epoch, debug: as for `sparsify.distribute`; `epoch` is set on what this
            returns.

    Attributes:
        last_report: what this worker sent to other replicas in the last step, see
            `sparsify.wrappers.engine.StepReport`.

    Raises:
        ValueError: the model is not sharded, or by something else; there is one replica; the method must see
            the whole gradient; torch's version is unknown.
        WorkerMismatch: on all workers, where they were not given the same.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
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
        self.units, optimizer = find_units(model), unwrap_optimizer(optimizer)
        grid = make_grid(self.units, resolve_process_group(replicas))
        self._everyone, parameters = grid.all_workers(), named_unit_parameters(self.units)

        def facts() -> dict[str, Any]:
            check_optimizer(optimizer)
            check_shardable(method, optimizer, parameters)
            reduce_scatter_of(within)
            told = wrapping_facts(
                model, optimizer, method, within=stable_repr(within), seed=seed, check=check, debug=debug,
                steps_per_epoch=steps_per_epoch,
            )  # fmt: skip
            return told | {f"unit {unit.name}": f"{unit.names} in {unit.dtype}" for unit in self.units}

        check_arguments_agree(self._everyone, nn.ParameterList(map(local_parameter, parameters)), facts)
        super().__init__(method, grid.replicas, steps_per_epoch, None)
        self.method, self.optimizer, self.check, self.debug = method, optimizer, check, debug
        broadcast_first_replica(model, grid)
        buckets, self._inside = make_unit_buckets(self.units, method)
        self.engine = Engine(method, buckets, grid.replicas, None, seed, select)
        self._parameters = parameters
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._waiting = dict[int, Tensor]()  # by unit, what is exchanged with the next gradients
        self._steps, self._parts = list[StepSettings](), list[StepReport]()  # of this step
        self._overhead, self._tells = AveragingOverhead(self.engine.comm, ""), self._everyone.rank == 0
        if not self._tells:
            self._overhead.samples = None
        self._saved = OptimizerStateExtension(
            self, optimizer, dict(parameters), grid, self.check_between_steps
        )
        self.scatter = reduce_scatter_of(within)
        for at, unit in enumerate(self.units):
            unit.replace_all_reduce(partial(self._take, at))
            if self.scatter is not None:
                unit.replace_reduce_scatter(self.scatter)
        for handle in (
            optimizer.register_step_pre_hook(while_alive(self._check_before_step)),
            optimizer.register_step_post_hook(while_alive(self._end)),
        ):
            finalize(self, handle.remove)

    def _take(self, at: int, grad: Tensor) -> None:
        """A unit's gradients on this worker, (n,), have come."""
        unit = self.units[at]
        unit.check(grad)
        if (waiting := self._waiting.pop(at, None)) is not None:
            grad.add_(waiting)
        if unit.is_all_reduce_deferred:
            self._waiting[at] = grad.clone()
            grad.zero_()
            return
        with self._overhead.measure():
            self._average(at, grad)

    def _average(self, at: int, grad: Tensor) -> None:
        """Between the replicas."""
        engine, inside = self.engine, self._inside[at]
        if not self._parts:
            self._begin()
        if self.check and not isinstance(self.method, Dense):
            n, names = grad.numel(), [self.units[at].name]
            engine.agree([grad], names, [n], None, error=NonFiniteShard, among=self._everyone)
        gradients = engine.gradients_of([grad], [self._steps[bucket] for bucket in inside], inside)
        self._parts.append(engine.average(gradients))

    def _begin(self) -> None:
        """A step."""
        self._check_model()
        self.check_step(self.optimizer)
        if self.debug:
            told = {"method": stable_repr(self.method), "step": self.steps, "epoch": self.epoch}
            check_workers_agree(
                self._everyone, {**told, **optimizer_facts(self.optimizer)}, self.engine.buckets[0].flat
            )
        step, buckets = StepSettings(self.method.density_at(self.epoch)), self.engine.buckets
        self._steps = [step] * len(buckets)
        if self.method.needs_lr:
            lrs = bucket_learning_rates(self._parameters, buckets, self.optimizer)
            self._steps = [step._replace(lr=lr) for lr in lrs]

    def _end(self, *_: Any) -> None:
        """The optimizer has made a step; torch.distributed.checkpoint also makes one without gradients."""
        if not self._parts:
            return
        self.last_report, self._parts = StepReport.total(self._parts), []
        self.engine.step += 1
        self.engine.timer.samples.clear()
        self._overhead.end_step(self.last_report)

    def check_between_steps(self, what: str) -> None:
        """Refuse what must not come between backward and step."""
        if self._parts or self._waiting:
            raise ValueError(
                f"{what} came between backward and step, when part of this step is in the residuals already; "
                "call it after the step"
            )

    def _check_model(self) -> None:
        """Refuse parameters that somebody else averages, or nobody.

        Raises:
            ValueError: one was frozen when the model was sharded and is trained now, or a hook is not ours.
        """
        for name, p in self._frozen:
            if p.requires_grad:
                raise ValueError(
                    f"{name} was frozen when sparsify.shard was called, and is trained now, so that it would "
                    "not be exchanged by the method; unfreeze it first, then make the optimizer and call "
                    "sparsify.shard"
                )
        for unit in self.units:
            unit.check_hook()

    def _check_before_step(self, *_: Any) -> None:
        """Refuse a GradScaler, which hides the scale, and skips steps that have been delivered."""
        self._check_model()
        if self._parts and stepped_by_scaler():
            raise ValueError(
                "a GradScaler steps the optimizer, so residuals would hold gradients of different scales; "
                "reduce in bfloat16 or float32, MixedPrecisionPolicy(reduce_dtype=...), which need no scaler"
            )


def named_unit_parameters(units: Sequence[ShardedUnit]) -> Named:
    """All that is trained, unit by unit."""
    return [one for unit in units for one in zip(unit.names, unit.parameters, strict=True)]


def local_parameter(named: tuple[str, nn.Parameter]) -> nn.Parameter:
    """A parameter's shard as a plain one, in the same memory."""
    return nn.Parameter(local_part(named[1]), requires_grad=False)


def broadcast_first_replica(model: nn.Module, grid: ShardGrid) -> None:
    """Give all replicas the parameters and buffers of the first one. All travel on one device."""
    tensors = map(local_part, (*model.parameters(), *model.buffers()))
    broadcast_all(grid.replicas, [tensor for tensor in tensors if tensor.numel()], grid.device)


def make_grid(units: Sequence[ShardedUnit], replicas: dist.ProcessGroup | None) -> ShardGrid:
    """The workers of these units: their own replicas, or those that were handed over.

    Raises:
        ValueError: the units are not all on one mesh, or there are no replicas.
    """
    first = units[0]
    ranks = [dist.get_process_group_ranks(unit.shards) for unit in units]
    for unit, others in zip(units, ranks, strict=True):
        if others != ranks[0] or (unit.replicas is None) != (first.replicas is None):
            raise ValueError(
                f"{unit.name} is sharded over the workers {others}, and {first.name} over {ranks[0]}, or not "
                "on the same mesh; shard exchanges all units between the same replicas: give fully_shard one "
                "mesh for all"
            )
    own = first.replicas
    if own is None and replicas is None:
        raise ValueError(
            "the model is sharded over one dimension of a mesh, which says nothing of replicas; hand over "
            "the other one: sparsify.shard(..., replicas=mesh['replicate'])"
        )
    if own is not None and replicas is not None:
        theirs, mine = map(dist.get_process_group_ranks, (replicas, own))
        if theirs != mine:
            raise ValueError(
                f"the model's own mesh has the replicas {mine}, and replicas= has {theirs}; leave it out"
            )
    return ShardGrid.of(own or replicas, first.shards, first.device)


def make_unit_buckets(units: Sequence[ShardedUnit], method: Method) -> tuple[list[Bucket], list[list[int]]]:
    """What is exchanged together; and of each unit which buckets they are. There is no memory behind them."""
    buckets, inside = list[Bucket](), list[list[int]]()
    is_whole = isinstance(method, Dense) or method.scope == "bucket"
    for unit in units:
        groups = grouped(unit.sizes, unit.dtype.itemsize, "global" if is_whole else method.scope)
        begun, like = len(buckets), torch.zeros(1, dtype=unit.dtype, device=unit.device)
        for group in groups:
            at = slice(group.start, group.stop)
            n = sum(unit.sizes[at])
            buckets.append(Bucket(like.expand(n), tuple(unit.names[at]), tuple(unit.shapes[at])))
        inside.append([*range(begun, len(buckets))])
    return buckets, inside
