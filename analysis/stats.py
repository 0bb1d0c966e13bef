"""Statistics of runs: means, ratios and differences, each with its 95 % interval and its number of samples.

The unit of replication of a training is the run, by its seed; that of a time is the launch: a group of
processes that is started anew. Within a launch times agree better than launches do, because they share their
memory, their cores and their minutes. The blocks in which variants take turns are averaged in each launch,
and give an interval only where there are fewer than three launches, which then decides nothing.
From three units on the interval is Student's, computed on the scale that suits the quantity: ratios and times
on the log scale, shares on the logit scale, so that no interval contains what cannot be. Two units or one
give no interval. Ratios and differences are paired: by seed, or by block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.records.frames import Frames, cache_by_frames, find_diverged_keys, note_read_keys
from analysis.records.steps import (
    BLOCKS,
    ENOUGH_LAUNCHES,
    LAUNCHES,
    ReplicationUnits,
    has_blocks,
    replication_units,
    used_precisions,
)

CONFIDENCE = 0.95
# How many samples make a verdict possible, by their kind: no number of our own blocks does. Windows are those
# behind the speeds that authors logged, logged blocks those of their iterations (analysis.published).
RUNS, WINDOWS, LOGGED = "runs", "windows", "logged blocks"
PRINTED, COUNTED = "printed values", "counts"  # without an error of their own
ENOUGH_SAMPLES = {RUNS: ENOUGH_LAUNCHES, LAUNCHES: 5, WINDOWS: 30, LOGGED: 30, PRINTED: 1, COUNTED: 1}
Bounds = tuple[float, float]  # what a quantity cannot reach
UNBOUNDED: Bounds = (-np.inf, np.inf)  # a difference
POSITIVE: Bounds = (0.0, np.inf)  # a time, a speed, a ratio
PERCENT: Bounds = (0.0, 100.0)  # percent of a whole
BOUNDS_BY_COLUMN: dict[str, Bounds] = {
    "val_top1": PERCENT, "val_top5": PERCENT, "test_top1": PERCENT,
    "val_perplexity": (1.0, np.inf), "train_loss": POSITIVE, "val_loss": POSITIVE, "test_loss": POSITIVE,
}  # fmt: skip
# Runs that are compared must agree in these: the protocol, the problem, the arithmetic, the images.
COLUMNS_THAT_AGREE = (
    "timing.mode", "task.name", "task.batch_size", "workers", "simulated", "precision",
    "provenance.data.digest", "late.draw", "late.s", "late.spread", "late.rank",
)  # fmt: skip


class MixedRunsError(ValueError):
    """Runs that must not be compared with each other."""


class Estimate(NamedTuple):
    """A measured number with its interval. `n` is the number of independent samples, `of` their kind."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 1
    of: str = RUNS  # a kind of ENOUGH, or blocks
    df: float | None = None  # degrees of freedom behind the interval; by default n - 1
    floor: float = -np.inf  # the interval is Student's for log(value - floor); here for the value itself

    @classmethod
    def exact(cls, value: float, n: int, of: str) -> Estimate:
        """A value without an error: a count, or what printed values say of themselves."""
        return cls(float(value), float(value), float(value), n, of)

    @property
    def decides(self) -> bool:
        """Check that it has an interval, over so many samples that a verdict may rest on it."""
        return (
            self.low is not None and self.high is not None and self.n >= ENOUGH_SAMPLES.get(self.of, np.inf)
        )

    def p_value(self, limit: float) -> float:
        """Two-sided p-value of the hypothesis that `limit` is the truth, by the interval; 1 without one."""
        if self.low is None or self.high is None:
            return 1.0
        nearer = self.low if limit < self.value else self.high
        middle, edge, at = (_log_above(each, self.floor) for each in (self.value, nearer, limit))
        half, away = abs(edge - middle), abs(at - middle)
        if not np.isfinite(half) or half == 0:
            return float(self.low <= limit <= self.high)
        import scipy.special

        df = self.n - 1 if self.df is None else self.df
        return float(2 * scipy.special.stdtr(df, -away / half * student_quantile(df)))

    @property
    def half_width(self) -> float:
        """Relative half-width of a ratio's interval, on the log scale: 0.05 is 5 %. Infinite without one."""
        if self.low is None or self.high is None or self.low <= 0:
            return float(np.inf)
        return float(np.sqrt(self.high / self.low) - 1)

    def more_in_percent(self) -> Estimate:
        """Percent by which a ratio exceeds 1."""
        return self._moved(lambda edge: 100 * (edge - 1))

    def times(self, factor: float) -> Estimate:
        """The value in another unit, by a positive factor."""
        return self._moved(lambda edge: factor * edge)

    def _moved(self, onto: Callable[[float], float]) -> Estimate:
        """The value under an increasing linear map."""
        low, high = (None if edge is None else onto(edge) for edge in (self.low, self.high))
        floor = onto(self.floor) if np.isfinite(self.floor) else self.floor
        return self._replace(value=onto(self.value), low=low, high=high, floor=floor)


def student_quantile(df: float) -> float:
    """Student's quantile with so many degrees of freedom: half an interval at `CONFIDENCE`, in errors."""
    import scipy.special  # which commands that only list need not wait for

    return float(scipy.special.stdtrit(df, (1 + CONFIDENCE) / 2))


def _log_above(edge: float, floor: float) -> float:
    """`edge` on the scale where `floor` is infinitely far below."""
    if not np.isfinite(floor):
        return edge
    return float(np.log(edge - floor)) if edge > floor else -np.inf


def estimate_mean(
    samples: Sequence[float] | np.ndarray,
    bounds: Bounds = UNBOUNDED,
    of: str = RUNS,
    value: float | None = None,
) -> Estimate:
    """The mean of independent samples; Student's interval on the scale where `bounds` are infinitely far.

    Blocks that follow each other resemble each other: a positive correlation r of neighbours leaves
    n (1 - r) / (1 + r) independent ones of n (the variance of the mean of an AR(1) series), at least two.

    Args:
        samples: in the order of their measurement; at least one.
        value: the estimate, if it is not the mean on that scale: a mean that adds up with others.
    """
    data = np.asarray(samples, dtype=float)
    onto, back = _unbounded_scale(bounds, data)
    on_scale, n = onto(data), len(data)
    estimate = float(back(on_scale.mean())) if value is None else value
    if n < ENOUGH_LAUNCHES or not np.isfinite(on_scale).all():
        return Estimate(estimate, n=n, of=of)
    independent = max(2.0, n * _independent_share(on_scale)) if of == BLOCKS else float(n)
    error = on_scale.std(ddof=1) / np.sqrt(independent)
    half = student_quantile(independent - 1) * error
    middle = onto(np.asarray(estimate))
    low, high = (float(np.clip(back(middle + side * half), *bounds)) for side in (-1, 1))
    floor = bounds[0] if bounds[1] == np.inf and _is_within(data, bounds) else -np.inf
    return Estimate(estimate, low, high, n, of, independent - 1, floor)


def estimate_mean_over_launches(by_block: pd.Series[float], bounds: Bounds = UNBOUNDED) -> Estimate:
    """The mean over launches of the means over their blocks, on the scale of `bounds`; with the interval over
    launches, or over blocks where there are fewer than three launches.

    Args:
        by_block: samples by launch and block.
    """
    onto, back = _unbounded_scale(bounds, by_block.to_numpy())
    of_launches = pd.Series(onto(by_block.to_numpy()), by_block.index).groupby(level=0).mean()
    if len(of_launches) >= ENOUGH_LAUNCHES:
        return estimate_mean(back(of_launches.to_numpy()), bounds, LAUNCHES)
    return estimate_mean(by_block.to_numpy(), bounds, BLOCKS)


def samples_per_second(frames: Frames, keys: Sequence[str]) -> Estimate | None:
    """Samples per second over all workers."""
    if not keys:
        return None
    _check_comparable(frames, keys)
    run = frames.runs[frames.runs["key"] == keys[0]].iloc[0]
    samples = run["workers"] * run["task.batch_size"]
    return _estimate_from_units(
        replication_units(frames, keys), ("slowest",), lambda seconds: samples / seconds, POSITIVE
    )


def step_time_ratio(frames: Frames, keys: Sequence[str], baseline: Sequence[str]) -> Estimate | None:
    """Step time of `keys` over that of `baseline`, paired; above 1, `keys` are slower."""
    return phase_time_ratio(frames, keys, baseline, "slowest")


@cache_by_frames
def phase_time_ratio(
    frames: Frames, keys: Sequence[str], baseline: Sequence[str], phase: str
) -> Estimate | None:
    """Time of a phase in `keys` over that in `baseline`: the mean of the logarithms of its paired ratios.

    A pair is a block of both in one group of processes, else the runs of one seed. None where it was not
    recorded, or where nothing pairs.
    """
    return _paired_estimate(frames, keys, baseline, (phase,), lambda here, there: here / there, POSITIVE)


def phase_seconds_difference(
    frames: Frames, keys: Sequence[str], others: Sequence[str], phases: Sequence[str]
) -> Estimate | None:
    """Seconds that `phases` take together in `keys`, less those in `others`; paired as in `phase_time_ratio`."""
    return _paired_estimate(frames, keys, others, phases, lambda here, there: here - there, UNBOUNDED)


def phase_statistic(
    frames: Frames, keys: Sequence[str], phases: Sequence[str], statistic: Callable[..., Any], bounds: Bounds
) -> Estimate | None:
    """`statistic` of the mean seconds of `phases`, which may include `step` and `unaccounted`.

    The estimate is that of the overall means, which `steps.breakdown` shows, so that parts add up to the
    whole; the interval is that of the statistic over runs or blocks. None where a phase was not recorded.
    """
    if not keys:
        return None
    _check_comparable(frames, keys)
    found = replication_units(frames, keys)
    return _estimate_from_units(found, phases, statistic, bounds) if set(phases) <= set(found.means) else None


def phase_time(frames: Frames, keys: Sequence[str], *phases: str, unit: float = 1.0) -> Estimate | None:
    """The time that phases take together, in seconds, or so many units of one; `slowest` is a whole step."""
    return phase_statistic(frames, keys, phases, lambda *seconds: unit * sum(seconds), POSITIVE)


def final_value(frames: Frames, keys: Sequence[str], column: str, geometric: bool = False) -> Estimate | None:
    """`column` at the last epoch, over runs that differ in their seed.

    Args:
        geometric: the geometric mean, of what may differ by powers of ten, as losses do where some diverged.
    """
    _check_comparable(frames, keys, "steps_total")
    last = _last_value_by_seed(frames, keys, column)
    if not len(last):
        return None
    return estimate_mean(last.to_numpy(), POSITIVE) if geometric else _column_mean(last, column)


def final_ratio(frames: Frames, keys: Sequence[str], others: Sequence[str], column: str) -> Estimate | None:
    """`column` at the last epoch, `keys` over `others`; paired by seed, that is, by initial weights."""
    _check_comparable(frames, [*keys, *others], "steps_total")
    here, there = _paired_last_values(frames, keys, others, column)
    return estimate_mean((here / there).to_numpy(), POSITIVE) if len(here) else None


def final_difference(
    frames: Frames, keys: Sequence[str], others: Sequence[str], column: str, by: str = ""
) -> Estimate | None:
    """`column` at the last epoch, `keys` minus `others`; paired by seed, that is, by initial weights.

    Args:
        by: in which column both sides may differ, where it is what is compared; within a side none may.
    """
    for side in (keys, others) if by else ():
        _check_comparable(frames, side)
    _check_comparable(frames, [*keys, *others], "steps_total", without=by)
    here, there = _paired_last_values(frames, keys, others, column)
    low, high = BOUNDS_BY_COLUMN.get(column, UNBOUNDED)
    return estimate_mean((here - there).to_numpy(), (low - high, high - low)) if len(here) else None


def mean_curve(frames: Frames, keys: Sequence[str], column: str) -> pd.DataFrame:
    """Per epoch until one of the runs diverged: step, mean over runs, its interval or NaN (low, high), n."""
    note_read_keys(keys)
    epochs = frames.epochs[frames.epochs["key"].isin(keys)]
    ended = epochs[epochs["key"].isin(find_diverged_keys(frames))].groupby("key")["epoch"].max()
    epochs = epochs[epochs["epoch"] < (ended.min() if len(ended) else np.inf)].dropna(subset=[column])
    rows = []
    for epoch, of_epoch in epochs.groupby("epoch"):
        value = _column_mean(of_epoch[column], column)
        low, high = (np.nan, np.nan) if value.low is None else (value.low, value.high)
        rows.append((int(epoch), int(of_epoch["step"].iloc[0]), value.value, low, high, value.n))
    table: pd.DataFrame = pd.DataFrame(rows, columns=["epoch", "step", "mean", "low", "high", "n"])
    return table


def lasting_lead_step(
    frames: Frames, keys: Sequence[str], others: Sequence[str], column: str
) -> Estimate | None:
    """The step from which on `column` of `keys` stays above that of `others`; paired by seed.

    Infinite where one of the pairs does not stay so.
    """
    here, there = (_epochs_by_seed(frames, side, column) for side in (keys, others))
    seeds = [seed for seed in here if seed in there]
    steps = [_lasting_lead_step(here[seed], there[seed], column) for seed in seeds]
    return estimate_mean(steps, POSITIVE) if steps else None


def _paired_estimate(
    frames: Frames,
    keys: Sequence[str],
    others: Sequence[str],
    phases: Sequence[str],
    compared: Callable[[Any, Any], Any],
    bounds: Bounds,
) -> Estimate | None:
    if not keys or not others:
        return None
    both = [*keys, *others]
    _check_comparable(frames, both)
    by_block = has_blocks(frames, both)
    here, there = (replication_units(frames, side, by_block) for side in (keys, others))
    if not set(phases) <= set(here.means) & set(there.means):
        return None
    sums = [side.means[list(phases)].sum(axis="columns") for side in (here, there)]
    paired = pd.concat(sums, axis="columns", join="inner", keys=["here", "there"]).sort_index()
    if not len(paired):
        return None
    samples = compared(paired["here"], paired["there"])
    return (
        estimate_mean_over_launches(samples, bounds) if by_block else estimate_mean(samples, bounds, here.of)
    )


def _estimate_from_units(
    found: ReplicationUnits, phases: Sequence[str], statistic: Callable[..., Any], bounds: Bounds
) -> Estimate:
    per_unit = np.array([statistic(*row) for row in found.means[list(phases)].to_numpy()], dtype=float)
    overall = float(statistic(*found.means[list(phases)].mean()))
    return estimate_mean(per_unit, bounds, found.of, overall)


def _column_mean(values: pd.Series[float], column: str) -> Estimate:
    """The arithmetic mean, whose interval knows what the column can be."""
    return estimate_mean(
        values.to_numpy(), BOUNDS_BY_COLUMN.get(column, UNBOUNDED), value=float(values.to_numpy().mean())
    )


def _unbounded_scale(bounds: Bounds, data: np.ndarray) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A scale on which the bounds are infinitely far away, and the way back.

    The plain one where a sample lies on a bound, which would be infinite; the interval is then cut there.
    """
    low, high = bounds
    if low == -np.inf or not _is_within(data, bounds):
        return (lambda x: x), (lambda x: x)
    if high == np.inf:
        return (lambda x: np.log(x - low)), (lambda x: low + np.exp(x))
    import scipy.special

    return (
        lambda x: scipy.special.logit((x - low) / (high - low)),
        lambda x: low + (high - low) * scipy.special.expit(x),
    )


def _is_within(data: np.ndarray, bounds: Bounds) -> bool:
    low, high = bounds
    return bool(((data > low) & (data < high)).all())


def _independent_share(series: np.ndarray) -> float:
    """Share of a series that counts, by the correlation r of neighbours; all where r is negative."""
    deviation = series - series.mean()
    spread = float((deviation**2).sum())
    r = float((deviation[1:] * deviation[:-1]).sum()) / spread if spread else 0.0
    return (1 - r) / (1 + r) if r > 0 else 1.0


@cache_by_frames
def _check_comparable(frames: Frames, keys: Sequence[str], *more: str, without: str = "") -> None:
    """Refuse runs as Mixed that differ in a column of `COLUMNS_THAT_AGREE`, but for `without`, or of `more`."""
    note_read_keys(keys)
    there = frames.runs["key"].isin(keys).to_numpy()
    columns = {name: frames.runs[name] for name in (*COLUMNS_THAT_AGREE, *more) if name in frames.runs}
    columns["precision"] = used_precisions(frames.runs)
    for column in (name for name in (*COLUMNS_THAT_AGREE, *more) if name != without):
        values = columns[column][there].dropna() if column in columns else ()
        found = sorted({str(value)[:12] for value in values})
        if len(found) > 1:
            raise MixedRunsError(
                f"these runs can't be compared: they differ in {column} ({', '.join(found)}); "
                "measure all of them alike (--force measures again)"
            )


def _seed_by_key(frames: Frames) -> pd.Series[Any]:
    """The seed of each run, by key."""
    if "seed" not in frames.runs:
        return pd.Series(dtype=float)
    by_key: pd.Series[Any] = pd.Series(frames.runs["seed"].to_numpy(), frames.runs["key"])
    return by_key


@cache_by_frames
def _last_value_by_seed(frames: Frames, keys: Sequence[str], column: str) -> pd.Series[float]:
    """`column` at each run's last epoch, by seed; NaN of a run that diverged. Only of runs that validated."""
    note_read_keys(keys)
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].sort_values("epoch")
    recorded = (epochs.groupby("key")[column].transform("count") > 0) | epochs["key"].isin(
        find_diverged_keys(frames)
    )
    last = epochs[recorded].set_index("key")[column].groupby(level="key", sort=False).tail(1)
    return last.rename(index=_seed_by_key(frames))  # type: ignore[no-any-return]


def _paired_last_values(
    frames: Frames, keys: Sequence[str], others: Sequence[str], column: str
) -> tuple[pd.Series[float], pd.Series[float]]:
    """`_last_value_by_seed` of both sides, of the seeds that both have."""
    here, there = _last_value_by_seed(frames, keys, column), _last_value_by_seed(frames, others, column)
    seeds = [seed for seed in here.index if seed in there.index]
    return here[seeds], there[seeds]


def _epochs_by_seed(frames: Frames, keys: Sequence[str], column: str) -> dict[Any, pd.DataFrame]:
    """The epochs of each run in which `column` was recorded, and the last one of a run that diverged."""
    note_read_keys(keys)
    ended = frames.epochs["key"].isin(find_diverged_keys(frames))
    seeds, epochs = _seed_by_key(frames), frames.epochs[frames.epochs[column].notna() | ended]
    tables = {seeds.get(key, key): epochs[epochs["key"] == key] for key in keys}
    return {seed: table for seed, table in tables.items() if len(table)}


def _lasting_lead_step(here: pd.DataFrame, there: pd.DataFrame, column: str) -> float:
    both = here.merge(there, on="epoch", suffixes=("", "_other")).sort_values("epoch")
    behind = np.flatnonzero(~(both[column] > both[f"{column}_other"]).to_numpy())
    first = behind[-1] + 1 if len(behind) else 0
    return float(both["step"].iloc[first]) if first < len(both) else float(np.inf)
