"""Statistics of runs: means, ratios and differences, each with its 95 % interval and its number of samples.

Three runs or more are the units of replication, with Student's interval; with fewer runs, blocks of their
steps are resampled in a percentile bootstrap.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats

from analysis.frames import Frames
from analysis.steps import phase_seconds, step_seconds

CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0  # the same records give the same interval
ENOUGH_RUNS = 3  # with so many, a run is the unit of replication; with fewer, a block of steps
ENOUGH_BLOCKS = 8  # blocks are shortened until there are so many of them, where there are enough steps
BLOCK = 5  # steps in a block, at most: neighbouring steps resemble each other
# scipy 1.15 renamed it.
RANDOM_ARGUMENT = "rng" if "rng" in inspect.signature(scipy.stats.bootstrap).parameters else "random_state"


class Value(NamedTuple):
    """A measured number with its interval. `n` is the number of samples, `of` their kind: runs, or steps."""

    value: float | bool
    low: float | None = None
    high: float | None = None
    n: int = 1
    of: str = "runs"

    def more_in_percent(self) -> Value:
        """For a ratio: by how many percent it exceeds 1."""
        low, high = (None if edge is None else 100 * (edge - 1) for edge in (self.low, self.high))
        return Value(100 * (self.value - 1), low, high, self.n, self.of)

    def minus(self, other: Value) -> Value:
        """The difference of two independent values; the halves of their intervals add in quadrature.

        Without an interval where one of them has none.
        """
        value, fewest = self.value - other.value, min(self, other, key=lambda value: value.n)
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return Value(value, n=fewest.n, of=fewest.of)
        low = value - np.hypot(self.value - self.low, other.high - other.value)
        high = value + np.hypot(self.high - self.value, other.value - other.low)
        return Value(value, float(low), float(high), fewest.n, fewest.of)


def throughput(frames: Frames, keys: Sequence[str]) -> Value | None:
    """Samples per second over all workers."""
    if not keys:
        return None
    run = frames.runs[frames.runs["key"] == keys[0]].iloc[0]
    samples = run["workers"] * run["task.batch_size"]
    return _estimate([_units(_step_times(frames, keys))], lambda seconds: samples / seconds)


def slowdown(frames: Frames, keys: Sequence[str], baseline: Sequence[str]) -> Value | None:
    """Mean step time of `keys` over that of `baseline`; above 1, `keys` are slower."""
    if not keys or not baseline:
        return None
    units = [_units(_step_times(frames, side)) for side in (keys, baseline)]
    return _estimate(units, lambda seconds, base: seconds / base)


def of_phases(
    frames: Frames, keys: Sequence[str], phases: Sequence[str], statistic: Callable[..., Any]
) -> Value | None:
    """`statistic` of the mean seconds of `phases`, which may include `step` and `unaccounted`.

    The phases of a step are resampled together. None where a phase was not recorded.
    """
    if not keys:
        return None
    tables = [phase_seconds(frames, key) for key in keys]
    if not all(set(phases) <= set(table.columns) for table in tables):
        return None
    by_phase = [_units([table[phase].to_numpy() for table in tables]) for phase in phases]
    return _estimate(by_phase, statistic, paired=True)


def phase_ratio(frames: Frames, keys: Sequence[str], baseline: Sequence[str], phase: str) -> Value | None:
    """Mean time of a phase in `keys` over that in `baseline`. None where it was not recorded."""
    sides = [[phase_seconds(frames, key) for key in side] for side in (keys, baseline)]
    if not all(tables and all(phase in table for table in tables) for tables in sides):
        return None
    units = [_units([table[phase].to_numpy() for table in tables]) for tables in sides]
    return _estimate(units, lambda seconds, base: seconds / base)


def over_seeds(values: Sequence[float]) -> Value:
    """Mean, with Student's interval from three values on: a bootstrap of three would be too narrow."""
    data = np.asarray(values, dtype=float)
    mean, n = float(data.mean()), len(data)
    if n < ENOUGH_RUNS or not np.isfinite(data).all():
        return Value(mean, n=n)
    half = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * data.std(ddof=1) / np.sqrt(n)
    return Value(mean, float(mean - half), float(mean + half), n)


def final(frames: Frames, keys: Sequence[str], column: str) -> Value | None:
    """`column` at the last epoch, over runs that differ in their seed."""
    values = _last(frames, keys, column)
    return over_seeds(values.to_list()) if len(values) else None


def final_difference(frames: Frames, keys: Sequence[str], others: Sequence[str], column: str) -> Value | None:
    """`column` at the last epoch, `keys` minus `others`; paired by seed, that is, by initial weights."""
    difference = (_last(frames, keys, column) - _last(frames, others, column)).dropna()
    return over_seeds(difference.to_list()) if len(difference) else None


def curve(frames: Frames, keys: Sequence[str], column: str) -> pd.DataFrame:
    """Per epoch: step, mean over runs, low and high (NaN where there are too few runs for an interval), n."""
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].dropna(subset=[column])
    rows = []
    for epoch, of_epoch in epochs.groupby("epoch"):
        value = over_seeds(of_epoch[column].to_list())
        low, high = (np.nan, np.nan) if value.low is None else (value.low, value.high)
        rows.append((int(epoch), int(of_epoch["step"].iloc[0]), value.value, low, high, value.n))
    table: pd.DataFrame = pd.DataFrame(rows, columns=["epoch", "step", "mean", "low", "high", "n"])
    return table


def ahead_for_good(frames: Frames, keys: Sequence[str], others: Sequence[str], column: str) -> Value | None:
    """The step from which on the mean of `keys` stays above that of `others`; infinite where it does not."""
    here, there = curve(frames, keys, column), curve(frames, others, column)
    both = here.merge(there, on="epoch", suffixes=("", "_other"))
    if not len(both):
        return None
    behind = np.flatnonzero(~(both["mean"] > both["mean_other"]).to_numpy())
    first = behind[-1] + 1 if len(behind) else 0
    step = float(both["step"].iloc[first]) if first < len(both) else np.inf
    return Value(step, n=int(both["n"].min()))


class Units(NamedTuple):
    """What is resampled: runs, or blocks of steps."""

    means: np.ndarray  # (units,)
    n: int  # samples behind them, for `Value`
    of: str  # kind of these samples
    overall: float  # mean over all samples


def _step_times(frames: Frames, keys: Sequence[str]) -> list[np.ndarray]:
    """Seconds of each warm step, (steps,) per run."""
    return [step_seconds(frames, key) for key in keys]


def _units(per_run: list[np.ndarray]) -> Units:
    """What to resample, from each run's samples, (steps,): the runs, or blocks of steps if runs are few."""
    if len(per_run) >= ENOUGH_RUNS:
        means = np.array([times.mean() for times in per_run])
        return Units(means, len(per_run), "runs", float(means.mean()))
    n = sum(map(len, per_run))
    length = max(1, min(BLOCK, n // ENOUGH_BLOCKS))
    blocks = [
        block.mean() for times in per_run for block in np.array_split(times, max(1, len(times) // length))
    ]
    of = f"steps in blocks of {length}" if length > 1 else "steps"
    return Units(np.array(blocks), n, of, float(np.concatenate(per_run).mean()))


def _estimate(units: list[Units], statistic: Callable[..., Any], paired: bool = False) -> Value:
    """`statistic` of the overall means, with a percentile bootstrap over the units.

    With enough runs it is taken once per repetition, of runs that were made one after the other, and the
    interval over repetitions is Student's.
    """
    if all(unit.of == "runs" for unit in units) and len({unit.n for unit in units}) == 1:
        repetitions = zip(*(unit.means for unit in units), strict=True)
        return over_seeds([float(statistic(*means)) for means in repetitions])
    value = float(statistic(*(unit.overall for unit in units)))
    fewest = min(units, key=lambda unit: unit.n)
    if min(len(unit.means) for unit in units) < 2:
        return Value(value, n=fewest.n, of=fewest.of)

    def of_means(*samples: np.ndarray, axis: int = -1) -> Any:
        return statistic(*(sample.mean(axis=axis) for sample in samples))

    interval = scipy.stats.bootstrap(
        [unit.means for unit in units],
        of_means,
        paired=paired,
        vectorized=True,
        method="percentile",
        confidence_level=CONFIDENCE,
        n_resamples=RESAMPLES,
        **{RANDOM_ARGUMENT: np.random.default_rng(SEED)},
    ).confidence_interval
    return Value(value, float(interval.low), float(interval.high), fewest.n, fewest.of)


def _last(frames: Frames, keys: Sequence[str], column: str) -> pd.Series[float]:
    """`column` at each run's last epoch, indexed by seed."""
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].dropna(subset=[column])
    last = epochs.sort_values("epoch").groupby("key")[column].last()
    seeds = frames.runs.set_index("key")["seed"] if "seed" in frames.runs else pd.Series(dtype=float)
    by_seed: pd.Series[float] = last.rename(index=seeds)
    return by_seed
