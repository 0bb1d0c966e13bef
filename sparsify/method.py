"""Methods, which turn the gradients of all workers into their average, by buckets. Start reading here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify import cost, ranges
from sparsify.bucket_group import BucketGroupMixin, GroupSupport
from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.exchange import Exchange, write_scaled_sum
from sparsify.feedback import Feedback, LearningRateFeedback
from sparsify.kernels import Workspace
from sparsify.ranges import Density, PositiveFloat, Scope, ScopeOrBucket
from sparsify.select import Selector, TopK
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    BucketContext,
    BucketStep,
    PredictedBytes,
    SparseVector,
    StepSettings,
    accumulation_dtype,
    exact_bytes,
    num_selected,
)


class Method(ABC):
    """Base of all methods, which average gradients over the workers.

    The `repr` of a method identifies it with its hyperparameters. By default a method has no density,
    momentum or residual. Training loops ask the method and never its parts, because a method may wrap
    another one.
    """

    def __post_init__(self) -> None:
        ranges.check_fields(self)

    @property
    @abstractmethod
    def scope(self) -> str | float:
        """The stretch of the model that one bucket spans, see `sparsify.core.bucket`."""

    @property
    def applies_momentum(self) -> bool:
        """True if the method applies momentum itself, so that the optimizer must have none."""
        return False

    @property
    def needs_lr(self) -> bool:
        """True if `StepSettings.lr` must be the optimizer's learning rate."""
        return False

    @property
    def needs_pass_over_all_gradients(self) -> bool:
        """True if `prepare_gradients_in_place` must run, before any bucket is aggregated."""
        return False

    @property
    def num_density_warmup_epochs(self) -> int:
        """The number of first epochs with densities of their own; 0 if the density never changes."""
        return 0

    def density_at(self, epoch: int) -> float:
        """Return the density k/n in an epoch, counted from 0."""
        return 1.0

    def prepare_gradients_in_place(self, grads: list[Tensor], comm: Comm) -> None:
        """Change the whole gradient, (n,) of each bucket, before any bucket is aggregated."""
        return None

    @property
    def group_support(self) -> GroupSupport:
        """The operations that this method can do on several buckets at once; by default none."""
        return GroupSupport()

    @abstractmethod
    def init(self, like: Tensor, context: BucketContext) -> Any:
        """Return the initial state for a bucket, given a tensor (n,) of its size, type and device."""

    @abstractmethod
    def aggregate(self, grad: Tensor, step: StepSettings, state: Any, comm: Comm, timer: PhaseTimer) -> int:
        """Replace grad (n,) by the average over the workers; return how many elements this worker sent."""

    def residual(self, state: Any) -> Tensor | None:
        """Return this worker's residual (n,); None for a method without residuals."""
        return None

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes | None:
        """Return the bytes that a worker sends of a bucket in a step; None without a closed form."""
        return None

    def make_fsdp_reduce_scatter(self) -> Any:
        """Return a reduce-scatter for `set_custom_reduce_scatter` of FSDP2; None for a method without one."""
        return None

    def broken_laws(self) -> dict[str, str]:
        """Return the reason why a law can't hold for this method, by law."""
        return {}


class FeedbackMethod(Method):
    """Base of methods with error feedback, whose state is in the field `feedback` of the method's state."""

    feedback: Feedback

    @property
    def needs_lr(self) -> bool:
        return isinstance(self.feedback, LearningRateFeedback)

    def residual(self, state: Any) -> Tensor | None:
        return self.feedback.residual(state.feedback)


class SparsifierState(NamedTuple):
    """The state of a sparsifier for one bucket: the state of each of its parts."""

    select: Any
    feedback: Any
    exchange: Any
    total: Workspace | None  # a buffer in which half-precision gradients are summed in single precision


@dataclass(frozen=True)
class Sparsifier(BucketGroupMixin, FeedbackMethod):
    """A method that selects k of n elements, exchanges them, and keeps the rest as a residual.

    Args:
        density: k/n.
        scope: the stretch that one bucket spans, see `sparsify.core.bucket`.
        density_warmup: lower bounds of the density in the first epochs, one for each.
        unbiased: scale what is sent by n/k, so that its expectation is the gradient; for random choices that
            keep no residual.
        average: divide the sum over the workers by their number. Algorithm 1 of Eghlidi and Jaggi, as
            printed, does not.
        clip_norm: clip this worker's gradient to this norm divided by sqrt(P) beforehand, as Lin et al. 2018.

    Raises:
        ValueError: density outside (0, 1], or parts that do not fit together.
    """

    density: Density
    select: Selector
    feedback: Feedback
    exchange: Exchange
    scope: ScopeOrBucket = "global"
    density_warmup: tuple[Density, ...] = ()
    unbiased: bool = False
    average: bool = True
    clip_norm: PositiveFloat | None = None

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: SparsifierState, comm: Comm, timer: PhaseTimer
    ) -> int:
        k = num_selected(grad.numel(), step.step_density)
        with timer.phase("select"):
            # 1. Accumulate: acc <- residual + gradient. Some selectors add while they search.
            acc, addend = self.feedback.prepare_accumulation_terms(grad, step.lr, state.feedback)
            # 2. Select k of the n elements.
            selected = self.select.accumulate_and_select(acc, addend, k, comm, state.select)
            selection = selected.gather_from(acc)
        if step.selection_hook:
            step.selection_hook(acc, selection)
        return self.exchange_and_average(selection, grad, step, state, comm, timer)

    def exchange_and_average(
        self,
        selection: SparseVector,
        grad: Tensor,
        step: StepSettings,
        state: SparsifierState,
        comm: Comm,
        timer: PhaseTimer,
    ) -> int:
        """Exchange a selection, keep the rest, and write the average; return how many elements were sent."""
        n = grad.numel()
        k = num_selected(n, step.step_density)
        with timer.phase("exchange"):
            # 3. Exchange: sum the selections of all workers.
            delivery = self.exchange.exchange(selection, n, k, comm, state.exchange)
        with timer.phase("select"):
            # 4. Keep what was not delivered, as the residual of the next step.
            self.feedback.retain_undelivered(delivery, state.feedback)
        with timer.phase("scatter"):
            # 5. Average: write the sum over the workers, divided by their number, into the gradient.
            scale = (n / k if self.unbiased else 1) / (comm.size if self.average else 1)
            write_scaled_sum(
                delivery.sum_parts, scale, grad, state.total.buffer("total") if state.total else None
            )
        return selection.indices.numel()

    @property
    def group_support(self) -> GroupSupport:
        has_own_step = type(self).aggregate is not Sparsifier.aggregate
        has_own_group_step = type(self).aggregate_group is not BucketGroupMixin.aggregate_group
        if (has_own_step and not has_own_group_step) or not self.feedback.supports_groups:
            return GroupSupport()
        one_search = type(self.select) is TopK
        one_message = (
            self.exchange.supports_groups and self.select.is_communication_free and not self.unbiased
        )
        sees_all = one_message and not self.needs_pass_over_all_gradients
        return GroupSupport(
            one_search,
            one_message,
            accepts_pieces=sees_all and self.feedback.accepts_pieces,
            shared_k=sees_all and one_search,
        )

    def init(self, like: Tensor, context: BucketContext) -> SparsifierState:
        wide = None if accumulation_dtype(like.dtype) == like.dtype else Workspace(like)
        return SparsifierState(
            self.select.init(like, context), self.feedback.init(like), self.exchange.init(like, context), wide
        )

    def density_at(self, epoch: int) -> float:
        """Return the density, or the warm-up's where that is larger, as in the published code."""
        return max((self.density, *self.density_warmup[epoch : epoch + 1]))

    def prepare_gradients_in_place(self, grads: list[Tensor], comm: Comm) -> None:
        if self.clip_norm is not None:
            limit = self.clip_norm / comm.size**0.5
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, (limit / norm).clamp_(max=1))

    @property
    def applies_momentum(self) -> bool:
        return getattr(self.feedback, "momentum", 0) > 0

    @property
    def needs_pass_over_all_gradients(self) -> bool:
        return self.clip_norm is not None

    @property
    def num_density_warmup_epochs(self) -> int:
        return len(self.density_warmup)

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        return self.select.predict_bytes(bucket_step) + self.exchange.predict_bytes(bucket_step)

    def broken_laws(self) -> dict[str, str]:
        broken = self.select.broken_laws() | self.feedback.broken_laws() | self.exchange.broken_laws()
        if not self.average:
            broken[DENSE_AT_DENSITY_1] = "the sum is not divided by the number of workers"
        if self.clip_norm is not None:
            reason = "what clip_norm cuts off a gradient is neither applied nor kept"
            broken |= {NOTHING_IS_LOST: reason, DENSE_AT_DENSITY_1: reason}
        return broken

    def __post_init__(self) -> None:
        ranges.check_fields(self)
        select, exchange = type(self.select).__name__, type(self.exchange).__name__
        if self.exchange.needs_shared_indices and not self.select.shared:
            raise ValueError(
                f"{exchange} sends values without indices, so every worker must pick the same ones, but with "
                f"{select} each picks its own; use AllGather, or a shared selector"
            )
        if self.exchange.needs_equal_counts and not self.select.selects_fixed_count:
            raise ValueError(
                f"{exchange} expects the same number of elements from every worker, but with {select} it "
                "depends on the data; use AllGather(uneven=True), or a selector of exactly k"
            )
        incompatibility = self.exchange.why_incompatible(self.select)
        if incompatibility:
            raise ValueError(incompatibility)
        if self.unbiased and NOTHING_IS_LOST not in self.feedback.broken_laws():
            raise ValueError(
                "unbiased=True scales what is sent by n/k, which with error feedback would count it n/k "
                "times; take feedback=none, or unbiased=False"
            )


@dataclass(frozen=True)
class Dense(Method):
    """A method that averages all elements by a dense all-reduce."""

    scope: Scope = "global"

    def init(self, like: Tensor, context: BucketContext) -> None:
        return None

    def aggregate(self, grad: Tensor, step: StepSettings, state: None, comm: Comm, timer: PhaseTimer) -> int:
        comm.all_reduce(grad)
        with timer.phase("scatter"):
            grad.div_(comm.size)
        return grad.numel()

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        return exact_bytes(
            cost.all_reduce(bucket_step.n * bucket_step.dtype.itemsize, bucket_step.world_size)
        )
