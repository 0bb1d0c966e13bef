"""One bucket, one step: what every worker does with its gradient to get the average. Start reading here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from sparsify import cost, host
from sparsify.bucket import check_scope
from sparsify.comm import Comm
from sparsify.exchange import Exchange
from sparsify.feedback import Feedback, Sum
from sparsify.parts import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    Delivery,
    Place,
    Run,
    Selection,
    Sparse,
    Work,
    work_dtype,
)
from sparsify.select import AddAndSelect, Selector
from sparsify.timer import PhaseTimer


class Step(NamedTuple):
    """What changes from step to step, and is the same for all workers."""

    density: float  # k/n to send in this step
    lr: float = 1.0  # of the optimiser


class Report(NamedTuple):
    """What one worker did in one step."""

    selected: int  # elements sent
    wire_bytes: int  # bytes sent, by the closed forms of cost.py
    host_syncs: int = 0  # how often the host waited for the device


class Method(Protocol):
    """Turns a worker's gradient into the average over all workers. `repr` tells it from every other one."""

    @property
    def scope(self) -> str | float: ...

    @property
    def momentum_inside(self) -> bool:
        """Does it apply momentum itself, so that the optimiser must have none?"""

    def init(self, like: Tensor, place: Place) -> Any:
        """The state for a bucket like this one."""

    def density_at(self, epoch: int) -> float:
        """k/n in the given epoch, counted from 0."""

    def prepare(self, grad: Tensor, comm: Comm) -> None:
        """What is done to the gradient of the whole model, in place, before its buckets are aggregated."""

    def aggregate(self, grad: Tensor, step: Step, state: Any, comm: Comm, timer: PhaseTimer) -> Report:
        """(n,) this worker's gradient in, the average out, in place."""

    def residual(self, state: Any) -> Tensor | None:
        """What this worker still owes, (n,), or None."""

    def bounds(self, n: int, k: int, size: int) -> tuple[int, int]:
        """The least and the largest number of elements that a worker sends of n, when asked for k."""

    def broken_laws(self) -> dict[str, str]:
        """The laws that can't hold, and why."""


class State(NamedTuple):
    """All that a sparsifier remembers of one bucket."""

    select: Any
    feedback: Any
    exchange: Any
    total: Work | None  # half-precision gradients are summed in single precision


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

    @property
    def momentum_inside(self) -> bool:
        return getattr(self.feedback, "momentum", 0) > 0

    def init(self, like: Tensor, place: Place) -> State:
        wide = None if work_dtype(like.dtype) == like.dtype else Work.like(like)
        return State(
            self.select.init(like, place), self.feedback.init(like), self.exchange.init(like, place), wide
        )

    def density_at(self, epoch: int) -> float:
        """The schedule is a lower bound, as in the published code: a larger density wins over it."""
        return (
            max(self.density, self.density_warmup[epoch])
            if epoch < len(self.density_warmup)
            else self.density
        )

    def prepare(self, grad: Tensor, comm: Comm) -> None:
        if self.clip_norm is not None:
            limit = self.clip_norm / comm.size**0.5
            grad.mul_((limit / torch.linalg.vector_norm(grad)).clamp_(max=1))

    def aggregate(self, grad: Tensor, step: Step, state: State, comm: Comm, timer: PhaseTimer) -> Report:
        n, k = grad.numel(), num_selected(grad.numel(), step.density)
        waits = host.waits()
        with timer.phase("select"):
            acc, chosen = self.accumulate_and_select(grad, k, step.lr, state, comm)
            part = Sparse(chosen.indices, acc[chosen.indices] if chosen.values is None else chosen.values)
        with timer.phase("exchange"):
            delivery = self.exchange.exchange(part, n, k, comm, state.exchange)
        with timer.phase("select"):
            self.feedback.retain(delivery, state.feedback)
        with timer.phase("scatter"):
            scale = (n / k if self.unbiased else 1) / (comm.size if self.average else 1)
            scatter(delivery.total, scale, grad, state.total.buffer if state.total else None)
        sent_bytes = chosen.sent_bytes + delivery.sent_bytes
        return Report(chosen.indices.numel(), sent_bytes, host.waits() - waits)

    def accumulate_and_select(
        self, grad: Tensor, k: int, lr: float, state: State, comm: Comm
    ) -> tuple[Tensor, Selection]:
        """In one pass where feedback and selector allow it: then the one leaves the addition to the other."""
        if isinstance(self.feedback, Sum) and isinstance(self.select, AddAndSelect):
            acc, rest = self.feedback.addends(grad, lr, state.feedback)
            return acc, self.select.add_and_select(acc, rest, k, comm, state.select)
        acc = self.feedback.accumulate(grad, lr, state.feedback)
        return acc, self.select.select(acc, k, comm, state.select)

    def residual(self, state: State) -> Tensor | None:
        return self.feedback.residual(state.feedback)

    def bounds(self, n: int, k: int, size: int) -> tuple[int, int]:
        return self.select.bounds(n, k, size)

    def broken_laws(self) -> dict[str, str]:
        broken = self.select.broken_laws() | self.feedback.broken_laws() | self.exchange.broken_laws()
        if not self.average:
            broken[DENSE_AT_DENSITY_1] = "the sum is not divided by the number of workers"
        return broken


def scatter(total: list[Sparse | Run], scale: float, grad: Tensor, wide: Tensor | None) -> None:
    """grad (n,) <- scale x the sum of `total`, part by part: within one, indices are distinct, so the order
    of the sum is fixed.
    """
    into = grad if wide is None else wide
    into.zero_()
    for part in total:
        part.add_to(into, alpha=scale)
    if wide is not None:
        grad.copy_(wide)


class Quantiser(Protocol):
    """A rule that writes a whole bucket in few bits."""

    def init(self, like: Tensor, place: Place) -> Any:
        """The state for a bucket like this one."""

    def encode(self, acc: Tensor, state: Any) -> Tensor:
        """(n,) -> (bytes,) uint8, of a length that depends on n alone. `acc` is not to be written to."""

    def decode(self, message: Tensor, out: Tensor, state: Any) -> Tensor:
        """(bytes,) -> (n,), what `encode` wrote, into `out`."""

    def broken_laws(self) -> dict[str, str]: ...


class CoarseState(NamedTuple):
    quantise: Any
    feedback: Any
    decoded: Work
    total: Work


@dataclass(frozen=True)
class Coarse:
    """Send all of n in few bits each: everybody's message to everybody, decoded and summed in rank order.

    Args:
        majority: the update is the sign of the sum, not the average.
    """

    quantise: Quantiser
    feedback: Feedback
    scope: str | float = "layer"
    majority: bool = False
    momentum_inside: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_scope(self.scope)

    def init(self, like: Tensor, place: Place) -> CoarseState:
        work = Work.like(like), Work.like(like)
        return CoarseState(self.quantise.init(like, place), self.feedback.init(like), *work)

    def density_at(self, epoch: int) -> float:
        return 1.0

    def prepare(self, grad: Tensor, comm: Comm) -> None:
        return None

    def aggregate(
        self, grad: Tensor, step: Step, state: CoarseState, comm: Comm, timer: PhaseTimer
    ) -> Report:
        waits = host.waits()
        with timer.phase("select"):
            acc = self.feedback.accumulate(grad, step.lr, state.feedback)
            message = self.quantise.encode(acc, state.quantise)
        with timer.phase("exchange"):
            total, decoded = state.total.buffer.zero_(), state.decoded.buffer
            for one in comm.all_gather(message):
                total.add_(self.quantise.decode(one, decoded, state.quantise))
        with timer.phase("select"):
            if self.feedback.residual(state.feedback) is not None:
                mine = self.quantise.decode(message, decoded, state.quantise)
                self.feedback.retain(Delivery([], [Run(0, mine)], 0), state.feedback)
        with timer.phase("scatter"):
            grad.copy_(total.sign_() if self.majority else total.div_(comm.size))
        sent = cost.all_gather(len(message), comm.size).sent_bytes
        return Report(grad.numel(), sent, host.waits() - waits)

    def residual(self, state: CoarseState) -> Tensor | None:
        return self.feedback.residual(state.feedback)

    def bounds(self, n: int, k: int, size: int) -> tuple[int, int]:
        return n, n

    def broken_laws(self) -> dict[str, str]:
        rounded = {DENSE_AT_DENSITY_1: "every element is rounded to a few bits"}
        return rounded | self.quantise.broken_laws() | self.feedback.broken_laws()


@dataclass(frozen=True)
class Dense:
    """Plain averaging of everything."""

    scope: str | float = "global"
    momentum_inside: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_scope(self.scope)

    def init(self, like: Tensor, place: Place) -> None:
        return None

    def density_at(self, epoch: int) -> float:
        return 1.0

    def prepare(self, grad: Tensor, comm: Comm) -> None:
        return None

    def aggregate(self, grad: Tensor, step: Step, state: None, comm: Comm, timer: PhaseTimer) -> Report:
        comm.all_reduce(grad)
        with timer.phase("scatter"):
            grad.div_(comm.size)
        return Report(grad.numel(), cost.all_reduce(grad.nbytes, comm.size).sent_bytes)

    def residual(self, state: None) -> None:
        return None

    def bounds(self, n: int, k: int, size: int) -> tuple[int, int]:
        return n, n

    def broken_laws(self) -> dict[str, str]:
        return {}


def num_selected(n: int, density: float) -> int:
    """k: the whole part of density times n, at least 1 of a bucket that is not empty. Shi et al.'s code."""
    return min(n, max(1, int(density * n)))


def check_density(density: float) -> None:
    if not 0 < density <= 1:  # also refuses NaN
        raise ValueError(f"{density=} is out of range: the share of gradients to send must lie in (0, 1]")
