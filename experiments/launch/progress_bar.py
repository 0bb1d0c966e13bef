"""Progress of runs: on a terminal a line for each that is running, elsewhere a plain line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Column
from rich.text import Text

from analysis.records.configs import label_configs, run_id
from analysis.records.schema import Progress
from analysis.records.terminal_escapes import escape_controls, unwrap_terminal
from experiments.config.plan import PlannedRun

LINE_S = 30.0  # between two plain lines
DRAW_S = 0.25  # between two pictures on a terminal
SPEED_WINDOW_S = 300.0  # in which a speed is measured
LISTED = 8  # runs with a line of their own
BAR_COLUMNS = 10
FIELDS = ("steps", "quality", "time_left")  # of a line


class RunProgress(NamedTuple):
    """The progress of one run that is being made."""

    run_id: str
    progress: Progress


class UnfinishedRuns(NamedTuple):
    """The runs that have not ended."""

    running: list[RunProgress]
    num_waiting: int


class RunTable(RichProgress):
    """A line for each run, and a summary below them."""

    summary = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the lines of the runs and the summary, as rich draws them."""
        yield self.make_tasks_table(self.tasks)
        yield Text(self.summary, no_wrap=True, overflow="ellipsis")


class ProgressBar:
    """A display of the running runs: steps, loss or accuracy, time left; and of the number of runs done.

    Args:
        label_by_run_id: what people call each run.
        clock: returns a time in seconds.
    """

    def __init__(
        self,
        label_by_run_id: Mapping[str, str],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label_by_run_id = label_by_run_id
        self.stream = stream or sys.stderr
        self.clock = clock
        self.num_done = 0
        self.num_steps_by_run: dict[str, int] = {}
        self.last_shown_s = clock()
        console = Console(file=unwrap_terminal(self.stream), highlight=False, markup=False, emoji=False)
        self.is_live = self.stream.isatty() and not console.is_dumb_terminal and bool(label_by_run_id)
        label_column = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self.table = RunTable(
            TextColumn("{task.description}", markup=False, table_column=label_column),
            BarColumn(BAR_COLUMNS),
            *(TextColumn(f"{{task.fields[{field}]}}", markup=False, justify="right") for field in FIELDS),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
            get_time=clock,
            speed_estimate_period=SPEED_WINDOW_S,
            disable=not self.is_live,
        )
        self.task_by_run: dict[str, Task] = {}
        self.total = self._add_task("")
        with contextlib.suppress(OSError):
            self.table.start()

    def say(self, line: str) -> None:
        """Print one line above the runs; a terminal that is gone is no error."""
        with contextlib.suppress(OSError):
            if self.is_live:
                self.table.console.print(escape_controls(line), soft_wrap=True)
            else:
                print(line, file=self.stream, flush=True)

    def report_run_done(self, run_id: str, why_diverged: str = "") -> None:
        """Count a run as done and print its id, and why it diverged if it did."""
        self.num_done += 1
        label = self.label_by_run_id.get(run_id)
        line = f"[{self.num_done}/{len(self.label_by_run_id)}] {run_id}" + (f": {label}" if label else "")
        self.say(f"{line}; it diverged: {why_diverged}" if why_diverged else line)

    def update(self, running: Sequence[RunProgress], num_waiting: int) -> None:
        """Note the progress of the running runs, and draw or print it if enough time has passed."""
        for task in self.table.tasks:
            task.visible = False
        for run, progress in running:
            if run not in self.task_by_run:
                self.task_by_run[run] = self._add_task(self.label_by_run_id.get(run, run))
            task = self.task_by_run[run]
            num_steps = progress.steps or 0
            self.table.update(task.id, total=num_steps or 1, completed=progress.step)
            task.visible = (run, progress) in running[:LISTED]
            task.fields["steps"] = format_step_count(progress)
            task.fields["quality"] = format_accuracy_or_loss(progress)
            task.fields["time_left"] = format_time_left(task, max(0, num_steps - progress.step))
        summary = f"{self.num_done} of {len(self.label_by_run_id)} done, {num_waiting} waiting"
        summary += self._describe_time_left(running)
        elapsed_s = self.clock() - self.last_shown_s
        if self.is_live and elapsed_s >= DRAW_S:
            self.last_shown_s = self.clock()
            unlisted = f"and {len(running) - LISTED} more running; " if len(running) > LISTED else ""
            self.table.summary = unlisted + summary
            with contextlib.suppress(OSError):
                self.table.refresh()
        elif not self.is_live and running and elapsed_s > LINE_S:
            self.last_shown_s = self.clock()
            lines = [describe_task(task) for task in self.table.tasks if task.visible]
            self.say("; ".join([*lines, summary]))

    def close(self) -> None:
        """Restore the terminal."""
        with contextlib.suppress(OSError):
            self.table.stop()

    def _add_task(self, label: str) -> Task:
        identity = self.table.add_task(label, visible=False, steps="", quality="", time_left="")
        return next(task for task in self.table.tasks if task.id == identity)

    def _describe_time_left(self, running: Sequence[RunProgress]) -> str:
        """Return the time that all runs will take, in words.

        A run that has not said how many steps it has is taken to be as long as the others. Variants that take
        turns go on beyond their least number of rounds.
        """
        self.num_steps_by_run |= {run: progress.steps for run, progress in running if progress.steps}
        current_ids = {run for run, _ in running}
        steps_done = sum(progress.step for _, progress in running)
        steps_done += sum(steps for run, steps in self.num_steps_by_run.items() if run not in current_ids)
        self.table.update(self.total.id, completed=steps_done)
        num_known = len(self.num_steps_by_run)
        if not num_known:
            return ""
        mean_steps = sum(self.num_steps_by_run.values()) / num_known
        steps_in_all = round(mean_steps * max(len(self.label_by_run_id), num_known))
        if steps_done > steps_in_all:
            return ", until the ratios are known or the time is over"
        time_left = format_time_left(self.total, steps_in_all - steps_done)
        return f", about {time_left} left" if time_left else ""


def label_by_run_id(runs: Sequence[PlannedRun]) -> dict[str, str]:
    """Return a label for each run, the values in which it differs from the others, by run id."""
    configs = [run.config for run in runs]
    return dict(zip(map(run_id, configs), label_configs(configs), strict=True))


def describe_task(task: Task) -> str:
    """Return the label, steps and quality of one run."""
    steps = task.fields["steps"] + (" steps" if task.completed else "")
    return ", ".join(filter(None, (f"{task.description}: {steps}", task.fields["quality"])))


def format_time_left(task: Task, num_steps: int) -> str:
    """Return the time that so many more steps take; nothing as long as no speed was measured."""
    return format_duration(num_steps / task.speed) if task.speed else ""


def format_duration(seconds: float) -> str:
    """Return a time as coarse as it is known: 45 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{5 * round(seconds / 5)} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def format_step_count(progress: Progress) -> str:
    """Return the number of steps done, and of how many."""
    if not progress.steps:
        return f"{progress.step:,}" if progress.step else "starting"
    return f"{progress.step:,}/{progress.steps:,}"


def format_accuracy_or_loss(progress: Progress) -> str:
    """Return the newest accuracy, or the loss where no accuracy is measured."""
    if progress.top1 is not None:
        return f"top-1 {progress.top1:.1f} %"
    return "" if progress.loss is None else f"loss {progress.loss:.3g}"
