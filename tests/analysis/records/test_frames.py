"""Records as frames: nothing broken gets in, and nothing whole gets lost."""

from __future__ import annotations

import gc
import json
import os
import re
import weakref

import numpy as np
import pytest

from analysis.records.attempts import load_attempt, load_valid_attempts
from analysis.records.files import DamagedFileError
from analysis.records.frames import (
    Frames,
    build_runs_table,
    cache_by_frames,
    empty_frames,
    find_run_keys,
    merge_frames,
    order_and_type_columns,
    run_labels_by_key,
)
from analysis.records.store import Store
from tests.analysis import synthetic


def test_every_rank_step_epoch_and_span_has_its_row_and_configs_are_flat_columns(frames: Frames) -> None:
    # Runs, and their ranks by steps:
    assert (len(frames.runs), len(frames.steps), len(frames.epochs)) == (3, 2 * 2 * 20, 3)
    assert set(frames.spans["step"]) == {18, 19}
    assert frames.steps["select_s"].isna().sum() == 2 * 20  # dense selects nothing
    run = frames.runs.set_index("method.name").loc["dense"]
    columns = ["cluster.link.name", "provenance.data.name", "steps_total", "task.lr_milestones"]
    assert run[columns].to_list() == ["loopback", "synthetic", 20, "[81, 122]"]
    assert json.loads(run["config_json"])["train"]["steps"] == 20
    dense = {"method.name": "dense"}
    for of, values, keys in (
        (frames, dense, [run["key"]]), (frames, {**dense, "method.nothing": 1}, []),
        (empty_frames(), dense, []),
    ):  # fmt: skip
        assert find_run_keys(of, values) == keys
    partly = frames._replace(runs=frames.runs.assign(select=np.array(["fused", None, None], dtype=object)))
    for of, torch, fused in ((frames, 3, 0), (partly, 2, 1)):  # as older records imply
        assert [len(find_run_keys(of, {"select": select})) for select in ("torch", "fused")] == [torch, fused]


def test_a_broken_last_line_is_dropped_and_a_record_with_a_short_or_missing_file_left_out_which_is_told(
    store: Store,
) -> None:
    broken, missing, short = (
        synthetic.timed(store, synthetic.config(method)) for method in ("dense", "topk", "randomk")
    )
    with broken.rank_log_path(1).open("a") as file:
        file.write('{"kind":"step","step":20,"epo')
    broken.update_manifest(files=broken.size_and_digest_by_log())
    missing.rank_log_path(1).unlink()
    os.truncate(short.rank_log_path(0), 1000)
    frames, notes = load_valid_attempts([broken, missing, short])
    assert (list(frames.runs["key"]), len(frames.steps)) == ([broken.key], 2 * 20)
    assert re.search(r"rank1\.jsonl.*1 broken line|1 broken line.*rank1\.jsonl", notes[0])
    assert len(notes) == 3


def test_combine_takes_a_run_whole_from_the_newer_frames(store: Store, frames: Frames) -> None:
    key = synthetic.key(frames, "topk")
    short = synthetic.config("topk", train={"epochs": 1, "steps": 12, "validate": "never"})
    new, _ = load_attempt(synthetic.timed(store, short))
    both = merge_frames(frames, Frames(*(frame.assign(key=key) for frame in new)))  # under the same key
    assert len(both.runs) == 3
    assert both.steps["key"].eq(key).value_counts().to_dict() == {False: 2 * 20, True: 2 * 12}


def test_variants_of_one_run_have_a_key_each_and_share_a_group(store: Store) -> None:
    attempt = synthetic.alternated(store, ["dense", "topk"], blocks=4, block_steps=3)
    frames, notes = load_attempt(attempt)
    assert not notes
    labels = {f"{attempt.key}/{method}": method for method in ("dense", "topk")}
    assert run_labels_by_key(frames.runs).to_dict() == labels
    runs = frames.runs.set_index("key")
    assert runs["method.name"].to_dict() == runs["variant"].to_dict() == labels
    assert set(runs["group"]) == {attempt.key}
    for _, steps in frames.steps.groupby(["key", "rank"]):
        assert steps["step"].to_list() == list(range(2 + 4 * 3))
        assert steps["block"].to_list() == [0, 0, *np.repeat([1, 2, 3, 4], 3)]
    path = attempt.rank_log_path(0)
    path.write_text(path.read_text().replace('"variant":"topk"', '"variant":"topq"'))
    attempt.update_manifest(files=attempt.size_and_digest_by_log())
    with pytest.raises(DamagedFileError, match="variant topq"):
        load_attempt(attempt)


def test_ordinary_runs_and_older_tables_are_in_no_group(frames: Frames) -> None:
    older = order_and_type_columns("steps", frames.steps.drop(columns="block"))
    for steps in (frames.steps, older):
        assert steps["block"].isna().all()
    for runs in (frames.runs, order_and_type_columns("runs", frames.runs.drop(columns="group"))):
        assert runs["group"].to_list() == [None] * 3


calls: list[tuple[int, int]] = []


@cache_by_frames
def counted(frames: Frames, add: int = 0) -> int:
    calls.append((len(frames.runs), add))
    return len(frames.runs) + add


def test_what_is_remembered_is_computed_once_for_the_same_frames_and_arguments() -> None:
    one, other = empty_frames(), empty_frames()._replace(runs=build_runs_table([{"key": "a", "run_id": "a"}]))
    calls.clear()
    found = [counted(one), counted(one), counted(one, 2), counted(one, add=2), counted(other)]
    assert found == [0, 0, 2, 2, 1]
    assert calls == [(0, 0), (0, 2), (0, 2), (1, 0)]
    assert counted(one._replace(runs=other.runs)) == 1
    gone = [weakref.ref(table) for table in one]
    del one
    gc.collect()
    assert {reference() for reference in gone} == {None}  # nothing is kept of frames that are gone
