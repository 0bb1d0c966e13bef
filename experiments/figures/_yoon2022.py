"""Runs of each method, and measured quantities, that the items of Yoon and Oh 2022 share.

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
from analysis.published.block_intervals import BLOCKS
from analysis.records.frames import Frames, cache_by_frames, rows_as_dicts
from analysis.stats import (
    POSITIVE,
    Bounds,
    Estimate,
    phase_seconds_difference,
    phase_statistic,
    samples_per_second,
    step_time_ratio,
    student_t_quantile,
)
from experiments.config.run import Run, RunOrWords, RunSettings
from experiments.figures import _runs
from experiments.figures._runs import profile_settings
from experiments.figures.papers import published_value

METHODS = ("dense", "topk", "randomk")
PAPER = "Yoon and Oh 2022 (VGG-16, A100 and V100)"
STEPS_PER_EPOCH = 49
BLOCK_FACTS = {"blocks": BLOCKS}  # what captions tell of intervals

TIMING_SCALE = published_value("yoon2022.scale.timing")
TRAINING_SCALE = published_value("yoon2022.scale.training")
SEEDS = {"smoke": [0], "laptop": [0], "paper": [0, 1, 2]}
# With --all: the shipped figures have them.
MORE_SEEDS = {"smoke": [1], "laptop": [1, 2, 3, 4], "paper": list[int]()}


# --- runs


def timing_runs(
    profile: str,
    timing_mode: str,
    variants: Mapping[str, RunSettings] | None = None,
    overrides: RunOrWords = (),
    scale_item: str = "timing",
) -> list[Run]:
    """Return the run in which these variants take turns.

    In the mode `as_published` it validates inside its timed loop, as theirs.

    Args:
        variants: by default those of `timing` in variants.yaml.
        overrides: settings for all of them.
        scale_item: whose entry in scales.yaml says how profiles scale it.
    """
    validate = "epoch" if timing_mode == "as_published" else "never"
    shared = recipe_run(profile, profile_settings(scale_item, profile)) | {
        "train.validate": validate,
        "timing.mode": timing_mode,
    }
    return [Run((shared | overrides).settings, variants or _runs.settings_by_variant("timing"))]


def convergence_runs(profile: str, seeds_by_profile: Mapping[str, Sequence[int]] = SEEDS) -> list[Run]:
    """Return one whole training per method and seed."""
    shared = recipe_run(profile, profile_settings("convergence", profile))
    return [
        shared | {"method": method, **small_model_density(method, profile), "seed": seed}
        for seed in seeds_by_profile[profile]
        for method in METHODS
    ]


def small_model_density(method: str, profile: str) -> RunSettings:
    """Return the density of a sparse method where the model is small, which only the profile paper's is not.

    0.001 of 34,058 parameters would be 34 numbers a step.
    """
    return {"method.density": 0.01} if profile != "paper" and method != "dense" else {}


def small_model_settings_by_variant(item: str, profile: str) -> dict[str, RunSettings]:
    """Return an item's variants, with a density for small models."""
    return {
        name: {**settings, **small_model_density(settings["method"], profile)}
        for name, settings in _runs.settings_by_variant(item).items()
    }


def bucketed_settings_by_variant(item: str, profile: str) -> dict[str, RunSettings]:
    """Return an item's variants, those with buckets in the size that suits the profile's model."""
    buckets = profile_settings("buckets", profile)
    return {
        name: {**settings, **buckets} if "-buckets" in name else settings
        for name, settings in _runs.settings_by_variant(item).items()
    }


def recipe_run(profile: str, settings: RunSettings) -> Run:
    """Return a run of the paper's recipe, with the settings by which a profile scales it."""
    return Run({"recipe": "yoon2022", "profile": profile, **settings})


# --- whose runs


@cache_by_frames
def method_run_keys(frames: Frames, method: str, timing_mode: str = "") -> list[str]:
    """Return the runs of a method (and timing mode), in the order of their seeds."""
    if not len(frames.runs):
        return []
    # Of a run's hundred columns those that say which method it is, and how it was timed.
    columns = [name for name in ("key", *METHOD_COLUMNS, "timing.mode") if name in frames.runs]
    return [
        str(run["key"])
        for run in rows_as_dicts(frames.runs.sort_values("seed")[columns])
        if method_id(run) == method and timing_mode in ("", run["timing.mode"])
    ]


def measured_methods(frames: Frames, timing_mode: str = "") -> list[str]:
    """Return the methods that have runs, the paper's first.

    Raises:
        ValueError: none has.
    """
    candidates = dict.fromkeys((*METHODS, *map(method_id, rows_as_dicts(frames.runs))))
    methods = [method for method in candidates if method_run_keys(frames, method, timing_mode)]
    if not methods:
        raise ValueError(
            f"nothing to draw: there is no run{f' in timing mode {timing_mode}' if timing_mode else ''}"
        )
    return methods


# --- what is measured: functions of frames and of the methods that a claim names (`Claim.of`)


def method_samples_per_s(frames: Frames, method: str, timing_mode: str = "") -> Estimate | None:
    """Return the samples per second of all workers with a method; None without runs."""
    return samples_per_second(frames, method_run_keys(frames, method, timing_mode))


def step_time_ratio_to_baseline(
    frames: Frames, method: str, baseline: str = "dense", timing_mode: str = "production"
) -> Estimate | None:
    """Return the time of an iteration of a method over that of the baseline."""
    return step_time_ratio(
        frames, method_run_keys(frames, method, timing_mode), method_run_keys(frames, baseline, timing_mode)
    )


def step_percent_longer(frames: Frames, method: str, baseline: str = "dense") -> Estimate | None:
    """Return by how many percent an iteration of a method is longer, in the timing mode `production`."""
    ratio = step_time_ratio_to_baseline(frames, method, baseline)
    return ratio and ratio.percent_above_one()


def sum_in_ms(*seconds: Any) -> Any:
    """Return the sum of times in seconds, in milliseconds."""
    return 1e3 * sum(seconds)


def estimate_phase_statistic(
    frames: Frames,
    method: str,
    phases: Sequence[str],
    statistic: Callable[..., Any] = sum_in_ms,
    bounds: Bounds = POSITIVE,
    timing_mode: str = "serialised",
) -> Estimate | None:
    """Return a statistic of the seconds of these phases: by default milliseconds of all together."""
    return phase_statistic(frames, method_run_keys(frames, method, timing_mode), phases, statistic, bounds)


def extra_phase_ms(
    frames: Frames, method: str, baseline: str, phases: Sequence[str], timing_mode: str = "serialised"
) -> Estimate | None:
    """Return the milliseconds by which these phases together take longer than the baseline's."""
    keys, baseline_keys = (method_run_keys(frames, name, timing_mode) for name in (method, baseline))
    difference = phase_seconds_difference(frames, keys, baseline_keys, phases)
    return difference and difference.scale_by(1e3)


def subtract_exact(estimate: Estimate, amount: float) -> Estimate:
    """Return an estimate less an exact number."""
    low, high = (None if end is None else end - amount for end in (estimate.low, estimate.high))
    return estimate._replace(value=estimate.value - amount, low=low, high=high)


# --- when a claim holds


def published_replicate_spread(column: str, workers: int = 8) -> float:
    """Return the distance at which another run of theirs may end from the published one, at 95 %.

    Student's quantile times the standard deviation within the pairs of their replicates with so many
    workers, which has as many degrees of freedom as there are pairs. Runs with another number of workers end
    elsewhere, and are not pooled with them.
    """
    pairs = np.array(list(published_value("yoon2022.replicates")[column][workers].values()))
    deviation = math.sqrt(float(((pairs[:, 0] - pairs[:, 1]) ** 2).mean()) / 2)
    return student_t_quantile(len(pairs)) * deviation


def published_replicate_gap_spread(column: str) -> float:
    """Return the distance by which the difference of two methods may vary, each of which was run once."""
    return math.sqrt(2) * published_replicate_spread(column)


GAP_SPREAD = "give or take what the difference of two runs may vary by, at 95 %, by their replicates."


# --- what they publish


def job_label(gpu: str, method: str, separator: str = " ") -> str:
    """Return how a job is called: 'Top-k 8 A100'."""
    return f"{method_style(method).label}{separator}8 {gpu}"


def published_results_by_method() -> dict[str, PublishedResult]:
    """Return the results of their sparse methods beside dense, on 8 A100s."""
    top1 = published_value("yoon2022.top1")
    results = {}
    for method in METHODS[1:]:
        parts = published_ms_by_phase(method)
        selecting = 100 * parts["select"] / sum(parts.values())
        lost = top1["dense"] - top1[method]
        ratio = published_value("yoon2022.ratio")[method]
        results[method] = PublishedResult(ratio, selecting, lost, "8 A100")
    return results


def published_ms_by_phase(method: str) -> dict[str, float]:
    """Return the parts of their bar by our names of phases, and what it leaves out of the whole."""
    parts = dict(published_value(f"yoon2022.iteration.{method}"))
    total = parts.pop("total")
    return parts | {"unaccounted": total - sum(parts.values())}
