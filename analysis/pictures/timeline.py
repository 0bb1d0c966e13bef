"""Recorded spans on one time axis.

Every rank has its own clock. In each step they are laid over each other where the first wait ends, because
that wait is a barrier and all ranks leave it together; without one, where the step begins.
"""

from __future__ import annotations

import pandas as pd

from analysis.records.frames import Frames, steps_of_run
from analysis.records.steps import slowest_rank_seconds_by_step, warm_steps

CLOCK_COLUMNS = ["key", "step", "rank"]  # spans that share these are of one clock and one step


def spans_of_run(frames: Frames, key: str) -> pd.DataFrame:
    """Return a run's spans.

    Raises:
        ValueError: it recorded none.
    """
    spans: pd.DataFrame = frames.spans[frames.spans["key"] == key]
    if not len(spans):
        raise ValueError(f"run {key} recorded no spans; set timing.span_steps above 0")
    return spans


def find_typical_step_with_spans(frames: Frames, key: str) -> int:
    """Return the warm step nearest to their median, of the steps with spans.

    Raises:
        ValueError: there are no spans.
    """
    spans = spans_of_run(frames, key)
    slowest = slowest_rank_seconds_by_step(warm_steps(frames, key).steps)
    recorded = slowest_rank_seconds_by_step(steps_of_run(frames, key)).loc[spans["step"].unique()]
    warm = recorded[recorded.index.isin(slowest.index)]  # older records kept the spans of one cold step
    distance = ((warm if len(warm) else recorded) - slowest.median()).abs()
    return int(distance.index.to_numpy()[distance.to_numpy().argmin()])


def spans_from_step_start_ms(spans: pd.DataFrame) -> pd.DataFrame:
    """Return spans, each from the beginning of its step: step, rank, phase, `start_ms` and `took_ms`."""
    rows = pd.MultiIndex.from_frame(spans[CLOCK_COLUMNS])
    start = spans["start_s"] - shared_moment_seconds(spans).reindex(rows).to_numpy()
    aligned: pd.DataFrame = spans[["step", "rank", "phase"]].assign(
        start_ms=1e3 * (start - start.groupby([spans["key"], spans["step"]]).transform("min")),
        took_ms=1e3 * spans["duration_s"],
    )
    return aligned


def shared_moment_seconds(spans: pd.DataFrame) -> pd.Series[float]:
    """Return a moment that all ranks share, in seconds on the clock of each, by run, step and rank."""
    starts = spans.groupby(CLOCK_COLUMNS)["start_s"].min()
    waits = spans[spans["phase"] == "wait"]
    ends = (waits["start_s"] + waits["duration_s"]).groupby([waits[name] for name in CLOCK_COLUMNS]).min()
    ends = ends.reindex(starts.index)
    all_wait = ends.notna().groupby(level=["key", "step"]).transform("all")
    shared_moments: pd.Series[float] = ends.where(all_wait, starts)
    return shared_moments


def collective_stretch_ratio(frames: Frames, key: str) -> float:
    """Return by how much collectives last longer than the slowest worker is in them.

    A collective lasts from when the last worker enters it until the last one leaves it. The result is all
    collectives of a step over what the slowest worker spends in them, the median over the steps with spans.
    A worker that only sends is done once the kernel has its data, and waits elsewhere for the receivers.

    The workers are processes of one machine, whose clock they share.
    """
    spans = frames.spans[(frames.spans["key"] == key) & (frames.spans["phase"] == "transfer")]
    spans = spans.sort_values(["step", "rank", "start_s"]).assign(
        end_s=spans["start_s"] + spans["duration_s"]
    )
    spans["collective"] = spans.groupby(["step", "rank"]).cumcount()
    whole = spans.groupby(["step", "collective"]).agg(begin=("start_s", "max"), end=("end_s", "max"))
    all_collectives_s = (whole["end"] - whole["begin"]).groupby("step").sum()
    slowest = spans.groupby(["step", "rank"])["duration_s"].sum().groupby("step").max()
    return float((all_collectives_s / slowest).median()) if len(spans) else 1.0
