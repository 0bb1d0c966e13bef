"""Sparsified gradients in a plain training loop: an optimizer that averages before it steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from sparsify.comm import Comm
from sparsify.comm.torch import TorchComm
from sparsify.core import host_sync
from sparsify.core.claims import ParameterClaim
from sparsify.core.used_parameters import Used
from sparsify.method import Method, StepSettings
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.checks import (
    ForeignStepGuard,
    WrapperBase,
    broadcast_model,
    bucket_learning_rates,
    check_distribute_arguments,
    check_scaler_allows_overlap,
    make_comm,
    parameters_of,
)
from sparsify.wrappers.double_averaging import DoubleAveragingGuard
from sparsify.wrappers.engine import PartlyDelivered, StepReport
from sparsify.wrappers.grad_scaler import all_reduce_overflow, check_scale_known, unscale_and_find_overflows
from sparsify.wrappers.handshake import buffer_facts, check_arguments_agree, optimizer_facts, wrapping_facts
from sparsify.wrappers.optimizer_wrapper import OptimizerWrapper, exclude_from_compile, explain_lost_worker
from sparsify.wrappers.overhead import AveragingOverhead, fewer_messages_advice
from sparsify.wrappers.overlap import BackwardOverlap
from sparsify.wrappers.saved_states import (
    check_all_can_load,
    check_and_load_inner,
    marked_state_dict,
    restore_on_error,
)


class DistributedOptimizer(WrapperBase, OptimizerWrapper):
    """`optimizer`, whose `step` first replaces the gradients by their average over the workers.

    Averaged are the gradients of the optimizer's parameters; a model may have several such optimizers, each
    with parameters of its own. Gradients may accumulate over any number of backward passes: they are
    compressed once per `step`. What nobody used since the last step, and what is frozen, is left alone, as
    PyTorch does (with `check=False` what nobody used has a gradient of zero). Schedulers take the inner
    optimizer or this one. Hooks on `step` run after averaging, as they do under DistributedDataParallel.

    Parameters and buffers of rank 0 are broadcast at the beginning; what modules keep beside them
    (`get_extra_state`) is not. Afterwards buffers are each worker's own: those of batch normalisation follow
    the worker's own batches.

    Mixed precision: residuals must not see scaled gradients, and a step that overflows on one worker must be
    skipped by all. So hand over the scaler, here; then its usual recipe is right, with or without `unscale_`:

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    With a scaler of another kind, call `optimizer.aggregate(scale)` before it steps.

    Nothing else may average: train through the model itself, as it was handed over, and not through what
    DistributedDataParallel, `replicate`, Accelerate or a Trainer made of it. The first step refuses that.

    `clip_grad_norm_` before `step` clips this worker's own gradient; after `aggregate()`, the average.

    With `overlap` a bucket of gradients is aggregated as soon as backpropagation has filled it, while it goes
    on: in a thread, on a GPU on a stream of its own, in the order of the buckets. The weights are the same to
    the bit. In return a step has one backward pass, and those before it, which only accumulate, run within
    `no_sync()`; between backward and `step`, or `aggregate()`, gradients are on their way, and may neither be
    changed nor looked at; and `check` sees each bucket before it reaches its residuals, so its error comes
    when earlier ones were delivered: go on from a checkpoint. No GPU has run this yet.

    Args:
        model: has all of the optimizer's parameters, and perhaps more.
        comm, group: who averages: a communicator, a process group, or a mesh of one dimension; by default
            torch.distributed's own group. With `overlap` the default is a new group, which all workers make
            here together; what is given is used by the thread, and by nothing else during backward.
        check: look for NaN and Inf before every step, one host synchronisation; all workers then raise
            `NonFinite`, with residuals untouched (with `overlap` those of that bucket and the later ones).
            Without it they get into the residuals and stay there.
        debug, select: see `Aggregator`.
        steps_per_epoch: for methods that raise the density in the first epochs; or set `epoch`, counted from
            0, before the first step of each.
        scaler: the GradScaler that will step this optimizer.
        overlap: needs a method of several buckets: scope='layer', or a bucket size in MB.

    Attributes:
        last_report: what this worker did in the last step: `sent_density`, `wire_bytes` and more, a
            `sparsify.wrappers.engine.StepReport`. None before the first step, or where a GradScaler skips it.

    Raises:
        ValueError: the parts don't fit together: the optimizer has momentum, and the method has its own; a
            parameter that is not the model's; a sharded model, or one that averages by itself; there is no
            process group; or a scaler, a clip_norm or a single bucket leaves nothing to overlap.
        WorkerMismatch: on all workers, where they were not given the same, see `sparsify.wrappers.handshake`.
    """

    # A GradScaler then leaves it to `step` to divide by the scale, and to skip, as all workers do together.
    _step_supports_amp_scaling: ClassVar[bool] = True
    grad_scale: Tensor | None  # it sets these two while it steps; None: the gradients are unscaled
    found_inf: Tensor

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        method: Method,
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
    ) -> None:
        def facts() -> dict[str, Any]:
            check_distribute_arguments(optimizer, model, method, scaler)
            if overlap:
                check_scaler_allows_overlap(scaler)
            told = wrapping_facts(
                model, optimizer, method, seed=seed, check=check, debug=debug, overlap=overlap,
                steps_per_epoch=steps_per_epoch, scaler=scaler is not None,
            )  # fmt: skip
            return {**told, **buffer_facts(model)}

        check_arguments_agree(meeting := make_comm(comm, group), model, facts)
        if overlap and comm is None and group is None:
            meeting = TorchComm.beside()
        # Not Optimizer.__init__: parameters, state and defaults are the inner optimizer's.
        super().__init__(method, meeting, steps_per_epoch, scaler)
        self.check, self._model = check, model
        self._is_aggregated = self._is_skipped = False
        self._scale: float | None = None  # that `aggregate` was told
        self.mirror_optimizer(optimizer)
        broadcast_model(model, self.comm)
        self._known = parameters_of(optimizer)
        mine = set(map(id, self._known))
        named = [(name, p) for name, p in model.named_parameters() if id(p) in mine]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self.engine = self.aggregator = Aggregator(
            method, named, self.comm, seed=seed, debug=debug, select=select, in_place=overlap
        )
        self.aggregator.more_facts = partial(optimizer_facts, optimizer)
        self._overhead = AveragingOverhead(
            self.aggregator.comm,
            fewer_messages_advice(self.aggregator.sends_one_message, len(self.aggregator.buckets)),
        )
        self._used = Used([p for _, p in self.aggregator.source.parameters])
        self._step_guard, self._double_averaging = (
            ForeignStepGuard(optimizer),
            DoubleAveragingGuard(self._known),
        )
        self._claim = ParameterClaim("average", self._known)
        self._accumulates = False  # within `no_sync`?
        self._drops = False  # within `skip`, what is not on its way
        # Of each parameter, has any worker used it in this step? As far as is known.
        self._used_anywhere = [True] * len(self._used.parameters)
        self._overlap = (
            BackwardOverlap(self.aggregator, self._aggregate_full, self._begin) if overlap else None
        )

    @exclude_from_compile
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: in place, where backpropagation writes into the method's own buffer; where the
        method can read them anywhere, they are taken away, as PyTorch does, or zeroed.
        """
        self._refuse_halfway("zero_grad() came")
        self.aggregator.source.clear(set_to_none)
        for _, p in self._frozen:  # one may hold the gradient from before it was frozen
            p.grad = None
        self._used.clear()
        self._is_aggregated = False  # a step that was skipped leaves it set

    @exclude_from_compile
    @explain_lost_worker
    def aggregate(self, scale: float | None = None) -> StepReport | None:
        """Average the gradients now; the next `step` then doesn't. None where a step must be skipped.

        Args:
            scale: what the loss was multiplied with, where no `scaler` was handed over. The gradients are
                divided by it before the method sees them and multiplied again afterwards, for whoever divides
                them next. If any worker's have overflowed, all workers' become infinite, so that every scaler
                skips the step; residuals are untouched.
        """
        with self._overhead.measure():
            report = self._average(scale)
        self._overhead.end_step(report)
        return report

    def _average(self, scale: float | None) -> StepReport | None:
        """See `aggregate`."""
        self._check_unchanged()
        if scale is not None and self.scaler is not None:
            raise ValueError("the scaler was handed over, so its scale is known: call aggregate() without it")
        if scale is not None and self._overlap is not None:
            raise ValueError(
                "overlap=True averages gradients before aggregate(scale) can divide them; leave one out"
            )
        if self._is_aggregated and not self._is_skipped and not self._used.those:
            raise ValueError("aggregate was called twice; call it once, after the last backward of a step")
        self._is_aggregated, self._scale, self.last_report = True, scale, None
        if self._overlap is not None:
            return self._finish(self._overlap)
        grads = self.aggregator.source.collect()
        if scale is not None:
            torch._foreach_div_(grads, scale)
        used, self._is_skipped = self._look(grads, scale)
        self._used.clear()
        if self._is_skipped:
            for grad in grads:
                grad.fill_(torch.inf)
            return None
        self.last_report = self.aggregator.aggregate_collected(grads, self.epoch, self._rates())
        self._leave_alone(grads, used)
        if scale is not None:
            torch._foreach_mul_(grads, scale)
        return self.last_report

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within only accumulate; the next one outside is the step's last. What `overlap`
        needs to be told; without it all backward passes before `step` accumulate.
        """
        before, self._accumulates = self._accumulates, True
        try:
            yield
        finally:
            self._accumulates = before

    @exclude_from_compile
    def skip(self) -> None:
        """Leave this worker's batch out, after an error in forward or backward, and step with the others, who
        step as ever: what this worker has not sent counts as zero, residuals are delivered and kept as ever,
        and all workers' weights remain the same. To be called in place of the rest of the step:

            try:
                loss_of(batch).backward()
                optimizer.step()
            except torch.cuda.OutOfMemoryError:
                optimizer.skip()
        """
        if not self._is_aggregated:
            if self._overlap is None or not self._overlap.is_begun:
                self.aggregator.source.clear()
            if self.scaler is not None:
                self.scaler.scale(self.aggregator.source.flat.new_zeros(()))  # has it ever scaled before?
            self._used.clear()
            self._drops = True
        try:
            self.step()
        finally:
            self._drops = False
        self.zero_grad()

    def _begin(self) -> None:
        """The first gradient of a step has come, perhaps one that is to be sent."""
        if self._overlap is None or self._accumulates or self._is_aggregated:
            return
        if not self.aggregator.source.claim.is_superseded:
            self._check_unchanged()
            self._overlap.begin(self.epoch, self._rates())

    def _finish(self, overlap: BackwardOverlap) -> StepReport:
        """Send what overlapping has not sent yet, and wait."""
        if not overlap.is_begun:  # no gradient has come, or all within `no_sync`
            self.aggregator.source.collect()
            overlap.begin(self.epoch, self._rates())
        try:
            self.last_report = overlap.finish(self._drops)
        finally:
            self._used.clear()
        used, self._used_anywhere = self._used_anywhere, [True] * len(self._used.parameters)
        self._leave_alone(self.aggregator.source.views, used)
        return self.last_report

    def _aggregate_full(self, group: Sequence[int], steps: Sequence[StepSettings]) -> StepReport:
        """Aggregate some buckets in the thread of `overlap`."""
        assert self._overlap is not None  # which calls this
        aggregator, overlap = self.aggregator, self._overlap
        if self.check:
            inside = overlap.inside[overlap.groups.index([*group])]
            grads = [aggregator.gradients.views[index] for index in inside]
            names, seen = [aggregator.gradients.parameters[index][0] for index in inside], self._used.flags
            sizes, flags = [grad.numel() for grad in grads], [seen[index] for index in inside]
            used = aggregator.agree(grads, names, sizes, flags, error=PartlyDelivered)
            for index, is_used in zip(inside, used, strict=True):
                self._used_anywhere[index] = is_used
        return overlap.average(group, steps)

    def _leave_alone(self, grads: Sequence[Tensor], used: list[bool]) -> None:
        """Take the gradients of what was not used away, else weight decay and momentum would move it; unless
        a residual was delivered to it.
        """
        parameters = self.aggregator.source.parameters
        unused = {at: grads[at] for at, is_used in enumerate(used) if not is_used}
        if unused:  # one host synchronisation
            is_any = host_sync.to_host(torch.stack([grad.any() for grad in unused.values()]))
            unused = {at: grad for (at, grad), found in zip(unused.items(), is_any, strict=True) if not found}
        for at, (_, p) in enumerate(parameters):
            if at in unused or not p.requires_grad:
                p.grad = None

    def _refuse_halfway(self, what: str) -> None:
        """While gradients are on their way."""
        if self._overlap is not None and self._overlap.is_begun:
            raise ValueError(
                f"{what} between backward and step, when gradients are on their way already; "
                "call it after step, or after aggregate(); where backward has failed, call skip()"
            )

    def _look(self, grads: Sequence[Tensor], scale: float | None) -> tuple[list[bool], bool]:
        """Flags of the parameters that any worker used; and whether the step must be skipped."""
        flags = self._used.flags
        if scale is not None or self.scaler is not None:
            found = unscale_and_find_overflows(self.scaler, self) if self.scaler is not None else None
            return all_reduce_overflow(self.comm, grads, flags, found)
        if not self.check:
            return [True] * len(flags), False
        names = [name for name, _ in self.aggregator.source.parameters]
        return self.aggregator.agree(grads, names, [grad.numel() for grad in grads], flags), False

    @exclude_from_compile
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average, unless `aggregate` has done so since the last step; then the optimizer's own step.

        A closure is called once, before all that: trainers put backward into it. Its loss is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        is_stepped_by_scaler = hasattr(self, "found_inf") and self.scaler is None
        if is_stepped_by_scaler:
            check_scale_known(self._scale if self._is_aggregated else None, self.grad_scale)
        if not self._is_aggregated:
            self.aggregate()
        elif self._used.those:
            raise ValueError("backward ran after aggregate; call aggregate after the last backward of a step")
        self._is_aggregated = False
        if self._is_skipped:
            return loss
        if is_stepped_by_scaler:
            assert self.grad_scale is not None  # `check_scale_known` has looked
            for p in self._known:
                if p.grad is not None:
                    p.grad.div_(self.grad_scale)
        with self._step_guard.allow_step():
            self.inner_optimizer.step()
        return loss

    def _check_unchanged(self) -> None:
        """Refuse an optimizer with other parameters than it had, or with frozen ones that are trained now."""
        anew = (
            "wrap it anew: sparsify.distribute(optimizer.inner_optimizer, ...); residuals begin at zero then"
        )
        now = parameters_of(self.inner_optimizer)
        if len(now) != len(self._known) or any(p is not q for p, q in zip(now, self._known, strict=True)):
            raise ValueError(f"the optimizer has other parameters than when it was wrapped; {anew}")
        for name, p in self._frozen:
            if p.requires_grad or p.grad is not None:
                raise ValueError(
                    f"{name} was frozen when its optimizer was wrapped, and is trained now; {anew}"
                )
        self._claim.check()
        self._double_averaging.check()
        if not self._used.those:
            self._double_averaging.check_model_has_parameters(self._model)
        self.check_step(self.inner_optimizer)

    def _rates(self) -> float | list[float]:
        """The learning rate of each bucket, where the method follows it."""
        gradients = self.aggregator.source
        if not self.aggregator.method.needs_lr:
            return 1.0
        return bucket_learning_rates(gradients.parameters, gradients.buckets, self.inner_optimizer)

    def state_dict(self) -> dict[str, Any]:
        """State of the inner optimizer, and under `method` and `epoch` the method's state of this worker:
        save it per rank.
        """
        self._refuse_halfway("state_dict() came")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        method = self.aggregator.state_dict()
        saved = {**marked_state_dict(self.inner_optimizer), "method": method, "epoch": self.user_epoch}
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. All workers call it together; see
        `Aggregator.load_state_dict` for what is refused, and then nothing is loaded.
        """
        self._refuse_halfway("load_state_dict() came")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        with restore_on_error(self.inner_optimizer):
            check = partial(
                check_and_load_inner, state_dict, self.inner_optimizer, self.aggregator.check_state
            )
            check_all_can_load(self.comm, self.aggregator.source.flat.device, check)
        self.aggregator.restore_state(state_dict["method"])
        self.user_epoch = state_dict["epoch"]
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.aggregator.method!r}, {self.inner_optimizer!r})"
