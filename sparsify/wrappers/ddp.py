"""Sparsified gradients under DistributedDataParallel: a communication hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsify.comm import Comm
from sparsify.comm.torch import TorchComm
from sparsify.core.bucket import Bucket, FlatGradients, TensorKind, in_backward_order, num_reals, shape_of
from sparsify.core.used_parameters import Used
from sparsify.method import Dense, Method
from sparsify.ranges import stable_repr
from sparsify.types import StepSettings
from sparsify.wrappers.checks import (
    bucket_learning_rates,
    parameters_of,
    resolve_process_group,
    stepped_by_scaler,
)
from sparsify.wrappers.ddp_buckets import (
    BucketLayout,
    Flags,
    FullBucket,
    check_hook_arguments,
    ddp_comm,
    dense,
    find_ddp,
    register_comm_hook,
    separate_ddp_comm,
    used_by_any_worker,
)
from sparsify.wrappers.double_averaging import DoubleAveragingGuard
from sparsify.wrappers.engine import (
    Engine,
    NonFinite,
    PartlyDelivered,
    StepReport,
    check_unchanged,
    while_alive,
)
from sparsify.wrappers.handshake import (
    check_arguments_agree,
    check_workers_agree,
    optimizer_facts,
    tensor_facts,
    wrapping_facts,
)
from sparsify.wrappers.overhead import AveragingOverhead, fewer_messages_advice
from sparsify.wrappers.overlap import BackgroundStream
from sparsify.wrappers.wrapper_base import WrapperBase


class DDPHook(WrapperBase):
    """Lets `method` average the gradients of `model`, instead of DDP's allreduce: `sparsify.register`.

    DDP hands gradients over in buckets of its own, which it rebuilds after the first step. They wait until
    the last one is full; then the method sees all of them at once, in its own buckets (`scope`: the whole
    model, a tensor, or so many MB), laid out as `sparsify.distribute` does, to the same bits. So no residual
    is lost, whatever DDP's buckets are. With `overlap` tensors are aggregated as soon as their bucket is
    full, while backpropagation goes on. dense always averages as DDP itself does, overlapped.

    Under `no_sync` DDP calls no hook: gradients accumulate, and are compressed once. With
    `find_unused_parameters` DDP drops what is averaged for a parameter that no worker used since the last
    step: of such a parameter nothing is sent where `scope` is a layer, and else what was sent goes back into
    the residuals. Under `join` workers without inputs bring gradients of 0 and deliver their residuals. A
    copy of the model, or one that was loaded whole from a file, has no hook: register one anew.

    Args:
        model: a DistributedDataParallel, or what wraps one, such as `torch.compile`.
        optimizer: whose learning rates feedback in the learning-rate domain follows, each parameter's own
            group's; and which must have no momentum where the method has its own.
        comm, group: as for `sparsify.distribute`, but by default DDP's own process group; a new one of the
            same workers with `overlap`.
        check, debug, select, steps_per_epoch: as for `sparsify.distribute`; `epoch` is set on what this
            returns.
        scaler: the GradScaler that scales the loss: residuals hold gradients without its scale, and where a
            gradient overflows on one worker, the scalers of all workers skip the step.
        overlap: in a thread, in the order of DDP's buckets; needs scope='layer', and no `clip_norm`. The rest
            is as for `sparsify.distribute`.

    Attributes:
        last_report: as for `sparsify.distribute`, of the tensors that took part in the last step.

    Raises:
        ValueError: a model that is no DistributedDataParallel, or that has a communication hook already; a
            method that needs to know the optimizer, where there is none, or whose momentum would be applied
            twice; gradients of several types that should share a bucket; or too little to overlap.
        WorkerMismatch: on all workers, where they were not given the same.
    """

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        optimizer: torch.optim.Optimizer | None = None,
        comm: Comm | None = None,
        seed: int = 0,
        check: bool = True,
        select: str = "auto",
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        steps_per_epoch: int | None = None,
        scaler: GradScaler | None = None,
        overlap: bool = False,
        debug: bool = False,
    ) -> None:
        model = find_ddp(model)
        group = resolve_process_group(group)
        if comm is not None and group is not None:
            raise ValueError("comm and group both say who averages; give one of them")

        def facts() -> dict[str, Any]:
            check_hook_arguments(model, method, optimizer, scaler, overlap)
            return wrapping_facts(
                model.module, optimizer, method, seed=seed, check=check, debug=debug, overlap=overlap,
                steps_per_epoch=steps_per_epoch, scaler=scaler is not None,
            )  # fmt: skip

        check_arguments_agree(meeting := comm or ddp_comm(model, group), model, facts)
        if overlap and comm is None and not isinstance(method, Dense):
            meeting = separate_ddp_comm(model, group)
        super().__init__(method, meeting, steps_per_epoch, scaler)
        self.method, self.optimizer, self.check, self.debug = method, optimizer, check, debug
        averaged = [
            (name, p) for name, p in model.module.named_parameters() if name not in model.parameters_to_ignore
        ]
        # Numbered as `Gradients` does: what is drawn for a bucket is the same with and without DDP.
        self.parameters = in_backward_order(averaged)
        self.names = {id(p): name for name, p in self.parameters}
        self.strides = {name: p.stride() for name, p in self.parameters}
        # Has each tensor a bucket of its own, which is sent when it comes? Else what DDP brings waits.
        self._is_tensorwise = method.scope in ("layer", "bucket") or isinstance(method, Dense)
        if self._is_tensorwise:
            self._likes = {
                name: p.new_zeros(1, dtype=p.dtype.to_real()).expand(num_reals(p))
                for name, p in self.parameters
            }
            buckets = [
                Bucket(self._likes[name], (name,), (shape_of(p),)) for name, p in self.parameters if p.numel()
            ]
        else:
            anew = "take scope='layer', which mixes no types"
            flat = FlatGradients(averaged, method.scope, anew, holds=not method.group_support.pieces)
            buckets = flat.buckets
            self._likes = {name: view for (name, _), view in zip(flat.parameters, flat.views, strict=True)}
        self.engine = Engine(method, buckets, meeting, None, seed, select)
        self._at = {name: at for at, bucket in enumerate(buckets) for name in bucket.names}
        self._known = dict[int, BucketLayout]()  # by the number of DDP's bucket
        self._in_order, self._all = [name for name, _ in self.parameters], range(len(buckets))
        self._overhead = AveragingOverhead(
            self.engine.comm, fewer_messages_advice(self.engine.sends_one_message, len(buckets))
        )
        self._full: list[FullBucket] = []  # not yet aggregated
        self._parts: list[StepReport] = []  # of this step
        self._came = set[str]()  # what DDP has handed over in this step
        self._steps: list[StepSettings] = []  # of this step, by the engine's buckets
        # Averages as DDP itself does.
        self._dense = meeting if isinstance(method, Dense) and isinstance(meeting, TorchComm) else None
        device = next(model.module.parameters()).device
        self._background = BackgroundStream(device) if overlap and self._dense is None else None
        self._number = {name: number for number, (name, _) in enumerate(self.parameters)}
        self._used = Used([p for _, p in self.parameters]) if model.find_unused_parameters else None
        self._double_averaging = DoubleAveragingGuard(model.parameters(), besides=model)
        self._is_scaler_checked = scaler is not None or isinstance(method, Dense)
        register_comm_hook(model, self, call)
        if not self._is_scaler_checked:
            finalize(self, register_optimizer_step_pre_hook(while_alive(self._check_scaler)).remove)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Nothing: DDP does not use again what it copies of its hooks, and process groups can't be copied."""
        return type(None), ()

    def __call__(self, bucket: Any) -> Future[Tensor]:
        with self._overhead.measure():
            averaged = self._take(bucket)
        if bucket.is_last() and self._dense is None:
            self._overhead.end_step(self.last_report)
        return averaged

    def _take(self, bucket: Any) -> Future[Tensor]:
        """A bucket of DDP's that is full."""
        if bucket.index() == 0:  # also after a backward pass that ended in an error
            self._begin()
        (buffer, back), parameters = dense(bucket.buffer()), bucket.parameters()
        known = self._look_up(bucket.index(), buffer, parameters)
        self._came.update(known.names)
        if bucket.is_last():
            self._check_all_came()
            self._double_averaging.check()
        if self._dense is not None:
            averaged = self._begin_average(buffer, self._dense.group, back)
        else:
            # Each as it lies in the buffer, whatever its strides. Complex numbers are two real ones: so DDP
            # hands their buckets over (and `bucket.gradients()` does not know it).
            numbers = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
            used = [self._used.take(self._number[name]) for name in known.names] if self._used else None
            averaged = Future(devices=[buffer.device] if buffer.is_cuda else [])
            filled = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
            self._full.append(FullBucket(buffer, numbers, known, used, averaged, back, filled))
            if self._background is not None:
                full, self._full = self._full, []
                self._background.submit(partial(self._average, full))
            elif bucket.is_last():
                self._average(self._full)
        if bucket.is_last():
            self._end()
        return averaged

    def _begin(self) -> None:
        """A step."""
        self._full, self._parts, self._came = [], [], set()
        if self._background is not None:
            self._background.futures = []
        if self.debug:
            self._shake_hands()
        if self._dense is None:
            self.check_step(self.optimizer)
            step, buckets = StepSettings(self.method.density_at(self.epoch)), self.engine.buckets
            self._steps = [step] * len(buckets)
            if self.method.needs_lr:
                assert self.optimizer is not None  # `check_ddp_method` has looked
                lrs = bucket_learning_rates(self.parameters, buckets, self.optimizer)
                self._steps = [step._replace(lr=lr) for lr in lrs]

    def _shake_hands(self) -> None:
        """Before the first bucket of a step."""
        step = {"method": stable_repr(self.method), "step": self.steps, "epoch": self.epoch}
        named = tensor_facts("parameter", self.parameters)
        check_workers_agree(
            self.comm, {**step, **named, **optimizer_facts(self.optimizer)}, self.parameters[0][1]
        )

    def _end(self) -> None:
        """A step. There is nothing left to overlap with, and errors are raised here, for DDP would take those
        of a future for gradients.
        """
        self._full = []
        if self._background is not None:
            self._background.finish()
        self.engine.timer.samples.clear()
        if self._parts:
            self.engine.step += 1
            self.last_report = StepReport.total(self._parts)

    def _look_up(self, index: int, buffer: Tensor, parameters: list[Tensor]) -> BucketLayout:
        """A bucket of DDP's, whose parameters change once, after the first step."""
        ids, kind = [*map(id, parameters)], TensorKind.of(buffer)
        known = self._known.get(index)
        if known is None or (known.ids, known.kind) != (ids, kind):
            names, sizes = [self._name(p) for p in parameters], [num_reals(p) for p in parameters]
            real = buffer.new_empty(1, dtype=buffer.dtype.to_real())
            for name, size in zip(names, sizes, strict=True):
                check_unchanged(real.expand(size), self._likes[name], name)
            known = self._known[index] = BucketLayout(
                ids, kind, names, sizes, [p.stride() for p in parameters]
            )
        elif known.strides != [p.stride() for p in parameters]:
            for p in parameters:
                self._name(p)
        return known

    def _begin_average(
        self, buffer: Tensor, group: dist.ProcessGroup | None, back: Callable[[Tensor], Tensor]
    ) -> Future[Tensor]:
        """DDP's own way: nothing waits for it here."""
        comm, size = self.engine.comm, self.comm.size
        work = dist.all_reduce(buffer.div_(size), group=group, async_op=True)
        assert work is not None
        n, (sent, _) = buffer.numel(), comm.priced("all_reduce", buffer.nbytes, size)
        self._parts.append(StepReport(n, n, sent.sent_bytes, 0, sent.messages))
        future: Future[Tensor] = work.get_future()
        return future.then(lambda done: back(done.value()[0]))

    def _average(self, full: list[FullBucket]) -> None:
        """These buckets, which are full: all, or with `overlap` one after the other, in a thread."""
        for bucket in full:
            if bucket.filled is not None:
                torch.cuda.current_stream(bucket.buffer.device).wait_event(bucket.filled)
        scale = self.scaler.get_scale() if self.scaler else 1.0
        if scale != 1:
            for bucket in full:
                bucket.buffer.div_(scale)
        try:
            used = used_by_any_worker(
                full, self._ask if self.check or self.scaler is not None or self._used else None
            )
        except NonFinite:
            if self.scaler is None:
                raise
            self.last_report = None
            for bucket in full:
                bucket.buffer.fill_(torch.inf)  # of which the scaler takes notice, on all workers
        else:
            self._parts += self._average_used(full, used)
            if scale != 1:
                for bucket in full:
                    bucket.buffer.mul_(scale)
        for bucket in full:
            bucket.averaged.set_result(bucket.back(bucket.buffer))

    def _average_used(self, full: list[FullBucket], used: list[list[bool]]) -> list[StepReport]:
        """What any worker has used since the last step; in buckets of several tensors, all of them."""
        if not self._is_tensorwise:
            return [self._average_all(full, used)]
        is_one, units = self.method.scope == "bucket", [(full, used)]
        if is_one:
            units = [([bucket], [flags]) for bucket, flags in zip(full, used, strict=True)]
        return [report for unit in units for report in self._average_tensors(*unit, is_one)]

    def _average_tensors(
        self, full: list[FullBucket], used: list[list[bool]], is_one: bool
    ) -> list[StepReport]:
        """Tensors, each with a state of its own, in the order in which they lie in DDP's buckets."""
        grads, ats = list[Tensor](), list[int]()
        for bucket, flags in zip(full, used, strict=True):
            if all(flags):
                grads.append(bucket.numbers)
                ats += [self._at[name] for name in bucket.known.names if name in self._at]
                continue
            for name, grad, is_used in zip(bucket.known.names, bucket.grads(), flags, strict=True):
                if is_used and name in self._at:
                    grads.append(grad)
                    ats.append(self._at[name])
        if not ats:
            return []
        gradients = self.engine.gradients_of(grads, [self._steps[at] for at in ats], ats)
        return [self.engine.average(gradients, is_one)]

    def _average_all(self, full: list[FullBucket], used: list[list[bool]]) -> StepReport:
        """The whole model, in the method's own buckets."""
        names, is_all = [name for bucket in full for name in bucket.known.names], all(map(all, used))
        if is_all and names == self._in_order:
            tensors = [bucket.numbers for bucket in full]
            return self.engine.average(self.engine.gradients_of(tensors, self._steps))
        by_name = dict[str, Tensor]()
        for bucket, flags in zip(full, used, strict=True):
            for name, grad, is_used in zip(bucket.known.names, bucket.grads(), flags, strict=True):
                by_name[name] = grad if is_used else grad.zero_()
        grads = [grad for name in self._in_order if (grad := by_name[name]).numel()]
        report = self.engine.average(self.engine.gradients_of(grads, self._steps))
        residuals = {} if is_all else self.engine.residuals()
        for name, is_used in zip(names, (flag for flags in used for flag in flags), strict=True):
            # DDP drops this average: with this, all workers together owe what they have just delivered.
            if not is_used and name in residuals:
                residuals[name].add_(by_name[name])
        return report

    def _ask(
        self, grads: Sequence[Tensor], names: Sequence[str], sizes: Sequence[int], used: Flags
    ) -> list[bool]:
        """See `Engine.agree`: asked only where there is anything to agree on."""
        looks, error = (
            self.check or self.scaler is not None,
            PartlyDelivered if self._background else NonFinite,
        )
        return self.engine.agree(grads, names, sizes, used, looks, error)

    def _name(self, p: Tensor) -> str:
        if id(p) not in self.names:
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} was frozen when `register` was called, and now DDP "
                "averages it; call register while it requires a gradient"
            )
        name: str = self.names[id(p)]
        if p.stride() != self.strides[name]:
            # It reads what a hook returns by the strides of now, and filled the bucket by those of before.
            raise ValueError(
                f"{name} lies in memory otherwise than when `register` was called, and DDP would mix up its "
                "gradient; convert the model first (such as to channels_last), then wrap it"
            )
        return name

    def _check_all_came(self) -> None:
        """Refuse a step in which DDP leaves a parameter out: it would be each worker's own."""
        if missing := [name for name, _ in self.parameters if name not in self._came]:
            raise ValueError(
                f"{missing[0]} requires a gradient, but was frozen when DistributedDataParallel was made, "
                "which does not average it; unfreeze it first, then wrap the model"
            )

    def _check_scaler(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse the first step of the model's optimizer if an unknown GradScaler makes it."""
        if self._is_scaler_checked or not any(id(p) in self.names for p in parameters_of(optimizer)):
            return
        self._is_scaler_checked = True
        if stepped_by_scaler():
            raise ValueError(
                "a GradScaler steps the optimizer, so residuals would hold gradients of different scales; "
                "hand it over, sparsify.register(..., scaler=scaler): gradients are divided by its scale then"
            )

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, of tensors and numbers only: save it per rank, beside model and optimizer."""
        return self.engine.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, on all workers together: see `Engine.load_state_dict`."""
        self.engine.load_state_dict(saved)


def call(hook: DDPHook, bucket: Any) -> Future[Tensor]:
    """The hook as a function, which DDP asks for."""
    return hook(bucket)


call.__annotations__.clear()  # DDP inspects them, and would not know what is text here
