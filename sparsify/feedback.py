"""Error feedback, which keeps the gradients that were not delivered for later steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsify.core import huge_pages
from sparsify.kernels import GroupKernel, Workspace
from sparsify.kernels.group_kernel import ConsecutiveTensors, split_like
from sparsify.ranges import (
    AnyFeedbackName,
    MomentumFactor,
    NonNegativeFloat,
    NonNegativeFraction,
    PositiveFraction,
)
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
    """Base of the parts of methods that keep what was not delivered."""

    # True if `prepare_accumulation_terms` returns the gradient unchanged: then it may lie in several pieces.
    accepts_pieces: ClassVar[bool] = False

    @property
    def residual_weight(self) -> float | None:
        """The factor of the residual if accumulation is factor x residual + gradient, else None.

        Selectors that accumulate while they search need it.
        """
        return None

    @property
    def supports_groups(self) -> bool:
        """True unless a subclass overrides `retain_undelivered` and not `retain_undelivered_of_group`."""
        cls = type(self)
        is_inherited = cls.retain_undelivered is Feedback.retain_undelivered
        return is_inherited or cls.retain_undelivered_of_group is not Feedback.retain_undelivered_of_group

    @abstractmethod
    def init(self, like: Tensor) -> Any:
        """Return the state for a bucket like this tensor."""

    @abstractmethod
    def prepare_accumulation_terms(self, grad: Tensor, lr: float, state: Any) -> tuple[Tensor, Tensor | None]:
        """Return two tensors (n,) whose sum is the residual plus the gradient.

        A selector may add them while it searches, in place of the first, which may be a buffer of the state
        or `grad` itself. The second is None if the first is the sum already.
        """

    def accumulate_in_gradient_units(self, grad: Tensor, lr: float, state: Any) -> Tensor:
        """Return the residual, in units of the gradient, plus the gradient (n,)."""
        acc, addend = self.prepare_accumulation_terms(grad, lr, state)
        return acc if addend is None else acc.add_(addend)

    def retain_undelivered(self, delivery: Delivery, state: Any) -> None:
        """Keep the accumulated gradient less what was delivered of it, as the new residual."""
        residual = self.residual(state)
        if residual is not None:
            for part in self.parts_to_subtract(delivery):
                part.add_to(residual, alpha=-1)

    def parts_to_subtract(self, delivery: Delivery) -> list[SparseVector | DenseSlice]:
        """Return the parts that are subtracted from the residual: those that this worker delivered."""
        return delivery.own_parts

    def prepare_group_accumulation_terms(
        self, gradients: ConsecutiveTensors, lrs: Sequence[float], states: Sequence[Any]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Prepare the accumulation of several buckets: return (n,) of each, and what is to be added to them.

        These addends are tensors (m,) that follow each other; none where nothing is left to add.

        Args:
            gradients: of each bucket a single piece unless `accepts_pieces`.
            lrs: the learning rate of each bucket's step.
        """
        accs = list[Tensor]()
        addends = list[list[Tensor]]()
        for pieces, lr, state in zip(gradients.pieces, lrs, states, strict=True):
            acc, addend = self.prepare_accumulation_terms(pieces[0], lr, state)
            accs.append(acc)
            if addend is None:
                addends.append([])
            else:
                addends.append(pieces if addend is pieces[0] else [addend])
        if all(addends):
            return accs, [piece for pieces in addends for piece in pieces]
        # Kernels add to all buckets or to none.
        for acc, pieces in zip(accs, addends, strict=True):
            if pieces:
                torch._foreach_add_(split_like(acc, pieces), pieces)
        return accs, []

    def retain_undelivered_of_group(
        self, delivery: Delivery, states: Sequence[Any], kernel: GroupKernel
    ) -> None:
        """Do as `retain_undelivered` for a group of buckets, given the delivery of the whole group."""
        residuals = [self.residual(state) for state in states]
        kept = [residual for residual in residuals if residual is not None]
        if kept:
            kernel.add(kept, require_all_sparse(self.parts_to_subtract(delivery)), alpha=-1)

    def residual(self, state: Any) -> Tensor | None:
        """Return the residual (n,), by default the state's field of this name; None where nothing is kept."""
        residual: Tensor = state.residual
        return residual


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """No error feedback: what was not sent is lost."""

    always_broken_laws: ClassVar[dict[str, str]] = {
        NOTHING_IS_LOST: "there is no residual: what is not sent is lost"
    }

    def init(self, like: Tensor) -> Workspace | None:
        return None if accumulation_dtype(like.dtype) == like.dtype else Workspace(like)

    def prepare_accumulation_terms(
        self, grad: Tensor, lr: float, state: Workspace | None
    ) -> tuple[Tensor, None]:
        return (grad if state is None else state.buffer("acc").copy_(grad)), None

    def residual(self, state: Workspace | None) -> None:
        return None


@dataclass(frozen=True)
class ErrorFeedback(Feedback):
    """Error feedback in the gradient domain, as in the code of Shi et al. 2019.

    acc = e + g;  e <- acc, 0 where delivered. The residual e is not scaled by the learning rate, so it is
    applied at the rate of the step that delivers it.
    """

    accepts_pieces: ClassVar[bool] = True

    @property
    def residual_weight(self) -> float | None:
        return (
            1.0 if type(self).prepare_accumulation_terms is ErrorFeedback.prepare_accumulation_terms else None
        )

    def init(self, like: Tensor) -> Tensor:
        return huge_pages.zeros_like(like, accumulation_dtype(like.dtype))

    def prepare_accumulation_terms(self, grad: Tensor, lr: float, state: Tensor) -> tuple[Tensor, Tensor]:
        return state, grad  # acc lies in the residual's buffer, so that nothing of size n is allocated

    def prepare_group_accumulation_terms(
        self, gradients: ConsecutiveTensors, lrs: Sequence[float], states: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        return [*states], gradients.tensors

    def residual(self, state: Tensor) -> Tensor:
        return state


@dataclass(frozen=True)
class DecayedFeedback(ErrorFeedback):
    """Error feedback with a residual that decays: acc = decay e + g;  e <- acc, less what was delivered.

    This is SparseLoCo's error feedback, arXiv:2508.15706, algorithm 1, which replaces outer momentum, and
    DeMo's momentum, arXiv:2411.19870. Only what decays is lost: over T steps the sum of the deliveries is the
    sum of the gradients, less e(T), less (1 - decay) times the sum of e(t) over t < T.

    Args:
        decay: share of the residual that a step keeps, beta in the paper; 1 is plain error feedback, 0 none:
            what is not delivered is lost.
    """

    decay: NonNegativeFraction = 0.95

    @property
    def residual_weight(self) -> float | None:
        return (
            self.decay
            if type(self).prepare_accumulation_terms is DecayedFeedback.prepare_accumulation_terms
            else None
        )

    def broken_laws(self) -> dict[str, str]:
        reason = "the residual decays, by 1 - decay in each step; with decay=1 nothing is lost"
        return {} if self.decay == 1 else {NOTHING_IS_LOST: reason}

    def prepare_accumulation_terms(self, grad: Tensor, lr: float, state: Tensor) -> tuple[Tensor, Tensor]:
        return (state if self.decay == 1 else state.mul_(self.decay)), grad

    def prepare_group_accumulation_terms(
        self, gradients: ConsecutiveTensors, lrs: Sequence[float], states: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        if self.decay != 1:
            torch._foreach_mul_([*states], self.decay)
        return [*states], gradients.tensors


@dataclass
class ScaledResidual:
    """A residual in units of the gradient at a learning rate."""

    residual: Tensor  # (n,)
    lr: NonNegativeFloat = 0.0  # of the last step; 0 before the first


@dataclass(frozen=True)
class LearningRateFeedback(Feedback):
    """Error feedback in the learning-rate domain: p = lr g + e;  e <- p, 0 where delivered.

    Stich et al. 2018; Eghlidi and Jaggi 2020, algorithm 1, as its text explains it. The code computes in
    units of the gradient, p / lr = g + e / lr, so that any optimizer can follow. A residual is applied at the
    learning rate of the step that left it, however small the rate has become since. At rate 0, as schedules
    begin, zeros are delivered and the residual waits.

    Raises:
        ValueError: in `prepare_accumulation_terms`, lr is negative or NaN.
    """

    accepts_pieces: ClassVar[bool] = True

    def init(self, like: Tensor) -> ScaledResidual:
        return ScaledResidual(huge_pages.zeros_like(like, accumulation_dtype(like.dtype)))

    def prepare_accumulation_terms(
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
    """Algorithm 1 of Eghlidi and Jaggi 2020 as printed, for a `Sparsifier` with `average=False`.

    Line 9 sums without averaging, x <- x - q, and line 11 subtracts the sum q from every worker's p, although
    the text says that a worker keeps what *it* did not send. The sums still balance: x less the mean residual
    follows plain SGD. But at a coordinate that a worker selects the step is P times too long, and all
    residuals together take it back later.
    """

    def parts_to_subtract(self, delivery: Delivery) -> list[SparseVector | DenseSlice]:
        return delivery.sum_parts


@dataclass
class MomentumCorrectionState:
    """The momentum and the residual of momentum correction."""

    momentum: Tensor  # (n,) u in the paper
    residual: Tensor  # (n,) v in the paper


@dataclass(frozen=True)
class MomentumCorrection(Feedback):
    """Error feedback with momentum correction. Lin et al. 2018, arXiv:1712.01887, algorithm 4.

    Momentum u is applied before the residual v accumulates: u <- m u + g;  v <- v + u;  u, v <- 0 where
    delivered. With `nesterov`: u <- m (u + g);  v <- v + u + g. The optimizer must have no momentum.
    """

    momentum: MomentumFactor = 0.9
    masking: bool = True
    nesterov: bool = False

    def broken_laws(self) -> dict[str, str]:
        reason = "momentum counts a gradient up to 1 / (1 - momentum) times; with momentum=0 nothing is lost"
        broken = {NOTHING_IS_LOST: reason} if self.momentum else {}
        if self.momentum and self.nesterov:
            broken[DENSE_AT_DENSITY_1] = "Nesterov's first step is (1 + momentum) times the gradient"
        return broken

    def init(self, like: Tensor) -> MomentumCorrectionState:
        dtype = accumulation_dtype(like.dtype)
        return MomentumCorrectionState(huge_pages.zeros_like(like, dtype), huge_pages.zeros_like(like, dtype))

    def prepare_accumulation_terms(
        self, grad: Tensor, lr: float, state: MomentumCorrectionState
    ) -> tuple[Tensor, Tensor]:
        u = state.momentum
        v = state.residual
        if self.nesterov:
            u.add_(grad).mul_(self.momentum)
            return v.add_(u), grad
        u.mul_(self.momentum).add_(grad)
        return v, u

    def retain_undelivered(self, delivery: Delivery, state: MomentumCorrectionState) -> None:
        for part in delivery.own_parts:
            part.add_to(state.residual, alpha=-1)
            if self.masking and isinstance(part, SparseVector):
                state.momentum.index_fill_(0, part.indices.long(), 0)

    def retain_undelivered_of_group(
        self, delivery: Delivery, states: Sequence[MomentumCorrectionState], kernel: GroupKernel
    ) -> None:
        super().retain_undelivered_of_group(delivery, states, kernel)
        if self.masking:
            for part in require_all_sparse(delivery.own_parts):
                kernel.clear_at([state.momentum for state in states], part)


@dataclass
class LowPassState:
    """A residual, and within a step the accumulated gradient."""

    residual: Tensor  # (n,) m in the paper
    acc: Tensor | None = field(default=None, metadata={"saved": False})  # (n,)


@dataclass(frozen=True)
class LowPass(Feedback):
    """Error feedback through a low-pass filter: m <- (1 - beta) m + beta (m + g - sent).

    Chen et al. 2020 (ScaleCom, NeurIPS), eq. 5. beta = 1 is plain error feedback; the paper takes 0.1 to 0.3
    for large batches.
    """

    beta: PositiveFraction = 1.0

    def broken_laws(self) -> dict[str, str]:
        return {} if self.beta == 1 else {NOTHING_IS_LOST: "beta < 1 filters part of each gradient away"}

    def init(self, like: Tensor) -> LowPassState:
        dtype = accumulation_dtype(like.dtype)
        acc = None if dtype == like.dtype else huge_pages.request(torch.empty_like(like, dtype=dtype))
        return LowPassState(huge_pages.zeros_like(like, dtype), acc)

    def prepare_accumulation_terms(self, grad: Tensor, lr: float, state: LowPassState) -> tuple[Tensor, None]:
        # acc lies in the gradient's buffer, since m is still needed. Half-precision types get a wider buffer.
        is_wide = grad.dtype == state.residual.dtype
        state.acc = grad.add_(state.residual) if is_wide else torch.add(state.residual, grad, out=state.acc)
        return state.acc, None

    def retain_undelivered(self, delivery: Delivery, state: LowPassState) -> None:
        assert state.acc is not None
        state.residual.lerp_(state.acc, self.beta)
        for part in delivery.own_parts:
            part.add_to(state.residual, alpha=-self.beta)


# By the value of a method's parameter `feedback`.
FEEDBACKS: Mapping[AnyFeedbackName, Feedback] = {
    "gradient": ErrorFeedback(),
    "learning_rate": LearningRateFeedback(),
    "literal": LiteralFeedback(),
    "none": NoFeedback(),
}


def require_all_sparse(parts: Sequence[SparseVector | DenseSlice]) -> list[SparseVector]:
    """Return the parts of a delivery, which are all sparse where an exchange supports groups."""
    vectors = [part for part in parts if isinstance(part, SparseVector)]
    assert len(vectors) == len(parts)
    return vectors
