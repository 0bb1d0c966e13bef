"""What the items of Yoon and Oh 2022 share: their runs, finding those of a method, and what is measured.

Daegun Yoon and Sangyoon Oh, "Empirical Analysis on Top-k Gradient Sparsification for Distributed Deep
Learning in a Supercomputing Environment", 2022. What they publish is in papers/yoon2022.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from analysis.pictures.style import METHOD_COLUMNS, method_id, method_style
from analysis.pictures.summary import PublishedResult
from analysis.published.dependent import BLOCKS
from analysis.records.frames import Frames, cache_by_frames, to_dicts
from analysis.stats import (
    POSITIVE,
    Bounds,
    Estimate,
    phase_seconds_difference,
    phase_statistic,
    samples_per_second,
    step_time_ratio,
    student_quantile,
)
from experiments.config.run import Run, RunOrWords, RunSettings
from experiments.figures._runs import scale, variants
from experiments.figures.papers import value

METHODS = ("dense", "topk", "randomk")
PAPER = "Yoon and Oh 2022 (VGG-16, A100 and V100)"
STEPS_PER_EPOCH = 49
IN_BLOCKS = {"blocks": BLOCKS}  # what captions tell of intervals

TIMING_SCALE, TRAINING_SCALE = value("yoon2022.scale.timing"), value("yoon2022.scale.training")
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
# With --all: the shipped figures have them.
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2, 3, 4], "paper": list[int]()}


# --- runs


def timing_runs(
    profile: str,
    mode: str,
    own: Mapping[str, RunSettings] | None = None,
    more: RunOrWords = (),
    at: str = "timing",
) -> list[Run]:
    """The run in which these variants take turns, with `more` settings for all of them.

    `as_published` validates inside its timed loop, as theirs.

    Args:
        own: the variants; by default those of `at` in variants.yaml.
        at: how profiles scale it, in scales.yaml.
    """
    validate = "epoch" if mode == "as_published" else "never"
    shared = start(profile, scale(at, profile)) | {"train.validate": validate, "timing.mode": mode} | more
    return [Run(shared.settings, own or variants(at))]


def convergence_runs(profile: str, seeds: Mapping[str, Sequence[int]] = SEEDS) -> list[Run]:
    """One whole training per method and seed."""
    shared = start(profile, scale("convergence", profile))
    return [
        shared | {"method": method, **small_density(method, profile), "seed": seed}
        for seed in seeds[profile]
        for method in METHODS
    ]


def small_density(method: str, profile: str) -> RunSettings:
    """The density of a sparse method where the model is small, which only the profile paper's is not: 0.001
    of 34,058 parameters would be 34 numbers a step.
    """
    return {"method.density": 0.01} if profile != "paper" and method != "dense" else {}


def of_small(name: str, profile: str) -> dict[str, RunSettings]:
    """An item's variants, with a density for small models."""
    return {
        variant: {**own, **small_density(own["method"], profile)} for variant, own in variants(name).items()
    }


def with_buckets(name: str, profile: str) -> dict[str, RunSettings]:
    """An item's variants, those with buckets in the size that suits the profile's model."""
    buckets = scale("buckets", profile)
    return {
        variant: {**own, **buckets} if "-buckets" in variant else own
        for variant, own in variants(name).items()
    }


def start(profile: str, settings: RunSettings) -> Run:
    """The paper's recipe, with the settings by which a profile scales it."""
    return Run({"recipe": "yoon2022", "profile": profile, **settings})


# --- whose runs


@cache_by_frames
def keys(frames: Frames, method: str, mode: str = "") -> list[str]:
    """The runs of a method (and timing mode), in the order of their seeds."""
    if not len(frames.runs):
        return []
    # Of a run's hundred columns those that say which method it is, and how it was timed.
    told = [name for name in ("key", *METHOD_COLUMNS, "timing.mode") if name in frames.runs]
    return [
        str(run["key"])
        for run in to_dicts(frames.runs.sort_values("seed")[told])
        if method_id(run) == method and mode in ("", run["timing.mode"])
    ]


def present(frames: Frames, mode: str = "") -> list[str]:
    """The methods that have runs, the paper's first.

    Raises:
        ValueError: none has.
    """
    found = map(method_id, to_dicts(frames.runs))
    methods = [method for method in dict.fromkeys((*METHODS, *found)) if keys(frames, method, mode)]
    if not methods:
        raise ValueError(f"nothing to draw: there is no run{f' in timing mode {mode}' if mode else ''}")
    return methods


# --- what is measured: functions of frames and of the methods that a claim names (`Claim.of`)


def speed(frames: Frames, method: str, mode: str = "") -> Estimate | None:
    """Samples per second of all workers."""
    return samples_per_second(frames, keys(frames, method, mode))


def ratio(frames: Frames, method: str, baseline: str = "dense", mode: str = "production") -> Estimate | None:
    """Time of an iteration of a method over that of another."""
    return step_time_ratio(frames, keys(frames, method, mode), keys(frames, baseline, mode))


def longer(frames: Frames, method: str, baseline: str = "dense") -> Estimate | None:
    """Percent by which an iteration of `method` is longer, nothing synchronising inside it."""
    found = ratio(frames, method, baseline)
    return None if found is None else found.more_in_percent()


def phases(
    frames: Frames,
    method: str,
    names: Sequence[str],
    statistic: Callable[..., Any] = lambda *seconds: 1e3 * sum(seconds),
    bounds: Bounds = POSITIVE,
    mode: str = "serialised",
) -> Estimate | None:
    """A statistic of the seconds of these phases: by default milliseconds of all together."""
    return phase_statistic(frames, keys(frames, method, mode), names, statistic, bounds)


def more_ms(
    frames: Frames, method: str, baseline: str, names: Sequence[str], mode: str = "serialised"
) -> Estimate | None:
    """Milliseconds by which these phases together take longer."""
    found = phase_seconds_difference(frames, keys(frames, method, mode), keys(frames, baseline, mode), names)
    return found.times(1e3) if found else None


# --- when a claim holds


def spread(column: str, workers: int = 8) -> float:
    """Distance at which another run of theirs may end from the one that they published, at 95 %.

    Student's quantile times the standard deviation within the pairs of their replicates with so many
    workers, which has as many degrees of freedom as there are pairs. Runs with another number of workers end
    elsewhere, and are not pooled with them.
    """
    pairs = np.array(list(value("yoon2022.replicates")[column][workers].values()))
    deviation = math.sqrt(float(((pairs[:, 0] - pairs[:, 1]) ** 2).mean()) / 2)
    return student_quantile(len(pairs)) * deviation


def gap_spread(column: str) -> float:
    """The same for the difference of two methods, each of which was run once."""
    return math.sqrt(2) * spread(column)


GAP_SPREAD = "give or take what the difference of two runs may vary by, at 95 %, by their replicates."


# --- what they publish


def of_job(gpu: str, method: str, apart: str = " ") -> str:
    """'Top-k 8 A100'."""
    return f"{method_style(method).label}{apart}8 {gpu}"


def published_results() -> dict[str, PublishedResult]:
    """Their sparse methods beside dense, on 8 A100s."""
    top1, ratios = value("yoon2022.top1"), value("yoon2022.ratio")
    parts = {method: published_parts(method) for method in METHODS[1:]}
    return {
        method: PublishedResult(
            ratios[method], 100 * own["select"] / sum(own.values()), top1["dense"] - top1[method]
        )
        for method, own in parts.items()
    }


def published_parts(method: str) -> dict[str, float]:
    """The parts of their bar in milliseconds, by our names of phases, and what it leaves out of the whole."""
    parts = dict(value(f"yoon2022.iteration.{method}"))
    total = parts.pop("total")
    return parts | {"unaccounted": total - sum(parts.values())}
