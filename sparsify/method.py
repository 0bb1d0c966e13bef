"""One bucket, one step: what every worker does with its gradient to get the average. Start reading here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsify import cost, ranges
from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.exchange import Exchange
from sparsify.feedback import Feedback, FusableFeedback, LearningRateFeedback
from sparsify.kernels import TOGETHER_UP_TO, JointKernel, Workspace, joint_kernel_for
from sparsify.ranges import Density, Positive, Scope
from sparsify.select import FusableSelector, JointSelector, Selector
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    BucketContext,
    PromisedBytes,
    SeenStep,
    Selection,
    Slice,
    Sparse,
    exactly,
    work_dtype,
)

Watch = Callable[[Tensor, Sparse], None]


class Step(NamedTuple):
    """Values that change from step to step, and are the same for all workers."""

    step_density: float  # k/n to send in this step
    lr: float = 1.0  # of the optimiser
    watch: Watch | None = None  # a sparsifier tells it of (n,) that it selects from, and of what it will send


class Method(Protocol):
    """Turns a worker's gradient into the average over all workers. `repr` tells it from every other one.

    Methods that are no `Sparsifier` inherit from `MethodDefaults` what they do not need. What loops must know
    of a method is asked here, never of its parts: a method may wrap another one.
    """

    @property
    def scope(self) -> str | float:
        """Stretch that one bucket spans, see `sparsify.core.bucket`."""

    @property
    def momentum_inside(self) -> bool:
        """True if it applies momentum itself, so that the optimiser must have none."""

    @property
    def needs_lr(self) -> bool:
        """Must `Step.lr` be the optimiser's learning rate?"""

    @property
    def needs_whole_gradient(self) -> bool:
        """Must `prepare` see the gradient of the whole model before the first bucket is aggregated?"""

    @property
    def num_warmup_epochs(self) -> int:
        """Number of epochs with a density of their own; 0: it does not matter which epoch it is."""

    def density_at(self, epoch: int) -> float:
        """k/n in the given epoch, counted from 0."""

    def prepare(self, grads: list[Tensor], comm: Comm) -> None:
        """Change the gradient of the whole model in place, before its buckets are aggregated.

        Args:
            grads: (n,) of each bucket.
        """

    def init(self, like: Tensor, context: BucketContext) -> Any:
        """The state for a bucket like this one."""

    def aggregate(self, grad: Tensor, step: Step, state: Any, comm: Comm, timer: PhaseTimer) -> int:
        """(n,) this worker's gradient in, the average out, in place. Returns how many elements were sent."""

    def residual(self, state: Any) -> Tensor | None:
        """This worker's residual, (n,); None where nothing is kept."""

    def promised(self, seen: SeenStep) -> PromisedBytes | None:
        """Bytes that a worker sends of a bucket in a step, see `Part.promised`; None: no closed form."""

    def broken_laws(self) -> dict[str, str]:
        """The laws that can't hold, and why."""


class JointSearch(NamedTuple):
    """Several of a model's buckets, and what searches them at once."""

    kernel: JointKernel
    buckets: list[int]  # which, ascending


@runtime_checkable
class SearchesTogether(Protocol):
    """Methods that can search several buckets at once, if these are aggregated together."""

    def joint_search(self, likes: Sequence[Tensor], select: str) -> JointSearch | None:
        """Buckets that are to be searched together; None: each by itself."""

    def search_together(
        self,
        joint: JointSearch,
        grads: Sequence[Tensor],
        steps: Sequence[Step],
        states: Sequence[Any],
        timer: PhaseTimer,
    ) -> dict[int, Sparse]:
        """Parts that this worker is to send of each of them.

        Args:
            grads, steps, states: of all buckets.
        """

    def deliver(
        self, part: Sparse, grad: Tensor, step: Step, state: Any, comm: Comm, timer: PhaseTimer
    ) -> int:
        """The rest of `Method.aggregate`, for a bucket of which `part` was found."""


class MethodDefaults:
    """A method without density, momentum and residual, and with nothing to prepare."""

    momentum_inside: ClassVar[bool] = False
    needs_whole_gradient: ClassVar[bool] = False
    num_warmup_epochs: ClassVar[int] = 0

    def __post_init__(self) -> None:
        ranges.check_fields(self)

    @property
    def needs_lr(self) -> bool:
        """True where feedback follows the learning rate."""
        return False

    def density_at(self, epoch: int) -> float:
        """Share of the elements that is sent in this epoch."""
        return 1.0

    def prepare(self, grads: list[Tensor], comm: Comm) -> None:
        """Change the whole gradient in place before its buckets are aggregated."""
        return None

    def residual(self, state: Any) -> Tensor | None:
        """This worker's residual, (n,)."""
        return None

    def promised(self, seen: SeenStep) -> PromisedBytes | None:
        """Bytes that a worker sends, in closed form."""
        return None

    def broken_laws(self) -> dict[str, str]:
        """Laws that can't hold, and why."""
        return {}


class SparsifierState(NamedTuple):
    """All that a sparsifier remembers of one bucket."""

    select: Any
    feedback: Any
    exchange: Any
    total: Workspace | None  # half-precision gradients are summed in single precision


@dataclass(frozen=True)
class Sparsifier:
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
    scope: Scope = "global"
    density_warmup: tuple[Density, ...] = ()
    unbiased: bool = False
    average: bool = True
    clip_norm: Positive | None = None

    def aggregate(
        self, grad: Tensor, step: Step, state: SparsifierState, comm: Comm, timer: PhaseTimer
    ) -> int:
        """Average one bucket in place, see `Method.aggregate`."""
        k = num_selected(grad.numel(), step.step_density)
        with timer.phase("select"):
            acc, selection = self.accumulate_and_select(grad, k, step.lr, state, comm)
            part = selection.of(acc)
        if step.watch:
            step.watch(acc, part)
        return self.deliver(part, grad, step, state, comm, timer)

    def deliver(
        self, part: Sparse, grad: Tensor, step: Step, state: SparsifierState, comm: Comm, timer: PhaseTimer
    ) -> int:
        """Exchange what was chosen, keep the rest, and write the average, see `SearchesTogether.deliver`."""
        n, k = grad.numel(), num_selected(grad.numel(), step.step_density)
        with timer.phase("exchange"):
            delivery = self.exchange.exchange(part, n, k, comm, state.exchange)
        with timer.phase("select"):
            self.feedback.retain(delivery, state.feedback)
        with timer.phase("scatter"):
            scale = (n / k if self.unbiased else 1) / (comm.size if self.average else 1)
            scatter(delivery.total, scale, grad, state.total.buffer("total") if state.total else None)
        return part.indices.numel()

    def accumulate_and_select(
        self, grad: Tensor, k: int, lr: float, state: SparsifierState, comm: Comm
    ) -> tuple[Tensor, Selection]:
        """Accumulate and select, in one pass where both allow it: then the selector does the addition."""
        if isinstance(self.feedback, FusableFeedback) and isinstance(self.select, FusableSelector):
            acc, addend = self.feedback.operands(grad, lr, state.feedback)
            return acc, self.select.accumulate_and_select(acc, addend, k, comm, state.select)
        acc = self.feedback.accumulate(grad, lr, state.feedback)
        return acc, self.select.select(acc, k, comm, state.select)

    def joint_search(self, likes: Sequence[Tensor], select: str) -> JointSearch | None:
        """Buckets that are small enough, and a kernel for all of them."""
        if not (isinstance(self.feedback, FusableFeedback) and isinstance(self.select, JointSelector)):
            return None
        buckets = [at for at, like in enumerate(likes) if like.numel() <= TOGETHER_UP_TO]
        kernel = joint_kernel_for([likes[at] for at in buckets], select)
        return None if kernel is None else JointSearch(kernel, buckets)

    def search_together(
        self,
        joint: JointSearch,
        grads: Sequence[Tensor],
        steps: Sequence[Step],
        states: Sequence[SparsifierState],
        timer: PhaseTimer,
    ) -> dict[int, Sparse]:
        """Accumulate and search these buckets at once."""
        assert isinstance(self.feedback, FusableFeedback)
        assert isinstance(self.select, JointSelector)
        with timer.phase("select"):
            operands = [
                self.feedback.operands(grads[at], steps[at].lr, states[at].feedback) for at in joint.buckets
            ]
            ks = [num_selected(grads[at].numel(), steps[at].step_density) for at in joint.buckets]
            accs, addends = zip(*operands, strict=True)
            parts = self.select.search_all(accs, addends, ks, joint.kernel)
        return dict(zip(joint.buckets, parts, strict=True))

    def init(self, like: Tensor, context: BucketContext) -> SparsifierState:
        """State of a bucket like this one."""
        wide = None if work_dtype(like.dtype) == like.dtype else Workspace(like)
        return SparsifierState(
            self.select.init(like, context), self.feedback.init(like), self.exchange.init(like, context), wide
        )

    def density_at(self, epoch: int) -> float:
        """The schedule is a lower bound, as in the published code: a larger density wins over it."""
        return (
            max(self.density, self.density_warmup[epoch])
            if epoch < len(self.density_warmup)
            else self.density
        )

    def prepare(self, grads: list[Tensor], comm: Comm) -> None:
        """Change the whole gradient in place before its buckets are aggregated."""
        if self.clip_norm is not None:
            limit = self.clip_norm / comm.size**0.5
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, (limit / norm).clamp_(max=1))

    @property
    def momentum_inside(self) -> bool:
        """True where the method applies momentum itself."""
        return getattr(self.feedback, "momentum", 0) > 0

    @property
    def needs_lr(self) -> bool:
        """True where feedback follows the learning rate."""
        return isinstance(self.feedback, LearningRateFeedback)

    @property
    def needs_whole_gradient(self) -> bool:
        """True where the norm of the whole gradient is needed first."""
        return self.clip_norm is not None

    @property
    def num_warmup_epochs(self) -> int:
        """Number of epochs with a density of their own."""
        return len(self.density_warmup)

    def residual(self, state: SparsifierState) -> Tensor | None:
        """This worker's residual, (n,)."""
        return self.feedback.residual(state.feedback)

    def promised(self, seen: SeenStep) -> PromisedBytes:
        """Bytes that a worker sends, in closed form."""
        return self.select.promised(seen) + self.exchange.promised(seen)

    def broken_laws(self) -> dict[str, str]:
        """Laws that can't hold, and why."""
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
        if self.unbiased and NOTHING_IS_LOST not in self.feedback.broken_laws():
            raise ValueError(
                "unbiased=True scales what is sent by n/k, which with error feedback would count it n/k "
                "times; take feedback=none, or unbiased=False"
            )


@dataclass(frozen=True)
class Dense(MethodDefaults):
    """Plain averaging of everything."""

    scope: Scope = "global"

    def init(self, like: Tensor, context: BucketContext) -> None:
        """State of a bucket like this one."""
        return None

    def aggregate(self, grad: Tensor, step: Step, state: None, comm: Comm, timer: PhaseTimer) -> int:
        """Average one bucket in place, see `Method.aggregate`."""
        comm.all_reduce(grad)
        with timer.phase("scatter"):
            grad.div_(comm.size)
        return grad.numel()

    def promised(self, seen: SeenStep) -> PromisedBytes:
        """Bytes that a worker sends, in closed form."""
        return exactly(cost.all_reduce(seen.n * seen.dtype.itemsize, seen.size))


def scatter(total: list[Sparse | Slice], scale: float, grad: Tensor, wide: Tensor | None) -> None:
    """grad (n,) <- scale x the sum of `total`, part by part: within one, indices are distinct, so the order
    of the sum is fixed.
    """
    into = grad if wide is None else wide
    into.zero_()
    for part in total:
        part.add_to(into, alpha=scale)
    if wide is not None:
        grad.copy_(wide)


def num_selected(n: int, density: float) -> int:
    """k: the whole part of density times n, at least 1 of a bucket that is not empty. Shi et al.'s code."""
    return min(n, max(1, int(density * n)))
