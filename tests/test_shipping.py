"""Raw runs into tables: only what is sound is collected."""

from __future__ import annotations

from pathlib import Path

from analysis.frames import from_attempts, read_parquet
from experiments.planning import Folders
from experiments.shipping import consolidate, thinned
from tests import synthetic


def test_a_run_whose_bytes_changed_is_left_out_and_named(tmp_path: Path) -> None:
    folders = Folders(tmp_path)
    for method in ("dense", "topk"):
        synthetic.timed(folders.store, synthetic.config(method))
    assert list(consolidate(folders))[-1].startswith("2 runs")
    (changed,) = (attempt for attempt in folders.store.all_valid() if attempt.run_id.startswith("topk"))
    path = changed.rank_path(0)
    path.write_text(path.read_text().replace('"step":1,', '"step":9,', 1))  # the same length
    lines = list(consolidate(folders))
    assert lines[0].startswith(f"left out {changed.run_id}")
    assert list(read_parquet(folders.records).runs["method.name"]) == ["dense"]


def test_steps_are_shipped_of_timed_runs_only(tmp_path: Path) -> None:
    frames, _ = from_attempts(synthetic.item_store(tmp_path).all_valid())
    kept = thinned(frames)
    timed = frames.runs["key"][frames.runs["train.validate"] == "never"]
    assert set(kept.steps["key"]) == set(timed)
    assert len(kept.steps) == frames.steps["key"].isin(timed).sum() > 0
    assert kept.epochs.equals(frames.epochs)
