"""Strategies of local steps: which method averages the drift, how often, and which outer step follows.

With R workers, a common anchor theta and H = `every`, a round is:

    1. each worker takes H steps of its own optimizer from theta, to theta_r;
    2. its drift is theta - theta_r, which points as a gradient does;
    3. a method of this library averages the drift, with its residual from round to round;
    4. the outer step moves theta by the average, and each worker goes on from there.

McMahan et al. 2017 (FedAvg), Stich 2019 (Local SGD), Douillard et al. 2023 (DiLoCo, arXiv:2311.08105).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsify import ranges
from sparsify.method import Dense, FeedbackMethod, Method
from sparsify.ranges import KeptFraction, MomentumFactor, NonNegativeInt, PositiveFloat, PositiveInt
from sparsify.types import ANCHORS_AGREE


class OuterStep(ABC):
    """A step that moves the anchor by the average drift, which takes the place of a gradient."""

    lr: float

    def __post_init__(self) -> None:
        ranges.check_fields(self)

    def init(self, anchor: Sequence[Tensor]) -> Any:
        """Return the initial state for the anchor, tensors (n,)."""
        return None

    def __repr__(self) -> str:
        # Workers, and saved states, compare it; a user's class need not be a dataclass.
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    @abstractmethod
    def step(self, anchor: Sequence[Tensor], drift: Sequence[Tensor], state: Any) -> None:
        """Move the anchor, tensors (n,), in place. The average drift may be overwritten."""


@dataclass(frozen=True)
class PlainStep(OuterStep):
    """Outer step of plain SGD: theta <- theta - lr drift."""

    lr: PositiveFloat = 1.0

    def step(self, anchor: Sequence[Tensor], drift: Sequence[Tensor], state: None) -> None:
        torch._foreach_add_([*anchor], [*drift], alpha=-self.lr)


@dataclass(frozen=True)
class MomentumStepBase(OuterStep):
    """Base of outer steps with momentum m, a tensor like each of the anchor's; DiLoCo's rates."""

    lr: PositiveFloat = 0.7
    momentum: MomentumFactor = 0.9

    def init(self, anchor: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(tensor) for tensor in anchor]


@dataclass(frozen=True)
class Nesterov(MomentumStepBase):
    """Outer step of torch.optim.SGD(momentum=mu, nesterov=True) on the drift.

    m <- mu m + drift; theta <- theta - lr (drift + mu m). DiLoCo, algorithm 1.
    """

    def step(self, anchor: Sequence[Tensor], drift: Sequence[Tensor], state: list[Tensor]) -> None:
        torch._foreach_mul_(state, self.momentum)
        torch._foreach_add_(state, [*drift])
        torch._foreach_add_([*drift], state, alpha=self.momentum)
        torch._foreach_add_([*anchor], [*drift], alpha=-self.lr)


@dataclass(frozen=True)
class HeavyBall(MomentumStepBase):
    """Outer step of torch.optim.SGD(momentum=mu) on the drift.

    m <- mu m + drift; theta <- theta - lr m. Several public codes call this Nesterov, gensyn-ai/noloco's
    DiLoCo among them.
    """

    def step(self, anchor: Sequence[Tensor], drift: Sequence[Tensor], state: list[Tensor]) -> None:
        torch._foreach_mul_(state, self.momentum)
        torch._foreach_add_(state, [*drift])
        torch._foreach_add_([*anchor], state, alpha=-self.lr)


@dataclass(frozen=True)
class AveragedState:
    """An entry of the inner optimizer's state that is averaged, too, every `every` steps."""

    key: str  # `exp_avg` of AdamW, ...
    every: PositiveInt

    def __post_init__(self) -> None:
        ranges.check_fields(self)


@dataclass(frozen=True)
class LocalSteps:
    """A strategy that averages by any method every H steps instead of every step, for `sparsify.distribute`.

    Args:
        every: H, steps of each worker's own optimizer from one exchange to the next.
        method: averages the drift, as it would average gradients.
        outer: the step of the anchor that follows the average.
        fragments: number of fragments of the model, which are exchanged in turns spread evenly over a round;
            see `sparsify.local.fragments`. Douillard et al. 2025 (Streaming DiLoCo, arXiv:2501.18512).
        delay: steps between sending a fragment and applying its average, in which workers step on.
        mix: the share of its own parameters that a worker keeps when an average is applied, so that its
            replica differs from the anchor: theta_r <- mix theta_r + (1 - mix) theta.
        states: entries of the inner optimizer's state that are averaged, without an outer step; by default
            each worker keeps its own.

    Raises:
        ValueError: a number out of range, more fragments than steps, a delay of a whole round, or momentum
            twice.
    """

    every: PositiveInt
    method: Method
    outer: OuterStep = PlainStep()
    fragments: PositiveInt = 1
    delay: NonNegativeInt = 0
    mix: KeptFraction = 0.0
    states: tuple[AveragedState, ...] = ()

    def __post_init__(self) -> None:
        ranges.check_fields(self)
        if not isinstance(self.method, Method):
            raise ValueError(
                f"method={self.method!r} does not average; give LocalSteps one of every step, such as "
                "sparsify.build('topk', density=0.01)"
            )
        if not isinstance(self.outer, OuterStep):
            raise ValueError(
                f"outer={self.outer!r} is no outer step; take PlainStep, Nesterov or HeavyBall of "
                "sparsify.local.strategy, or a class of your own that is an OuterStep"
            )
        momentum = getattr(self.outer, "momentum", 0)
        if self.method.applies_momentum and momentum:
            raise ValueError(
                f"the method applies momentum itself, and the outer step has {momentum} too; take "
                "outer=PlainStep(), or build the method with momentum=0"
            )
        if self.has_different_anchors and isinstance(self.method, FeedbackMethod):
            raise ValueError(
                "with this method anchors differ between workers, and it would send only a part of them; "
                "take a method that averages whole tensors, such as PairwiseAverage of "
                "sparsify.methods.noloco"
            )
        if self.fragments > self.every:
            raise ValueError(
                f"fragments={self.fragments} can't take turns within every={self.every} steps; take fewer "
                "fragments, or a longer round"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"delay={self.delay} steps: the next exchange, after every={self.every}, would come before "
                "this one is applied; take a shorter delay"
            )

    @property
    def averages_models(self) -> bool:
        """True if the parameters are averaged themselves, as by FedAvg, and not their drift.

        The outcome is the same then, without the rounding of theta - (theta - theta_r).
        """
        return type(self.method) is Dense and self.outer == PlainStep(1.0)

    @property
    def has_different_anchors(self) -> bool:
        """True if a worker meets few others in a round, so that anchors differ and are averaged, too."""
        return ANCHORS_AGREE in self.method.broken_laws()

    @property
    def can_fuse_exchange(self) -> bool:
        """True if a plain outer step follows the average, and takes anchor and workers to one point."""
        return (
            type(self.outer) is PlainStep
            and self.replaces_parameters
            and not self.averages_models
            and not self.has_different_anchors
        )

    def broken_laws(self) -> dict[str, str]:
        """Return the laws of local steps that can't hold, and why."""
        broken = self.method.broken_laws()
        return {law: why for law, why in broken.items() if law == ANCHORS_AGREE}

    @property
    def replaces_parameters(self) -> bool:
        """True if an exchange replaces a worker's parameters wholly, so that they can hold the drift."""
        return not self.delay and not self.mix
