"""The Trace Event Format: what Perfetto needs of every event, and what must not overlap."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pandas as pd
import pytest

from analysis.records.frames import Frames
from analysis.records.store import Store
from analysis.times.trace import build_perfetto_trace
from tests.analysis import synthetic

# Of google.github.io/perfetto's reading of the format: the keys of a complete event and of metadata.
EVERY = {"name": str, "ph": str, "pid": int, "tid": int, "args": dict}
KEYS = {"X": {**EVERY, "cat": str, "ts": float, "dur": float}, "M": EVERY}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    store = Store(tmp_path_factory.mktemp("runs"))
    synthetic.timed(store, synthetic.config("topk", workers=3))
    synthetic.alternated(store, ["dense", "topk"], blocks=3)
    return synthetic.frames_of(store)


def traced(frames: Frames) -> dict[str, Any]:
    """Return the trace of the run of three workers."""
    (key,) = frames.runs.loc[frames.runs["group"].isna(), "key"]
    found = build_perfetto_trace(frames, [key], "a run")
    json.dumps(found, allow_nan=False)
    return found


def slices(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == "X"]


def test_every_event_has_the_keys_of_its_kind_and_ranks_clocks_meet_where_the_first_wait_ends(
    frames: Frames,
) -> None:
    found = traced(frames)
    assert (found["displayTimeUnit"], found["otherData"]["times"]) == ("ms", "measured")
    for event in found["traceEvents"]:
        assert {key: type(value) for key, value in event.items()} == KEYS[event["ph"]], event
        assert event["ph"] == "X" or event["name"] in METADATA
    names = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "process_name"]
    assert names == ["rank 0", "rank 1", "rank 2"]
    events = pd.DataFrame(slices(found))
    assert (events[["ts", "dur"]] >= 0).all(axis=None)
    events["step"] = [args["step"] for args in events["args"]]
    steps, phases = (events[events["cat"] == kind] for kind in ("step", "phase"))
    assert (len(steps), {*steps["tid"]}) == (3 * 20, {0})
    assert {*zip(phases["pid"], phases["step"], strict=True)} == {*product(range(3), (18, 19))}
    waits = events[events["name"] == "communication: wait"]
    ends = (waits["ts"] + waits["dur"]).groupby(waits["step"])
    assert set(ends.count()) == {3}
    assert (ends.max() - ends.min()).max() < 1  # microseconds; the clocks are seconds apart


def test_slices_of_a_thread_do_not_overlap(frames: Frames) -> None:
    spans = frames.spans.copy()  # the transfer goes on beside the backward pass
    spans.loc[spans["phase"] == "transfer", "start_s"] -= 0.02
    for each in (frames, frames._replace(spans=spans)):
        events = pd.DataFrame(slices(traced(each))).sort_values("ts")
        for _, thread in events.groupby(["pid", "tid"]):
            ends = thread["ts"] + thread["dur"]
            assert (ends.to_numpy()[:-1] <= thread["ts"].to_numpy()[1:] + 1e-6).all()
    assert {*events["tid"]} == {0, 1, 2}


def test_variants_that_took_turns_are_in_one_trace(frames: Frames) -> None:
    keys = frames.runs.loc[frames.runs["group"].notna(), "key"].tolist()
    events = slices(build_perfetto_trace(frames, keys, "turns"))
    assert {event["args"]["variant"] for event in events} == {"dense", "topk"}
    assert {event["name"] for event in events} >= {"dense step 0", "topk step 0"}


def test_simulated_times_are_called_so_and_a_loss_that_is_no_number_is_left_out(frames: Frames) -> None:
    steps = frames.steps.assign(loss=float("nan"))
    found = traced(frames._replace(runs=frames.runs.assign(simulated=True), steps=steps))
    assert found["otherData"]["times"] == "simulated"
    assert all("loss" not in event["args"] for event in slices(found))


def test_a_run_without_spans_is_refused(frames: Frames) -> None:
    with pytest.raises(ValueError, match="span_steps"):
        traced(frames._replace(spans=frames.spans.iloc[:0]))
