"""Timing of the phases of a training step, in one of three modes.

No figure mixes modes without saying so.

serialised    the device is synchronised at every phase boundary, and there is a barrier before each
              collective: the breakdown. The phases add up to the step; the difference is *unaccounted*.
production    nothing synchronises inside a step; the step's time, and each collective's whole duration.
as_published  host clocks without synchronisation, communication = the final wait: the protocol that the
              numbers of Yoon and Oh 2022 imply. It exists to show what that protocol does to numbers.

Every sample is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

TIMING_MODES = ("serialised", "production", "as_published")

# A point in time: seconds on the host, or an object with the `elapsed_time` of CUDA events.
TimeMark = Any


@dataclass
class StepTimes:
    """Times of one step: when it began, how long it took, and its phases, in seconds."""

    start_s: float
    step_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # phase, start, duration
    marks: list[tuple[TimeMark, TimeMark]] = field(default_factory=list)  # production: the collectives
    step_marks: tuple[TimeMark, TimeMark] | None = None
    stops: int = 0  # how often the process was stopped and continued since the step before


class PhaseTimer:
    """A timer of steps and of the phases within them.

    Args:
        now: a clock in seconds; a virtual rank brings its own.
        synchronise: waits for the device.
        record_event: records a point in the device's time, as `record_cuda_event` does, or
            `VirtualComm.record_mark`: production steps are then timed by these, and turned into seconds after
            the window.
        keep_spans: tells of a step's number whether to keep every single span of it, for a timeline.
        count_stops: counts how often this process was stopped and continued until now.
    """

    def __init__(
        self,
        mode: str = "serialised",
        now: Callable[[], float] = time.perf_counter,
        synchronise: Callable[[], None] = lambda: None,
        record_event: Callable[[], TimeMark] | None = None,
        keep_spans: Callable[[int], bool] = lambda step: False,
        count_stops: Callable[[], int] = lambda: 0,
    ) -> None:
        if mode not in TIMING_MODES:
            raise ValueError(f"no timing mode {mode!r}; there are: {', '.join(TIMING_MODES)}")
        self.mode = mode
        self.now = now
        self.synchronise = synchronise
        self.record_event = record_event if mode == "production" else None
        self.keep_spans = keep_spans
        self.count_stops = count_stops
        self._stops = count_stops()  # before the step: others may wait in it for a worker stopped before it
        self.samples: list[StepTimes] = []
        self.num_steps = 0
        self._current = StepTimes(0.0)  # times outside a step are not kept
        self._open_phases: list[str] = []  # the innermost last
        self._resumed_at = 0.0  # when the innermost phase began, or went on after a phase inside it
        self._keeps_spans = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time the block as one step."""
        self._keeps_spans = self.keep_spans(self.num_steps)
        start = self._read_boundary_s()
        mark = self._record_mark() if self.record_event else None
        sample = self._current = StepTimes(start)
        try:
            yield
        finally:
            sample.step_s = self._read_boundary_s() - start
            if mark is not None:
                sample.step_marks = (mark, self._record_mark())
            stops = self.count_stops()
            sample.stops = stops - self._stops
            self._stops = stops
            self.num_steps += 1
            self._current = StepTimes(0.0)
            self._keeps_spans = False
            self._open_phases.clear()
        self.samples.append(sample)  # unless it ended in an error

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase of the step.

        A phase inside another one interrupts it: each second is counted once.
        """
        if self.mode == "production":
            yield
            return
        begin = self._read_boundary_s()
        if self._open_phases:
            self._add_span(self._open_phases[-1], begin)
        self._open_phases.append(name)
        self._resumed_at = begin
        try:
            yield
        finally:
            end = self._read_boundary_s()
            self._add_span(name, end)
            if self._open_phases:  # not after a step that ended in an error
                self._open_phases.pop()
            self._resumed_at = end

    def _add_span(self, name: str, end: float) -> None:
        """Add the time since the innermost phase began, or went on, to the current step."""
        duration = end - self._resumed_at
        phases = self._current.phases
        phases[name] = phases.get(name, 0.0) + duration
        if self._keeps_spans and duration:
            self._current.spans.append((name, self._resumed_at, duration))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Time the block as one collective, in production mode."""
        start = self._record_mark()
        try:
            yield
        finally:
            self._current.marks.append((start, self._record_mark()))

    def _read_boundary_s(self) -> float:
        """Return the time at the border of two phases, in seconds, synchronised if the mode asks for it."""
        if self.mode == "serialised":
            self.synchronise()
        return self.now()

    def _record_mark(self) -> TimeMark:
        """Record a point in the device's time."""
        return self.record_event() if self.record_event else self.now()

    def finish_window_and_split_waits(
        self, gather: Callable[[list[float]], list[list[float]]]
    ) -> list[StepTimes]:
        """End a window: turn marks into seconds, split collectives, and return the window's samples.

        All workers finish the same steps together. The shortest duration of a collective over the workers is
        that of the last one to arrive: this is the transfer. The rest is wait.

        Args:
            gather: returns all workers' lists, given this worker's.
        """
        if self.mode == "production":
            self.synchronise()
            durations = [_elapsed_s(*marks) for sample in self.samples for marks in sample.marks]
            transfers = [min(of_workers) for of_workers in zip(*gather(durations), strict=True)]
            pairs = iter(zip(durations, transfers, strict=True))
            for sample in self.samples:
                if sample.step_marks:
                    sample.step_s = _elapsed_s(*sample.step_marks)
                for _ in sample.marks:
                    duration, transfer = next(pairs)
                    sample.phases["wait"] = sample.phases.get("wait", 0.0) + duration - transfer
                    sample.phases["transfer"] = sample.phases.get("transfer", 0.0) + transfer
        samples = self.samples
        self.samples = []
        return samples


def record_cuda_event() -> TimeMark:
    """Record an event that marks where the current stream is."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_s(start: TimeMark, end: TimeMark) -> float:
    """Return the seconds between two marks of the same kind."""
    return float(end - start) if isinstance(end, float) else float(start.elapsed_time(end)) / 1e3
