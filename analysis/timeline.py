"""Recorded spans on one time axis.

Every rank has its own clock. In each step they are laid over each other where the first wait ends, because
that wait is a barrier and all ranks leave it together; without one, where the step begins.
"""

from __future__ import annotations

import pandas as pd

from analysis.frames import Frames
from analysis.steps import warm


def spans_of(frames: Frames, key: str) -> pd.DataFrame:
    """A run's spans.

    Raises:
        ValueError: it recorded none.
    """
    spans: pd.DataFrame = frames.spans[frames.spans["key"] == key]
    if not len(spans):
        raise ValueError(f"run {key} recorded no spans; set timing.span_steps above 0")
    return spans


def typical_step(frames: Frames, key: str) -> int:
    """The warm step nearest to their median, of those with spans.

    Raises:
        ValueError: there are no spans.
    """
    spans = spans_of(frames, key)
    slowest = warm(frames, key).steps.groupby("step")["step_s"].max()
    step_s = frames.steps[frames.steps["key"] == key].groupby("step")["step_s"].max()
    recorded = step_s.loc[spans["step"].unique()]
    of_warm = recorded[recorded.index.isin(slowest.index)]  # older records kept the spans of one cold step
    return int(((of_warm if len(of_warm) else recorded) - slowest.median()).abs().idxmin())


def aligned(spans: pd.DataFrame) -> pd.DataFrame:
    """The spans of one step: rank, phase, and `start_ms` and `took_ms` from the step's beginning."""
    chosen = spans.copy()
    chosen["start_ms"] = 1e3 * (chosen["start_s"] - chosen["rank"].map(meeting(chosen)))
    chosen["start_ms"] -= chosen["start_ms"].min()
    chosen["took_ms"] = 1e3 * chosen["duration_s"]
    columns: pd.DataFrame = chosen[["rank", "phase", "start_ms", "took_ms"]]
    return columns


def meeting(spans: pd.DataFrame) -> pd.Series[float]:
    """The same moment of one step on each rank's clock, in seconds, by rank."""
    waits = spans[spans["phase"] == "wait"]
    if set(waits["rank"]) == set(spans["rank"]):
        found: pd.Series[float] = (waits["start_s"] + waits["duration_s"]).groupby(waits["rank"]).min()
    else:
        found = spans.groupby("rank")["start_s"].min()
    return found
