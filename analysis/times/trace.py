"""A run's recorded spans as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

The format is Google's Trace Event Format, as JSON: a process for each rank, a slice for each step and each
phase of a drawn step. Times are microseconds on the clock of rank 0. How far another rank's clock is ahead is
the median over the drawn steps of what analysis/pictures/timeline.py finds in each: leaving a barrier may
take a rank milliseconds once, and a clock does not jump.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.pictures.timeline import shared_moment_seconds, spans_of_run
from analysis.records import phases
from analysis.records.frames import Frames

STEP_LANE = 0  # the lane of a rank that shows its steps; phases are in those after it
STEP_FACTS = ("epoch", "loss", "wire_bytes", "sent_density")  # of a step
NS_PER_S = 1e9
MAX_OVERLAP_NS = 100  # spans that overlap by less follow each other: stored times have no more digits
TraceEvent = dict[str, Any]


def build_perfetto_trace(frames: Frames, keys: Sequence[str], name: str) -> TraceEvent:
    """Return the trace of one run: of its key, or of the keys of variants that duration_ns turns in it.

    Raises:
        ValueError: no spans were recorded.
    """
    spans = pd.concat([spans_of_run(frames, key) for key in keys])
    clock_ahead_s = _clock_ahead_s_by_rank(spans)
    steps = frames.steps[frames.steps["key"].isin(keys)]
    slices = pd.concat(
        [
            _to_slices(steps, "step_s", clock_ahead_s),
            _to_slices(spans, "duration_s", clock_ahead_s),
        ]
    )
    slices["start_ns"] -= slices["start_ns"].min()
    events = list[TraceEvent]()
    for rank, rank_slices in slices.groupby("rank"):
        is_span = rank_slices["phase"].notna()
        lanes = [rank_slices[~is_span], *_split_into_lanes(rank_slices[is_span])]
        events += _name_events(int(str(rank)), len(lanes))
        for lane, lane_slices in enumerate(lanes):
            events += _slice_events(lane_slices, lane)
    simulated = bool(frames.runs.loc[frames.runs["key"].isin(keys), "simulated"].any())
    metadata = {"run": name, "times": "simulated" if simulated else "measured"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": metadata}


def _clock_ahead_s_by_rank(spans: pd.DataFrame) -> pd.Series[float]:
    """Return seconds by which the clock of each rank is ahead of the first one's."""
    moments = shared_moment_seconds(spans)
    ahead = moments - moments.groupby(level=["key", "step"]).transform("first")
    median: pd.Series[float] = ahead.groupby(level="rank").median()
    return median


def _to_slices(rows: pd.DataFrame, duration: str, clock_ahead_s: pd.Series[float]) -> pd.DataFrame:
    """Return steps or spans with whole `start_ns` and `duration_ns`; of steps, phase is NaN."""
    start_s = rows["start_s"] - rows["rank"].map(clock_ahead_s).fillna(0.0)
    slices = rows.reindex(columns=["key", "rank", "step", "phase", *STEP_FACTS]).assign(
        start_ns=(NS_PER_S * start_s).round().astype("int64"),
        duration_ns=(NS_PER_S * rows[duration]).round().astype("int64"),
    )
    ordered: pd.DataFrame = slices.sort_values(
        ["start_ns", "duration_ns"], ascending=[True, False], kind="stable"
    )
    return ordered


def _split_into_lanes(spans: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the spans of one rank, each in the first lane in which none is under way; at least one lane."""
    ends = [0]
    lane_by_place = list[int]()
    for start, duration_ns in zip(spans["start_ns"], spans["duration_ns"], strict=True):
        lane = next((lane for lane, end in enumerate(ends) if end <= start + MAX_OVERLAP_NS), len(ends))
        ends[lane : lane + 1] = [start + duration_ns]
        lane_by_place.append(lane)
    lanes = np.array(lane_by_place, dtype=int)
    return [spans[lanes == lane] for lane in range(len(ends))]


def _name_events(rank: int, lanes: int) -> Iterator[TraceEvent]:
    yield _metadata_event("process_name", rank, 0, name=f"rank {rank}")
    yield _metadata_event("process_sort_index", rank, 0, sort_index=rank)
    for lane, name in enumerate(["steps", "phases", *["phases at the same time"] * (lanes - 2)]):
        yield _metadata_event("thread_name", rank, lane, name=name)
        yield _metadata_event("thread_sort_index", rank, lane, sort_index=lane)


def _metadata_event(kind: str, rank: int, lane: int, **args: Any) -> TraceEvent:
    return {"name": kind, "ph": "M", "pid": rank, "tid": lane, "args": args}


def _slice_events(slices: pd.DataFrame, lane: int) -> Iterator[TraceEvent]:
    """Yield complete events, in microseconds.

    Each ends where the next one begins at the latest, for slices of a thread must not overlap.
    """
    room = -slices["start_ns"].diff(-1)
    duration_ns = slices["duration_ns"].astype(float)
    duration_ns = duration_ns.where(~(duration_ns > room), room)
    is_step = lane == STEP_LANE
    for row in slices.assign(duration_ns=duration_ns).to_dict("records"):
        variant = str(row["key"]).partition("/")[2]
        args: dict[str, Any] = {"step": int(row["step"])}
        if variant:
            args["variant"] = variant
        if is_step:
            name = f"{variant} step {row['step']}".strip()
            args |= {fact: row[fact] for fact in STEP_FACTS if math.isfinite(row[fact])}
        else:
            name = phases.find_phase_or_default(row["phase"]).label
        yield {
            "name": name,
            "cat": "step" if is_step else "phase",
            "ph": "X",
            "pid": int(row["rank"]),
            "tid": lane,
            "ts": row["start_ns"] / 1e3,
            "dur": row["duration_ns"] / 1e3,
            "args": args,
        }
