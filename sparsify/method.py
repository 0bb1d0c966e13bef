"""One bucket, one step: what every worker does with its gradient to get the average. Start reading here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify import cost, ranges
from sparsify.bucket_group import GroupForm, GroupSupport
from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.exchange import Exchange, scatter
from sparsify.feedback import Feedback, LearningRateFeedback
from sparsify.kernels import Workspace
from sparsify.ranges import Density, PositiveFloat, Scope, ScopeOrBucket
from sparsify.select import Selector, TopK
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    BucketContext,
    PromisedBytes,
    SeenStep,
    Sparse,
    exactly,
    work_dtype,
)
from sparsify.types import Step as Step
from sparsify.types import Watch as Watch
from sparsify.types import num_selected as num_selected


class Method(ABC):
    """Turns a worker's gradient into the average over all workers. `repr` tells it from every other one.

    By default it has no density, momentum and residual, and nothing to prepare. What loops must know of a
    method is asked here, never of its parts: a method may wrap another one.
    """

    def __post_init__(self) -> None:
        ranges.check_fields(self)

    @property
    @abstractmethod
    def scope(self) -> str | float:
        """Stretch that one bucket spans, see `sparsify.core.bucket`."""

    @property
    def momentum_inside(self) -> bool:
        """True if it applies momentum itself, so that the optimizer must have none."""
        return False

    @property
    def needs_lr(self) -> bool:
        """True if `Step.lr` must be the optimizer's learning rate."""
        return False

    @property
    def needs_whole_gradient(self) -> bool:
        """True if `prepare` must see the whole model's gradient before the first bucket is aggregated."""
        return False

    @property
    def num_warmup_epochs(self) -> int:
        """Number of epochs with a density of their own; 0: it does not matter which epoch it is."""
        return 0

    def density_at(self, epoch: int) -> float:
        """k/n in the given epoch, counted from 0."""
        return 1.0

    def prepare(self, grads: list[Tensor], comm: Comm) -> None:
        """Change the whole gradient in place, (n,) of each bucket, before these are aggregated."""
        return None

    @property
    def group_support(self) -> GroupSupport:
        """What this method can do with several buckets at once; by default nothing."""
        return GroupSupport()

    @abstractmethod
    def init(self, like: Tensor, context: BucketContext) -> Any:
        """The state for a bucket like this one."""

    @abstractmethod
    def aggregate(self, grad: Tensor, step: Step, state: Any, comm: Comm, timer: PhaseTimer) -> int:
        """(n,) this worker's gradient in, the average out, in place. Returns how many elements were sent."""

    def residual(self, state: Any) -> Tensor | None:
        """This worker's residual, (n,); None where nothing is kept."""
        return None

    def promised(self, seen: SeenStep) -> PromisedBytes | None:
        """Bytes that a worker sends of a bucket in a step, see `Part.promised`; None: no closed form."""
        return None

    def reduce_scatter(self) -> Any:
        """Its half within a replica, as `fully_shard` takes it (`set_custom_reduce_scatter`); None: none."""
        return None

    def broken_laws(self) -> dict[str, str]:
        """The laws that can't hold, and why."""
        return {}


class FeedbackMethod(Method):
    """Base of methods that have a `feedback`, whose state is in the state's field of this name."""

    feedback: Feedback

    @property
    def needs_lr(self) -> bool:
        return isinstance(self.feedback, LearningRateFeedback)

    def residual(self, state: Any) -> Tensor | None:
        return self.feedback.residual(state.feedback)


class SparsifierState(NamedTuple):
    """All that a sparsifier remembers of one bucket."""

    select: Any
    feedback: Any
    exchange: Any
    total: Workspace | None  # half-precision gradients are summed in single precision


@dataclass(frozen=True)
class Sparsifier(GroupForm, FeedbackMethod):
    """Send k of n, keep the rest.

    Args:
        density: k/n.
        scope: what one bucket spans, see `sparsify.core.bucket`.
        density_warmup: lower bounds of the density in the first epochs, one each.
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
        self, grad: Tensor, step: Step, state: SparsifierState, comm: Comm, timer: PhaseTimer
    ) -> int:
        k = num_selected(grad.numel(), step.step_density)
        with timer.phase("select"):
            acc, addend = self.feedback.operands(grad, step.lr, state.feedback)
            part = self.select.accumulate_and_select(acc, addend, k, comm, state.select).of(acc)
        if step.watch:
            step.watch(acc, part)
        return self.deliver(part, grad, step, state, comm, timer)

    def deliver(
        self, part: Sparse, grad: Tensor, step: Step, state: SparsifierState, comm: Comm, timer: PhaseTimer
    ) -> int:
        """Exchange what was chosen, keep the rest, and write the average."""
        n, k = grad.numel(), num_selected(grad.numel(), step.step_density)
        with timer.phase("exchange"):
            delivery = self.exchange.exchange(part, n, k, comm, state.exchange)
        with timer.phase("select"):
            self.feedback.retain(delivery, state.feedback)
        with timer.phase("scatter"):
            scale = (n / k if self.unbiased else 1) / (comm.size if self.average else 1)
            scatter(delivery.total, scale, grad, state.total.buffer("total") if state.total else None)
        return part.indices.numel()

    @property
    def group_support(self) -> GroupSupport:
        has_own_step = type(self).aggregate is not Sparsifier.aggregate
        has_own_group_step = type(self).aggregate_group is not GroupForm.aggregate_group
        if (has_own_step and not has_own_group_step) or not self.feedback.supports_groups:
            return GroupSupport()
        one_search = type(self.select) is TopK
        one_message = self.exchange.supports_groups and self.select.is_silent and not self.unbiased
        sees_all = one_message and not self.needs_whole_gradient
        return GroupSupport(
            one_search,
            one_message,
            pieces=sees_all and self.feedback.accepts_pieces,
            shared_k=sees_all and one_search,
        )

    def init(self, like: Tensor, context: BucketContext) -> SparsifierState:
        wide = None if work_dtype(like.dtype) == like.dtype else Workspace(like)
        return SparsifierState(
            self.select.init(like, context), self.feedback.init(like), self.exchange.init(like, context), wide
        )

    def density_at(self, epoch: int) -> float:
        """The schedule is a lower bound, as in the published code: a larger density wins over it."""
        return max((self.density, *self.density_warmup[epoch : epoch + 1]))

    def prepare(self, grads: list[Tensor], comm: Comm) -> None:
        if self.clip_norm is not None:
            limit = self.clip_norm / comm.size**0.5
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, (limit / norm).clamp_(max=1))

    @property
    def momentum_inside(self) -> bool:
        return getattr(self.feedback, "momentum", 0) > 0

    @property
    def needs_whole_gradient(self) -> bool:
        return self.clip_norm is not None

    @property
    def num_warmup_epochs(self) -> int:
        return len(self.density_warmup)

    def promised(self, seen: SeenStep) -> PromisedBytes:
        return self.select.promised(seen) + self.exchange.promised(seen)

    def broken_laws(self) -> dict[str, str]:
        broken = self.select.broken_laws() | self.feedback.broken_laws() | self.exchange.broken_laws()
        if not self.average:
            broken[DENSE_AT_DENSITY_1] = "the sum is not divided by the number of workers"
        if self.clip_norm is not None:
            clipped = "what clip_norm cuts off a gradient is neither applied nor kept"
            broken |= {NOTHING_IS_LOST: clipped, DENSE_AT_DENSITY_1: clipped}
        return broken

    def __post_init__(self) -> None:
        ranges.check_fields(self)
        select, exchange = type(self.select).__name__, type(self.exchange).__name__
        if self.exchange.needs_shared and not self.select.shared:
            raise ValueError(
                f"{exchange} sends values without indices, so every worker must pick the same ones, but with "
                f"{select} each picks its own; use AllGather, or a shared selector"
            )
        if self.exchange.needs_exact and not self.select.exact:
            raise ValueError(
                f"{exchange} expects the same number of elements from every worker, but with {select} it "
                "depends on the data; use AllGather(uneven=True), or a selector of exactly k"
            )
        if misfit := self.exchange.misfit(self.select):
            raise ValueError(misfit)
        if self.unbiased and NOTHING_IS_LOST not in self.feedback.broken_laws():
            raise ValueError(
                "unbiased=True scales what is sent by n/k, which with error feedback would count it n/k "
                "times; take feedback=none, or unbiased=False"
            )


@dataclass(frozen=True)
class Dense(Method):
    """Plain averaging of everything."""

    scope: Scope = "global"

    def init(self, like: Tensor, context: BucketContext) -> None:
        return None

    def aggregate(self, grad: Tensor, step: Step, state: None, comm: Comm, timer: PhaseTimer) -> int:
        comm.all_reduce(grad)
        with timer.phase("scatter"):
            grad.div_(comm.size)
        return grad.numel()

    def promised(self, seen: SeenStep) -> PromisedBytes:
        return exactly(cost.all_reduce(seen.n * seen.dtype.itemsize, seen.size))
