"""The cache of frames: nothing that is damaged or of another record is taken from it."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pandas.testing import assert_frame_equal

from analysis.records import attempts, frame_cache
from analysis.records.attempts import load_newest_attempts
from analysis.records.frame_cache import load_newest_attempts_cached
from analysis.records.frames import Frames
from analysis.records.store import Store
from tests.analysis import synthetic


def load(store: Store, folder: Path, *runs: str) -> Frames:
    """Return the frames of these runs, else of all, of which nothing is said."""
    frames, notes = load_newest_attempts_cached(store, runs or store.list_run_ids(), folder)
    assert notes == []
    return frames


def assert_equal(frames: Frames, others: Frames) -> None:
    for one, other in zip(frames, others, strict=True):
        assert_frame_equal(one, other, rtol=1e-6, check_dtype=False)


def test_what_is_read_from_the_cache_is_what_the_logs_hold(store: Store, tmp_path: Path) -> None:
    """Frames have the runs' order and each run's own types, also where the cache can't be written."""
    synthetic.timed(store, synthetic.config("dense"))
    synthetic.timed(store, synthetic.config("topk") | {"method": {"name": "topk", "density": "auto"}})
    synthetic.learned(store, synthetic.learning_config("topk", epochs=3))
    synthetic.alternated(store, ["dense", "topk"], blocks=3)
    names = store.list_run_ids()
    (store.root / "cache").write_text("no folder")
    for runs in (names, names[::-1], names[1:2]):
        for folder in (tmp_path, tmp_path, store.root):
            assert_equal(load(store, folder, *runs), load_newest_attempts(store, runs).frames)


def test_a_damaged_batch_or_one_of_another_record_is_made_again(store: Store, tmp_path: Path) -> None:
    attempt, other = (synthetic.timed(store, synthetic.config(method)) for method in ("dense", "topk"))
    first = load(store, tmp_path, attempt.run_id)
    (batch,) = tmp_path.glob("cache/*/*")
    for path in [*batch.iterdir()]:
        raw = path.read_bytes()
        middle = len(raw) // 3
        path.write_bytes(raw[:middle] + bytes([raw[middle] ^ 255]) + raw[middle + 1 :])
        assert_equal(load(store, tmp_path, attempt.run_id), first)
        assert path.read_bytes() == raw
    load(store, tmp_path, other.run_id)
    (batch_of_other,) = [path for path in tmp_path.glob("cache/*/*") if path != batch]
    shutil.rmtree(batch)
    shutil.copytree(batch_of_other, batch)  # which names another run
    assert set(load(store, tmp_path, attempt.run_id).runs["run_id"]) == {attempt.run_id}
    attempt.update_manifest(parameters=7)
    assert load(store, tmp_path, attempt.run_id).runs["parameters"].tolist() == [7]


def test_several_processes_may_fill_it_at_a_time(store: Store, tmp_path: Path) -> None:
    synthetic.timed(store, synthetic.config())
    with ThreadPoolExecutor(6) as pool:
        every = [*pool.map(load, [store] * 6, [tmp_path] * 6)]
    for frames in every:
        assert len(frames.steps) == 2 * 20
        assert_equal(frames, every[0])
    assert len([*tmp_path.glob("cache/*/*")]) == 1


def test_the_newest_whole_attempt_of_each_run_is_taken_and_damaged_ones_are_named(
    store: Store, tmp_path: Path
) -> None:
    old, new = (synthetic.timed(store, synthetic.config(), slow=slow) for slow in (1.0, 2.0))
    other = synthetic.timed(store, synthetic.config("topk"))
    log = new.rank_log_path(1)
    log.write_text(log.read_text().replace('"step":1,', '"step":9,', 1))  # the same length
    with other.rank_log_path(0).open("a") as half:
        half.write('{"kind":')
    other.update_manifest(files=other.size_and_digest_by_log())
    for verify in (False, True, False):
        frames, notes = load_newest_attempts_cached(
            store, store.list_run_ids(), tmp_path, verify_digests=verify
        )
        assert set(frames.runs["attempt"]) == {old.number, other.number}
        assert sorted(notes) == [
            f"dropped 1 broken line(s) in {other.name}/rank0.jsonl",
            f"left out {new.name}: rank1.jsonl is not what was recorded: it has another digest",
        ]


def test_many_batches_of_few_runs_are_kept_as_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_cache, "MAX_SMALL_BATCHES", 2)
    monkeypatch.setattr(attempts, "BATCH_RUNS", 3)
    for seed in range(4):
        synthetic.timed(store, synthetic.config(seed=seed))
        assert len(load(store, tmp_path).runs) == seed + 1
        assert len([*tmp_path.glob("cache/*/*")]) <= 3
    assert_equal(load(store, tmp_path), load_newest_attempts(store, store.list_run_ids()).frames)
