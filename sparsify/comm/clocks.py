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


class HostClocks:
    """Clocks of all ranks that the host reads, after it has waited for the device.

    Without waiting a rank would be charged for the kernels that another one has queued.
    """

    def __init__(self, size: int, synchronise: Callable[[], None]) -> None:
        self.synchronise = synchronise
        self.elapsed_s = [0.0] * size  # of each rank, up to its last switch
        self.resumed_at_s = [0.0] * size  # when a rank began to compute, on the host's clock

    def resume(self, rank: int) -> None:
        """Restart the rank's clock: it computes from now on."""
        self.resumed_at_s[rank] = time.perf_counter()

    def pause(self, rank: int) -> None:
        """Stop the rank's clock, at a collective."""
        self.synchronise()
        self.elapsed_s[rank] += time.perf_counter() - self.resumed_at_s[rank]

    def finish_collective(self, cost_s: float | None) -> None:
        """Move all clocks to the latest one plus the cost of a collective; None: leave them."""
        self.synchronise()  # the combining of tensors is charged to no rank
        if cost_s is not None:
            self.elapsed_s = [max(self.elapsed_s) + cost_s] * len(self.elapsed_s)

    def charge_all(self, work: Callable[[], T]) -> T:
        """Do work once that every rank would do, and charge its time to each; no rank waits for others."""
        start = time.perf_counter()
        result = work()
        self.synchronise()
        work_s = time.perf_counter() - start
        self.elapsed_s = [elapsed_s + work_s for elapsed_s in self.elapsed_s]
        return result

    def idle(self, rank: int, seconds: float) -> None:
        """Advance the rank's clock by seconds in which it does nothing."""
        self.elapsed_s[rank] += seconds

    def now_s(self, rank: int) -> float:
        """Return the seconds on the rank's clock."""
        self.synchronise()
        return self.elapsed_s[rank] + time.perf_counter() - self.resumed_at_s[rank]


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

    clocks: DeviceClocks
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


class DeviceClocks:
    """Clocks of all ranks that the device keeps by events; nothing waits until marks are compared."""

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

    def finish_collective(self, cost_s: float | None) -> None:
        """Move all clocks to the latest one plus the cost of a collective; None: leave them."""
        self._begin_spans(lambda ends: ends if cost_s is None else [max(ends) + cost_s] * len(ends))

    def charge_all(self, work: Callable[[], T]) -> T:
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

    def now_s(self, rank: int) -> float:
        """Return the seconds on the host's clock, which need not wait for the device."""
        return time.perf_counter()

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
