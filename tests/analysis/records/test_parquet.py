"""Frames on disk: Parquet returns what it was given, always as the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from pandas.testing import assert_frame_equal

from analysis.records.attempts import load_attempt, load_valid_attempts
from analysis.records.frames import Frames, empty_frames, merge_frames, select_runs
from analysis.records.parquet import read_parquet, write_parquet
from analysis.records.store import Store
from tests.analysis import synthetic


def test_parquet_gives_back_what_it_was_given_and_is_the_same_bytes_twice(
    frames: Frames, tmp_path: Path
) -> None:
    for path in write_parquet(frames, tmp_path):
        (again,) = [other for other in write_parquet(frames, tmp_path / "b") if other.name == path.name]
        assert path.read_bytes() == again.read_bytes()
    read = read_parquet(tmp_path)
    for name, before, after in zip(Frames._fields, frames, read, strict=True):
        texts = before.select_dtypes(exclude="number").astype(object)
        # float32 on disk keeps seven digits of steps and spans
        expected = before.assign(**texts.where(texts.notna(), None))
        assert_frame_equal(after, expected, check_dtype=name != "runs", rtol=1e-6)
    for column in ("wire_bytes", "start_s"):
        assert read.steps[column].eq(frames.steps[column]).all()
    # A text that stands in many rows is in memory once: rules of 14,000 characters in each row of thousands.
    keys = read.steps["key"]
    assert len({id(key) for key in keys[keys == keys[0]]}) == 1 < (keys == keys[0]).sum()


def test_empty_frames_survive_everything(tmp_path: Path, frames: Frames) -> None:
    write_parquet(load_valid_attempts([])[0], tmp_path)
    for nothing in (read_parquet(tmp_path), read_parquet(tmp_path / "nowhere"), select_runs(frames, [])):
        assert not any(map(len, nothing))
        for both in (merge_frames(nothing, frames), merge_frames(frames, nothing)):
            assert_frame_equal(both.steps, frames.steps)
    assert list(empty_frames().steps.columns) == list(frames.steps.columns)


PANDAS = {  # metadata that pandas would obey
    "no JSON": b"{bad",
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "an index that is not there": b'{"index_columns": ["nope"], "column_indexes": [], "columns": []}',
    "an index": b'{"index_columns": ["key"], "column_indexes": [], "columns": []}',
    "a range without a step": (
        b'{"index_columns": [{"kind": "range", "name": null, "start": 0, "stop": 2, "step": 0}],'
        b' "column_indexes": [], "columns": []}'
    ),
}


def test_what_a_file_says_to_pandas_is_not_obeyed_and_a_corrupt_file_is_named(
    frames: Frames, tmp_path: Path
) -> None:
    path, *_ = write_parquet(frames, tmp_path)
    before = read_parquet(tmp_path).runs
    table = pq.read_table(path)
    for metadata in PANDAS.values():
        pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"pandas": metadata}), path)
        assert_frame_equal(read_parquet(tmp_path).runs, before)
    (tmp_path / "steps.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"steps\.parquet is not a whole Parquet file"):
        read_parquet(tmp_path)


def test_a_column_that_configs_disagree_about_becomes_text(tmp_path: Path) -> None:
    configs = (
        synthetic.config() | {"method": {"name": "topk", "density": density}} for density in ("auto", 0.001)
    )
    frames = synthetic.frames_with(tmp_path / "runs", *configs)
    write_parquet(frames, tmp_path)
    assert set(merge_frames(read_parquet(tmp_path), frames).runs["method.density"]) == {"auto", "0.001"}


def test_losses_that_are_not_numbers_stay_so(store: Store, tmp_path: Path) -> None:
    attempt = synthetic.timed(store, synthetic.config())
    log = attempt.rank_log_path(0)
    log.write_text(log.read_text().replace('"loss":2.3,', '"loss":NaN,').replace('"lr":0.1', '"lr":null'))
    attempt.update_manifest(files=attempt.size_and_digest_by_log())
    write_parquet(load_attempt(attempt)[0], tmp_path)
    steps = read_parquet(tmp_path).steps
    assert steps.loc[0, ["loss", "lr"]].isna().all()
    assert steps["lr"].dtype == np.float64
