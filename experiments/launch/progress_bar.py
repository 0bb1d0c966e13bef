"""Progress of runs: on a terminal a line for each that is running, elsewhere a plain line now and then."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from analysis.records.configs import labels, run_id
from analysis.records.schema import Progress
from analysis.records.visible import terminal, visible
from experiments.config.plan import PlannedRun

LINE_S = 30.0  # between two plain lines
DRAW_S = 0.25  # between two pictures on a terminal
FORGET_S = 60.0  # what lies longer back counts less than a third in a speed
LISTED = 8  # runs with a line of their own
BAR = 10  # columns


class RunProgress(NamedTuple):
    """The progress of a run that is being made."""

    run: str  # its id
    done: Progress


class UnfinishedRuns(NamedTuple):
    """The runs that have not ended."""

    running: list[RunProgress]
    waiting: int  # runs


class Speed:
    """Seconds a step takes, smoothed, so that the time left is steady; measured where the count changes."""

    def __init__(self) -> None:
        self.steps, self.since = 0, 0.0  # at the last change
        self.measured_steps = self.measured_s = 0.0  # those long ago count less

    def see(self, steps: int, now: float) -> None:
        """The first steps seen are where a run begins, or goes on from; how long they took is not known."""
        if self.steps < steps and self.steps:
            keep = math.exp((self.since - now) / FORGET_S)
            self.measured_steps = keep * self.measured_steps + steps - self.steps
            self.measured_s = keep * self.measured_s + now - self.since
        if self.steps != steps:
            self.steps, self.since = steps, now

    def left_s(self, steps: int, now: float) -> float | None:
        """Seconds that so many steps more take; None where nothing was measured."""
        if not self.measured_steps:
            return None
        return max(0.0, steps * self.measured_s / self.measured_steps - (now - self.since))


class ProgressBar:
    """Shows the current runs, their steps, loss or accuracy, the time left, and runs done and left.

    Args:
        labels: what people call each run, by its id.
    """

    def __init__(
        self,
        labels: Mapping[str, str],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.labels, self.stream, self.clock = labels, stream or sys.stderr, clock
        self.done = 0
        self.known_steps: dict[str, int] = {}
        self.speeds: dict[str, Speed] = {}
        self.speed = Speed()  # of all together
        self.last_line = self.last_drawn = clock()
        self.live: Live | None = None
        console = Console(file=terminal(self.stream), highlight=False, markup=False, emoji=False)
        if self.stream.isatty() and not console.is_dumb_terminal and labels:
            self.live = Live(console=console, auto_refresh=False, transient=True)
            with contextlib.suppress(OSError):
                self.live.start()

    def say(self, line: str) -> None:
        """One visible line, above the others. A terminal that is gone is told nothing, and ends nothing."""
        with contextlib.suppress(OSError):
            if self.live is not None:
                self.live.console.print(visible(line), soft_wrap=True)
            else:
                print(line, file=self.stream, flush=True)

    def finished(self, run: str, diverged: str = "") -> None:
        """Count and name a run that is done; with the reason, where it diverged."""
        self.done += 1
        label, ended = self.labels.get(run), f"; it diverged: {diverged}" * bool(diverged)
        self.say(f"[{self.done}/{len(self.labels)}] {run}" + (f": {label}" if label else "") + ended)

    def show(self, running: Sequence[RunProgress], num_waiting: int) -> None:
        """Tell how far they are, if it is time to."""
        now = self.clock()
        steps, total = self._steps(running)
        self.speed.see(steps, now)
        for run, done in running:
            self.speeds.setdefault(run, Speed()).see(done.step, now)
        summary = f"{self.done} of {len(self.labels)} done, {num_waiting} waiting"
        summary += self._left(steps, total, now)
        if self.live is not None:
            if now - self.last_drawn >= DRAW_S:
                self.last_drawn = now
                self._draw(self.live, running, summary)
        elif running and now - self.last_line > LINE_S:
            self.last_line = now
            what = "; ".join(map(self._described, running[:LISTED]))
            self.say(f"{what}; {summary}")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.live is not None:
            with contextlib.suppress(OSError):
                self.live.stop()

    def _steps(self, running: Sequence[RunProgress]) -> tuple[int, int]:
        """Steps done of all runs, and steps in all. Those that have not said how many they have are taken to
        be as long as the others.
        """
        self.known_steps |= {run: done.steps for run, done in running if done.steps}
        current = {run for run, _ in running}
        finished = sum(steps for run, steps in self.known_steps.items() if run not in current)
        known = len(self.known_steps)
        mean = sum(self.known_steps.values()) / known if known else 0
        total = round(mean * max(len(self.labels), known))
        return finished + sum(done.step for _, done in running), total

    def _left(self, steps: int, total: int, now: float) -> str:
        """The time that it will take, in words; variants that take turns go on beyond their least number of
        rounds.
        """
        if steps > total > 0:
            return ", until the ratios are known or the time is over"
        left_s = self.speed.left_s(total - steps, now)
        return "" if left_s is None else f", about {format_duration(left_s)} left"

    def _described(self, one: RunProgress) -> str:
        name, done = self.labels.get(one.run, one.run), one.done
        return ", ".join(filter(None, (f"{name}: {_of(done)}" + " steps" * bool(done.step), _measured(done))))

    def _draw(self, live: Live, running: Sequence[RunProgress], summary: str) -> None:
        lines = Table.grid(padding=(0, 2, 0, 0), expand=True)
        lines.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        lines.add_column(no_wrap=True)
        for _ in range(3):
            lines.add_column(no_wrap=True, justify="right")
        now = self.clock()
        for run, done in running[:LISTED]:
            steps = done.steps or 0
            bar = Bar(steps or 1, min(done.step, steps), width=BAR)
            left_s = self.speeds[run].left_s(max(0, steps - done.step), now) if steps else None
            left = "" if left_s is None else format_duration(left_s)
            lines.add_row(Text(self.labels.get(run, run)), bar, _of(done), _measured(done), left)
        others = f"and {len(running) - LISTED} more running; " if len(running) > LISTED else ""
        live.console.width = _columns(self.stream)
        with contextlib.suppress(OSError):
            live.update(
                Group(lines, Text(f"{others}{summary}", no_wrap=True, overflow="ellipsis")), refresh=True
            )


def labels_by_run(runs: Sequence[PlannedRun]) -> dict[str, str]:
    """Values that vary among runs, by their ids."""
    configs = [run.config for run in runs]
    return dict(zip(map(run_id, configs), labels(configs), strict=True))


def format_duration(seconds: float) -> str:
    """A time as coarse as it is known: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{5 * round(seconds / 5)} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _of(done: Progress) -> str:
    if not done.steps:
        return f"{done.step:,}" if done.step else "starting"
    return f"{done.step:,}/{done.steps:,}"


def _measured(done: Progress) -> str:
    """The newest accuracy, or the loss where none is measured."""
    if done.top1 is not None:
        return f"top-1 {done.top1:.1f} %"
    return "" if done.loss is None else f"loss {done.loss:.3g}"


def _columns(stream: TextIO) -> int:
    """Columns of the terminal; some say that they have none."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80
