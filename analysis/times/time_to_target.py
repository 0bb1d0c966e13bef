"""Time to a target: between which two validations the curve of a training first reaches a value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from analysis.records.frames import Frames, find_diverged_keys, note_read_run_keys
from analysis.stats import POSITIVE, Estimate, estimate_mean


class TargetCrossing(NamedTuple):
    """The validations between which a training reaches a target; both infinite where it does not."""

    last_before: float  # the last validated step that has not reached it
    first_at: float  # the step that has


CrossingBySeed = Mapping[Any, TargetCrossing]


def find_target_crossing(
    steps: Iterable[float], values: Iterable[float], level: float, falls: bool = False
) -> TargetCrossing:
    """Return where values first are at least `level`, or at most where they fall."""
    before = 0.0
    for step, value in zip(steps, values, strict=True):
        if value <= level if falls else value >= level:
            return TargetCrossing(before, float(step))
        before = float(step)
    return TargetCrossing(before, np.inf)


def crossing_by_seed(
    frames: Frames,
    keys: Sequence[str],
    column: str,
    level: float,
    falls: bool = False,
    position_column: Literal["step", "wall_s"] = "step",
) -> dict[Any, TargetCrossing]:
    """Return the steps at which each training that validated reaches `level`, by seed.

    Args:
        frames: of these runs.
        keys: of the trainings.
        column: of the epochs.
        level: the target.
        falls: the column falls, as losses do.
        position_column: `wall_s` for the seconds that a training had spent in steps by then.
    """
    if not keys:
        return {}
    note_read_run_keys(keys)
    seeds = frames.runs.set_index("key")["seed"]
    epochs = frames.epochs.dropna(subset=[column]).sort_values("epoch")
    diverged = find_diverged_keys(frames)
    crossings = {}
    for key in keys:
        validated = epochs[epochs["key"].eq(key)]
        if len(validated) or key in diverged:
            crossings[seeds[key]] = find_target_crossing(
                validated[position_column], validated[column], level, falls
            )
    return crossings


def is_reached_by_all_seeds(crossings: CrossingBySeed) -> bool:
    """Return True where there are seeds and every one reaches the target."""
    return bool(crossings) and all(np.isfinite(crossing.first_at) for crossing in crossings.values())


def seconds_to_target(crossings: CrossingBySeed, step_s: float) -> Estimate | None:
    """Return the mean over seeds, at `step_s` seconds a step; None where one of them does not get there.

    The interval is that over seeds, and begins as if each had got there right after the validation before:
    seeds that get there at the same validation are not alike for certain.
    """
    if not is_reached_by_all_seeds(crossings):
        return None
    earliest = estimate_mean([crossing.last_before for crossing in crossings.values()], POSITIVE)
    latest = estimate_mean([crossing.first_at for crossing in crossings.values()], POSITIVE)
    return latest._replace(low=earliest.low).scale_by(step_s)


def speedup_to_target(
    slow: CrossingBySeed, fast: CrossingBySeed, step_time_ratio: Estimate
) -> Estimate | None:
    """Return the slower training's time to the target over the faster one's, paired by seed.

    It is 0 where the slow one gets there and the fast one does not, infinite the other way round; None where
    no pair has one that gets there.

    The interval reaches from the earliest that the slow one can have got there, by the latest of the fast
    one, to the opposite: between two validations nobody looked, and who did not get there might have after
    the last. Both edges take the worst of `step_time_ratio` as well.

    Args:
        slow: crossings of the one in the numerator.
        fast: crossings of the other one.
        step_time_ratio: a step's time, the slow one's over the fast one's. Without an interval, as of
            simulated times, the result has none.
    """
    pairs = [
        (slow[seed], fast[seed]) for seed in slow
        if seed in fast and np.isfinite(min(slow[seed].first_at, fast[seed].first_at))
    ]  # fmt: skip
    if not pairs:
        return None
    ratios = [slower.first_at / faster.first_at for slower, faster in pairs]
    estimate = estimate_mean(ratios, POSITIVE).scale_by(step_time_ratio.value)
    least = estimate_mean(
        [slower.last_before / faster.first_at for slower, faster in pairs],
        POSITIVE,
    ).low
    if least is None or step_time_ratio.low is None or step_time_ratio.high is None:
        return Estimate(estimate.value, n=estimate.n)
    greatest = [
        slower.first_at / faster.last_before if faster.last_before else np.inf for slower, faster in pairs
    ]
    most = estimate_mean(greatest, POSITIVE).high if np.isfinite(greatest).all() else np.inf
    assert most is not None, "as many pairs have an interval below"
    return Estimate(estimate.value, least * step_time_ratio.low, most * step_time_ratio.high, estimate.n)
