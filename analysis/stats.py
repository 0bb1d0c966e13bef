"""Statistics of runs: what counts as warm, means and ratios with intervals, and always how many samples.

Means rather than medians where parts must add up to a whole, as in a stacked bar, and because the papers
report means. A step lasts as long as its slowest rank. Every interval is a 95 % interval.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats

from analysis.frames import PHASES, Frames

WINDOW = 5  # steps in a rolling median
SETTLED = 0.02  # warm: the rolling median moves by less than this from one step to the next
CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 0  # the same records give the same interval
ENOUGH_RUNS = 3  # from here on a run is the unit of replication; below it, a block of steps
ENOUGH_BLOCKS = 8  # blocks are shortened until there are so many, if there are so many steps
BLOCK = 5  # steps in a block, at most: neighbouring steps resemble each other
RANDOM_ARGUMENT = "rng" if "rng" in inspect.signature(scipy.stats.bootstrap).parameters else "random_state"


class Value(NamedTuple):
    """A number of ours with its interval. `n` counts what `of` says: runs, or steps where runs are few."""

    value: float | bool
    low: float | None = None
    high: float | None = None
    n: int = 1
    of: str = "runs"

    def more_in_percent(self) -> Value:
        """Of a ratio: by how many percent it exceeds 1."""
        low, high = (None if edge is None else 100 * (edge - 1) for edge in (self.low, self.high))
        return Value(100 * (self.value - 1), low, high, self.n, self.of)

    def minus(self, other: Value) -> Value:
        """The difference of two independent values; the halves of their intervals add in quadrature."""
        value, fewest = self.value - other.value, min(self, other, key=lambda each: each.n)
        if None in (self.low, self.high, other.low, other.high):
            return Value(value, n=fewest.n, of=fewest.of)
        low = value - np.hypot(self.value - self.low, other.high - other.value)
        high = value + np.hypot(self.high - self.value, other.value - other.low)
        return Value(value, float(low), float(high), fewest.n, fewest.of)


class Warm(NamedTuple):
    """A run's steps after its warm-up, and how many steps that left out."""

    steps: pd.DataFrame
    dropped: int  # of the first
    again: int = 0  # after interruptions

    @property
    def n(self) -> int:
        return int(self.steps["step"].nunique())


def warm_up(step_s: Sequence[float] | np.ndarray, at_least: int) -> int:
    """How many first steps to leave out: `at_least`, then until the rolling median settles, at most half."""
    times = np.asarray(step_s, dtype=float)
    most = len(times) // 2
    for first in range(min(at_least, most), most):
        here, next_ = (np.median(times[start : start + WINDOW]) for start in (first, first + 1))
        if abs(next_ - here) < SETTLED * here:
            return first
    return most


def warm(frames: Frames, key: str) -> Warm:
    """The steps of a run after its warm-up, which every rank leaves at the same step.

    After an interruption the machine has to warm up again, for as long; a part of the run that is shorter
    than that is left out whole, unless nothing else is there.
    """
    steps = frames.steps[frames.steps["key"] == key]
    run = frames.runs[frames.runs["key"] == key].iloc[0]
    slowest = steps.groupby("step")["step_s"].max().sort_index()
    at_least = int(run["timing.warmup_steps"])
    bounds = [0, *np.searchsorted(slowest.index, _resumed(run)), len(slowest)]
    parts = [slowest.iloc[first:end] for first, end in itertools.pairwise(bounds)]
    cold = [warm_up(part.to_numpy(), at_least) for part in parts]
    if len(parts) > 1:
        longer = [max(few, min(at_least, len(part))) for part, few in zip(parts, cold, strict=True)]
        cold = longer if sum(longer) < len(slowest) else cold
    kept = pd.concat([part.iloc[few:] for part, few in zip(parts, cold, strict=True)])
    return Warm(steps[steps["step"].isin(kept.index)], cold[0], sum(cold[1:]))


def _resumed(run: pd.Series) -> list[int]:
    """The steps at which a run went on after interruptions; older frames do not have the column."""
    steps = run.get("resumed")
    return json.loads(steps) if isinstance(steps, str) else []


def step_seconds(frames: Frames, key: str) -> np.ndarray:
    """What training feels, (steps,): each warm step's time on its slowest rank."""
    return warm(frames, key).steps.groupby("step")["step_s"].max().sort_index().to_numpy()


def phase_seconds(frames: Frames, key: str) -> pd.DataFrame:
    """Per warm step the mean over ranks of the step, of each recorded phase, and of the unaccounted."""
    columns = ["step_s", *(f"{phase}_s" for phase in PHASES)]
    steps = warm(frames, key).steps.set_index("step")[columns].dropna(axis="columns", how="all")
    # A phase that only one rank has (validate) takes no time on the others.
    table = (
        steps.fillna(0.0).groupby(level="step").mean().rename(columns=lambda name: name.removesuffix("_s"))
    )
    table["unaccounted"] = table["step"] - table.drop(columns="step").sum(axis="columns")
    return table


def breakdown(frames: Frames, keys: Sequence[str]) -> pd.Series:
    """Mean seconds per phase, `unaccounted` and `step`: over a run's ranks and warm steps, then over runs."""
    return pd.DataFrame([phase_seconds(frames, key).mean() for key in keys]).mean()


def phase_summary(frames: Frames, keys: Sequence[str]) -> pd.DataFrame:
    """Mean and median seconds of each phase over warm steps (ranks averaged first), with n."""
    table = pd.concat([phase_seconds(frames, key) for key in keys])
    return pd.DataFrame({"mean": table.mean(), "median": table.median(), "n": len(table)})


def throughput(frames: Frames, keys: Sequence[str]) -> Value | None:
    """Samples per second over all workers."""
    if not keys:
        return None
    run = frames.runs[frames.runs["key"] == keys[0]].iloc[0]
    samples = run["workers"] * run["task.batch_size"]
    return _estimate([_units(_runs(frames, keys))], lambda seconds: samples / seconds)


def slowdown(frames: Frames, keys: Sequence[str], baseline: Sequence[str]) -> Value | None:
    """How many times longer a step of `keys` takes than one of `baseline`."""
    if not keys or not baseline:
        return None
    units = [_units(_runs(frames, some)) for some in (keys, baseline)]
    return _estimate(units, lambda seconds, base: seconds / base)


def of_phases(
    frames: Frames, keys: Sequence[str], phases: Sequence[str], statistic: Callable[..., Any]
) -> Value | None:
    """`statistic` of the mean seconds of `phases` (also `step`, `unaccounted`), the phases of a step
    resampled together. None where a phase was not recorded."""
    if not keys:
        return None
    tables = [phase_seconds(frames, key) for key in keys]
    if not all(set(phases) <= set(table.columns) for table in tables):
        return None
    by_phase = [_units([table[phase].to_numpy() for table in tables]) for phase in phases]
    return _estimate(by_phase, statistic, paired=True)


def phase_ratio(frames: Frames, keys: Sequence[str], baseline: Sequence[str], phase: str) -> Value | None:
    """How many times longer a phase takes in `keys` than in `baseline`. None where it was not recorded."""
    tables = [[phase_seconds(frames, key) for key in some] for some in (keys, baseline)]
    if not all(some and all(phase in table for table in some) for some in tables):
        return None
    units = [_units([table[phase].to_numpy() for table in some]) for some in tables]
    return _estimate(units, lambda seconds, base: seconds / base)


def over_seeds(values: Sequence[float]) -> Value:
    """Mean, and Student's interval from three on: a bootstrap of three numbers is too narrow."""
    data = np.asarray(values, dtype=float)
    mean, n = float(data.mean()), len(data)
    if n < ENOUGH_RUNS or not np.isfinite(data).all():
        return Value(mean, n=n)
    half = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * data.std(ddof=1) / np.sqrt(n)
    return Value(mean, float(mean - half), float(mean + half), n)


def final(frames: Frames, keys: Sequence[str], column: str) -> Value | None:
    """`column` of the last epoch, over runs that differ in their seed."""
    values = _last(frames, keys, column)
    return over_seeds(values.to_list()) if len(values) else None


def final_difference(frames: Frames, keys: Sequence[str], others: Sequence[str], column: str) -> Value | None:
    """Last epoch of `keys` minus last epoch of `others`, paired by seed, so by initial weights."""
    difference = (_last(frames, keys, column) - _last(frames, others, column)).dropna()
    return over_seeds(difference.to_list()) if len(difference) else None


def curve(frames: Frames, keys: Sequence[str], column: str) -> pd.DataFrame:
    """Per epoch: step, mean over runs, low and high (NaN where runs are too few for an interval), n."""
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].dropna(subset=[column])
    rows = []
    for epoch, group in epochs.groupby("epoch"):
        value = over_seeds(group[column].to_list())
        low, high = (np.nan, np.nan) if value.low is None else (value.low, value.high)
        rows.append((int(epoch), int(group["step"].iloc[0]), value.value, low, high, value.n))
    return pd.DataFrame(rows, columns=["epoch", "step", "mean", "low", "high", "n"])


def ahead_for_good(frames: Frames, keys: Sequence[str], others: Sequence[str], column: str) -> Value | None:
    """The step from which the mean of `keys` stays above that of `others`; infinite if it never does."""
    here, there = curve(frames, keys, column), curve(frames, others, column)
    both = here.merge(there, on="epoch", suffixes=("", "_other"))
    if not len(both):
        return None
    behind = np.flatnonzero(~(both["mean"] > both["mean_other"]).to_numpy())
    first = behind[-1] + 1 if len(behind) else 0
    step = float(both["step"].iloc[first]) if first < len(both) else np.inf
    return Value(step, n=int(both["n"].min()))


class Units(NamedTuple):
    """Means of what is resampled, and the words for it."""

    means: np.ndarray
    n: int
    of: str
    overall: float


def _runs(frames: Frames, keys: Sequence[str]) -> list[np.ndarray]:
    return [step_seconds(frames, key) for key in keys]


def _units(per_run: list[np.ndarray]) -> Units:
    """What to resample of each run's samples: the runs themselves, or blocks of steps if runs are few."""
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
    """`statistic` of the overall means, with a percentile bootstrap over the units. Enough runs stand for
    themselves: the statistic of each repetition, whose runs came one after the other, and Student's
    interval."""
    if all(unit.of == "runs" for unit in units) and len({unit.n for unit in units}) == 1:
        return over_seeds([float(statistic(*means)) for means in zip(*(u.means for u in units), strict=True)])
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


def _last(frames: Frames, keys: Sequence[str], column: str) -> pd.Series:
    """`column` of each run's last epoch, indexed by seed."""
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].dropna(subset=[column])
    last = epochs.sort_values("epoch").groupby("key")[column].last()
    seeds = frames.runs.set_index("key")["seed"] if "seed" in frames.runs else pd.Series(dtype=float)
    return last.rename(index=seeds)
