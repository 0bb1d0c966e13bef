"""The strategy of local steps: which method averages the drift, how often, and what follows its average.

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
from sparsify.method import Dense, Method
from sparsify.ranges import KeptFraction, MomentumFactor, NonNegativeInt, PositiveFloat, PositiveInt

ANCHORS_AGREE = "anchors agree"  # a law that a method may break, and says so


class Outer(ABC):
    """The step of the anchor, given the average drift in the place of a gradient."""

    lr: float

    def __post_init__(self) -> None:
        ranges.check_fields(self)

    def init(self, anchor: Sequence[Tensor]) -> Any:
        """The state for these tensors (n,)."""
        return None

    def __repr__(self) -> str:
        """Workers, and saved states, compare it: of a class that is no dataclass, too."""
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    @abstractmethod
    def step(self, anchor: Sequence[Tensor], drift: Sequence[Tensor], state: Any) -> None:
        """Move the anchor, tensors (n,), in place. The average drift may be overwritten."""


@dataclass(frozen=True)
class Plain(Outer):
    """theta <- theta - lr drift."""

    lr: PositiveFloat = 1.0

    def step(self, anchor: Sequence[Tensor], drift: Sequence[Tensor], state: None) -> None:
        torch._foreach_add_([*anchor], [*drift], alpha=-self.lr)


@dataclass(frozen=True)
class WithMomentum(Outer):
    """Base of outer steps with momentum m, one for each tensor; DiLoCo's rates."""

    lr: PositiveFloat = 0.7
    momentum: MomentumFactor = 0.9

    def init(self, anchor: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(tensor) for tensor in anchor]


@dataclass(frozen=True)
class Nesterov(WithMomentum):
    """m <- mu m + drift; theta <- theta - lr (drift + mu m): torch.optim.SGD(nesterov=True) on the drift.
    DiLoCo, algorithm 1.
    """

    def step(self, anchor: Sequence[Tensor], drift: Sequence[Tensor], state: list[Tensor]) -> None:
        torch._foreach_mul_(state, self.momentum)
        torch._foreach_add_(state, [*drift])
        torch._foreach_add_([*drift], state, alpha=self.momentum)
        torch._foreach_add_([*anchor], [*drift], alpha=-self.lr)


@dataclass(frozen=True)
class HeavyBall(WithMomentum):
    """m <- mu m + drift; theta <- theta - lr m: torch.optim.SGD(momentum=mu). What several public codes call
    Nesterov, gensyn-ai/noloco's DiLoCo among them.
    """

    def step(self, anchor: Sequence[Tensor], drift: Sequence[Tensor], state: list[Tensor]) -> None:
        torch._foreach_mul_(state, self.momentum)
        torch._foreach_add_(state, [*drift])
        torch._foreach_add_([*anchor], state, alpha=-self.lr)


@dataclass(frozen=True)
class AveragedState:
    """A part of the inner optimizer's state that is averaged, too, every so many steps."""

    key: str  # `exp_avg` of AdamW, ...
    every: PositiveInt

    def __post_init__(self) -> None:
        ranges.check_fields(self)


@dataclass(frozen=True)
class Local:
    """Any method of this library, every H steps instead of every step. For `sparsify.distribute`.

    Args:
        every: H, steps of each worker's own optimizer from one exchange to the next.
        method: averages the drift, as it would average gradients.
        outer: what follows the average.
        fragments: the model is exchanged in so many parts, in turns spread evenly over a round; see
            `sparsify.local.fragments`. Douillard et al. 2025 (Streaming DiLoCo, arXiv:2501.18512).
        delay: steps from when a part is sent to when its average is applied, in which workers step on.
        mix: the share of its own parameters that a worker keeps when an average is applied, from which its
            replica then differs: theta_r <- mix theta_r + (1 - mix) theta.
        states: of the inner optimizer, averaged as they are; by default each worker keeps its own.

    Raises:
        ValueError: a number out of range, more fragments than steps, a delay of a whole round, or momentum
            twice.
    """

    every: PositiveInt
    method: Method
    outer: Outer = Plain()
    fragments: PositiveInt = 1
    delay: NonNegativeInt = 0
    mix: KeptFraction = 0.0
    states: tuple[AveragedState, ...] = ()

    def __post_init__(self) -> None:
        ranges.check_fields(self)
        if not isinstance(self.method, Method):
            raise ValueError(
                f"method={self.method!r} does not average; give Local one of every step, such as "
                "sparsify.build('topk', density=0.01)"
            )
        if not isinstance(self.outer, Outer):
            raise ValueError(
                f"outer={self.outer!r} is no outer step; take Plain, Nesterov or HeavyBall of "
                "sparsify.local.strategy, or a class of your own that is an Outer"
            )
        momentum = getattr(self.outer, "momentum", 0)
        if self.method.applies_momentum and momentum:
            raise ValueError(
                f"the method applies momentum itself, and the outer step has {momentum} too; take "
                "outer=Plain(), or build the method with momentum=0"
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
        """True if the outer step only takes the place of the parameters' average. Then the parameters
        themselves are averaged, as by FedAvg, without the rounding of theta - (theta - theta_r).
        """
        return type(self.method) is Dense and self.outer == Plain(1.0)

    @property
    def pulls(self) -> bool:
        """True if a worker meets few others, so that anchors differ and have to be pulled together."""
        return ANCHORS_AGREE in self.method.broken_laws()

    @property
    def is_plain(self) -> bool:
        """True if all that follows an average is a step by it, of the anchor and of every worker alike."""
        plain = type(self.outer) is Plain and not self.averages_models
        return plain and self.is_replaced and not self.pulls

    def broken_laws(self) -> dict[str, str]:
        """The laws of local steps that can't hold, and why."""
        broken = self.method.broken_laws()
        return {law: why for law, why in broken.items() if law == ANCHORS_AGREE}

    @property
    def is_replaced(self) -> bool:
        """True if nothing of a worker's own parameters outlives an exchange, so that these can hold the
        drift meanwhile.
        """
        return not self.delay and not self.mix
