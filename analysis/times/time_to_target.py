"""When a training has an accuracy, or a loss: between which two validations its curve first gets there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from analysis.records.frames import Frames, find_diverged_keys, note_read_keys
from analysis.stats import POSITIVE, Estimate, estimate_mean


class TargetCrossing(NamedTuple):
    """The last validated step before it gets there, and the step that shows it; infinite where none does."""

    after: float
    at: float


CrossingBySeed = Mapping[Any, TargetCrossing]  # by seed


def find_crossing(
    steps: Iterable[float], values: Iterable[float], level: float, falls: bool = False
) -> TargetCrossing:
    """First with at least this value, of what falls at most this one."""
    before = 0.0
    for step, value in zip(steps, values, strict=True):
        if value <= level if falls else value >= level:
            return TargetCrossing(before, float(step))
        before = float(step)
    return TargetCrossing(before, np.inf)


def crossing_by_seed(
    frames: Frames, keys: Sequence[str], column: str, level: float, falls: bool = False, by: str = "step"
) -> dict[Any, TargetCrossing]:
    """Steps at which each training that validated gets there, by seed.

    Args:
        by: `wall_s` for the seconds that it had spent in steps by then.
    """
    if not keys:
        return {}
    note_read_keys(keys)
    seeds = frames.runs.set_index("key")["seed"]
    epochs, never = frames.epochs.dropna(subset=[column]).sort_values("epoch"), find_diverged_keys(frames)
    of_key = {key: epochs[epochs["key"].eq(key)] for key in keys}
    return {
        seeds[key]: find_crossing(own[by], own[column], level, falls)
        for key, own in of_key.items()
        if len(own) or key in never
    }


def all_seeds_reach(steps: CrossingBySeed) -> bool:
    return bool(steps) and all(np.isfinite(each.at) for each in steps.values())


def seconds_to_target(steps: CrossingBySeed, step_s: float) -> Estimate | None:
    """The mean over seeds, at so many seconds a step; None where one of them does not get there.

    The interval is that over seeds, and begins as if each had got there right after the validation before:
    seeds that get there at the same validation are not alike for certain.
    """
    if not all_seeds_reach(steps):
        return None
    earliest, latest = (estimate_mean([each[end] for each in steps.values()], POSITIVE) for end in (0, 1))
    return latest._replace(low=earliest.low).scale_by(step_s)


def speedup_to_target(slow: CrossingBySeed, fast: CrossingBySeed, times: Estimate) -> Estimate | None:
    """The slow one's time over the fast one's, paired by seed: 0 where it gets there and the fast one does
    not, infinite the other way round; None where no pair has one that gets there.

    The interval reaches from the earliest that the slow one can have got there, by the latest of the fast
    one, to the opposite: between two validations nobody looked, and who did not get there might have after
    the last. Both edges take the worst of `times` as well.

    Args:
        times: a step's time, the slow one's over the fast one's. Without an interval, as of simulated times,
            the result has none.
    """
    pairs = [(slow[seed], fast[seed]) for seed in slow if seed in fast]
    pairs = [(long, short) for long, short in pairs if np.isfinite(min(long.at, short.at))]
    if not pairs:
        return None
    estimate = estimate_mean([long.at / short.at for long, short in pairs], POSITIVE).scale_by(times.value)
    least = estimate_mean([long.after / short.at for long, short in pairs], POSITIVE).low
    if least is None or times.low is None or times.high is None:
        return Estimate(estimate.value, n=estimate.n)
    ends = [long.at / short.after if short.after else np.inf for long, short in pairs]
    most = estimate_mean(ends, POSITIVE).high if np.isfinite(ends).all() else np.inf
    assert most is not None, "as many pairs have an interval below"
    return Estimate(estimate.value, least * times.low, most * times.high, estimate.n)
