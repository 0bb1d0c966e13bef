"""Phases of a training step, timed in one of three modes; no figure mixes modes without saying so.

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

MODES = ("serialised", "production", "as_published")

Mark = Any  # seconds on the host, or what has CUDA events' `elapsed_time` and becomes seconds in `resolve`


@dataclass
class Sample:
    """One step: when it began, how long it took, and its phases, in seconds."""

    start_s: float
    step_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    spans: list[tuple[str, float, float]] = field(default_factory=list)  # phase, start, duration
    marks: list[tuple[Mark, Mark]] = field(default_factory=list)  # production: the collectives
    step_marks: tuple[Mark, Mark] | None = None
    stops: int = 0  # how often the process was stopped and continued since the step before


@dataclass
class _Phase:
    name: str
    start: float  # or where it went on, after a phase inside it


class PhaseTimer:
    """Times steps and the phases within them.

    Args:
        now: a clock in seconds; a virtual rank brings its own.
        synchronise: waits for the device.
        event: notes a point in the device's time, as `cuda_event` does, or on virtual ranks `mark`:
            production steps are then timed by these, and resolved after the window.
        keep_spans: of which steps to keep every single span, for a timeline; given the number of the step.
        stops: how often this process was stopped and continued until now, where somebody counts that.
    """

    def __init__(
        self,
        mode: str = "serialised",
        now: Callable[[], float] = time.perf_counter,
        synchronise: Callable[[], None] = lambda: None,
        event: Callable[[], Mark] | None = None,
        keep_spans: Callable[[int], bool] = lambda step: False,
        stops: Callable[[], int] = lambda: 0,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"no timing mode {mode!r}; there are: {', '.join(MODES)}")
        self.mode, self.now, self.synchronise = mode, now, synchronise
        self.event = event if mode == "production" else None
        self.keep_spans, self.stops = keep_spans, stops
        self._stops = stops()  # before the step: others may wait in it for one that was stopped ahead of it
        self.samples: list[Sample] = []
        self.num_steps = 0
        self._current = Sample(0.0)  # times outside a step are not kept
        self._open: list[_Phase] = []  # the innermost last
        self._keep = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """The timed region of one step."""
        self._keep = self.keep_spans(self.num_steps)
        start = self.boundary()
        mark = self.mark() if self.event else None
        sample = self._current = Sample(start)
        try:
            yield
        finally:
            sample.step_s = self.boundary() - start
            if mark is not None:
                sample.step_marks = (mark, self.mark())
            sample.stops, self._stops = self.stops() - self._stops, self.stops()
            self.num_steps += 1
            self._current, self._keep = Sample(0.0), False
            self._open.clear()
        self.samples.append(sample)  # unless it ended in an error

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A named span of a step. A phase inside another one interrupts it: each second is counted once."""
        if self.mode == "production":
            yield
            return
        phase = _Phase(name, self.boundary())
        if self._open:
            self._count(self._open[-1], phase.start)
        self._open.append(phase)
        try:
            yield
        finally:
            now = self.boundary()
            self._count(phase, now)
            if self._open:  # not after a step that ended in an error
                self._open.pop()
            if self._open:
                self._open[-1].start = now

    def _count(self, phase: _Phase, until: float) -> None:
        duration, phases = until - phase.start, self._current.phases
        phases[phase.name] = phases.get(phase.name, 0.0) + duration
        if self._keep and duration:
            self._current.spans.append((phase.name, phase.start, duration))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """One collective in production mode, timed whole."""
        start = self.mark()
        try:
            yield
        finally:
            self._current.marks.append((start, self.mark()))

    def boundary(self) -> float:
        """Seconds at the border of two phases, synchronised where the mode asks for it."""
        if self.mode == "serialised":
            self.synchronise()
        return self.now()

    def mark(self) -> Mark:
        """Point in the device's time."""
        return self.event() if self.event else self.now()

    def resolve(self, gather: Callable[[list[float]], list[list[float]]]) -> list[Sample]:
        """End a window: turn marks into seconds, split collectives, and hand over the window's samples.

        Args:
            gather: all workers' lists, given this worker's. All workers resolve the same steps together. The
                shortest duration of a collective over the workers is that of the last one to arrive: this is
                the transfer. The rest is wait.
        """
        if self.mode == "production":
            self.synchronise()
            mine = [seconds(*mark) for sample in self.samples for mark in sample.marks]
            transfers = [min(durations) for durations in zip(*gather(mine), strict=True)]
            pairs = iter(zip(mine, transfers, strict=True))
            for sample in self.samples:
                if sample.step_marks:
                    sample.step_s = seconds(*sample.step_marks)
                for _ in sample.marks:
                    whole, transfer = next(pairs)
                    sample.phases["wait"] = sample.phases.get("wait", 0.0) + whole - transfer
                    sample.phases["transfer"] = sample.phases.get("transfer", 0.0) + transfer
        samples, self.samples = self.samples, []
        return samples


def cuda_event() -> Mark:
    """Event that marks where the current stream is."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Mark, end: Mark) -> float:
    """Seconds between two marks of the same kind."""
    return float(end - start) if isinstance(end, float) else float(start.elapsed_time(end)) / 1e3
