"""Scores of the benchmark: how soon an entry reaches levels of the baseline's loss, cell by cell.

A cell is an entry on a task, by so many workers, over a link. A level is the loss that the baseline has after
a share of its budget of steps. A cell has one word for each level, and never one for all.

Intervals and tests are a bootstrap: `RESAMPLES` times seeds and launches are drawn with replacement, the same
ones for the entry and for the baseline, and levels, times and speedups are computed anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np
import pandas as pd

from analysis.benchmark.files import EntryFile
from analysis.records.frames import Frames, steps_of_run
from analysis.records.steps import ENOUGH_LAUNCHES, LAUNCHES
from analysis.significance import ALPHA, holm_level
from analysis.stats import POSITIVE, Estimate, estimate_mean, student_t_quantile
from analysis.times.exchange_rounds import step_seconds_by_launch

BASELINE = "dense"
LOSS_COLUMN = "val_loss"
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)  # of the baseline's budget: a level each
RESAMPLES = 4_000
LevelWord = Literal[
    "baseline", "faster", "slower", "slower (censored)", "inconclusive", "not reached", "not timed"
]
LEVEL_WORDS: tuple[LevelWord, ...] = get_args(LevelWord)
DECISIONS: tuple[LevelWord, ...] = ("faster", "slower", "slower (censored)")


@dataclass(frozen=True)
class LevelScore:
    """Time that an entry takes to a level, beside the baseline's."""

    share: float  # of the baseline's budget
    loss: float  # of the baseline then: the level
    word: LevelWord = "inconclusive"  # tested together with others
    word_alone: LevelWord = "inconclusive"
    # The baseline's time over the entry's. It is 0 where the entry does not reach the level in its budget:
    # the upper edge is then that of an entry that would reach it right after its budget.
    speedup: Estimate | None = None
    minutes: float | None = None  # infinite where it does not reach the level
    p_value: float = 1.0  # of equal losses at the time at which the baseline reaches the level
    is_too_short: bool = False  # its budget ends before the baseline's time, without the level


@dataclass(frozen=True)
class Cell:
    """An entry on one task, by so many workers, over one link."""

    entry: str
    task: str
    workers: int
    link: str
    levels: Sequence[LevelScore]
    curve: Sequence[tuple[float, float]]  # validated steps, and the mean best loss so far
    step_ms: Estimate | None  # the mean step
    seeds: int
    launches: int
    gbit_s: float | None  # found, all nodes sending at once
    delay_ms: float | None  # found, one way
    simulated: bool  # its times are
    dates: tuple[str, str]  # of its launches, or its trainings
    machine: str

    @property
    def place(self) -> tuple[str, str, int, str]:
        """Entry, task, workers and link, which tell a cell from all others."""
        return self.entry, self.task, self.workers, self.link

    def level(self, share: float) -> LevelScore | None:
        """Return the score at a level; None where the task has no such level."""
        return next((level for level in self.levels if level.share == share), None)


class Measurement(NamedTuple):
    """The curves and step times of an entry, or of the baseline beside it."""

    losses: np.ndarray  # (seeds, validations): the best loss so far
    step_s: np.ndarray  # (launches,): seconds of the mean step


def evaluate_entry(entry: EntryFile, baseline: EntryFile, floors: Mapping[str, float]) -> list[Cell]:
    """Return all cells of an entry, cells that were not timed among them; each word is tested alone.

    Args:
        entry: what to evaluate.
        baseline: the entry with whose trainings its own are compared, seed by seed.
        floors: a loss by task, which a level must be below.
    """
    cells = list[Cell]()
    name = entry.statement.name
    for task, statement in entry.statement.tasks.items():
        for workers, keys in statement.trainings.items():
            base_losses = best_losses(baseline, baseline.statement.tasks[task].trainings[workers])
            losses = best_losses(entry, keys).reindex(columns=base_losses.columns).ffill(axis=1)
            seeds = base_losses.index.intersection(losses.index)
            steps = losses.columns.to_numpy(float)
            for link, launches in statement.launches[workers].items():
                own_s = _mean_step_s_by_launch(entry.frames, launches)
                base_s = _mean_step_s_by_launch(entry.frames, statement.baseline[workers][link])
                shared = [launch for launch in own_s if launch in base_s]
                levels = score_levels(
                    steps,
                    Measurement(base_losses.loc[seeds].to_numpy(), np.array([base_s[key] for key in shared])),
                    Measurement(losses.loc[seeds].to_numpy(), np.array([own_s[key] for key in shared])),
                    floors.get(task, np.inf),
                )
                if name == BASELINE:  # which has nothing to be compared with
                    levels = [
                        LevelScore(level.share, level.loss, "baseline", "baseline", minutes=level.minutes)
                        for level in levels
                    ]
                runs = entry.frames.runs[entry.frames.runs["key"].isin(launches or keys)]
                dates = sorted(str(started)[:10] for started in runs["started"].dropna()) or [""]
                step = estimate_mean([*own_s.values()], POSITIVE, LAUNCHES) if own_s else None
                cell = Cell(
                    entry=name,
                    task=task,
                    workers=workers,
                    link=link,
                    levels=levels,
                    curve=[*zip(steps.tolist(), losses.mean().tolist(), strict=True)],
                    step_ms=step.scale_by(1e3) if step else None,
                    seeds=len(seeds),
                    launches=len(shared),
                    gbit_s=aggregate_column(runs, "provenance.machine.link.together_gbit_s", "median"),
                    delay_ms=aggregate_column(runs, "provenance.machine.link.latency_s", "median", 1e3),
                    simulated=bool(launches) and bool(runs["simulated"].fillna(False).astype(bool).any()),
                    dates=(dates[0], dates[-1]),
                    machine=", ".join(dict.fromkeys(map(str, runs["provenance.cpu"].dropna()))),
                )
                cells.append(cell)
    return cells


def best_losses(entry: EntryFile, keys: Sequence[str]) -> pd.DataFrame:
    """Return the lowest validation loss so far of trainings: a row a seed, a column a validated step."""
    epochs = entry.frames.epochs[entry.frames.epochs["key"].isin(keys)]
    seeds = entry.frames.runs.set_index("key")["seed"]
    losses = epochs.pivot_table(LOSS_COLUMN, "key", "step", dropna=False).rename(index=seeds)
    lowest: pd.DataFrame = losses.cummin(axis=1).ffill(axis=1)
    return lowest


def score_levels(
    steps: np.ndarray, baseline: Measurement, own: Measurement, floor: float = np.inf
) -> list[LevelScore]:
    """Return an entry's scores at all levels below the floor, each tested alone.

    A time to a level is the steps to it, interpolated between the two validations around it, times the
    seconds of the mean step. What reaches a level before its first validation counts as reaching it then. The
    test compares losses at the time at which the baseline reaches the level, so that it needs no time that
    nobody measured.

    Args:
        steps: (validations,) of both.
        baseline: with one row for each seed of the entry's.
        own: the entry's.
        floor: levels above it are dropped.
    """
    num_launches = len(own.step_s)
    num_units = min(len(own.losses), num_launches)
    seed_shares = draw_shares(len(own.losses), 0)
    base_curve, curve = (seed_shares @ each.losses for each in (baseline, own))
    ratio = np.ones(len(seed_shares))  # of step times
    if num_launches:
        launch_shares = draw_shares(num_launches, 1)
        ratio = (launch_shares @ baseline.step_s) / (launch_shares @ own.step_s)
    budget = float(steps[-1])
    scores = list[LevelScore]()
    for share in SHARES:
        level = interpolate_losses(base_curve, steps, np.full(len(ratio), share * budget))
        if not level[0] < floor:
            continue
        base_needed = steps_to_level(base_curve, steps, level)
        needed = steps_to_level(curve, steps, level)
        affordable = base_needed * ratio  # in the baseline's time
        leads = [  # by how much the loss is below the level then: of resampled seeds, of resampled launches
            level - interpolate_losses(curve, steps, np.minimum(base_needed * ratio[0], budget)),
            level[0] - np.interp(np.minimum(base_needed[0] * ratio, budget), steps, curve[0]),
        ]
        lowest = affordable / needed
        highest = affordable / np.minimum(needed, budget)
        score = LevelScore(share, float(level[0]))
        if not num_launches:
            scores.append(replace(score, word="not timed", word_alone="not timed"))
            continue
        low, high = _bootstrap_interval(lowest, highest, num_units)
        score = replace(
            score,
            speedup=Estimate(float(lowest[0]), low, high, num_units),
            minutes=float(needed[0] * own.step_s.mean() / 60),
            p_value=_p_value_of_zero(leads[0], leads[1], len(own.losses), num_launches),
            is_too_short=bool(lowest[0] == 0 and affordable[0] >= budget),
        )
        word = choose_word(score, ALPHA)
        scores.append(replace(score, word=word, word_alone=word))
    return scores


def choose_word(score: LevelScore, significance: float) -> LevelWord:
    """Return the word of a score at a level of significance.

    Only a test and an interval that agree say faster or slower.
    """
    if score.word in ("baseline", "not timed") or score.speedup is None:
        return score.word
    if score.is_too_short:
        return "not reached"
    low, high = score.speedup.interval
    if score.p_value > significance:
        return "inconclusive"
    if low > 1:
        return "faster"
    if high < 1:
        return "slower" if score.speedup.value else "slower (censored)"
    return "inconclusive"


def decide_together(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with the words that are left when those of a link and level are tested together."""
    p_values: dict[tuple[str, float], list[float]] = {}
    for cell in cells:
        for score in cell.levels:
            if score.speedup is not None and not score.is_too_short:
                p_values.setdefault((cell.link, score.share), []).append(score.p_value)
    levels = {place: holm_level(values) for place, values in p_values.items()}

    def decide(cell: Cell, score: LevelScore) -> LevelScore:
        significance = levels.get((cell.link, score.share), ALPHA)
        return replace(score, word=choose_word(score, significance))

    return [replace(cell, levels=[decide(cell, score) for score in cell.levels]) for cell in cells]


@cache
def draw_shares(num_units: int, seed: int) -> np.ndarray:
    """Return the share of each unit in every resample, (1 + resamples, units); the sample comes first."""
    drawn = np.random.default_rng(seed).multinomial(num_units, [1 / num_units] * num_units, RESAMPLES)
    return np.vstack([np.ones((1, num_units)), drawn]) / num_units


def interpolate_losses(curves: np.ndarray, steps: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return each curve's loss at its own step; before the first validation the loss of that.

    Args:
        curves: (curves, validations).
        steps: (validations,).
        at: (curves,).
    """
    after = np.clip(np.searchsorted(steps, at), 1, len(steps) - 1)
    rows = np.arange(len(curves))
    left, right = curves[rows, after - 1], curves[rows, after]
    way = (at - steps[after - 1]) / (steps[after] - steps[after - 1])
    losses: np.ndarray = left + np.clip(way, 0, 1) * (right - left)
    return losses


def steps_to_level(curves: np.ndarray, steps: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """Return the steps after which each falling curve is at its level; infinite where it never is."""
    is_reached = curves <= levels[:, None]
    after = np.maximum(is_reached.argmax(axis=1), 1)
    rows = np.arange(len(curves))
    left, right = curves[rows, after - 1], curves[rows, after]
    with np.errstate(divide="ignore", invalid="ignore"):
        way = np.clip(np.nan_to_num((left - levels) / (left - right)), 0, 1)
    found = steps[after - 1] + way * (steps[after] - steps[after - 1])
    return np.where(is_reached.any(axis=1), found, np.inf)


def _bootstrap_interval(
    lowest: np.ndarray, highest: np.ndarray, num_units: int
) -> tuple[float | None, float | None]:
    """Return the 95 % interval of resampled values, each known to lie between two; without enough units none.

    Plain percentiles of few units are too narrow. These are further out, so that the interval of a mean is as
    wide as Student's (Hesterberg, The American Statistician 69, 2015: the expanded percentile interval).
    """
    if num_units < ENOUGH_LAUNCHES:
        return None, None
    import scipy.special

    scale = np.sqrt(num_units / (num_units - 1))
    tail = scipy.special.ndtr(-scale * student_t_quantile(num_units - 1))
    return float(np.quantile(lowest[1:], tail)), float(np.quantile(highest[1:], 1 - tail))


def _p_value_of_zero(
    by_seeds: np.ndarray, by_launches: np.ndarray, num_seeds: int, num_launches: int
) -> float:
    """Return the two-sided p-value of zero for a number with errors of seeds and of launches.

    Standard errors are the bootstrap's; the distribution is Student's with Welch's degrees of freedom.
    """
    if min(num_seeds, num_launches) < ENOUGH_LAUNCHES or not np.isfinite(by_seeds).all():
        return 1.0
    import scipy.special

    # Of a resample the variance is that of n, where an unbiased one has n - 1.
    seed_variance = by_seeds[1:].var() * num_seeds / (num_seeds - 1)
    launch_variance = by_launches[1:].var() * num_launches / (num_launches - 1)
    variance = seed_variance + launch_variance
    if variance == 0:
        return float(by_seeds[0] == 0)
    df = variance**2 / (seed_variance**2 / (num_seeds - 1) + launch_variance**2 / (num_launches - 1))
    return float(2 * scipy.special.stdtr(df, -abs(by_seeds[0]) / np.sqrt(variance)))


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


def aggregate_column(
    rows: pd.DataFrame, column: str, statistic: Literal["mean", "median"] = "mean", factor: float = 1.0
) -> float | None:
    """Return a statistic of a column, times a factor; None where it was not recorded."""
    if column not in rows:
        return None
    value = float(rows[column].astype(float).agg(statistic))
    return None if np.isnan(value) else factor * value
