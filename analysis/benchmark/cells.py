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
REPEATED_BASELINE = (
    "dense-again"  # the same with other seeds: where it differs from the baseline, it is noise
)
LOSS_COLUMN = "val_loss"
SHARES = (0.25, 0.5, 0.75, 0.9, 1.0)  # of the baseline's budget: a level each
RESAMPLES = 4_000
ROUNDING = 1e-9  # nats: a level that was interpolated at a validation is that validation's loss
DIVERGED_LOSS = 100.0  # nats, of a training that diverged before its first validation: it learnt nothing
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
    seconds: float | None = None  # infinite where it does not reach the level
    lead: float = 0.0  # by how much its loss is below the level at the time at which the baseline reaches it
    p_value: float = 1.0  # of equal losses at the time at which the baseline reaches the level
    ends_before_baseline: bool = False  # without the level


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


class Curves(NamedTuple):
    """Trainings of one length, seed by seed."""

    steps: np.ndarray  # (validations,)
    losses: np.ndarray  # (seeds, validations): the best loss so far


class PairedStepSeconds(NamedTuple):
    """Seconds of the mean step in the launches in which the baseline and an entry took turns."""

    baseline_s: np.ndarray  # (launches,)
    own_s: np.ndarray  # (launches,)


def evaluate_entry(entry: EntryFile, baseline: EntryFile, floors: Mapping[str, float]) -> list[Cell]:
    """Return all cells of an entry; each word is tested alone.

    Args:
        entry: what to evaluate.
        baseline: the entry with whose trainings its own are compared, seed by seed.
        floors: a loss by task, which a level must be below.
    """
    cells = list[Cell]()
    name = entry.statement.name
    for task, statement in entry.statement.tasks.items():
        for workers, length_by_link in statement.lengths.items():
            baseline_length = next(iter(baseline.statement.tasks[task].lengths[workers].values()))
            baseline_curves = best_loss_curves(baseline, task, workers, baseline_length)
            for link, length in length_by_link.items():
                curves = best_loss_curves(entry, task, workers, length)
                launches = statement.launches[workers][link]
                own_s = mean_step_s_by_launch(entry.frames, launches)
                beside_s = mean_step_s_by_launch(entry.frames, statement.baseline[workers][link])
                shared = [launch for launch in own_s if launch in beside_s]
                step_s = PairedStepSeconds(
                    np.array([beside_s[launch] for launch in shared]),
                    np.array([own_s[launch] for launch in shared]),
                )
                levels = score_levels(baseline_curves, curves, step_s, floors.get(task, np.inf))
                baseline_s = _mean_step_s(baseline, task, workers, link)
                # Seconds of entries that other machines measured are scaled to the baseline's machine.
                scale = baseline_s / float(step_s.baseline_s.mean()) if shared and baseline_s else 1.0
                step_ms = estimate_mean([*own_s.values()], POSITIVE, LAUNCHES) if own_s else None
                runs = entry.frames.runs[entry.frames.runs["key"].isin(launches)]
                dates = sorted(str(started)[:10] for started in runs["started"].dropna()) or [""]
                cells.append(
                    Cell(
                        entry=name,
                        task=task,
                        workers=workers,
                        link=link,
                        levels=[_scale_time(level, scale, is_baseline=name == BASELINE) for level in levels],
                        curve=[*zip(curves.steps.tolist(), curves.losses.mean(axis=0).tolist(), strict=True)],
                        step_ms=step_ms.scale_by(1e3 * scale) if step_ms else None,
                        seeds=len(curves.losses),
                        launches=len(shared),
                        gbit_s=aggregate_column(runs, "provenance.machine.link.together_gbit_s", "median"),
                        delay_ms=aggregate_column(runs, "provenance.machine.link.latency_s", "median", 1e3),
                        simulated=bool(launches) and bool(runs["simulated"].fillna(False).astype(bool).any()),
                        dates=(dates[0], dates[-1]),
                        machine=", ".join(dict.fromkeys(map(str, runs["provenance.cpu"].dropna()))),
                    )
                )
    return cells


def _mean_step_s(entry: EntryFile, task: str, workers: int, link: str) -> float | None:
    """Return an entry's mean step in all of its launches at a place; None without any."""
    launches = entry.statement.tasks[task].launches.get(workers, {}).get(link, ())
    seconds = mean_step_s_by_launch(entry.frames, launches)
    return float(np.mean([*seconds.values()])) if seconds else None


def _scale_time(level: LevelScore, scale: float, *, is_baseline: bool) -> LevelScore:
    """Return a score with its time on another machine; the baseline's is compared with nothing."""
    seconds = None if level.seconds is None else level.seconds * scale
    if is_baseline:
        return LevelScore(level.share, level.loss, "baseline", "baseline", seconds=seconds)
    return replace(level, seconds=seconds)


def best_loss_curves(entry: EntryFile, task: str, workers: int, length: int) -> Curves:
    """Return the lowest validation loss so far of an entry's trainings of one length, seed by seed.

    A training that diverged keeps its lowest loss to the end.
    """
    runs = entry.frames.runs.set_index("key")
    runs = runs[runs.index.isin(entry.statement.tasks[task].trainings[workers])]
    runs = runs[training_length(runs) == length]
    every = int(steps_between_validations(runs).iloc[0])
    steps = np.arange(every, length + 1, every)
    epochs = entry.frames.epochs[entry.frames.epochs["key"].isin(runs.index)]
    table = epochs.pivot_table(LOSS_COLUMN, "key", "step", dropna=False).reindex(columns=steps)
    lowest = table.rename(index=runs["seed"]).sort_index().cummin(axis=1).ffill(axis=1)
    return Curves(steps.astype(float), lowest.fillna(DIVERGED_LOSS).to_numpy(float))


def training_length(runs: pd.DataFrame) -> pd.Series[float]:
    """Return the steps of each training."""
    return runs["train.epochs"].astype(float) * runs["train.epoch_steps"].astype(float)


def steps_between_validations(runs: pd.DataFrame) -> pd.Series[float]:
    """Return the steps between two validations of each training; records leave out that it is each epoch."""
    epochs = runs.reindex(columns=["train.validate_every"])["train.validate_every"].astype(float).fillna(1.0)
    steps: pd.Series[float] = epochs * runs["train.epoch_steps"].astype(float)
    return steps


def score_levels(
    baseline: Curves, own: Curves, step_s: PairedStepSeconds, floor: float = np.inf
) -> list[LevelScore]:
    """Return an entry's scores at all levels below the floor, each tested alone.

    A time to a level is the steps to it, interpolated between the two validations around it, times the
    seconds of the mean step. What reaches a level before its first validation counts as reaching it then. The
    test compares losses at the time at which the baseline reaches the level, so that it needs no time that
    nobody measured.

    Args:
        baseline: with as many seeds as the entry's, which are paired in their order.
        own: the entry's.
        step_s: without launches there are no words.
        floor: levels above it are dropped.
    """
    num_launches = len(step_s.own_s)
    num_seeds = len(own.losses)
    seed_shares = draw_shares(num_seeds, 0)
    base_curve = seed_shares @ baseline.losses
    curve = seed_shares @ own.losses
    ratio = np.ones(len(seed_shares))  # of step times
    if num_launches:
        launch_shares = draw_shares(num_launches, 1)
        ratio = (launch_shares @ step_s.baseline_s) / (launch_shares @ step_s.own_s)
    budget = float(own.steps[-1])
    scores = list[LevelScore]()
    for share in SHARES:
        level_step = np.full(len(ratio), share * baseline.steps[-1])
        level = interpolate_losses(base_curve, baseline.steps, level_step)
        if not level[0] < floor:
            continue
        if not num_launches:
            scores.append(LevelScore(share, float(level[0]), "not timed", "not timed"))
            continue
        base_needed = steps_to_level(base_curve, baseline.steps, level)
        needed = steps_to_level(curve, own.steps, level)
        affordable = base_needed * ratio  # in the baseline's time
        test = _test_zero(
            level - interpolate_losses(curve, own.steps, np.minimum(base_needed * ratio[0], budget)),
            level[0] - np.interp(np.minimum(base_needed[0] * ratio, budget), own.steps, curve[0]),
            num_seeds,
            num_launches,
        )
        speedup_at_least = affordable / needed
        speedup_at_most = affordable / np.minimum(needed, budget)
        low, high = _bootstrap_interval(speedup_at_least, speedup_at_most, test.degrees_of_freedom)
        score = LevelScore(
            share,
            float(level[0]),
            speedup=Estimate(float(speedup_at_least[0]), low, high, min(num_seeds, num_launches)),
            seconds=float(needed[0] * step_s.own_s.mean()),
            lead=test.value,
            p_value=test.p_value,
            ends_before_baseline=bool(speedup_at_least[0] == 0 and affordable[0] >= budget),
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
    if score.ends_before_baseline:
        return "not reached"
    low, high = score.speedup.interval
    if score.p_value > significance:
        return "inconclusive"
    if low > 1 and score.lead > 0:
        return "faster"
    if high < 1 and score.lead < 0:
        return "slower" if score.speedup.value else "slower (censored)"
    return "inconclusive"


def decide_together(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells with the words that are left when those of a link and level are tested together."""
    p_values: dict[tuple[str, float], list[float]] = {}
    for cell in cells:
        for score in cell.levels:
            if score.speedup is not None and not score.ends_before_baseline:
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
    is_reached = curves <= levels[:, None] + ROUNDING
    after = np.maximum(is_reached.argmax(axis=1), 1)
    rows = np.arange(len(curves))
    left, right = curves[rows, after - 1], curves[rows, after]
    with np.errstate(divide="ignore", invalid="ignore"):
        way = np.clip(np.nan_to_num((left - levels) / (left - right)), 0, 1)
    found = steps[after - 1] + way * (steps[after] - steps[after - 1])
    return np.where(is_reached.any(axis=1), found, np.inf)


def _bootstrap_interval(
    lowest: np.ndarray, highest: np.ndarray, degrees_of_freedom: float
) -> tuple[float | None, float | None]:
    """Return the 95 % interval of resampled values, each known to lie between two; None without enough units.

    Plain percentiles of few units are too narrow. These are further out, so that the interval of a mean is as
    wide as Student's (Hesterberg, The American Statistician 69, 2015: the expanded percentile interval).
    """
    if not degrees_of_freedom:
        return None, None
    import scipy.special

    scale = np.sqrt((degrees_of_freedom + 1) / degrees_of_freedom)
    tail = scipy.special.ndtr(-scale * student_t_quantile(degrees_of_freedom))
    return float(np.quantile(lowest[1:], tail)), float(np.quantile(highest[1:], 1 - tail))


class ZeroTest(NamedTuple):
    """Test of a number against zero."""

    value: float
    p_value: float  # two-sided
    degrees_of_freedom: float  # 0 where there are too few seeds or launches


def _test_zero(by_seeds: np.ndarray, by_launches: np.ndarray, num_seeds: int, num_launches: int) -> ZeroTest:
    """Test a number with errors of seeds and of launches against zero.

    Standard errors are the bootstrap's; the distribution is Student's with Welch's degrees of freedom.

    Args:
        by_seeds: the number, then the same of resampled seeds.
        by_launches: the same of resampled launches.
    """
    value = float(by_seeds[0])
    if min(num_seeds, num_launches) < ENOUGH_LAUNCHES or not np.isfinite(by_seeds).all():
        return ZeroTest(value, 1.0, 0.0)
    import scipy.special

    # Of a resample the variance is that of n, where an unbiased one has n - 1.
    seed_variance = by_seeds[1:].var() * num_seeds / (num_seeds - 1)
    launch_variance = by_launches[1:].var() * num_launches / (num_launches - 1)
    variance = seed_variance + launch_variance
    if variance == 0:
        return ZeroTest(value, float(value == 0), min(num_seeds, num_launches) - 1)
    df = float(variance**2 / (seed_variance**2 / (num_seeds - 1) + launch_variance**2 / (num_launches - 1)))
    return ZeroTest(value, float(2 * scipy.special.stdtr(df, -abs(value) / np.sqrt(variance))), df)


def mean_step_s_by_launch(frames: Frames, keys: Sequence[str]) -> dict[int, float]:
    """Return seconds of the mean step, by launch.

    Steps that exchange and those that do not count as many times as there were in the timed blocks, which are
    whole rounds.
    """
    by_launch = dict[int, float]()
    for key in keys:
        steps = steps_of_run(frames, key)
        share = float((steps.loc[steps["block"] > 0, "wire_bytes"] > 0).mean())
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
