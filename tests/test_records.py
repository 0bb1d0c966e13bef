"""The store: written whole or not at all, keyed by what is measured, and nothing lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.records import RankLog, Store, read_lines, run_id, run_key, write_atomic

CONFIG = {
    "method": {"name": "topk", "density": 0.001},
    "task": {"name": "vgg16_cifar10"},
    "cluster": {"where": "local"},
    "workers": 2,
    "seed": 0,
    "data": {"root": "somewhere"},
    "profile": "laptop",
    "recipe": "yoon2022",
}


def finished(store: Store, loss: float = 1.0) -> object:
    attempt = store.begin(CONFIG)
    log = RankLog(attempt.rank_path(0))
    log.add("step", step=0, loss=loss)
    log.flush(durable=True)
    attempt.finish(simulated=False)
    return attempt


def test_the_key_ignores_where_data_lie_and_how_the_run_was_named() -> None:
    elsewhere = {**CONFIG, "data": {"root": "elsewhere"}, "profile": "paper", "recipe": "none"}
    assert run_key(elsewhere) == run_key(CONFIG)
    assert run_key({**CONFIG, "seed": 1}) != run_key(CONFIG)
    assert run_id(CONFIG).startswith("topk-vgg16_cifar10-2w-local-")


def test_a_finished_run_is_found_by_its_config(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.valid(CONFIG) is None
    attempt = finished(store)
    assert store.valid(CONFIG) == attempt
    assert store.valid({**CONFIG, "seed": 1}) is None


def test_a_new_attempt_hides_nothing_until_it_is_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old = finished(store)
    new = store.begin(CONFIG)
    assert (old.number, new.number) == (1, 2)
    new.update(state="running")
    assert store.valid(CONFIG) == old
    new.fail("the cat", "error")
    assert store.valid(CONFIG) == old
    newest = finished(store, loss=2.0)
    assert store.valid(CONFIG) == newest
    assert len(store.attempts(run_id(CONFIG))) == 3


@pytest.mark.parametrize("damage", ["missing", "truncated", "unfinished", "garbled manifest", "other schema"])
def test_a_damaged_attempt_does_not_count(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    attempt = finished(store)
    path = attempt.rank_path(0)
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif damage == "unfinished":
        attempt.update(state="running")
    elif damage == "garbled manifest":
        (attempt.path / "run.json").write_text('{"state": "o')
    else:
        attempt.update(schema=99)
    assert store.valid(CONFIG) is None


def test_changed_bytes_of_the_same_length_are_found_when_verified(tmp_path: Path) -> None:
    attempt = finished(Store(tmp_path))
    path = attempt.rank_path(0)
    path.write_text(path.read_text().replace("1.0", "2.0"))
    assert attempt.is_valid()
    assert not attempt.is_valid(verify=True)


def test_lines_wait_in_memory_until_flushed(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "rank0.jsonl")
    log.add("step", step=0)
    assert not log.path.exists()
    log.flush()
    log.add("step", step=1)
    log.flush(durable=True)
    assert [record["step"] for record in read_lines(log.path)[0]] == [0, 1]


def test_a_broken_last_line_is_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"kind":"step","step":0}\n{"kind":"ste')
    records, dropped = read_lines(path)
    assert [record["step"] for record in records] == [0]
    assert dropped == 1


def test_an_atomic_write_that_fails_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


def test_the_stored_config_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    attempt = Store(tmp_path).begin(CONFIG)
    assert "somewhere" not in json.dumps(attempt.config)
