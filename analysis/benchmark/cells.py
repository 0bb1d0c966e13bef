"""What an entry comes to on each task, number of workers and link, beside the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import pandas as pd

from analysis.benchmark.files import EntryFile
from analysis.records.frames import Frames, find_diverged_keys, steps_of_run
from analysis.records.steps import LAUNCHES
from analysis.stats import POSITIVE, Estimate, estimate_mean, final_value
from analysis.times import exchange_rounds
from analysis.times.time_to_target import (
    CrossingBySeed,
    all_seeds_reach,
    crossing_by_seed,
    seconds_to_target,
    speedup_to_target,
)

BASELINE = "dense"
LOSS_COLUMN = "val_loss"
MEGA = 1e-6
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
    sooner: Estimate | None  # times as soon at the target as the baseline, over seeds and launches
    minutes: Estimate | None  # to the target; None where a seed misses it
    step_ms: Estimate | None  # the mean step
    times: Estimate | None  # the baseline's step over its own
    reached: int  # seeds at the target
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
    def minutes_to(self) -> float | None:
        """Minutes to the target, infinite where it is missed; None where nothing was timed."""
        if self.step_ms is None:
            return None
        return self.minutes.value if self.minutes else np.inf


def target_losses(baseline: EntryFile, share: float) -> TargetLosses:
    """The loss that every seed of the baseline has at this share of its budget: the highest of them."""
    frames = baseline.frames
    return {
        task: {workers: _highest_loss(frames, keys, share) for workers, keys in own.trainings.items()}
        for task, own in baseline.statement.tasks.items()
    }


def _highest_loss(frames: Frames, keys: Sequence[str], share: float) -> float:
    epochs = frames.epochs[frames.epochs["key"].isin(keys)]
    number = round(share * int(epochs["epoch"].max()))
    return float(epochs.loc[epochs["epoch"] == number, LOSS_COLUMN].max())


def evaluate_entry(entered: EntryFile, baseline: EntryFile, aims: TargetLosses) -> list[Cell]:
    """All cells of an entry, those that were not timed among them.

    Args:
        baseline: the entry with whose trainings its own are compared, seed by seed.
    """
    found = list[Cell]()
    for task, own in entered.statement.tasks.items():
        for workers, keys in own.trainings.items():
            level = aims[task][workers]
            reach = crossing_by_seed(entered.frames, keys, LOSS_COLUMN, level, falls=True)
            theirs = baseline.statement.tasks[task].trainings[workers]
            slow = crossing_by_seed(baseline.frames, theirs, LOSS_COLUMN, level, falls=True)
            for link, launches in own.launches[workers].items():
                beside = own.baseline[workers][link]
                found.append(
                    _evaluate_cell(entered, (task, workers, link), level, (reach, slow), (launches, beside))
                )
    return found


def _evaluate_cell(
    entered: EntryFile,
    place: tuple[str, int, str],
    level: float,
    reaching: tuple[CrossingBySeed, CrossingBySeed],
    launched: tuple[Sequence[str], Sequence[str]],
) -> Cell:
    (task, workers, link), (own, slow), frames = place, reaching, entered.frames
    keys = entered.statement.tasks[task].trainings[workers]
    taken, theirs = (_mean_step_s_by_launch(frames, each) for each in launched)
    pairs = [theirs[seed] / taken[seed] for seed in taken if seed in theirs]
    step = estimate_mean([*taken.values()], POSITIVE, LAUNCHES) if taken else None
    times = estimate_mean(pairs, POSITIVE, LAUNCHES) if pairs else None
    gain = speedup_to_target(slow, own, times) if times else None
    is_baseline = entered.statement.name == BASELINE
    rows = frames.runs[frames.runs["key"].isin(launched[0] or keys)]
    dates = sorted(str(at)[:10] for at in rows["started"].dropna()) or [""]
    return Cell(
        entered.statement.name, task, workers, link,
        word=_cell_word(own, gain, is_baseline),
        sooner=None if is_baseline else gain,
        minutes=_minutes_to_target(own, step) if step else None,
        step_ms=step.scale_by(1e3) if step else None,
        times=times,
        reached=sum(np.isfinite(each.at) for each in own.values()),
        seeds=len(own), launches=len(taken), target=level,
        loss=None if {*keys} & {*find_diverged_keys(frames)} else final_value(frames, keys, LOSS_COLUMN),
        sent_mb=_sent_mb(frames, keys, own),
        gbit_s=_median(rows, "provenance.machine.link.together_gbit_s"),
        delay_ms=_scale_or_none(1e3, _median(rows, "provenance.machine.link.latency_s")),
        simulated=bool(launched[0]) and bool(rows["simulated"].fillna(False).astype(bool).any()),
        dates=(dates[0], dates[-1]),
        machine=", ".join(dict.fromkeys(map(str, rows["provenance.cpu"].dropna()))),
    )  # fmt: skip


def _cell_word(own: CrossingBySeed, gain: Estimate | None, is_baseline: bool) -> CellWord:
    """The rule's word: only an interval that excludes 1 says faster or slower."""
    if is_baseline:
        return "baseline"
    if not all_seeds_reach(own):
        return "misses the target"
    if gain is None:
        return "not timed"
    if gain.low is not None and gain.low > 1:
        return "faster"
    if gain.high is not None and gain.high < 1:
        return "slower"
    return "inconclusive"


def _minutes_to_target(own: CrossingBySeed, step: Estimate) -> Estimate | None:
    """Minutes to the target: its interval has that over seeds, and that of a step over launches."""
    found = seconds_to_target(own, step.value / 60)
    if found is None or found.low is None or found.high is None or step.low is None or step.high is None:
        return found
    return found._replace(low=found.low * step.low / step.value, high=found.high * step.high / step.value)


def _mean_step_s_by_launch(frames: Frames, keys: Sequence[str]) -> dict[int, float]:
    """Seconds of the mean step, by launch: of those that exchange and those that do not as many as there were
    in the blocks, which are whole rounds.
    """
    found = dict[int, float]()
    for key in keys:
        steps = steps_of_run(frames, key)
        share = float((steps.loc[steps["block"].notna(), "wire_bytes"] > 0).mean())
        for seed, own in exchange_rounds.step_seconds_by_launch(frames, [key]).items():
            found[seed] = (
                own.local_s + share * (own.exchanging_s - own.local_s) if share < 1 else own.exchanging_s
            )
    return found


def _sent_mb(frames: Frames, keys: Sequence[str], own: CrossingBySeed) -> float | None:
    """Megabytes that a worker sent until the target, the mean over seeds; of all steps if one misses it."""
    per_step = frames.runs.loc[frames.runs["key"].isin(keys), "wire_bytes"].mean()
    total = frames.runs.loc[frames.runs["key"].isin(keys), "steps_total"].mean()
    steps = float(np.mean([each.at for each in own.values()])) if all_seeds_reach(own) else float(total)
    return None if np.isnan(per_step) else float(per_step * steps * MEGA)


def _median(rows: pd.DataFrame, column: str) -> float | None:
    value = rows[column].astype(float).median() if column in rows else np.nan
    return None if np.isnan(value) else float(value)


def _scale_or_none(unit: float, value: float | None) -> float | None:
    return None if value is None else unit * value


class ComposedTime(NamedTuple):
    """A training in real time beside what was composed for it."""

    entry: str
    task: str
    workers: int
    link: str
    real_min: float  # in steps, until its last validation
    composed_min: float

    @property
    def off(self) -> float:
        """Percent by which the composed time is off."""
        return 100 * abs(self.composed_min / self.real_min - 1)


def compare_composed_times(entered: EntryFile, found: Sequence[Cell]) -> list[ComposedTime]:
    """Its trainings in real time."""
    told, epochs, name = list[ComposedTime](), entered.frames.epochs, entered.statement.name
    for task, own in entered.statement.tasks.items():
        for each in own.whole:
            place = (name, task, each.workers, each.link)
            cell = next((c for c in found if (c.entry, c.task, c.workers, c.link) == place), None)
            rows = epochs[epochs["key"] == each.key].sort_values("epoch")
            if cell and cell.step_ms and len(rows):
                last = rows.iloc[-1]
                minutes = float(last["step"]) * cell.step_ms.value / 6e4
                told.append(ComposedTime(*place, float(last["wall_s"]) / 60, minutes))
    return told


def sort_table_cells(found: Sequence[Cell], task: str, workers: int, link: str) -> list[Cell]:
    """The rows of one table: the baseline first, then by the times as soon; what misses stands last."""
    own = [cell for cell in found if (cell.task, cell.workers, cell.link) == (task, workers, link)]

    def place(cell: Cell) -> tuple[bool, bool, float]:
        missing = cell.word in ("misses the target", "not timed")
        return cell.word != "baseline", missing, -(cell.sooner.value if cell.sooner else 0.0)

    return sorted(own, key=place)
