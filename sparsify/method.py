"""One bucket, one step: what every worker does with its gradient to get the average. Start reading here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsify.bucket import check_scope
from sparsify.comm import Comm
from sparsify.exchange import Exchange
from sparsify.feedback import Feedback, FusableFeedback, LearningRateFeedback
from sparsify.kernels import TOGETHER_UP_TO, JointKernel, joint_kernel_for
from sparsify.select import FusableSelector, JointSelector, Selector
from sparsify.timer import PhaseTimer
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    BucketContext,
    Selection,
    Slice,
    Sparse,
    work_dtype,
)
from sparsify.workspace import Workspace

Watch = Callable[[Tensor, Sparse], None]


class Step(NamedTuple):
    """What changes from step to step, and is the same for all workers."""

    density: float  # k/n to send in this step
    lr: float = 1.0  # of the optimiser
    watch: Watch | None = None  # a sparsifier tells it of (n,) that it selects from, and of what it will send


class Method(Protocol):
    """Turns a worker's gradient into the average over all workers. `repr` tells it from every other one.

    Methods that are no `Sparsifier` inherit from `MethodDefaults` what they do not need. What loops must know
    of a method is asked here, never of its parts: a method may wrap another one.
    """

    @property
    def scope(self) -> str | float:
        """What one bucket spans, see `sparsify.bucket`."""

    @property
    def momentum_inside(self) -> bool:
        """Does it apply momentum itself, so that the optimiser must have none?"""

    @property
    def needs_lr(self) -> bool:
        """Must `Step.lr` be the optimiser's learning rate?"""

    @property
    def needs_whole_gradient(self) -> bool:
        """Must `prepare` see the gradient of the whole model before the first bucket is aggregated?"""

    @property
    def num_warmup_epochs(self) -> int:
        """Of epochs with a density of their own; 0: it does not matter which epoch it is."""

    def density_at(self, epoch: int) -> float:
        """k/n in the given epoch, counted from 0."""

    def prepare(self, grads: list[Tensor], comm: Comm) -> None:
        """What is done to the gradient of the whole model, in place, before its buckets are aggregated.

        Args:
            grads: (n,) of each bucket.
        """

    def init(self, like: Tensor, context: BucketContext) -> Any:
        """The state for a bucket like this one."""

    def aggregate(self, grad: Tensor, step: Step, state: Any, comm: Comm, timer: PhaseTimer) -> int:
        """(n,) this worker's gradient in, the average out, in place. Returns how many elements were sent."""

    def residual(self, state: Any) -> Tensor | None:
        """This worker's residual, (n,); None where nothing is kept."""

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
        """Which of these buckets are to be searched together; None: each by itself."""

    def search_together(
        self,
        joint: JointSearch,
        grads: Sequence[Tensor],
        steps: Sequence[Step],
        states: Sequence[Any],
        timer: PhaseTimer,
    ) -> dict[int, Sparse]:
        """What this worker is to send of each of them.

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

    @property
    def needs_lr(self) -> bool:
        return False

    def density_at(self, epoch: int) -> float:
        return 1.0

    def prepare(self, grads: list[Tensor], comm: Comm) -> None:
        return None

    def residual(self, state: Any) -> Tensor | None:
        return None

    def broken_laws(self) -> dict[str, str]:
        return {}


class State(NamedTuple):
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
        scope: what one bucket spans, see `sparsify.bucket`.
        density_warmup: lower bounds of the density in the first epochs, one each.
        unbiased: scale what is sent by n/k, so that its expectation is the gradient; for random choices that
            keep no residual.
        average: divide the sum over the workers by their number. Algorithm 1 of Eghlidi and Jaggi, as
            printed, does not.
        clip_norm: clip this worker's gradient to this norm divided by sqrt(P) beforehand, as Lin et al. 2018.

    Raises:
        ValueError: density outside (0, 1], or parts that do not fit together.
    """

    density: float
    select: Selector
    feedback: Feedback
    exchange: Exchange
    scope: str | float = "global"
    density_warmup: tuple[float, ...] = ()
    unbiased: bool = False
    average: bool = True
    clip_norm: float | None = None

    def aggregate(self, grad: Tensor, step: Step, state: State, comm: Comm, timer: PhaseTimer) -> int:
        k = num_selected(grad.numel(), step.density)
        with timer.phase("select"):
            acc, selection = self.accumulate_and_select(grad, k, step.lr, state, comm)
            part = selection.of(acc)
        if step.watch:
            step.watch(acc, part)
        return self.deliver(part, grad, step, state, comm, timer)

    def deliver(
        self, part: Sparse, grad: Tensor, step: Step, state: State, comm: Comm, timer: PhaseTimer
    ) -> int:
        n, k = grad.numel(), num_selected(grad.numel(), step.density)
        with timer.phase("exchange"):
            delivery = self.exchange.exchange(part, n, k, comm, state.exchange)
        with timer.phase("select"):
            self.feedback.retain(delivery, state.feedback)
        with timer.phase("scatter"):
            scale = (n / k if self.unbiased else 1) / (comm.size if self.average else 1)
            scatter(delivery.total, scale, grad, state.total.buffer("total") if state.total else None)
        return part.indices.numel()

    def accumulate_and_select(
        self, grad: Tensor, k: int, lr: float, state: State, comm: Comm
    ) -> tuple[Tensor, Selection]:
        """In one pass where feedback and selector allow it: then the selector does the addition."""
        if isinstance(self.feedback, FusableFeedback) and isinstance(self.select, FusableSelector):
            acc, addend = self.feedback.operands(grad, lr, state.feedback)
            return acc, self.select.accumulate_and_select(acc, addend, k, comm, state.select)
        acc = self.feedback.accumulate(grad, lr, state.feedback)
        return acc, self.select.select(acc, k, comm, state.select)

    def joint_search(self, likes: Sequence[Tensor], select: str) -> JointSearch | None:
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
        states: Sequence[State],
        timer: PhaseTimer,
    ) -> dict[int, Sparse]:
        assert isinstance(self.feedback, FusableFeedback)
        assert isinstance(self.select, JointSelector)
        with timer.phase("select"):
            operands = [
                self.feedback.operands(grads[at], steps[at].lr, states[at].feedback) for at in joint.buckets
            ]
            ks = [num_selected(grads[at].numel(), steps[at].density) for at in joint.buckets]
            accs, addends = zip(*operands, strict=True)
            parts = self.select.search_all(accs, addends, ks, joint.kernel)
        return dict(zip(joint.buckets, parts, strict=True))

    def init(self, like: Tensor, context: BucketContext) -> State:
        wide = None if work_dtype(like.dtype) == like.dtype else Workspace(like)
        return State(
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
        if self.clip_norm is not None:
            limit = self.clip_norm / comm.size**0.5
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            torch._foreach_mul_(grads, (limit / norm).clamp_(max=1))

    @property
    def momentum_inside(self) -> bool:
        return getattr(self.feedback, "momentum", 0) > 0

    @property
    def needs_lr(self) -> bool:
        return isinstance(self.feedback, LearningRateFeedback)

    @property
    def needs_whole_gradient(self) -> bool:
        return self.clip_norm is not None

    @property
    def num_warmup_epochs(self) -> int:
        return len(self.density_warmup)

    def residual(self, state: State) -> Tensor | None:
        return self.feedback.residual(state.feedback)

    def broken_laws(self) -> dict[str, str]:
        broken = self.select.broken_laws() | self.feedback.broken_laws() | self.exchange.broken_laws()
        if not self.average:
            broken[DENSE_AT_DENSITY_1] = "the sum is not divided by the number of workers"
        if self.clip_norm is not None:
            clipped = "what clip_norm cuts off a gradient is neither applied nor kept"
            broken |= {NOTHING_IS_LOST: clipped, DENSE_AT_DENSITY_1: clipped}
        return broken

    def __post_init__(self) -> None:
        for density in (self.density, *self.density_warmup):
            check_density(density)
        check_scope(self.scope)
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
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm} is out of range: it must be above 0")


@dataclass(frozen=True)
class Dense(MethodDefaults):
    """Plain averaging of everything."""

    scope: str | float = "global"

    def __post_init__(self) -> None:
        check_scope(self.scope)

    def init(self, like: Tensor, context: BucketContext) -> None:
        return None

    def aggregate(self, grad: Tensor, step: Step, state: None, comm: Comm, timer: PhaseTimer) -> int:
        comm.all_reduce(grad)
        with timer.phase("scatter"):
            grad.div_(comm.size)
        return grad.numel()


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


def check_density(density: float) -> None:
    if not 0 < density <= 1:  # also refuses NaN
        raise ValueError(f"{density=} is out of range: the share of gradients to send must lie in (0, 1]")
