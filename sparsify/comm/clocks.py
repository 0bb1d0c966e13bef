"""Clocks of virtual ranks: simulated time that a rank's own computing and the network's cost advance."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class TimedEvent(Protocol):
    """A point in the device's time, such as torch.cuda.Event."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this event to `end`; the device must have passed both."""


class HostEvent(NamedTuple):
    """A point in the host's time."""

    at_s: float

    def elapsed_time(self, end: HostEvent) -> float:
        """Return the milliseconds from this event to `end`."""
        return 1e3 * (end.at_s - self.at_s)


@dataclass
class ComputeSpan:
    """A rank's time between two collectives."""

    began_s: float = 0.0  # on the rank's clock; known when the spans before are resolved
    start: TimedEvent | None = None
    end: TimedEvent | None = None

    def seconds_at(self, event: TimedEvent | None) -> float:
        """Return the seconds on the rank's clock at an event of this span."""
        assert self.start is not None
        return self.began_s + self.start.elapsed_time(event) / 1e3


@dataclass
class ClockMark:
    """A point in a rank's time."""

    clocks: EventClocks
    span: ComputeSpan
    event: TimedEvent

    def elapsed_time(self, end: ClockMark) -> float:
        """Return the milliseconds to a later mark of this rank; the device must have passed it."""
        self.clocks.resolve_spans()
        return 1e3 * (end.span.seconds_at(end.event) - self.span.seconds_at(self.event))


class SpanTransition(NamedTuple):
    """The time between some ranks' spans and their next ones."""

    before: list[ComputeSpan]
    after: list[ComputeSpan]
    compute_starts: Callable[[list[float]], list[float]]  # from the ends of `before`, in seconds


class EventClocks:
    """Clocks of all ranks that are kept by events; nothing waits until marks are compared."""

    def __init__(self, size: int, record_event: Callable[[], TimedEvent]) -> None:
        self.record_event = record_event
        self.spans = [ComputeSpan() for _ in range(size)]
        self.unresolved: list[SpanTransition] = []

    def resume(self, rank: int) -> None:
        """Restart the rank's clock: it computes from now on."""
        self.spans[rank].start = self.record_event()

    def pause(self, rank: int) -> None:
        """Stop the rank's clock, at a collective."""
        self.spans[rank].end = self.record_event()

    def finish_collective(self, cost_s: float) -> None:
        """Move all clocks to the latest one plus the cost of a collective."""
        self._begin_spans(lambda ends: [max(ends) + cost_s] * len(ends))

    def finish_unnoticed_collective(self) -> None:
        """Leave all clocks as they are after a collective that no rank is charged for or waits in."""
        self._begin_spans(lambda ends: ends)

    def run_and_charge_all(self, work: Callable[[], T]) -> T:
        """Do work once that every rank would do, and charge its time to each; no rank waits for others."""
        start = self.record_event()
        result = work()
        end = self.record_event()
        self._begin_spans(lambda ends: [end_s + start.elapsed_time(end) / 1e3 for end_s in ends])
        return result

    def idle(self, rank: int, seconds: float) -> None:
        """Advance the rank's clock by seconds in which it does nothing."""
        self.pause(rank)
        before = self.spans[rank]
        after = self.spans[rank] = ComputeSpan()
        self.unresolved.append(SpanTransition([before], [after], lambda ends: [ends[0] + seconds]))
        self.resume(rank)

    def record_mark(self, rank: int) -> ClockMark:
        """Return this point in the rank's time."""
        return ClockMark(self, self.spans[rank], self.record_event())

    def resolve_spans(self) -> None:
        """Compute when each span began. The device must have passed all spans that are over."""
        for before, after, compute_starts in self.unresolved:
            starts_s = compute_starts([span.seconds_at(span.end) for span in before])
            for span, start_s in zip(after, starts_s, strict=True):
                span.began_s = start_s
        self.unresolved.clear()

    def _begin_spans(self, compute_starts: Callable[[list[float]], list[float]]) -> None:
        """Begin a new span of every rank."""
        before = self.spans
        self.spans = [ComputeSpan() for _ in before]
        self.unresolved.append(SpanTransition(before, self.spans, compute_starts))


class HostClocks(EventClocks):
    """Clocks of all ranks that the host reads at once, after it has waited for the device.

    Without waiting a rank would be charged for the kernels that another one has queued.
    """

    def __init__(self, size: int, synchronise: Callable[[], None]) -> None:
        def record_event() -> HostEvent:
            synchronise()
            return HostEvent(time.perf_counter())

        super().__init__(size, record_event)

    def now_s(self, rank: int) -> float:
        """Return the seconds on the rank's clock."""
        self.resolve_spans()
        return self.spans[rank].seconds_at(self.record_event())

    def _begin_spans(self, compute_starts: Callable[[list[float]], list[float]]) -> None:
        super()._begin_spans(compute_starts)
        self.resolve_spans()
