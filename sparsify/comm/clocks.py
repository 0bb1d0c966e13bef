"""Clocks of virtual ranks: simulated time, which a rank's own computing and the network's cost advance."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class TimedEvent(Protocol):
    """A point in the device's time, as torch.cuda.Event."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from here to `end`; the device must have passed both."""


class HostClocks:
    """Read by the host, which waits for the device each time: else a rank would be charged for the kernels
    that another one has queued.
    """

    def __init__(self, size: int, synchronise: Callable[[], None]) -> None:
        self.synchronise = synchronise
        self.lived = [0.0] * size  # seconds of each rank, up to its last switch
        self.resumed = [0.0] * size  # when the computing rank took over, on the host's clock

    def resume(self, rank: int) -> None:
        """The rank computes from now on."""
        self.resumed[rank] = time.perf_counter()

    def leave(self, rank: int) -> None:
        """The rank has come to a collective."""
        self.synchronise()
        self.lived[rank] += time.perf_counter() - self.resumed[rank]

    def meet(self, price_s: float | None) -> None:
        """The collective is over; without a price the clocks take no notice of it."""
        self.synchronise()  # combining is charged to no rank
        if price_s is not None:
            self.lived = [max(self.lived) + price_s] * len(self.lived)

    def together(self, work: Callable[[], T]) -> T:
        """Do once what every rank does at this moment: each is charged for it, and none waits."""
        began = time.perf_counter()
        result = work()
        self.synchronise()
        took = time.perf_counter() - began
        self.lived = [lived + took for lived in self.lived]
        return result

    def idle(self, rank: int, seconds: float) -> None:
        """The rank does nothing for so many seconds."""
        self.lived[rank] += seconds

    def now(self, rank: int) -> float:
        """Seconds on this clock."""
        self.synchronise()
        return self.lived[rank] + time.perf_counter() - self.resumed[rank]


@dataclass
class Turn:
    """Work of a rank between two collectives."""

    began_s: float = 0.0  # on its clock; known when the turns before are settled
    start: TimedEvent | None = None
    end: TimedEvent | None = None

    def at_s(self, event: TimedEvent | None) -> float:
        """Seconds on the rank's clock at an event of this turn."""
        assert self.start is not None
        return self.began_s + self.start.elapsed_time(event) / 1e3


@dataclass
class ClockMark:
    """A point in a rank's time."""

    clocks: DeviceClocks
    turn: Turn
    event: TimedEvent

    def elapsed_time(self, end: ClockMark) -> float:
        """Milliseconds to a later mark of this rank; the device must have passed it."""
        self.clocks.settle()
        return 1e3 * (end.turn.at_s(end.event) - self.turn.at_s(self.event))


class Between(NamedTuple):
    """Time between some ranks' turns and their next ones."""

    before: list[Turn]
    after: list[Turn]
    began: Callable[[list[float]], list[float]]  # ends of the former -> beginnings of the latter, in seconds


class DeviceClocks:
    """Kept by the device: turns begin and end with events, and nothing waits until marks are compared."""

    def __init__(self, size: int, event: Callable[[], TimedEvent]) -> None:
        self.event = event
        self.turns = [Turn() for _ in range(size)]
        self.unsettled: list[Between] = []

    def resume(self, rank: int) -> None:
        """The rank computes from now on."""
        self.turns[rank].start = self.event()

    def leave(self, rank: int) -> None:
        """The rank has come to a collective."""
        self.turns[rank].end = self.event()

    def meet(self, price_s: float | None) -> None:
        """The collective is over; without a price the clocks take no notice of it."""
        self._turn(lambda ends: ends if price_s is None else [max(ends) + price_s] * len(ends))

    def together(self, work: Callable[[], T]) -> T:
        """Do once what every rank does at this moment: each is charged for it, and none waits."""
        began = self.event()
        result = work()
        ended = self.event()
        self._turn(lambda ends: [end + began.elapsed_time(ended) / 1e3 for end in ends])
        return result

    def idle(self, rank: int, seconds: float) -> None:
        """The rank does nothing for so many seconds."""
        self.leave(rank)
        before, self.turns[rank] = self.turns[rank], Turn()
        self.unsettled.append(Between([before], [self.turns[rank]], lambda ends: [ends[0] + seconds]))
        self.resume(rank)

    def now(self, rank: int) -> float:
        """Seconds on this clock."""
        return time.perf_counter()  # the host's own: how far the device is, it would have to wait for

    def mark(self, rank: int) -> ClockMark:
        """Point in the rank's time."""
        return ClockMark(self, self.turns[rank], self.event())

    def settle(self) -> None:
        """Work out when each turn began. The device must have passed all that are over."""
        for before, after, began in self.unsettled:
            beginnings = began([turn.at_s(turn.end) for turn in before])
            for turn, beginning in zip(after, beginnings, strict=True):
                turn.began_s = beginning
        self.unsettled.clear()

    def _turn(self, began: Callable[[list[float]], list[float]]) -> None:
        """All ranks' turns are over."""
        before, self.turns = self.turns, [Turn() for _ in self.turns]
        self.unsettled.append(Between(before, self.turns, began))
