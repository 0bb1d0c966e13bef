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

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis.records.frames import Frames, cache_by_frames, find_diverged_keys, note_read_run_keys
from analysis.records.steps import (
    BLOCKS,
    ENOUGH_LAUNCHES,
    LAUNCHES,
    has_blocks_in_every_run,
    replication_units,
    share_a_group,
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


class IncomparableRunsError(ValueError):
    """Runs that must not be compared with each other."""


class Estimate(NamedTuple):
    """A measured number with its interval."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int = 1  # independent samples
    sample_kind: str = RUNS  # a key of ENOUGH_SAMPLES, or blocks
    degrees_of_freedom: float | None = None  # degrees of freedom behind the interval; by default n - 1
    floor: float = -np.inf  # the interval is Student's for log(value - floor); here for the value itself

    @classmethod
    def exact(cls, value: float, n: int, sample_kind: str) -> Estimate:
        """Return a value without an error: a count, or what printed values say of themselves."""
        return cls(float(value), float(value), float(value), n, sample_kind)

    @property
    def can_support_verdict(self) -> bool:
        """True if there is an interval over so many samples that a verdict may rest on it."""
        return self.low is not None and self.n >= ENOUGH_SAMPLES.get(self.sample_kind, np.inf)

    @property
    def interval(self) -> tuple[float, float]:
        """The interval; an infinite one where it is not known."""
        if self.low is None or self.high is None:
            return -np.inf, np.inf
        return self.low, self.high

    def two_sided_p_value(self, limit: float) -> float:
        """Return the two-sided p-value of the hypothesis that `limit` is the truth; 1 without an interval."""
        if self.low is None:
            return 1.0
        low, high = self.interval
        nearer = low if limit < self.value else high
        middle = _log_above(self.value, self.floor)
        half_width = abs(_log_above(nearer, self.floor) - middle)
        distance = abs(_log_above(limit, self.floor) - middle)
        if not np.isfinite(half_width) or half_width == 0:
            return float(low <= limit <= high)
        import scipy.special

        df = self.n - 1 if self.degrees_of_freedom is None else self.degrees_of_freedom
        return float(2 * scipy.special.stdtr(df, -distance / half_width * student_t_quantile(df)))

    @property
    def half_width_on_log_scale(self) -> float:
        """Relative half-width of a ratio's interval, on the log scale: 0.05 is 5 %. Infinite without one."""
        low, high = self.interval
        return float(np.sqrt(high / low) - 1) if low > 0 else np.inf

    def percent_above_one(self) -> Estimate:
        """Return the percentage by which a ratio exceeds 1."""
        return self._map(lambda edge: 100 * (edge - 1))

    def scale_by(self, factor: float) -> Estimate:
        """Return the estimate in another unit, by a positive factor."""
        return self._map(lambda edge: factor * edge)

    def _map(self, function: Callable[[float], float]) -> Estimate:
        """Return the estimate under an increasing linear map."""
        low, high = (None if edge is None else function(edge) for edge in (self.low, self.high))
        floor = function(self.floor) if np.isfinite(self.floor) else self.floor
        return self._replace(value=function(self.value), low=low, high=high, floor=floor)


def student_t_quantile(df: float) -> float:
    """Return Student's quantile: half an interval at `CONFIDENCE`, in standard errors."""
    import scipy.special  # which commands that only list need not wait for

    return float(scipy.special.stdtrit(df, (1 + CONFIDENCE) / 2))


def _log_above(edge: float, floor: float) -> float:
    """Return `edge` on the scale where `floor` is infinitely far below."""
    if not np.isfinite(floor):
        return edge
    return float(np.log(edge - floor)) if edge > floor else -np.inf


def estimate_mean(
    samples: Sequence[float] | np.ndarray,
    bounds: Bounds = UNBOUNDED,
    sample_kind: str = RUNS,
    value: float | None = None,
) -> Estimate:
    """Return the mean of independent samples, with Student's interval.

    Both are computed on the scale where `bounds` are infinitely far. Blocks that follow each other resemble
    each other: a positive correlation r of neighbours leaves
    n (1 - r) / (1 + r) independent ones of n (the variance of the mean of an AR(1) series), at least two.

    Args:
        samples: in the order of their measurement; at least one.
        bounds: what the quantity cannot reach.
        sample_kind: what a sample is, see `Estimate`.
        value: the estimate, if it is not the mean on that scale: a mean that adds up with others.
    """
    data = np.asarray(samples, dtype=float)
    n = len(data)
    to_scale, from_scale = _unbounded_scale(bounds, data)
    on_scale = to_scale(data)
    estimate = float(from_scale(on_scale.mean())) if value is None else value
    if n < ENOUGH_LAUNCHES or not np.isfinite(on_scale).all():
        return Estimate(estimate, n=n, sample_kind=sample_kind)
    independent = max(2.0, n * _independent_share(on_scale)) if sample_kind == BLOCKS else float(n)
    error = on_scale.std(ddof=1) / np.sqrt(independent)
    half_width = student_t_quantile(independent - 1) * error
    middle = to_scale(np.asarray(estimate))
    low, high = (float(np.clip(from_scale(middle + side * half_width), *bounds)) for side in (-1, 1))
    floor = bounds[0] if bounds[1] == np.inf and _is_within(data, bounds) else -np.inf
    return Estimate(estimate, low, high, n, sample_kind, independent - 1, floor)


def estimate_mean_over_launches(by_block: pd.Series[float], bounds: Bounds = UNBOUNDED) -> Estimate:
    """Return the mean over launches of the means over their blocks, on the scale of `bounds`.

    The interval is over launches, or over blocks where there are fewer than three launches.

    Args:
        by_block: samples by launch and block.
    """
    to_scale, from_scale = _unbounded_scale(bounds, by_block.to_numpy())
    launch_means = pd.Series(to_scale(by_block.to_numpy()), by_block.index).groupby(level=0).mean()
    if len(launch_means) >= ENOUGH_LAUNCHES:
        return estimate_mean(from_scale(launch_means.to_numpy()), bounds, LAUNCHES)
    return estimate_mean(by_block.to_numpy(), bounds, BLOCKS)


def samples_per_second(frames: Frames, keys: Sequence[str]) -> Estimate | None:
    """Return the samples per second over all workers; None without runs."""
    if not keys:
        return None
    run = frames.runs[frames.runs["key"] == keys[0]].iloc[0]
    samples = run["workers"] * run["task.batch_size"]
    return phase_statistic(frames, keys, ("slowest",), lambda seconds: samples / seconds, POSITIVE)


def step_time_ratio(frames: Frames, keys: Sequence[str], baseline_keys: Sequence[str]) -> Estimate | None:
    """Return the step time of `keys` over that of `baseline_keys`, paired."""
    return phase_time_ratio(frames, keys, baseline_keys, "slowest")


@cache_by_frames
def phase_time_ratio(
    frames: Frames, keys: Sequence[str], baseline_keys: Sequence[str], phase: str
) -> Estimate | None:
    """Return the time of a phase in `keys` over that in `baseline_keys`: the geometric mean of paired ratios.

    A pair is a block of both in one group of processes, else the runs of one seed. None where it was not
    recorded, or where nothing pairs.
    """
    return _paired_estimate(frames, keys, baseline_keys, (phase,), lambda ours, base: ours / base, POSITIVE)


def phase_seconds_difference(
    frames: Frames, keys: Sequence[str], other_keys: Sequence[str], phases: Sequence[str]
) -> Estimate | None:
    """Return seconds of `phases` in `keys` less those in `other_keys`, paired as in `phase_time_ratio`."""
    return _paired_estimate(frames, keys, other_keys, phases, lambda ours, theirs: ours - theirs, UNBOUNDED)


def phase_statistic(
    frames: Frames, keys: Sequence[str], phases: Sequence[str], statistic: Callable[..., Any], bounds: Bounds
) -> Estimate | None:
    """Return `statistic` of the mean seconds of `phases`, which may include `step` and `unaccounted`.

    The estimate is that of the overall means, those of `steps.mean_phase_seconds`, so that parts add up to
    the whole; the interval is that of the statistic over runs or blocks. None where a phase was not recorded.
    """
    if not keys:
        return None
    _check_comparable(frames, keys)
    units = replication_units(frames, keys)
    if not set(phases) <= set(units.means_by_unit):
        return None
    means = units.means_by_unit[list(phases)]
    per_unit = np.array([statistic(*row) for row in means.to_numpy()], dtype=float)
    return estimate_mean(per_unit, bounds, units.unit_kind, float(statistic(*means.mean())))


def phase_time(
    frames: Frames, keys: Sequence[str], *phases: str, units_per_second: float = 1.0
) -> Estimate | None:
    """Return the time that phases take together; `slowest` is a whole step.

    Args:
        units_per_second: of the result; 1e3 for milliseconds.
    """
    return phase_statistic(frames, keys, phases, lambda *seconds: units_per_second * sum(seconds), POSITIVE)


def final_mean(
    frames: Frames, keys: Sequence[str], column: str, is_geometric: bool = False
) -> Estimate | None:
    """Return the mean of `column` at the last epoch, over runs that differ in their seed.

    Args:
        is_geometric: return the geometric mean, for what differs by powers of ten, as losses may.
    """
    _check_comparable(frames, keys, "steps_total")
    last = _last_value_by_seed(frames, keys, column)
    if not len(last):
        return None
    return estimate_mean(last.to_numpy(), POSITIVE) if is_geometric else _column_mean(last, column)


def final_ratio(
    frames: Frames, keys: Sequence[str], other_keys: Sequence[str], column: str
) -> Estimate | None:
    """Return `column` at the last epoch, `keys` over `other_keys`; paired by seed, so by initial weights."""
    _check_comparable(frames, [*keys, *other_keys], "steps_total")
    ours, theirs = _paired_last_values(frames, keys, other_keys, column)
    return estimate_mean((ours / theirs).to_numpy(), POSITIVE) if len(ours) else None


def final_difference(
    frames: Frames, keys: Sequence[str], other_keys: Sequence[str], column: str, may_differ_in: str = ""
) -> Estimate | None:
    """Return `column` at the last epoch, `keys` minus `other_keys`; paired by seed, so by initial weights.

    Args:
        may_differ_in: a column in which the sides may differ, where it is what is compared; within a side
            no runs may.
    """
    for side in (keys, other_keys) if may_differ_in else ():
        _check_comparable(frames, side)
    _check_comparable(frames, [*keys, *other_keys], "steps_total", without=may_differ_in)
    ours, theirs = _paired_last_values(frames, keys, other_keys, column)
    low, high = BOUNDS_BY_COLUMN.get(column, UNBOUNDED)
    return estimate_mean((ours - theirs).to_numpy(), (low - high, high - low)) if len(ours) else None


def final_contrast(
    frames: Frames, added: Sequence[Sequence[str]], subtracted: Sequence[Sequence[str]], column: str
) -> Estimate | None:
    """Return a sum of the last values of `column` over sets of runs less that over others, paired by seed.

    Args:
        added: sets of runs that differ in their seeds; so are those of `subtracted`.
    """
    _check_comparable(frames, [key for keys in (*added, *subtracted) for key in keys], "steps_total")
    gains = [_last_value_by_seed(frames, keys, column) for keys in added]
    losses = [_last_value_by_seed(frames, keys, column) for keys in subtracted]
    by_seed = pd.concat([*gains, *(-loss for loss in losses)], axis=1, join="inner")
    return estimate_mean(by_seed.sum(axis=1, skipna=False).to_numpy()) if len(by_seed) else None


def mean_curve(frames: Frames, keys: Sequence[str], column: str) -> pd.DataFrame:
    """Return a row per epoch until a run diverged: step, mean over runs, low, high (NaN without any), n."""
    note_read_run_keys(keys)
    epochs = frames.epochs[frames.epochs["key"].isin(keys)]
    diverged = epochs[epochs["key"].isin(find_diverged_keys(frames))]
    if len(diverged):
        epochs = epochs[epochs["epoch"] < diverged.groupby("key")["epoch"].max().min()]
    rows = []
    for epoch, runs in epochs.dropna(subset=[column]).groupby("epoch"):
        mean = _column_mean(runs[column], column)
        rows.append((int(epoch), int(runs["step"].iloc[0]), mean.value, mean.low, mean.high, mean.n))
    columns = ["epoch", "step", "mean", "low", "high", "n"]
    table: pd.DataFrame = pd.DataFrame(rows, columns=columns).astype({"low": float, "high": float})
    return table


def lasting_lead_step(
    frames: Frames, keys: Sequence[str], other_keys: Sequence[str], column: str
) -> Estimate | None:
    """Return the step from which on `column` of `keys` stays above that of `other_keys`; paired by seed.

    Infinite where one of the pairs does not stay so.
    """
    ours = _epochs_by_seed(frames, keys, column)
    theirs = _epochs_by_seed(frames, other_keys, column)
    steps = [
        _lasting_lead_step(epochs, theirs[seed], column) for seed, epochs in ours.items() if seed in theirs
    ]
    return estimate_mean(steps, POSITIVE) if steps else None


def _paired_estimate(
    frames: Frames,
    keys: Sequence[str],
    other_keys: Sequence[str],
    phases: Sequence[str],
    compare: Callable[[Any, Any], Any],
    bounds: Bounds,
) -> Estimate | None:
    if not keys or not other_keys:
        return None
    both_keys = [*keys, *other_keys]
    _check_comparable(frames, both_keys)
    by_block = has_blocks_in_every_run(frames, both_keys) and share_a_group(frames, keys, other_keys)
    ours = replication_units(frames, keys, by_block)
    theirs = replication_units(frames, other_keys, by_block)
    if not set(phases) <= set(ours.means_by_unit) & set(theirs.means_by_unit):
        return None
    sums = [side.means_by_unit[list(phases)].sum(axis="columns") for side in (ours, theirs)]
    paired = pd.concat(sums, axis="columns", join="inner", keys=["ours", "theirs"]).sort_index()
    if not len(paired):
        return None
    samples = compare(paired["ours"], paired["theirs"])
    if by_block:
        return estimate_mean_over_launches(samples, bounds)
    return estimate_mean(samples, bounds, ours.unit_kind)


def _column_mean(values: pd.Series[float], column: str) -> Estimate:
    """Return the arithmetic mean, whose interval knows what the column can be."""
    mean = float(values.to_numpy().mean())
    return estimate_mean(values.to_numpy(), BOUNDS_BY_COLUMN.get(column, UNBOUNDED), value=mean)


def _unbounded_scale(bounds: Bounds, data: np.ndarray) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the map to a scale on which the bounds are infinitely far away, and the way back.

    The plain scale where a sample lies on a bound, which would be infinite; the interval is then cut there.
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
    """Return the share of a series that counts, by the correlation r of neighbours; 1 where r is negative."""
    deviation = series - series.mean()
    spread = float((deviation**2).sum())
    r = float((deviation[1:] * deviation[:-1]).sum()) / spread if spread else 0.0
    return (1 - r) / (1 + r) if r > 0 else 1.0


@cache_by_frames
def _check_comparable(frames: Frames, keys: Sequence[str], *more: str, without: str = "") -> None:
    """Refuse runs that differ in a column of `COLUMNS_THAT_AGREE`, but for `without`, or of `more`.

    Raises:
        IncomparableRunsError: they differ.
    """
    note_read_run_keys(keys)
    columns = [name for name in (*COLUMNS_THAT_AGREE, *more) if name != without]
    for column, values in differing_values_by_column(
        frames.runs[frames.runs["key"].isin(keys)], columns
    ).items():
        raise IncomparableRunsError(
            f"these runs can't be compared: they differ in {column} ({', '.join(values)}); "
            "measure all of them alike (--force measures again)"
        )


def differing_values_by_column(runs: pd.DataFrame, columns: Iterable[str]) -> dict[str, list[str]]:
    """Return the values of the columns in which runs differ, shortened, by the names of columns."""
    runs = runs.assign(precision=used_precisions(runs))
    texts = {name: {str(value)[:12] for value in runs[name].dropna()} for name in columns if name in runs}
    return {name: sorted(values) for name, values in texts.items() if len(values) > 1}


def _seed_by_key(frames: Frames) -> pd.Series[Any]:
    if "seed" not in frames.runs:
        return pd.Series(dtype=float)
    by_key: pd.Series[Any] = pd.Series(frames.runs["seed"].to_numpy(), frames.runs["key"])
    return by_key


@cache_by_frames
def _last_value_by_seed(frames: Frames, keys: Sequence[str], column: str) -> pd.Series[float]:
    """Return `column` at the last epoch of each run that validated; NaN of a run that diverged."""
    note_read_run_keys(keys)
    epochs = frames.epochs[frames.epochs["key"].isin(keys)].sort_values("epoch")
    has_values = epochs.groupby("key")[column].transform("count") > 0
    has_last_value = has_values | epochs["key"].isin(find_diverged_keys(frames))
    last = epochs[has_last_value].set_index("key")[column].groupby(level="key", sort=False).tail(1)
    return last.rename(index=_seed_by_key(frames))  # type: ignore[no-any-return]  # pandas: of a Series


def _paired_last_values(
    frames: Frames, keys: Sequence[str], other_keys: Sequence[str], column: str
) -> tuple[pd.Series[float], pd.Series[float]]:
    """Return `_last_value_by_seed` of both sides, of the seeds that both have."""
    ours = _last_value_by_seed(frames, keys, column)
    theirs = _last_value_by_seed(frames, other_keys, column)
    seeds = [seed for seed in ours.index if seed in theirs.index]
    return ours[seeds], theirs[seeds]


def _epochs_by_seed(frames: Frames, keys: Sequence[str], column: str) -> dict[Any, pd.DataFrame]:
    """Return the epochs of each run in which `column` was recorded, and the last of a run that diverged."""
    note_read_run_keys(keys)
    seeds = _seed_by_key(frames)
    ended = frames.epochs["key"].isin(find_diverged_keys(frames))
    epochs = frames.epochs[frames.epochs[column].notna() | ended]
    tables = {seeds.get(key, key): epochs[epochs["key"] == key] for key in keys}
    return {seed: table for seed, table in tables.items() if len(table)}


def _lasting_lead_step(ours: pd.DataFrame, theirs: pd.DataFrame, column: str) -> float:
    paired_epochs = ours.merge(theirs, on="epoch", suffixes=("", "_other")).sort_values("epoch")
    behind = np.flatnonzero(~(paired_epochs[column] > paired_epochs[f"{column}_other"]).to_numpy())
    first = behind[-1] + 1 if len(behind) else 0
    return float(paired_epochs["step"].iloc[first]) if first < len(paired_epochs) else float(np.inf)
