"""Records into frames: nothing broken gets in, nothing whole gets lost, and Parquet returns what it got."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pandas.testing import assert_frame_equal

from analysis import frames as tables
from analysis.frames import Frames, combine, from_attempts, read_parquet, restrict, write_parquet
from analysis.records import Store
from tests import synthetic


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


@pytest.fixture
def frames(store: Store) -> Frames:
    for method in ("dense", "topk"):
        synthetic.timed(store, synthetic.config(method))
    synthetic.learned(store, synthetic.learning_config("topk", epochs=3))
    return from_attempts(store.all_valid())[0]


def test_every_rank_step_epoch_and_span_has_its_row(frames: Frames) -> None:
    assert len(frames.runs) == 3
    assert len(frames.steps) == 2 * 2 * 20  # runs, ranks, steps
    assert len(frames.epochs) == 3
    assert set(frames.spans["step"]) == {18, 19}
    assert frames.steps["select_s"].isna().sum() == 2 * 20  # dense selects nothing


def test_configs_and_provenance_are_flat_columns(frames: Frames) -> None:
    run = frames.runs.set_index("method.name").loc["dense"]
    assert run["cluster.link.name"] == "loopback"
    assert run["provenance.data.name"] == "synthetic"
    assert json.loads(run["task.lr_milestones"]) == [81, 122]
    assert json.loads(run["config_json"])["train"]["steps"] == 20
    assert run["steps_total"] == 20


def test_a_broken_last_line_is_dropped_and_reported(store: Store) -> None:
    attempt = synthetic.timed(store, synthetic.config())
    with attempt.rank_path(1).open("a") as file:
        file.write('{"kind":"step","step":20,"epo')
    attempt.finish(**{name: attempt.manifest[name] for name in ("steps", "simulated")})
    frames, notes = from_attempts([attempt])
    assert len(frames.steps) == 2 * 20
    assert len(notes) == 1
    assert "1 broken line" in notes[0]
    assert "rank1.jsonl" in notes[0]


def test_a_record_with_a_missing_or_short_file_is_left_out_and_reported(store: Store) -> None:
    missing = synthetic.timed(store, synthetic.config("dense"))
    short = synthetic.timed(store, synthetic.config("topk"))
    missing.rank_path(1).unlink()
    short.rank_path(0).write_bytes(short.rank_path(0).read_bytes()[:-30])
    assert not missing.is_valid()
    assert not short.is_valid()
    frames, notes = from_attempts([missing, short])
    assert not len(frames.runs)
    assert len(notes) == 2


def test_parquet_gives_back_what_it_was_given(frames: Frames, tmp_path: Path) -> None:
    write_parquet(frames, tmp_path)
    for name, before, after in zip(Frames._fields, frames, read_parquet(tmp_path), strict=True):
        # float32 on disk keeps seven digits of steps and spans
        assert_frame_equal(after, before, check_dtype=name != "runs", rtol=1e-6)
    after = read_parquet(tmp_path)
    assert (after.steps["wire_bytes"] == frames.steps["wire_bytes"]).all()
    assert (after.steps["start_s"] == frames.steps["start_s"]).all()


def test_parquet_is_the_same_bytes_twice_and_no_pickle(frames: Frames, tmp_path: Path) -> None:
    first = [path.read_bytes() for path in write_parquet(frames, tmp_path / "a")]
    second = [path.read_bytes() for path in write_parquet(frames, tmp_path / "b")]
    assert first == second
    for raw in first:
        with pytest.raises(pickle.UnpicklingError):
            pickle.loads(raw)


def test_empty_frames_survive_everything(tmp_path: Path, frames: Frames) -> None:
    empty, notes = from_attempts([])
    assert notes == []
    write_parquet(empty, tmp_path)
    for again in (read_parquet(tmp_path), read_parquet(tmp_path / "nowhere"), restrict(frames, [])):
        assert [len(frame) for frame in again] == [0, 0, 0, 0]
        assert_frame_equal(combine(again, frames).steps, frames.steps)
        assert_frame_equal(combine(frames, again).epochs, frames.epochs)
    assert list(tables.empty().steps.columns) == list(frames.steps.columns)


def test_a_corrupt_parquet_file_is_named(frames: Frames, tmp_path: Path) -> None:
    write_parquet(frames, tmp_path)
    (tmp_path / "steps.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"steps\.parquet is not a whole Parquet file"):
        read_parquet(tmp_path)


def test_combine_takes_a_run_whole_from_the_newer_frames(store: Store, frames: Frames) -> None:
    config = synthetic.config("topk") | {"train": {"epochs": 1, "steps": 12, "validate": "never"}}
    new, _ = from_attempts([synthetic.timed(store, config)])
    key = frames.runs["key"][(frames.runs["method.name"] == "topk") & (frames.runs["workers"] == 2)].iloc[0]
    renamed = Frames(*(frame.assign(key=key) for frame in new))  # as if measured again under the same key
    both = combine(frames, renamed)
    assert len(both.runs) == 3
    assert (both.steps["key"] == key).sum() == 2 * 12
    assert len(both.steps) == 2 * 20 + 2 * 12


def test_a_column_that_configs_disagree_about_becomes_text(store: Store, tmp_path: Path) -> None:
    auto = synthetic.config("topk")
    auto["method"] = auto["method"] | {"density": "auto"}
    for config in (auto, synthetic.config("topk"), synthetic.config("dense")):
        synthetic.timed(store, config)
    frames, _ = from_attempts(store.all_valid())
    write_parquet(frames, tmp_path)
    read = combine(read_parquet(tmp_path), frames)
    assert set(read.runs["method.density"].dropna()) == {"auto", "0.001"}


def test_losses_that_are_not_numbers_stay_so(store: Store, tmp_path: Path) -> None:
    attempt = synthetic.timed(store, synthetic.config())
    lines = (
        attempt.rank_path(0)
        .read_text()
        .replace('"loss":2.3,', '"loss":NaN,')
        .replace('"lr":0.1', '"lr":null')
    )
    attempt.rank_path(0).write_text(lines)
    attempt.finish(steps=20, simulated=False)
    write_parquet(from_attempts([attempt])[0], tmp_path)
    steps = read_parquet(tmp_path).steps
    assert np.isnan(steps["loss"].iloc[0])
    assert steps["lr"].dtype == np.float64
    assert pd.isna(steps["lr"].iloc[0])
