"""Cells of the benchmark: an entry on a task, by so many workers, over a link, beside the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import pandas as pd

from analysis.bands import Band
from analysis.benchmark.files import EntryFile
from analysis.records.frames import Frames, find_diverged_keys, steps_of_run
from analysis.records.steps import LAUNCHES
from analysis.stats import POSITIVE, Estimate, estimate_mean, final_mean
from analysis.times.exchange_rounds import step_seconds_by_launch
from analysis.times.time_to_target import (
    CrossingBySeed,
    crossing_by_seed,
    is_reached_by_all_seeds,
    seconds_to_target,
    speedup_to_target,
)

BASELINE = "dense"
LOSS_COLUMN = "val_loss"
MEGA = 1e-6
FASTER = Band(low=1.0, includes_limits=False)  # of a speedup
CellWord = Literal["baseline", "faster", "slower", "inconclusive", "misses the target", "not timed"]
CELL_WORDS: tuple[CellWord, ...] = get_args(CellWord)
TargetLosses = Mapping[str, Mapping[int, float]]  # by task and workers


@dataclass(frozen=True)
class Cell:
    """An entry on one task, by so many workers, over one link."""

    entry: str
    task: str
    workers: int
    link: str
    word: CellWord
    speedup: Estimate | None  # the baseline's time to the target over its own, over seeds and launches
    minutes: Estimate | None  # to the target; None where a seed misses it
    step_ms: Estimate | None  # the mean step
    step_ratio: Estimate | None  # the baseline's step over its own
    seeds_at_target: int
    seeds: int
    launches: int
    target: float
    loss: Estimate | None  # at the end of the budget; None where a seed diverged
    sent_mb: float | None  # by a worker until the target; of the whole budget where that is missed
    gbit_s: float | None  # found, all nodes sending at once
    delay_ms: float | None  # found, one way
    simulated: bool  # its times are
    dates: tuple[str, str]  # of its launches, or its trainings
    machine: str

    @property
    def place(self) -> tuple[str, str, int, str]:
        """Entry, task, workers and link, which tell a cell from all others."""
        return self.entry, self.task, self.workers, self.link

    @property
    def minutes_to_target(self) -> float | None:
        """Minutes to the target, infinite where it is missed; None where nothing was timed."""
        if self.step_ms is None:
            return None
        return self.minutes.value if self.minutes else np.inf


def target_loss_by_task_and_workers(baseline: EntryFile, budget_share: float) -> TargetLosses:
    """Return the highest loss that a seed of the baseline has at this share of its budget of epochs."""
    epochs = baseline.frames.epochs
    losses: dict[str, dict[int, float]] = {}
    for name, task in baseline.statement.tasks.items():
        losses[name] = {}
        for workers, keys in task.trainings.items():
            rows = epochs[epochs["key"].isin(keys)]
            number = round(budget_share * int(rows["epoch"].max()))
            losses[name][workers] = float(rows.loc[rows["epoch"] == number, LOSS_COLUMN].max())
    return losses


def evaluate_entry(entry: EntryFile, baseline: EntryFile, targets: TargetLosses) -> list[Cell]:
    """Return all cells of an entry, cells that were not timed among them.

    Args:
        entry: what to evaluate.
        baseline: the entry with whose trainings its own are compared, seed by seed.
        targets: the losses that count.
    """
    cells = list[Cell]()
    for name, task in entry.statement.tasks.items():
        for workers, keys in task.trainings.items():
            target = targets[name][workers]
            baseline_keys = baseline.statement.tasks[name].trainings[workers]
            entry_crossings = crossing_by_seed(entry.frames, keys, LOSS_COLUMN, target, falls=True)
            baseline_crossings = crossing_by_seed(
                baseline.frames, baseline_keys, LOSS_COLUMN, target, falls=True
            )
            for link, launches in task.launches[workers].items():
                place = (name, workers, link)
                base_launches = task.baseline[workers][link]
                crossings = (entry_crossings, baseline_crossings)
                cells.append(_evaluate_cell(entry, place, target, crossings, (launches, base_launches)))
    return cells


def _evaluate_cell(
    entry: EntryFile,
    place: tuple[str, int, str],
    target: float,
    crossings: tuple[CrossingBySeed, CrossingBySeed],
    launch_keys: tuple[Sequence[str], Sequence[str]],
) -> Cell:
    """Return a cell; crossings and launches are the entry's, then the baseline's."""
    task, workers, link = place
    entry_crossings, baseline_crossings = crossings
    frames = entry.frames
    name = entry.statement.name
    keys = entry.statement.tasks[task].trainings[workers]
    step_s, baseline_step_s = (_mean_step_s_by_launch(frames, launches) for launches in launch_keys)
    ratios = [baseline_step_s[seed] / step_s[seed] for seed in step_s if seed in baseline_step_s]
    step = estimate_mean([*step_s.values()], POSITIVE, LAUNCHES) if step_s else None
    step_ratio = estimate_mean(ratios, POSITIVE, LAUNCHES) if ratios else None
    speedup = speedup_to_target(baseline_crossings, entry_crossings, step_ratio) if step_ratio else None
    is_diverged = bool({*keys} & {*find_diverged_keys(frames)})
    runs = frames.runs[frames.runs["key"].isin(launch_keys[0] or keys)]
    dates = sorted(str(started)[:10] for started in runs["started"].dropna()) or [""]
    return Cell(
        entry=name,
        task=task,
        workers=workers,
        link=link,
        word="baseline" if name == BASELINE else _cell_word(entry_crossings, speedup),
        speedup=None if name == BASELINE else speedup,
        minutes=_minutes_to_target(entry_crossings, step) if step else None,
        step_ms=step.scale_by(1e3) if step else None,
        step_ratio=step_ratio,
        seeds_at_target=sum(np.isfinite(crossing.first_at) for crossing in entry_crossings.values()),
        seeds=len(entry_crossings),
        launches=len(step_s),
        target=target,
        loss=None if is_diverged else final_mean(frames, keys, LOSS_COLUMN),
        sent_mb=_sent_mb(frames, keys, entry_crossings),
        gbit_s=aggregate_column(runs, "provenance.machine.link.together_gbit_s", "median"),
        delay_ms=aggregate_column(runs, "provenance.machine.link.latency_s", "median", 1e3),
        simulated=bool(launch_keys[0]) and bool(runs["simulated"].fillna(False).astype(bool).any()),
        dates=(dates[0], dates[-1]),
        machine=", ".join(dict.fromkeys(map(str, runs["provenance.cpu"].dropna()))),
    )


def _cell_word(crossings: CrossingBySeed, speedup: Estimate | None) -> CellWord:
    """Return the rule's word: only an interval that excludes 1 says faster or slower."""
    if not is_reached_by_all_seeds(crossings):
        return "misses the target"
    if speedup is None:
        return "not timed"
    position = FASTER.interval_position(speedup)
    if position == "across a limit":
        return "inconclusive"
    return "faster" if position == "inside" else "slower"


def _minutes_to_target(crossings: CrossingBySeed, step: Estimate) -> Estimate | None:
    """Return minutes to the target: the interval has that over seeds, and that of a step over launches."""
    minutes = seconds_to_target(crossings, step.value / 60)
    if (
        minutes is None
        or minutes.low is None
        or minutes.high is None
        or step.low is None
        or step.high is None
    ):
        return minutes
    return minutes._replace(
        low=minutes.low * step.low / step.value, high=minutes.high * step.high / step.value
    )


def _mean_step_s_by_launch(frames: Frames, keys: Sequence[str]) -> dict[int, float]:
    """Return seconds of the mean step, by launch.

    Steps that exchange and those that do not count as many times as there were in the blocks, which are whole
    rounds.
    """
    by_launch = dict[int, float]()
    for key in keys:
        steps = steps_of_run(frames, key)
        share = float((steps.loc[steps["block"].notna(), "wire_bytes"] > 0).mean())
        for seed, step in step_seconds_by_launch(frames, [key]).items():
            extra_s = step.exchanging_s - step.local_s
            by_launch[seed] = step.local_s + share * extra_s if share < 1 else step.exchanging_s
    return by_launch


def _sent_mb(frames: Frames, keys: Sequence[str], crossings: CrossingBySeed) -> float | None:
    """Return the mean megabytes that a worker sent until the target; of all steps if a seed misses it."""
    runs = frames.runs[frames.runs["key"].isin(keys)]
    per_step = aggregate_column(runs, "wire_bytes")
    if per_step is None:
        return None
    steps = float(runs["steps_total"].mean())
    if is_reached_by_all_seeds(crossings):
        steps = float(np.mean([crossing.first_at for crossing in crossings.values()]))
    return per_step * steps * MEGA


def aggregate_column(
    rows: pd.DataFrame, column: str, statistic: Literal["mean", "median"] = "mean", factor: float = 1.0
) -> float | None:
    """Return a statistic of a column, times a factor; None where it was not recorded."""
    if column not in rows:
        return None
    value = float(rows[column].astype(float).agg(statistic))
    return None if np.isnan(value) else factor * value


class ComposedTimeCheck(NamedTuple):
    """The minutes that a training took in real time, beside those composed of steps and mean step time."""

    entry: str
    task: str
    workers: int
    link: str
    real_min: float  # in steps, until its last validation
    composed_min: float

    @property
    def error_percent(self) -> float:
        """Percent by which the composed time is off."""
        return 100 * abs(self.composed_min / self.real_min - 1)


def compare_composed_times(entry: EntryFile, cells: Sequence[Cell]) -> list[ComposedTimeCheck]:
    """Return the entry's trainings in real time, each beside the time that its cell composes."""
    times = list[ComposedTimeCheck]()
    epochs = entry.frames.epochs
    cell_by_place = {cell.place: cell for cell in cells}
    for task, statement in entry.statement.tasks.items():
        for training in statement.whole:
            place = (entry.statement.name, task, training.workers, training.link)
            cell = cell_by_place.get(place)
            rows = epochs[epochs["key"] == training.key].sort_values("epoch")
            if cell and cell.step_ms and len(rows):
                last = rows.iloc[-1]
                composed_min = float(last["step"]) * cell.step_ms.value / 6e4
                times.append(ComposedTimeCheck(*place, float(last["wall_s"]) / 60, composed_min))
    return times


def select_and_sort_table_cells(cells: Sequence[Cell], task: str, workers: int, link: str) -> list[Cell]:
    """Return the cells of one table: the baseline first, then by speedup; entries without one stand last."""

    def rank(cell: Cell) -> tuple[bool, bool, float]:
        is_missing = cell.word in ("misses the target", "not timed")
        return cell.word != "baseline", is_missing, -(cell.speedup.value if cell.speedup else 0.0)

    rows = [cell for cell in cells if (cell.task, cell.workers, cell.link) == (task, workers, link)]
    return sorted(rows, key=rank)
