"""The Trace Event Format: what Perfetto needs of every event, and what must not overlap."""

from __future__ import annotations

import json
from typing import Any

import pytest

from analysis.records.frames import Frames
from analysis.records.parquet import newest_frames
from analysis.records.store import Store
from analysis.times.trace import trace
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
    return newest_frames(store, store.runs(), store.root.parent / "kept")[0]


def key(frames: Frames) -> str:
    return str(frames.runs.loc[frames.runs["group"].isna(), "key"].iloc[0])


def of_kind(found: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [event for event in found["traceEvents"] if event["ph"] == kind]


def test_every_event_has_the_keys_of_its_kind_and_the_whole_is_json(frames: Frames) -> None:
    found = trace(frames, [key(frames)], "a run")
    assert json.loads(json.dumps(found, allow_nan=False))["displayTimeUnit"] == "ms"
    for event in found["traceEvents"]:
        kinds = KEYS[event["ph"]]
        assert set(event) == set(kinds)
        assert all(isinstance(event[name], kind) for name, kind in kinds.items()), event
        assert event["ph"] == "X" or event["name"] in METADATA
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in of_kind(found, "X"))


def test_a_process_is_a_rank_and_a_slice_a_step_or_a_phase(frames: Frames) -> None:
    found = trace(frames, [key(frames)], "a run")
    names = {event["pid"]: event["args"]["name"] for event in found["traceEvents"]
             if event["name"] == "process_name"}  # fmt: skip
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    slices = of_kind(found, "X")
    steps = [event for event in slices if event["cat"] == "step"]
    assert len(steps) == len(frames.steps[frames.steps["key"] == key(frames)])
    assert len(slices) - len(steps) == len(frames.spans[frames.spans["key"] == key(frames)])
    assert {event["tid"] for event in steps} == {0}
    assert all(event["args"]["step"] in {18, 19} for event in slices if event["cat"] == "phase")


def test_clocks_of_ranks_are_laid_over_each_other_where_the_first_wait_ends(frames: Frames) -> None:
    waits = [event for event in of_kind(trace(frames, [key(frames)], "a run"), "X")
             if event["name"] == "communication: wait"]  # fmt: skip
    for step in {event["args"]["step"] for event in waits}:
        ends = [event["ts"] + event["dur"] for event in waits if event["args"]["step"] == step]
        assert len(ends) == 3
        assert ends == pytest.approx([ends[0]] * 3, abs=1)  # microseconds; the clocks are seconds apart


def test_slices_of_a_thread_do_not_overlap(frames: Frames) -> None:
    spans = frames.spans.copy()  # the transfer goes on beside the backward pass
    at_once = spans["phase"] == "transfer"
    spans.loc[at_once, "start_s"] -= 0.02
    for each in (frames, frames._replace(spans=spans)):
        threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for event in of_kind(trace(each, [key(frames)], "a run"), "X"):
            threads.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["dur"]))
        for slices in threads.values():
            ordered = sorted(slices)
            ends = [start + took for start, took in ordered]
            assert all(end <= start + 1e-6 for end, (start, _) in zip(ends, ordered[1:], strict=False))
    assert {thread for _, thread in threads} == {0, 1, 2}


def test_variants_that_took_turns_are_in_one_trace(frames: Frames) -> None:
    keys = frames.runs.loc[frames.runs["group"].notna(), "key"].tolist()
    found = trace(frames, keys, "turns")
    assert {event["args"]["variant"] for event in of_kind(found, "X")} == {"dense", "topk"}
    assert {event["name"] for event in of_kind(found, "X")} >= {"dense step 0", "topk step 0"}


def test_simulated_times_are_called_so(frames: Frames) -> None:
    assert trace(frames, [key(frames)], "a run")["otherData"]["times"] == "measured"
    simulated = frames._replace(runs=frames.runs.assign(simulated=True))
    assert trace(simulated, [key(frames)], "a run")["otherData"]["times"] == "simulated"


def test_a_loss_that_is_no_number_is_left_out(frames: Frames) -> None:
    diverged = frames._replace(steps=frames.steps.assign(loss=float("nan")))
    found = trace(diverged, [key(frames)], "a run")
    json.dumps(found, allow_nan=False)
    assert all("loss" not in event["args"] for event in of_kind(found, "X"))


def test_a_run_without_spans_is_refused(frames: Frames) -> None:
    with pytest.raises(ValueError, match="span_steps"):
        trace(frames._replace(spans=frames.spans.iloc[:0]), [key(frames)], "a run")
