"""Records as frames: nothing broken gets in, and nothing whole gets lost."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

from analysis.records.attempts import from_attempts, of_attempt
from analysis.records.files import Damaged
from analysis.records.frames import Frames, combine, empty, keys_of, label, remembered, runs_frame, typed
from analysis.records.store import Store
from tests.analysis import synthetic


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


@pytest.fixture
def frames(store: Store) -> Frames:
    for method in ("dense", "topk"):
        synthetic.timed(store, synthetic.config(method))
    synthetic.learned(store, synthetic.learning_config("topk", epochs=3))
    return synthetic.frames_of(store)


def test_every_rank_step_epoch_and_span_has_its_row_and_configs_are_flat_columns(frames: Frames) -> None:
    assert len(frames.runs) == 3
    assert len(frames.steps) == 2 * 2 * 20  # runs, ranks, steps
    assert len(frames.epochs) == 3
    assert set(frames.spans["step"]) == {18, 19}
    assert frames.steps["select_s"].isna().sum() == 2 * 20  # dense selects nothing
    run = frames.runs.set_index("method.name").loc["dense"]
    columns = ["cluster.link.name", "provenance.data.name", "steps_total", "task.lr_milestones"]
    assert run[columns].to_list() == ["loopback", "synthetic", 20, "[81, 122]"]
    assert json.loads(run["config_json"])["train"]["steps"] == 20
    (found,) = keys_of(frames, {"method.name": "dense"})
    assert found == run["key"]
    assert keys_of(frames, {"method.name": "dense", "method.nothing": 1}) == []
    assert keys_of(empty(), {"method.name": "dense"}) == []
    partly = frames._replace(runs=frames.runs.assign(select=np.array(["fused", None, None], dtype=object)))
    for runs, select, n in (
        (frames, "torch", 3),
        (frames, "fused", 0),
        (partly, "torch", 2),
        (partly, "fused", 1),
    ):
        assert len(keys_of(runs, {"select": select})) == n  # what older records imply


def test_a_broken_last_line_is_dropped_and_reported(store: Store) -> None:
    attempt = synthetic.timed(store, synthetic.config())
    with attempt.rank_path(1).open("a") as file:
        file.write('{"kind":"step","step":20,"epo')
    attempt.update(files=attempt.fingerprints())
    frames, (note,) = from_attempts([attempt])
    assert len(frames.steps) == 2 * 20
    assert re.search(r"rank1\.jsonl.*1 broken line|1 broken line.*rank1\.jsonl", note)


def test_a_record_with_a_missing_or_short_file_is_left_out_and_reported(store: Store) -> None:
    missing, short = (synthetic.timed(store, synthetic.config(method)) for method in ("dense", "topk"))
    missing.rank_path(1).unlink()
    short.rank_path(0).write_bytes(short.rank_path(0).read_bytes()[:-30])
    frames, notes = from_attempts([missing, short])
    assert (len(frames.runs), len(notes)) == (0, 2)


def test_combine_takes_a_run_whole_from_the_newer_frames(store: Store, frames: Frames) -> None:
    key = synthetic.key(frames, "topk")
    short = synthetic.config("topk", train={"epochs": 1, "steps": 12, "validate": "never"})
    new, _ = of_attempt(synthetic.timed(store, short))
    measured_again = Frames(*(frame.assign(key=key) for frame in new))  # under the same key
    both = combine(frames, measured_again)
    assert len(both.runs) == 3
    assert (both.steps["key"] == key).sum() == 2 * 12
    assert len(both.steps) == 2 * 20 + 2 * 12


def test_variants_of_one_run_have_a_key_each_and_share_a_group(store: Store) -> None:
    attempt = synthetic.alternated(store, ["dense", "topk"], blocks=4, block_steps=3)
    frames, notes = of_attempt(attempt)
    assert not notes
    for name in ("method.name", "variant"):
        assert frames.runs[name].to_list() == ["dense", "topk"]
    labels = {f"{attempt.key}/{method}": method for method in ("dense", "topk")}
    assert label(frames.runs).to_dict() == labels
    assert set(frames.runs["group"]) == {attempt.key}
    for _, steps in frames.steps.groupby(["key", "rank"]):
        assert steps["step"].to_list() == list(range(2 + 4 * 3))
        assert steps["block"].to_list() == [0, 0, *np.repeat([1, 2, 3, 4], 3)]
    path = attempt.rank_path(0)
    path.write_text(path.read_text().replace('"variant":"topk"', '"variant":"topq"'))
    attempt.update(files=attempt.fingerprints())
    with pytest.raises(Damaged, match="variant topq"):
        of_attempt(attempt)


def test_ordinary_runs_and_older_tables_are_in_no_group(frames: Frames) -> None:
    older = typed("steps", frames.steps.drop(columns="block"))
    for steps in (frames.steps, older):
        assert steps["block"].isna().all()
    for runs in (frames.runs, typed("runs", frames.runs.drop(columns="group"))):
        assert runs["group"].to_list() == [None] * 3


calls: list[tuple[int, int]] = []


@remembered
def counted(frames: Frames, add: int = 0) -> int:
    calls.append((len(frames.runs), add))
    return len(frames.runs) + add


def test_what_is_remembered_is_computed_once_for_the_same_frames_and_arguments() -> None:
    one, other = empty(), empty()._replace(runs=runs_frame([{"key": "a", "run_id": "a"}]))
    calls.clear()
    found = [counted(one), counted(one), counted(one, 2), counted(one, add=2), counted(other)]
    assert found == [0, 0, 2, 2, 1]
    assert calls == [(0, 0), (0, 2), (0, 2), (1, 0)]
    assert counted(one._replace(runs=other.runs)) == 1


def test_nothing_is_kept_of_frames_that_are_gone() -> None:
    frames = empty()
    counted(frames)
    gone = [weakref.ref(table) for table in frames]
    del frames
    gc.collect()
    assert not any(reference() is not None for reference in gone)
