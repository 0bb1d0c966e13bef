"""Helpers of items that are drawn from published tables and logs: without runs, and without errors."""

from __future__ import annotations

from analysis.published.block_intervals import combine_independent_estimates
from analysis.published.rederived import JOB_BY_GPU_AND_METHOD
from analysis.published.validation_free import validation_free_step_ms
from analysis.records.frames import Frames
from analysis.stats import PRINTED, Estimate
from experiments.config.run import Run

JobName = tuple[str, str]  # a job of Yoon and Oh 2022 by its GPU and method


def no_runs(profile: str) -> list[Run]:
    """Return no run: the figure is drawn from published tables."""
    return []


def exact_estimate(frames: Frames, value: float, count: int) -> Estimate:
    """Return a number that follows from `count` printed values as an estimate without an error."""
    return Estimate.exact(value, count, PRINTED)


def validation_free_step_ratio(slower: JobName, quicker: JobName) -> Estimate:
    """Return the ratio of the times of an iteration of two jobs, without validation."""
    steps = (validation_free_step_ms(JOB_BY_GPU_AND_METHOD[job]) for job in (slower, quicker))
    return combine_independent_estimates(lambda long, short: long / short, *steps)
