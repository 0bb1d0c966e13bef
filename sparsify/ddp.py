"""Sparsified gradients under DistributedDataParallel: a communication hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakMethod, finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sparsify import checkpoint, host_sync
from sparsify.aggregator import FORMAT, NonFinite, Report, agree, check_saved, check_unchanged
from sparsify.bucket import Bucket, check_tensor, num_reals, shape_of
from sparsify.comm import Comm, CountingComm
from sparsify.comm.torch import TorchComm
from sparsify.method import Dense, Method, Step
from sparsify.optimiser import DistributedOptimiser
from sparsify.overlap import Background
from sparsify.timer import PhaseTimer
from sparsify.types import BucketContext
from sparsify.wrapping import (
    Clock,
    PartlyDelivered,
    Used,
    check_momentum,
    check_overlap,
    parameters_of,
    rates,
)


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
    """Those that have elements."""
    for parts in zip(full.parameters, full.names, full.gradients, full.used, strict=True):
        if (tensor := FullTensor(*parts)).gradient.numel():
            yield tensor


class DDPHook:
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
        last_report: what this worker did in the last step, of the tensors that took part: `density`,
            `wire_bytes` and more, see `sparsify.aggregator.Report`. None before the first step, and where a
            GradScaler skips it.
    """

    def __init__(
        self, model: DistributedDataParallel, method: Method, optimiser: torch.optim.Optimizer | None,
        comm: Comm, seed: int, check: bool, select: str, steps_per_epoch: int | None,
        scaler: GradScaler | None, overlap: bool,
    ) -> None:  # fmt: skip
        self.method, self.optimiser, self.check = method, optimiser, check
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.comm = CountingComm(comm)
        self.clock = Clock(method, steps_per_epoch, tells=comm.rank == 0)
        self.steps = 0
        self.last_report: Report | None = None
        self.timer = PhaseTimer("production")
        # Numbered as `Gradients` does: what is drawn for a layer is the same with and without DDP.
        named = [(name, p) for name, p in model.module.named_parameters() if p.requires_grad][::-1]
        for name, p in named:
            check_tensor(name, p)
        self.names = {id(p): name for name, p in named}
        self.strides = {name: p.stride() for name, p in named}
        self.buckets = {
            name: Bucket(p.new_empty(num_reals(p), dtype=p.dtype.to_real()), (name,), (shape_of(p),))
            for name, p in named
            if p.numel()
        }
        self.states = {
            name: method.init(bucket.flat, BucketContext(seed, comm.rank, i, bucket.shapes, select))
            for i, (name, bucket) in enumerate(self.buckets.items())
        }
        self._full: list[Full] = []  # not yet aggregated
        self._parts: list[Report] = []  # of this step
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
        """What DDP copies and saves of its hooks is not used again, and process groups can't be copied."""
        return type(None), ()

    @property
    def epoch(self) -> int:
        """Counted from 0, for methods that raise the density in the first epochs."""
        return self.clock.epoch(self.steps)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.clock.set(epoch)

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
        self.timer.samples.clear()
        if self._parts:
            self.steps += 1
            self.last_report = Report.total(self._parts)

    def _take_used(self, p: Tensor) -> bool:
        """Has this worker used it since the last step?"""
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
        self._parts.append(Report(n, n, sent.sent_bytes, 0, sent.messages))
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

    def _aggregate(self, name: str, grad: Tensor, step: Step) -> Report:
        check_unchanged(grad, self.buckets[name].flat, name)
        before, syncs_before = self.comm.counted, host_sync.num_syncs()
        selected = self.method.aggregate(grad, step, self.states[name], self.comm, self.timer)
        sent_bytes, messages, predicted_s = (a - b for a, b in zip(self.comm.counted, before, strict=True))
        syncs = host_sync.num_syncs() - syncs_before
        return Report(selected, grad.numel(), int(sent_bytes), syncs, int(messages), predicted_s)

    def _agree(self, tensors: list[FullTensor]) -> list[bool] | None:
        """Of each tensor, has any worker used it since the last step? None: a gradient has overflowed, and
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
        """Before the first step of the model's optimiser: does a GradScaler make it that we don't know?"""
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
        buckets = [{"names": [name], "state": checkpoint.dump(state)} for name, state in self.states.items()]
        who = {"rank": self.comm.rank, "size": self.comm.size}
        return {
            "format": FORMAT, "method": repr(self.method), "step": self.steps, **who, "buckets": buckets
        }  # fmt: skip

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; see `Aggregator.load_state_dict` for what is refused."""
        check_saved(saved, self.method, self.comm, list(self.buckets.values()))
        self.steps = saved["step"]
        for bucket in saved["buckets"]:
            (name,) = bucket["names"]
            self.states[name] = checkpoint.restore(self.states[name], bucket["state"])


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
        check: look for NaN and Inf before every step, one host synchronisation; all workers then raise
            `NonFinite`, with residuals untouched. Without it they get into the residuals and stay there.
        select: see `sparsify.aggregator.Aggregator`.
        steps_per_epoch: for methods that raise the density in the first epochs; or set `epoch` of what this
            returns, counted from 0, before the first step of each.
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
    check_model(model)
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
    return hook(bucket)


call.__annotations__.clear()  # DDP inspects them, and would not know what is text here


def check_model(model: object) -> None:
    """Refuse what is no DistributedDataParallel that takes a hook."""
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        raise ValueError(
            "torch.compile wraps this DistributedDataParallel; register with the one inside, before compiling"
        )
    if not isinstance(model, DistributedDataParallel):
        sharded = isinstance(model, nn.Module) and any(hasattr(p, "device_mesh") for p in model.parameters())
        why = "shards its gradients, and sparsification needs whole ones" if sharded else "has no buckets"
        raise ValueError(
            f"register takes a DistributedDataParallel, and {type(model).__name__} {why}; wrap the model in "
            "one, or take sparsify.distribute for a plain loop"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise ValueError(
            "DDP's mixed_precision averages with a hook of its own; leave it out, and use torch.autocast"
        )


def check_method(
    method: Method, optimiser: torch.optim.Optimizer | None, model: DistributedDataParallel
) -> None:
    """Refuse a method that can't work tensor by tensor, or not without the optimiser."""
    if not hasattr(method, "aggregate"):
        raise ValueError(
            f"{method!r} is not a method; build one, such as sparsify.build('topk', scope='layer')"
        )
    if method.scope != "layer" and not isinstance(method, Dense):
        raise ValueError(
            f"DDP hands gradients over bucket by bucket, so scope={method.scope!r} can't be had; take "
            "scope='layer', or sparsify.distribute, which sees the whole model"
        )
    if method.needs_whole_gradient:
        raise ValueError(
            "clip_norm needs the gradient of the whole model in one piece, which DDP does not have; take "
            "clip_norm=None, or sparsify.distribute"
        )
    if isinstance(optimiser, DistributedOptimiser):
        raise ValueError(
            "sparsify.distribute's optimiser averages by itself; give register the inner one, or leave it out"
        )
    if optimiser is None and (method.needs_lr or method.momentum_inside):
        why = "follows the learning rate" if method.needs_lr else "applies momentum itself"
        raise ValueError(
            f"the method {why}, so it must know the optimiser: sparsify.register(model, method, optimiser)"
        )
    if optimiser is not None:
        check_momentum(optimiser, method)
        known = set(map(id, parameters_of(optimiser)))
        for name, p in model.module.named_parameters():
            if method.needs_lr and p.requires_grad and id(p) not in known:
                raise ValueError(
                    f"the method follows each parameter's learning rate, and {name} is not the optimiser's"
                )


def group_of(model: DistributedDataParallel, group: dist.ProcessGroup | None) -> TorchComm:
    """DDP's own group, or another one of the same members."""
    members = dist.get_process_group_ranks(model.process_group)
    if group is not None and sorted(dist.get_process_group_ranks(group)) != sorted(members):
        raise ValueError(
            f"DDP keeps the model alike on the workers {members}, so they must average together; leave group "
            "out, or give it to DistributedDataParallel(process_group=...)"
        )
    return TorchComm(group or model.process_group)


def group_beside(model: DistributedDataParallel, group: dist.ProcessGroup | None) -> TorchComm:
    """Another group than DDP's own, whose collectives those of a thread would meet."""
    if group is not None and group is not model.process_group:
        return group_of(model, group)
    members = dist.get_process_group_ranks(model.process_group)
    if group is None and len(members) == dist.get_world_size():
        return TorchComm.beside()
    raise ValueError(
        f"overlap=True averages in a thread, and the group of the workers {members} is DDP's own; make "
        "another one of them, on all workers of the default group, and hand it over: "
        f"sparsify.register(..., group=torch.distributed.new_group({members}))"
    )


def watch(before_step: WeakMethod[Callable[..., None]]) -> RemovableHandle:
    """Has it called before any optimiser's step, as long as it lives."""

    def hook(*args: Any) -> None:
        if (call := before_step()) is not None:
            call(*args)

    return register_optimizer_step_pre_hook(hook)


def stepped_by_scaler() -> bool:
    """Does a GradScaler call this? Nothing else tells an optimiser's hooks."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if isinstance(caller, GradScaler) and caller.is_enabled():
            return True
        frame = frame.f_back
    return False


def gradients_in(buffer: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    """(n,) of each parameter, as it lies in the buffer, whatever its strides. Complex numbers are two real
    ones: DDP hands their buckets over so (and `bucket.gradients()` does not know it).
    """
    numbers = torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer
    return list(numbers.split([num_reals(p) for p in parameters]))
