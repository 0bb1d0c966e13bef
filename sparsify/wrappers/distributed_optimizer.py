"""An optimizer for plain training loops that averages sparsified gradients before it steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh

from sparsify.comm import Comm
from sparsify.core import host_sync
from sparsify.core.used_parameters import UsedParameters
from sparsify.method import Method
from sparsify.types import StepSettings
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.checks import (
    check_distribute_arguments,
    check_scaler_allows_overlap,
)
from sparsify.wrappers.engine import PartlyDeliveredError, StepReport
from sparsify.wrappers.grad_scaler import (
    all_reduce_used_and_overflow,
    check_scale_known,
    unscale_and_find_overflows,
)
from sparsify.wrappers.handshake import optimizer_facts
from sparsify.wrappers.optimizer_wrapper import OptimizerWrapper, exclude_from_compile, explain_lost_worker
from sparsify.wrappers.overhead import AveragingOverheadMonitor, fewer_messages_advice
from sparsify.wrappers.overlap import BackwardOverlap


class DistributedOptimizer(OptimizerWrapper):
    """An optimizer whose `step` first replaces the gradients by their average over the workers.

    It averages the gradients of the optimizer's parameters. A model may have several such optimizers, each
    with parameters of its own. Gradients may accumulate over any number of backward passes: they are
    compressed once per `step`. Parameters that are frozen, or that no worker used since the last step, keep
    their values, as in PyTorch (with `check=False` unused parameters get a gradient of zero). Schedulers take
    the inner optimizer or this one. Hooks on `step` run after averaging, as under DistributedDataParallel.

    Parameters and buffers of rank 0 are broadcast at the beginning, but not the extra state of modules
    (`get_extra_state`). Later on each worker has buffers of its own: those of batch normalisation follow the
    worker's own batches.

    Mixed precision: residuals must not see scaled gradients, and a step that overflows on one worker must be
    skipped by all. So hand over the scaler; then its usual recipe is right, with or without `unscale_`:

        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    With a scaler of another kind, call `optimizer.aggregate(scale)` before it steps.

    Nothing else may average: train through the model itself, as it was handed over, and not through what
    DistributedDataParallel, `replicate`, Accelerate or a Trainer made of it. The first step refuses that.

    `clip_grad_norm_` before `step` clips this worker's own gradient; after `aggregate()`, the average.

    With `overlap` a bucket of gradients is aggregated as soon as backpropagation has filled it, while
    backpropagation goes on: in a thread, on a GPU on a stream of its own, in the order of the buckets. The
    weights are equal to the bit. In return,

    - a step has one backward pass; passes before it, which only accumulate, run within `no_sync()`;
    - between backward and `step`, or `aggregate()`, gradients may be neither changed nor looked at;
    - `check` sees each bucket before it reaches its residual, so its error comes when earlier buckets were
      delivered: go on from a checkpoint.

    No GPU has run this yet.

    Args:
        model: has all of the optimizer's parameters, and perhaps more.
        comm: the communicator of the workers that average; by default over torch.distributed's own group.
            With `overlap` the default is a new group, which all workers make together; a given group is used
            by the thread, and by nothing else during backward.
        group: a process group, or a mesh of one dimension, in the place of a communicator.
        check: look for NaN and Inf before every step, one host synchronisation; all workers then raise
            `NonFiniteGradientError`, with residuals untouched (with `overlap` those of the bucket and later
            ones). Without this check NaN and Inf get into the residuals and stay there.
        debug: see `Aggregator`.
        select: see `Aggregator`.
        steps_per_epoch: for methods that raise the density in the first epochs; or set `epoch`, counted from
            0, before the first step of each.
        scaler: the GradScaler that will step this optimizer.
        overlap: needs a method of several buckets: scope='layer', or a bucket size in MB.

    Attributes:
        last_report: the report of this worker's last step: `sent_density`, `wire_bytes` and more, a
            `sparsify.wrappers.engine.StepReport`. None before the first step, or where a GradScaler skips it.

    Raises:
        ValueError: the arguments don't fit together: the optimizer has momentum, and the method its own; a
            parameter that is not the model's; a sharded model, or one that averages by itself; there is no
            process group; or a scaler, a clip_norm or a single bucket leaves nothing to overlap.
        WorkerMismatch: on all workers, where their arguments differ, see `sparsify.wrappers.handshake`.
    """

    rewrap_advice = (
        "wrap it anew: sparsify.distribute(optimizer.inner_optimizer, ...); residuals begin at zero then"
    )
    worker_state_key = "method"
    missing_worker_state = (
        "residuals: it is another optimizer's, or made by get_optimizer_state_dict, which leaves them out. "
        "Save optimizer.state_dict() on every worker; or load this into the inner optimizer "
        "(`optimizer.inner_optimizer`) and go on without what the workers still owed"
    )

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
        def check_arguments() -> None:
            check_distribute_arguments(optimizer, model, method, scaler)
            if overlap:
                check_scaler_allows_overlap(scaler)

        options = {
            "seed": seed,
            "check": check,
            "debug": debug,
            "overlap": overlap,
            "steps_per_epoch": steps_per_epoch,
            "scaler": scaler is not None,
        }
        super().__init__(optimizer, model, method, comm, group, scaler, check_arguments, options)
        self.check_finite = check
        self._is_aggregated = False
        self._is_skipped = False
        self._scale: float | None = None  # the argument of `aggregate`
        self.aggregator = Aggregator(
            method,
            self._named_parameters,
            self.comm,
            seed=seed,
            debug=debug,
            select=select,
            flat_gradients=overlap,
        )
        self.aggregator.more_facts = partial(optimizer_facts, optimizer)
        self.engine = self.aggregator
        advice = fewer_messages_advice(self.aggregator.sends_one_message, len(self.aggregator.buckets))
        self._overhead = AveragingOverheadMonitor(self.aggregator.comm, advice)
        self._used_parameters = UsedParameters(self.aggregator.source.parameters)
        self._guard_parameters()
        self._accumulates = False  # True within `no_sync`
        self._drops_gradients = False  # True within `skip`: gradients that are not sent yet
        # Of each parameter, has any worker used it in this step, as far as this worker knows?
        self._used_anywhere = [True] * len(self._used_parameters.parameters)
        self._overlap = (
            BackwardOverlap(self.aggregator, self._aggregate_group, self._begin_overlap) if overlap else None
        )

    @exclude_from_compile
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Gradients in the method's own buffer are cleared in place. Others are set to None, or zeroed.
        """
        self._check_between_steps("zero_grad")
        self.aggregator.source.clear(set_to_none)
        for _, p in self._frozen:  # which may hold a gradient from before it was frozen
            p.grad = None
        self._used_parameters.clear()
        self._is_aggregated = False  # a step that was skipped leaves it set

    @exclude_from_compile
    @explain_lost_worker
    def aggregate(self, scale: float | None = None) -> StepReport | None:
        """Average the gradients now, so that the next `step` does not; return None if it must be skipped.

        Args:
            scale: the factor of the loss, where no `scaler` was handed over. The gradients are divided by it
                before the method sees them and multiplied by it afterwards, for the scaler to divide them. If
                those of any worker have overflowed, all workers' become infinite, so that every scaler skips
                the step; residuals are untouched.
        """
        with self._overhead.measure_averaging():
            report = self._average(scale)
        self._overhead.end_step(report)
        return report

    def _average(self, scale: float | None) -> StepReport | None:
        """Average the gradients, see `aggregate`."""
        self._check_unchanged()
        if scale is not None and self.scaler is not None:
            raise ValueError("the scaler was handed over, so its scale is known: call aggregate() without it")
        if scale is not None and self._overlap is not None:
            raise ValueError(
                "overlap=True averages gradients before aggregate(scale) can divide them; leave one out"
            )
        if self._is_aggregated and not self._is_skipped and not self._used_parameters.used:
            raise ValueError("aggregate was called twice; call it once, after the last backward of a step")
        self._is_aggregated = True
        self._scale = scale
        self.last_report = None
        if self._overlap is not None:
            return self._finish_overlap(self._overlap)
        grads = self.aggregator.source.collect_by_parameter()
        if scale is not None:
            torch._foreach_div_(grads, scale)
        used, self._is_skipped = self._agree_on_used(grads, scale)
        self._used_parameters.clear()
        if self._is_skipped:
            for grad in grads:
                grad.fill_(torch.inf)
            return None
        self.last_report = self.aggregator.aggregate(self.epoch, self._learning_rates(), grads=grads)
        self._clear_unused(grads, used)
        if scale is not None:
            torch._foreach_mul_(grads, scale)
        return self.last_report

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate in the backward passes within; the next one outside is the step's last.

        Needed with `overlap` only: without it all backward passes before `step` accumulate.
        """
        accumulated_before = self._accumulates
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = accumulated_before

    @exclude_from_compile
    def skip(self) -> None:
        """Leave this worker's batch out, after an error in forward or backward, and step with the others.

        Gradients that this worker has not sent count as zero, residuals are delivered and kept as ever, and
        all workers' weights remain equal. Call it in place of the rest of the step:

            try:
                loss_of(batch).backward()
                optimizer.step()
            except torch.cuda.OutOfMemoryError:
                optimizer.skip()
        """
        if not self._is_aggregated:
            if self._overlap is None or not self._overlap.is_step_open:
                self.aggregator.source.clear()
            if self.scaler is not None:
                self.scaler.scale(self.aggregator.source.flat.new_zeros(()))  # so that it has a scale
            self._used_parameters.clear()
            self._drops_gradients = True
        try:
            self.step()
        finally:
            self._drops_gradients = False
        self.zero_grad()

    def _begin_overlap(self, overlap: BackwardOverlap) -> None:
        """Begin to overlap at the first gradient of a step, unless gradients only accumulate."""
        is_superseded = self.aggregator.source.claim.is_superseded
        if not (self._accumulates or self._is_aggregated or is_superseded):
            self._check_unchanged()
            overlap.begin_step(self.epoch, self._learning_rates())

    def _finish_overlap(self, overlap: BackwardOverlap) -> StepReport:
        """Send the gradients that are not sent yet, and wait for all."""
        if not overlap.is_step_open:  # no gradient has arrived, or all within `no_sync`
            self.aggregator.source.collect_by_parameter()
            overlap.begin_step(self.epoch, self._learning_rates())
        try:
            self.last_report = overlap.finish_step(self._drops_gradients)
        finally:
            self._used_parameters.clear()
        used = self._used_anywhere
        self._used_anywhere = [True] * len(used)
        self._clear_unused(self.aggregator.source.views, used)
        return self.last_report

    def _aggregate_group(
        self, overlap: BackwardOverlap, group: int, steps: Sequence[StepSettings]
    ) -> StepReport:
        """Aggregate a group of buckets in the thread of `overlap`."""
        aggregator = self.aggregator
        if self.check_finite:
            indices = overlap.parameters_by_group[group]
            grads = [aggregator.gradients.views[index] for index in indices]
            names = [aggregator.gradients.named_parameters[index][0] for index in indices]
            is_used = self._used_parameters.flags
            used = aggregator.check_finite_and_find_used(
                grads,
                names,
                [grad.numel() for grad in grads],
                [is_used[index] for index in indices],
                error=PartlyDeliveredError,
            )
            for index, is_used_anywhere in zip(indices, used, strict=True):
                self._used_anywhere[index] = is_used_anywhere
        return overlap.average_group(group, steps)

    def _clear_unused(self, grads: Sequence[Tensor], used: list[bool]) -> None:
        """Take away gradients of unused parameters, else weight decay and momentum would move these.

        A gradient that has got a delivered residual stays.
        """
        unused = [index for index, is_used in enumerate(used) if not is_used]
        if unused:  # one host synchronisation
            has_residual = host_sync.to_host(torch.stack([grads[index].any() for index in unused]))
            unused = [index for index, has in zip(unused, has_residual, strict=True) if not has]
        cleared = set(unused)
        for index, p in enumerate(self.aggregator.source.parameters):
            if index in cleared or not p.requires_grad:
                p.grad = None

    def _check_between_steps(self, call: str) -> None:
        """Refuse a call while gradients are on their way."""
        if self._overlap is not None and self._overlap.is_step_open:
            raise ValueError(
                f"{call}() came between backward and step, when gradients are on their way already; "
                "call it after step, or after aggregate(); where backward has failed, call skip()"
            )

    def _agree_on_used(self, grads: Sequence[Tensor], scale: float | None) -> tuple[list[bool], bool]:
        """Return, of each parameter, whether any worker used it; and whether the step must be skipped."""
        flags = self._used_parameters.flags
        if scale is not None or self.scaler is not None:
            overflows = unscale_and_find_overflows(self.scaler, self) if self.scaler is not None else None
            return all_reduce_used_and_overflow(self.comm, grads, flags, overflows)
        if not self.check_finite:
            return [True] * len(flags), False
        names = [name for name, _ in self.aggregator.source.named_parameters]
        return self.aggregator.check_finite_and_find_used(
            grads, names, [grad.numel() for grad in grads], flags
        ), False

    @exclude_from_compile
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients, unless `aggregate` has since the last step; then step the inner optimizer.

        A closure is called once, before averaging: trainers put backward into it. Its loss is returned.
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
        elif self._used_parameters.used:
            raise ValueError("backward ran after aggregate; call aggregate after the last backward of a step")
        self._is_aggregated = False
        if self._is_skipped:
            return loss
        if is_stepped_by_scaler:
            self._unscale_gradients()
        with self._step_guard.allow_step():
            self.inner_optimizer.step()
        return loss

    def _check_unchanged(self) -> None:
        """Refuse an optimizer with other parameters than it had, or gradients that others average too."""
        self._check_same_parameters()
        self._check_frozen()
        self._claim.check_not_superseded()
        self._averaged_gradients.check_not_averaged_this_step()
        if not self._used_parameters.used:
            self._averaged_gradients.check_model_still_has_parameters(self._model)
        self.check_momentum_and_epoch(self.inner_optimizer)

    def _learning_rates(self) -> float | list[float]:
        return self.find_learning_rates(self.inner_optimizer, self.aggregator.source.named_parameters)

    def worker_state_dict(self) -> dict[str, Any]:
        return self.aggregator.state_dict()

    def check_worker_state_and_collect_facts(self, saved: Any) -> dict[str, Any]:
        return self.aggregator.check_state_and_collect_facts(saved)

    def restore_worker_state(self, saved: Mapping[str, Any]) -> None:
        self.aggregator.restore_checked_state(saved)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.aggregator.method!r}, {self.inner_optimizer!r})"
