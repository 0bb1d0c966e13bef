"""When a training has an accuracy, or a loss: the step at which its curve first gets there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from analysis.frames import Frames
from analysis.stats import POSITIVE, Value, over_units


def first_step(steps: Iterable[float], values: Iterable[float], level: float, falls: bool = False) -> float:
    """The first step with at least this value, of what falls at most this one; infinite where none has."""
    for step, value in zip(steps, values, strict=True):
        if value <= level if falls else value >= level:
            return float(step)
    return np.inf


def steps_to(
    frames: Frames, keys: Sequence[str], column: str, level: float, falls: bool = False
) -> dict[Any, float]:
    """By seed; infinite of a training that does not get there."""
    seeds = frames.runs.set_index("key")["seed"]
    epochs = frames.epochs.dropna(subset=[column]).sort_values("epoch")
    of_key = {key: epochs[epochs["key"].eq(key)] for key in keys}
    return {
        seeds[key]: first_step(own["step"], own[column], level, falls)
        for key, own in of_key.items()
        if len(own)
    }


def seconds_to(steps: dict[Any, float], step_s: float) -> Value | None:
    """The mean over seeds, at so many seconds a step; None where one of them does not get there."""
    taken = [count * step_s for count in steps.values()]
    return over_units(taken, POSITIVE) if taken and np.isfinite(taken).all() else None


def sooner(
    slow: dict[Any, float], slow_step_s: float, fast: dict[Any, float], fast_step_s: float
) -> Value | None:
    """How many times as long the slow one takes, paired by seed: 0 where it gets there and the fast one does
    not, infinite the other way round; None where no pair has one that gets there.
    """
    pairs = [(slow[seed] * slow_step_s, fast[seed] * fast_step_s) for seed in slow if seed in fast]
    ratios = [long / short for long, short in pairs if np.isfinite(min(long, short))]
    return over_units(ratios, POSITIVE) if ratios else None
