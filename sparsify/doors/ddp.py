"""Sparsified gradients under DistributedDataParallel: a communication hook."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakMethod, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from sparsify.comm import Comm
from sparsify.comm.torch import TorchComm
from sparsify.core.bucket import Bucket, check_tensor, num_reals, shape_of
from sparsify.doors.engine import Engine, NonFinite, PartlyDelivered, StepReport, agree, check_unchanged
from sparsify.doors.overlap import Background
from sparsify.doors.wrapping import (
    EpochClock,
    Paced,
    Used,
    check_ddp,
    check_method,
    check_overlap,
    group_beside,
    group_of,
    parameters_of,
    rates,
    stepped_by_scaler,
    watch,
)
from sparsify.method import Dense, Method, Step


class Full(NamedTuple):
    """A bucket of DDP's whose gradients are all there."""

    buffer: Tensor  # (n,)
    parameters: list[Tensor]
    names: list[str]
    gradients: list[Tensor]  # (n,) each, views of the buffer
    used: list[bool]  # of each, has this worker used it since the last step?
    averaged: Future[Tensor]
    filled: Any  # an event on the stream that filled it; None on the CPU


class FullTensor(NamedTuple):
    """One of its tensors."""

    parameter: Tensor
    name: str
    gradient: Tensor  # (n,)
    is_used: bool


def tensors_in(full: Full) -> Iterator[FullTensor]:
    """Tensors that have elements."""
    for parts in zip(full.parameters, full.names, full.gradients, full.used, strict=True):
        if (tensor := FullTensor(*parts)).gradient.numel():
            yield tensor


class DDPHook(Paced):
    """A method in place of DDP's allreduce; make it with `register`.

    DDP hands gradients over in buckets of its own, which it rebuilds after the first step. Every tensor is
    aggregated by itself, and states are kept by the parameter's name: whatever the buckets are, no residual
    is lost. With `overlap` a bucket is aggregated as soon as it is full, while backpropagation goes on; else
    when the last one is full. dense always averages as DDP itself does, overlapped.

    Under `no_sync` DDP calls no hook: gradients accumulate, and are compressed once. With
    `find_unused_parameters` DDP drops what is averaged for a parameter that no worker used since the last
    step: such a parameter is left out, and its residual waits. Under `join` workers without inputs bring
    gradients of 0 and deliver their residuals. A copy of the model, or one that was loaded whole from a file,
    has no hook: register one anew.

    Attributes:
        last_report: what this worker did in the last step, of the tensors that took part: `sent_density`,
            `wire_bytes` and more, see `sparsify.doors.engine.StepReport`. None before the first step, and
            where a GradScaler skips it.
    """

    def __init__(
        self, model: DistributedDataParallel, method: Method, optimiser: torch.optim.Optimizer | None,
        comm: Comm, seed: int, check: bool, select: str, steps_per_epoch: int | None,
        scaler: GradScaler | None, overlap: bool,
    ) -> None:  # fmt: skip
        self.method, self.optimiser, self.check = method, optimiser, check
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.clock = EpochClock(method, steps_per_epoch, tells=comm.rank == 0)
        # Numbered as `Gradients` does: what is drawn for a layer is the same with and without DDP.
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad][::-1]
        for name, p in named:
            check_tensor(name, p)
        self.names = {id(p): name for name, p in named}
        self.strides = {name: p.stride() for name, p in named}
        buckets = [
            Bucket(p.new_empty(num_reals(p), dtype=p.dtype.to_real()), (name,), (shape_of(p),))
            for name, p in named
            if p.numel()
        ]
        self.engine = Engine(method, buckets, comm, None, seed, select)
        self.comm, self._at = self.engine.comm, {bucket.names[0]: at for at, bucket in enumerate(buckets)}
        self._full: list[Full] = []  # not yet aggregated
        self._parts: list[StepReport] = []  # of this step
        self._density, self._lrs = 1.0, dict[int, float]()  # of this step, the latter by the parameters' ids
        device = next(model.module.parameters()).device
        # Averages as DDP itself does.
        self._dense = comm if isinstance(method, Dense) and isinstance(comm, TorchComm) else None
        self._background = Background(device) if overlap and self._dense is None else None
        self._places = {id(p): at for at, (_, p) in enumerate(named)}
        self._used = Used([p for _, p in named]) if model.find_unused_parameters else None
        self._is_scaler_checked = scaler is not None or isinstance(method, Dense)
        if not self._is_scaler_checked:
            finalize(self, watch(WeakMethod(self._check_scaler)).remove)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Nothing: DDP does not use again what it copies of its hooks, and process groups can't be copied."""
        return type(None), ()

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self.engine.step

    @property
    def states(self) -> dict[str, Any]:
        """The method's state of each tensor, by its name."""
        return {name: self.engine.states[at] for name, at in self._at.items()}

    def __call__(self, bucket: Any) -> Future[Tensor]:
        if bucket.index() == 0:  # also after a backward pass that ended in an error
            self._begin()
        buffer, parameters = bucket.buffer(), bucket.parameters()
        names = [self._name(p) for p in parameters]
        if self._dense is not None:
            averaged = self._begin_average(buffer, self._dense.group)
        else:
            averaged = Future(devices=[buffer.device] if buffer.is_cuda else [])
            filled = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
            used = [self._take_used(p) for p in parameters]
            gradients = gradients_in(buffer, parameters)
            self._full.append(Full(buffer, parameters, names, gradients, used, averaged, filled))
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
        self._full, self._parts = [], []
        if self._background is not None:
            self._background.futures = []
        if self._dense is None:
            self.clock.check(self.steps)
            self._density = self.method.density_at(self.epoch)
            self._lrs = rates(self.optimiser) if self.optimiser and self.method.needs_lr else {}

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

    def _take_used(self, p: Tensor) -> bool:
        """True if this worker used it since the last step."""
        if self._used is None:
            return True
        at = self._places[id(p)]
        is_used, self._used.flags[at] = self._used.flags[at], False
        return is_used

    def _begin_average(self, buffer: Tensor, group: dist.ProcessGroup | None) -> Future[Tensor]:
        """DDP's own way: nothing waits for it here."""
        size = self.comm.size
        work = dist.all_reduce(buffer.div_(size), group=group, async_op=True)
        assert work is not None
        n, sent = buffer.numel(), self.comm.forms["all_reduce"](buffer.nbytes, size)
        self._parts.append(StepReport(n, n, sent.sent_bytes, 0, sent.messages))
        future: Future[Tensor] = work.get_future()
        return future.then(lambda done: done.value()[0])

    def _average(self, full: list[Full]) -> None:
        """These buckets, which are full: all, or with `overlap` one after the other, in a thread."""
        for bucket in full:
            if bucket.filled is not None:
                torch.cuda.current_stream(bucket.buffer.device).wait_event(bucket.filled)
        scale = self.scaler.get_scale() if self.scaler else 1.0
        if scale != 1:
            for bucket in full:
                bucket.buffer.div_(scale)
        tensors = [tensor for bucket in full for tensor in tensors_in(bucket)]
        used = self._agree(tensors)
        if used is None:
            self.last_report = None
            for bucket in full:
                bucket.buffer.fill_(torch.inf)  # of which the scaler takes notice, on all workers
        else:
            for tensor, is_used in zip(tensors, used, strict=True):
                if is_used:
                    step = Step(self._density, self._lrs.get(id(tensor.parameter), 1.0))
                    self._parts.append(self._aggregate(tensor.name, tensor.gradient, step))
            if scale != 1:
                for bucket in full:
                    bucket.buffer.mul_(scale)
        for bucket in full:
            bucket.averaged.set_result(bucket.buffer)

    def _aggregate(self, name: str, grad: Tensor, step: Step) -> StepReport:
        at = self._at[name]
        check_unchanged(grad, self.engine.buckets[at].flat, name)
        return self.engine.average(at, grad, step)

    def _agree(self, tensors: list[FullTensor]) -> list[bool] | None:
        """Flags of the tensors that any worker used since the last step. None: a gradient has overflowed, and
        the scaler will skip the step. One host synchronisation and a small allgather, if there is anything
        to agree on.

        Raises:
            NonFinite: on all workers if any has a NaN or Inf, and no scaler that expects it.
        """
        looks = self.check or self.scaler is not None
        mine = [tensor.is_used for tensor in tensors]
        if not tensors or (not looks and self._used is None):
            return mine
        agreed = agree(self.comm, [tensor.gradient for tensor in tensors], mine, looks)
        if agreed.nonfinite is None:
            return agreed.used
        if self.scaler is not None:
            return None
        (rank, at), error = agreed.nonfinite, NonFinite if self._background is None else PartlyDelivered
        raise error(rank, self.steps, tensors[at].name)

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

    def _check_scaler(self, optimiser: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse the first step of the model's optimiser if an unknown GradScaler makes it."""
        if self._is_scaler_checked or not any(id(p) in self.names for p in parameters_of(optimiser)):
            return
        self._is_scaler_checked = True
        if stepped_by_scaler():
            raise ValueError(
                "a GradScaler steps the optimiser, so residuals would hold gradients of different scales; "
                "hand it over, sparsify.register(..., scaler=scaler): gradients are divided by its scale then"
            )

    def state_dict(self) -> dict[str, Any]:
        """This worker's state, of tensors and numbers only: save it per rank, beside model and optimiser."""
        return self.engine.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; see `Engine.load_state_dict` for what is refused."""
        self.engine.load_state_dict(saved)


def register(
    model: DistributedDataParallel,
    method: Method,
    optimiser: torch.optim.Optimizer | None = None,
    comm: Comm | None = None,
    seed: int = 0,
    check: bool = True,
    select: str = "auto",
    *,
    group: dist.ProcessGroup | None = None,
    steps_per_epoch: int | None = None,
    scaler: GradScaler | None = None,
    overlap: bool = False,
) -> DDPHook:
    """Let `method` average the gradients of `model`, instead of DDP's allreduce.

    Args:
        optimiser: whose learning rates feedback in the learning-rate domain follows, each parameter's own
            group's; and which must have no momentum where the method has its own.
        comm, group: who averages: by default DDP's own process group. With `overlap` the default is a new
            group, which all workers make here together; what is given is used by the thread, and by nothing
            else during backward.
        check, select, steps_per_epoch: as for `sparsify.distribute`; `epoch` is set on what this returns.
        scaler: the GradScaler that scales the loss: residuals hold gradients without its scale, and where a
            gradient overflows on one worker, the scalers of all workers skip the step.
        overlap: aggregate each of DDP's buckets as soon as it is full, while backpropagation goes on: in a
            thread, on a GPU on a stream of its own, in the order of the buckets. The result is the same to
            the bit. `check` then looks at each bucket before it reaches its residuals, and its error comes
            when earlier ones were delivered: go on from a checkpoint. dense overlaps always. No GPU has
            run this yet.

    Raises:
        ValueError: a model that is no DistributedDataParallel, or that has a communication hook already; a
            method that needs to see more than one tensor at a time, or the optimiser, where there is none; or
            whose momentum would be applied twice.
    """
    check_ddp(model)
    check_method(method, optimiser, model)
    is_apart = overlap and not isinstance(method, Dense)
    if is_apart:
        check_overlap(scaler)
    if comm is None:
        comm = group_beside(model, group) if is_apart else group_of(model, group)
    elif group is not None:
        raise ValueError("comm and group both say who averages; give one of them")
    hook = DDPHook(model, method, optimiser, comm, seed, check, select, steps_per_epoch, scaler, overlap)
    try:
        model.register_comm_hook(hook, call)
    except RuntimeError as error:
        if "only be called once" not in str(error):
            raise
        raise ValueError(
            "this model has a communication hook already, and DDP takes no other; wrap `model.module` in a "
            "DistributedDataParallel anew"
        ) from error
    return hook


def call(hook: DDPHook, bucket: Any) -> Future[Tensor]:
    """The hook as a function, which DDP asks for."""
    return hook(bucket)


call.__annotations__.clear()  # DDP inspects them, and would not know what is text here


def gradients_in(buffer: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """(n,) of each parameter, as it lies in the buffer, whatever its strides. Complex numbers are two real
    ones: DDP hands their buckets over so (and `bucket.gradients()` does not know it).
    """
    numbers = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    return list(numbers.split([num_reals(p) for p in parameters]))
