"""One bucket, one step: what every worker does with its gradient to get the average. Start reading here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsify import cost
from sparsify.bucket import SCOPES, Gradients
from sparsify.comm import Comm
from sparsify.exchange import Exchange, Sparse
from sparsify.feedback import Feedback
from sparsify.select import Place, Selector
from sparsify.timer import PhaseTimer


class Report(NamedTuple):
    """What one worker did in one step."""

    selected: int  # elements sent
    wire_bytes: int  # bytes sent, by the closed forms of cost.py


class State(NamedTuple):
    """All that a sparsifier remembers of one bucket."""

    select: Any
    feedback: Any
    exchange: Any


class Method(Protocol):
    """Turns a worker's gradient into the average over all workers."""

    @property
    def scope(self) -> str: ...

    def init(self, like: Tensor, place: Place) -> Any:
        """The state for a bucket like this one."""

    def density_at(self, epoch: int) -> float:
        """k/n in the given epoch, counted from 0."""

    def aggregate(self, grad: Tensor, density: float, state: Any, comm: Comm, timer: PhaseTimer) -> Report:
        """(n,) this worker's gradient in, the average out, in place."""

    def residual(self, state: Any) -> Tensor | None:
        """What this worker still owes, (n,), or None."""


@dataclass(frozen=True)
class Sparsifier:
    """Send k of n, keep the rest.

    Raises:
        ValueError: density outside (0, 1], or parts that do not fit together.
    """

    density: float
    select: Selector
    feedback: Feedback
    exchange: Exchange
    scope: str = "global"
    density_warmup: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for density in (self.density, *self.density_warmup):
            check_density(density)
        if self.scope not in SCOPES:
            raise ValueError(f"no scope {self.scope!r}; there are: {', '.join(SCOPES)}")
        if self.exchange.needs_shared and not self.select.shared:
            raise ValueError(
                f"{type(self.exchange).__name__} sends values without indices, so every worker must pick the "
                f"same ones, but with {type(self.select).__name__} each picks its own; use AllGather, or a "
                "shared selector"
            )

    def init(self, like: Tensor, place: Place) -> State:
        return State(self.select.init(like, place), self.feedback.init(like), self.exchange.init(like))

    def density_at(self, epoch: int) -> float:
        """The schedule is a lower bound, as in the published code: a larger density wins over it."""
        return (
            max(self.density, self.density_warmup[epoch])
            if epoch < len(self.density_warmup)
            else self.density
        )

    def aggregate(self, grad: Tensor, density: float, state: State, comm: Comm, timer: PhaseTimer) -> Report:
        n, k = grad.numel(), num_selected(grad.numel(), density)
        with timer.phase("select"):
            acc = self.feedback.accumulate(grad, state.feedback)
            indices = self.select.select(acc, k, state.select)
            part = Sparse(indices, acc[indices])
        delivery = self.exchange.exchange(part, n, k, comm, state.exchange)
        with timer.phase("select"):
            self.feedback.retain(delivery.delivered, state.feedback)
        with timer.phase("scatter"):
            grad.zero_()
            for (
                one
            ) in delivery.total:  # worker by worker: indices are distinct within one, so the order is fixed
                grad.index_add_(0, one.indices, one.values, alpha=1 / comm.size)
        return Report(k, delivery.wire_bytes)

    def residual(self, state: State) -> Tensor | None:
        return self.feedback.residual(state.feedback)


@dataclass(frozen=True)
class Dense:
    """Plain averaging of everything."""

    scope: str = "global"

    def init(self, like: Tensor, place: Place) -> None:
        return None

    def density_at(self, epoch: int) -> float:
        return 1.0

    def aggregate(self, grad: Tensor, density: float, state: None, comm: Comm, timer: PhaseTimer) -> Report:
        comm.all_reduce(grad)
        with timer.phase("scatter"):
            grad.div_(comm.size)
        return Report(grad.numel(), cost.all_reduce(grad.nbytes, comm.size).sent_bytes)

    def residual(self, state: None) -> None:
        return None


class Aggregator:
    """A method at work on one worker's model: its buckets, and the method's state for each.

    Raises:
        ValueError: the density selects nothing of this model.
    """

    def __init__(
        self,
        method: Method,
        parameters: Iterable[tuple[str, Parameter]],
        comm: Comm,
        timer: PhaseTimer,
        seed: int = 0,
    ) -> None:
        self.method, self.comm, self.timer = method, comm, timer
        self.gradients = Gradients(parameters, method.scope)
        self.num_elements = self.gradients.flat.numel()
        if int(method.density_at(10**9) * self.num_elements) < 1:
            density = method.density_at(10**9)
            raise ValueError(
                f"density={density:g} of {self.num_elements} gradients selects none (k = 0); the smallest "
                f"density that selects one is {1 / self.num_elements:.3g}"
            )
        self.states = [
            method.init(bucket, Place(seed, comm.rank, i)) for i, bucket in enumerate(self.gradients.buckets)
        ]

    def aggregate(self, epoch: int) -> Report:
        """Replace all gradients by their averages over the workers."""
        density = self.method.density_at(epoch)
        reports = [
            self.method.aggregate(bucket, density, state, self.comm, self.timer)
            for bucket, state in zip(self.gradients.buckets, self.states, strict=True)
        ]
        return Report(sum(r.selected for r in reports), sum(r.wire_bytes for r in reports))

    def residual_norm(self) -> float:
        """Euclidean norm of all that this worker still owes."""
        residuals = [r for state in self.states if (r := self.method.residual(state)) is not None]
        norms = [torch.linalg.vector_norm(r, dtype=torch.float64).item() for r in residuals]
        return math.hypot(*norms)


def num_selected(n: int, density: float) -> int:
    """k: the whole part of density times n, at least 1 of a bucket that is not empty. Shi et al.'s code."""
    return min(n, max(1, int(density * n)))


def check_density(density: float) -> None:
    if not 0 < density <= 1:  # also refuses NaN
        raise ValueError(f"{density=} is out of range: the share of gradients to send must lie in (0, 1]")
