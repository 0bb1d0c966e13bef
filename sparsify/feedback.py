"""Feedback: what becomes of the gradients that were not delivered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsify.core import huge_pages
from sparsify.kernels import JointKernel, Workspace
from sparsify.kernels.joint import split_like
from sparsify.ranges import MomentumFactor, NonNegativeFloat, PositiveFraction
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    Delivery,
    DenseSlice,
    MethodPart,
    SparseVector,
    accumulation_dtype,
)


class Feedback(MethodPart, ABC):
    """Part of a method that keeps what was not sent."""

    accepts_pieces: ClassVar[bool] = (
        False  # does `prepare_accumulation` hand the gradient on as it is, in pieces too?
    )

    @property
    def residual_weight(self) -> float | None:
        """What `prepare_accumulation` multiplies the state with, which is the residual, and no more than that; None where
        it does anything else. For selectors that do it while they search, and add the gradient.
        """
        return None

    @property
    def supports_groups(self) -> bool:
        """True if several buckets' can be kept at once: unless `retain_undelivered` is its own, and for one alone."""
        own = type(self)
        return (
            own.retain_undelivered is Feedback.retain_undelivered
            or own.retain_together is not Feedback.retain_together
        )

    @abstractmethod
    def init(self, like: Tensor) -> Any:
        """The state for a bucket like this one."""

    @abstractmethod
    def prepare_accumulation(self, grad: Tensor, lr: float, state: Any) -> tuple[Tensor, Tensor | None]:
        """(n,) and (n,): the gradient plus the residual is their sum, taken in place of the first, maybe by a
        selector while it searches; None: nothing is left to be added. The first may be the state's own
        buffer, or `grad` itself.
        """

    def accumulate(self, grad: Tensor, lr: float, state: Any) -> Tensor:
        """(n,) -> (n,): the sum of the operands."""
        acc, addend = self.prepare_accumulation(grad, lr, state)
        return acc if addend is None else acc.add_(addend)

    def retain_undelivered(self, delivery: Delivery, state: Any) -> None:
        """Keep what `accumulate` returned, less what was delivered of it."""
        residual = self.residual(state)
        if residual is not None:
            for part in delivery.delivered:
                part.add_to(residual, alpha=-1)

    def operands_together(
        self, gradients: Sequence[Sequence[Tensor]], lrs: Sequence[float], states: Sequence[Any]
    ) -> tuple[list[Tensor], list[Sequence[Tensor]]]:
        """Return `prepare_accumulation` of several buckets: (n,) of each, and the pieces (m,) to be added to it, if any.

        Args:
            gradients: of each bucket its pieces; one each, unless `accepts_pieces`.
            lrs: the learning rate of each bucket's step.
        """
        accs = list[Tensor]()
        addends = list[Sequence[Tensor]]()
        for pieces, lr, state in zip(gradients, lrs, states, strict=True):
            acc, addend = self.prepare_accumulation(pieces[0], lr, state)
            accs.append(acc)
            if addend is None:
                addends.append([])
            else:
                addends.append(pieces if addend is pieces[0] else [addend])
        if all(addends):
            return accs, addends
        # Kernels add to all buckets or to none.
        for acc, pieces in zip(accs, addends, strict=True):
            for part, piece in zip(split_like(acc, pieces), pieces, strict=True) if pieces else ():
                part.add_(piece)
        return accs, [[] for _ in accs]

    def retain_together(self, delivery: Delivery, states: Sequence[Any], joint: JointKernel) -> None:
        """`retain_undelivered` of several buckets at once, given what was delivered of their space."""
        residuals = [found for state in states if (found := self.residual(state)) is not None]
        if residuals:
            joint.add(residuals, as_sparse_vectors(delivery.delivered), alpha=-1)

    def residual(self, state: Any) -> Tensor | None:
        """The residual at this moment, (n,): the state's field of this name; None where nothing is kept."""
        found: Tensor = state.residual
        return found


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """Nothing is kept: what was not sent is lost."""

    always_broken_laws: ClassVar[dict[str, str]] = {
        NOTHING_IS_LOST: "there is no residual: what is not sent is lost"
    }

    def init(self, like: Tensor) -> Workspace | None:
        return None if accumulation_dtype(like.dtype) == like.dtype else Workspace(like)

    def prepare_accumulation(self, grad: Tensor, lr: float, state: Workspace | None) -> tuple[Tensor, None]:
        return (grad if state is None else state.buffer("acc").copy_(grad)), None

    def residual(self, state: Workspace | None) -> None:
        return None


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """The residual in the gradient domain, as Shi et al. 2019 run it: acc = e + g; e <- acc, 0 where
    delivered.

    The learning rate is not inside: residuals are replayed at the rate of the step that delivers them.
    """

    accepts_pieces: ClassVar[bool] = True

    @property
    def residual_weight(self) -> float | None:
        return 1.0 if type(self).prepare_accumulation is ErrorFeedback.prepare_accumulation else None

    def init(self, like: Tensor) -> Tensor:
        return huge_pages.zeros_like(like, accumulation_dtype(like.dtype))

    def prepare_accumulation(self, grad: Tensor, lr: float, state: Tensor) -> tuple[Tensor, Tensor]:
        return state, grad  # the residual's own buffer serves as acc: nothing of size n is allocated

    def operands_together(
        self, gradients: Sequence[Sequence[Tensor]], lrs: Sequence[float], states: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Sequence[Tensor]]]:
        return [*states], [*gradients]

    def residual(self, state: Tensor) -> Tensor:
        return state


@dataclass(frozen=True)
class DecayedFeedback(ErrorFeedback):
    """The residual decays: acc = decay e + g; e <- acc, less what was delivered. SparseLoCo's error feedback,
    arXiv:2508.15706, algorithm 1, which replaces outer momentum; DeMo's momentum, arXiv:2411.19870.

    What decays is lost, and no more than that: over T steps the sum of what was delivered is the sum of what
    was bucket_step, less e(T), less (1 - decay) times the sum of e(t) over t < T.

    Args:
        decay: share of the residual that a step keeps, beta in the paper; 1 is plain error feedback.
    """

    decay: PositiveFraction = 0.95

    @property
    def residual_weight(self) -> float | None:
        return self.decay if type(self).prepare_accumulation is DecayedFeedback.prepare_accumulation else None

    def broken_laws(self) -> dict[str, str]:
        decayed = "the residual decays, by 1 - decay in each step; with decay=1 nothing is lost"
        return {} if self.decay == 1 else {NOTHING_IS_LOST: decayed}

    def prepare_accumulation(self, grad: Tensor, lr: float, state: Tensor) -> tuple[Tensor, Tensor]:
        return (state if self.decay == 1 else state.mul_(self.decay)), grad

    def operands_together(
        self, gradients: Sequence[Sequence[Tensor]], lrs: Sequence[float], states: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Sequence[Tensor]]]:
        if self.decay != 1:
            torch._foreach_mul_([*states], self.decay)
        return [*states], [*gradients]


@dataclass
class ScaledResidual:
    """A residual in units of the learning rate that it was last seen with."""

    residual: Tensor  # (n,)
    lr: NonNegativeFloat = 0.0  # 0: none seen yet


@dataclass(frozen=True)
class LearningRateFeedback(Feedback):
    """The residual in the learning-rate domain: p = lr g + e; e <- p, 0 where delivered; x <- x - mean of q.
    Stich et al. 2018; Eghlidi and Jaggi 2020, algorithm 1, as its text explains it.

    Written in units of the gradient, so that any optimizer can follow: p / lr = g + e / lr. So a residual
    that was left at one rate is replayed at that rate, however small the rate has become since. At rate 0, as
    schedules begin, nothing can be applied: zeros are delivered, and the residual waits.

    Raises:
        ValueError: in `prepare_accumulation`, lr is negative or NaN.
    """

    accepts_pieces: ClassVar[bool] = True

    def init(self, like: Tensor) -> ScaledResidual:
        return ScaledResidual(huge_pages.zeros_like(like, accumulation_dtype(like.dtype)))

    def prepare_accumulation(
        self, grad: Tensor, lr: float, state: ScaledResidual
    ) -> tuple[Tensor, Tensor | None]:
        if not lr >= 0:
            raise ValueError(f"feedback in the learning-rate domain divides by {lr=}; keep it at or above 0")
        if lr == 0:
            return torch.zeros_like(state.residual), None
        if state.lr and state.lr != lr:
            state.residual.mul_(state.lr / lr)
        state.lr = lr
        return state.residual, grad


@dataclass(frozen=True)
class LiteralFeedback(LearningRateFeedback):
    """Algorithm 1 of Eghlidi and Jaggi 2020 as printed: line 9 sums without averaging, x <- x - q, and line
    11 subtracts that sum q from every worker's p, where their text says that a worker keeps what *it* did not
    send. For a `Sparsifier` with `average=False`.

    The sums still balance: x less the mean residual follows plain SGD. But at a coordinate that a worker
    selects the step is P times too long, and all residuals together have to take it back later.
    """

    def retain_undelivered(self, delivery: Delivery, state: ScaledResidual) -> None:
        for part in delivery.total:
            part.add_to(state.residual, alpha=-1)

    def retain_together(
        self, delivery: Delivery, states: Sequence[ScaledResidual], joint: JointKernel
    ) -> None:
        joint.add([state.residual for state in states], as_sparse_vectors(delivery.total), alpha=-1)


@dataclass
class MomentumCorrectionState:
    """The two memories of momentum correction."""

    momentum: Tensor  # (n,) u in the paper
    residual: Tensor  # (n,) v in the paper


@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """Momentum before accumulation, both masked where delivered. Lin et al. 2018, arXiv:1712.01887, alg. 4.

    u <- m u + g;  v <- v + u;  u, v <- 0 where delivered. With `nesterov`: u <- m (u + g);  v <- v + u + g.
    The optimizer behind it must have no momentum of its own.
    """

    momentum: MomentumFactor = 0.9
    masking: bool = True
    nesterov: bool = False

    def broken_laws(self) -> dict[str, str]:
        counted = "momentum counts a gradient up to 1 / (1 - momentum) times; with momentum=0 nothing is lost"
        broken = {NOTHING_IS_LOST: counted} if self.momentum else {}
        if self.momentum and self.nesterov:
            broken[DENSE_AT_DENSITY_1] = "Nesterov's first step is (1 + momentum) times the gradient"
        return broken

    def init(self, like: Tensor) -> MomentumCorrectionState:
        u, v = (huge_pages.zeros_like(like, accumulation_dtype(like.dtype)) for _ in range(2))
        return MomentumCorrectionState(u, v)

    def prepare_accumulation(
        self, grad: Tensor, lr: float, state: MomentumCorrectionState
    ) -> tuple[Tensor, Tensor]:
        u, v = state.momentum, state.residual
        if self.nesterov:
            u.add_(grad).mul_(self.momentum)
            return v.add_(u), grad
        u.mul_(self.momentum).add_(grad)
        return v, u

    def retain_undelivered(self, delivery: Delivery, state: MomentumCorrectionState) -> None:
        for part in delivery.delivered:
            part.add_to(state.residual, alpha=-1)
            if self.masking and isinstance(part, SparseVector):
                state.momentum.index_fill_(0, part.indices.long(), 0)

    def retain_together(
        self, delivery: Delivery, states: Sequence[MomentumCorrectionState], joint: JointKernel
    ) -> None:
        super().retain_together(delivery, states, joint)
        if self.masking:
            for part in as_sparse_vectors(delivery.delivered):
                joint.clear_at([state.momentum for state in states], part)


@dataclass
class LowPassState:
    """A residual, and between accumulate and retain the sum that was selected from."""

    residual: Tensor  # (n,) m in the paper
    acc: Tensor | None = field(default=None, metadata={"saved": False})  # (n,)


@dataclass(frozen=True)
class LowPass(Feedback):
    """Error feedback through a low-pass filter: m <- (1 - beta) m + beta (m + g - sent). Chen et al. 2020
    (ScaleCom, NeurIPS), eq. 5. beta = 1 is plain error feedback; they take 0.1 to 0.3 for large batches.
    """

    beta: PositiveFraction = 1.0

    def broken_laws(self) -> dict[str, str]:
        return {} if self.beta == 1 else {NOTHING_IS_LOST: "beta < 1 filters part of each gradient away"}

    def init(self, like: Tensor) -> LowPassState:
        dtype = accumulation_dtype(like.dtype)
        work = None if dtype == like.dtype else huge_pages.advise(torch.empty_like(like, dtype=dtype))
        return LowPassState(huge_pages.zeros_like(like, dtype), work)

    def prepare_accumulation(self, grad: Tensor, lr: float, state: LowPassState) -> tuple[Tensor, None]:
        # The gradient's own buffer serves as acc, since m itself is still needed; half types get a wider one.
        is_wide = grad.dtype == state.residual.dtype
        state.acc = grad.add_(state.residual) if is_wide else torch.add(state.residual, grad, out=state.acc)
        return state.acc, None

    def retain_undelivered(self, delivery: Delivery, state: LowPassState) -> None:
        assert state.acc is not None
        state.residual.lerp_(state.acc, self.beta)
        for part in delivery.delivered:
            part.add_to(state.residual, alpha=-self.beta)


def build_feedback(name: str) -> Feedback:
    """The feedbacks that methods offer by a word."""
    parts: dict[str, Feedback] = {
        "gradient": ErrorFeedback(),
        "learning_rate": LearningRateFeedback(),
        "literal": LiteralFeedback(),
        "none": NoFeedback(),
    }
    if name not in parts:
        raise ValueError(f"no feedback {name!r}; there are: {', '.join(parts)}")
    return parts[name]


def as_sparse_vectors(parts: Sequence[SparseVector | DenseSlice]) -> list[SparseVector]:
    """Parts of exchanges that join buckets, which are all of this kind."""
    assert all(isinstance(part, SparseVector) for part in parts)
    return [part for part in parts if isinstance(part, SparseVector)]
