"""The store: records are written as a whole or not at all, keyed by what is measured, and never lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from analysis.records.configs import run_id, run_key
from analysis.records.log import Disturbed, RankLog
from analysis.records.store import Attempt, Store

CONFIG: dict[str, Any] = {
    "method": {"name": "topk", "density": 0.001},
    "task": {"name": "vgg16_cifar10"},
    "cluster": {"where": "local"},
    "workers": 2,
    "seed": 0,
    "timing": {"mode": "serialised", "warmup_steps": 1},
    "train": {"validate": "never"},
    "data": {"root": "somewhere"},
    "profile": "laptop",
    "recipe": "yoon2022",
}
STEPS = 3


def finished(store: Store, loss: float = 1.0) -> Attempt:
    attempt = running(store, loss=loss)
    attempt.finish(CONFIG["workers"], STEPS, simulated=False)
    return attempt


def running(store: Store, steps: Iterable[int] = range(STEPS), loss: float = 1.0) -> Attempt:
    """An attempt whose workers have logged these steps, and have not ended."""
    attempt = store.begin(CONFIG)
    attempt.start(0, "here")
    for rank in range(CONFIG["workers"]):
        with RankLog(attempt.rank_path(rank)) as log:
            for step in steps:
                log.add("step", step=step, loss=loss)
            log.add("epoch", epoch=1, step=STEPS, loss=loss)
            log.flush(durable=True)
    return attempt


def test_the_key_ignores_where_data_lie_and_how_the_run_was_named() -> None:
    elsewhere = {**CONFIG, "data": {"root": "elsewhere"}, "profile": "paper", "recipe": "none"}
    assert run_key(elsewhere) == run_key(CONFIG)
    assert run_key({**CONFIG, "seed": 1}) != run_key(CONFIG)
    assert run_id(CONFIG).startswith("topk-vgg16_cifar10-2w-local-")


def test_a_leaf_that_came_later_changes_the_key_only_where_it_changes_the_run() -> None:
    train = {"epochs": 1, "steps": 2, "validate": "never"}
    before, same = (
        {**CONFIG, "train": train},
        {**CONFIG, "train": {**train, "epoch_steps": None, "held_out": 0}},
    )
    assert run_key(same) == run_key(before)
    assert run_key({**CONFIG, "train": {**train, "held_out": 100}}) != run_key(before)


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


DAMAGE: dict[str, Callable[[Attempt], object]] = {
    "missing": lambda attempt: attempt.rank_path(0).unlink(),
    "truncated": lambda attempt: attempt.rank_path(0).write_bytes(attempt.rank_path(0).read_bytes()[:-5]),
    "unfinished": lambda attempt: attempt.update(state="running"),
    "garbled manifest": lambda attempt: (attempt.path / "run.json").write_text('{"state": "o'),
    "other schema": lambda attempt: attempt.update(schema=99),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_attempt_does_not_count(tmp_path: Path, damage: str) -> None:
    store = Store(tmp_path)
    DAMAGE[damage](finished(store))
    assert store.valid(CONFIG) is None


def test_changed_bytes_of_the_same_length_are_found_when_verified(tmp_path: Path) -> None:
    attempt = finished(Store(tmp_path))
    path = attempt.rank_path(0)
    path.write_text(path.read_text().replace("1.0", "2.0"))
    assert attempt.is_valid()
    assert not attempt.is_valid(verify=True)


def test_the_stored_config_names_no_folder_of_the_machine(tmp_path: Path) -> None:
    attempt = Store(tmp_path).begin(CONFIG)
    assert "somewhere" not in json.dumps(attempt.config)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([0, 2], "2 lines for 2 of 3 steps"),
        ([0, 1, 1, 2], "4 lines for 3 of 3 steps"),  # two wrote it
        ([1, 0, 2], "3 lines for 3 of 3 steps"),
        ([0, 1, 2, 3], "4 lines for 3 of 3 steps"),
        ([], "0 lines for 0 of 3 steps"),
    ],
)
def test_a_record_is_whole_when_each_rank_has_each_step_once_in_order(
    steps: list[int], told: str, tmp_path: Path
) -> None:
    attempt = running(Store(tmp_path))
    attempt.rank_path(1).write_text("".join(f'{{"kind":"step","step":{step}}}\n' for step in steps))
    with pytest.raises(Disturbed, match=f"rank1.jsonl holds {told}"):
        attempt.finish(2, STEPS)
    assert attempt.state == "running"


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        ("rank1.jsonl removed", "holds rank0.jsonl for 2 workers"),
        ("rank2.jsonl added", "holds rank0.jsonl, rank1.jsonl, rank2.jsonl for 2 workers"),
        ("rank0.jsonl broken", "and 1 that are broken"),
        ("config.json removed", "config.json was changed"),
        ("config.json of another run", "config.json was changed"),
        ("config.json too large", "config.json was changed .* no such file has more than 1,048,576"),
        ("run.json removed", "run.json was removed or damaged"),
        ("closed by another", "marked as failed .the cat. by another process"),
        ("whole already", "marked as ok by another process"),
    ],
)
def test_finish_does_not_believe_what_lies_there(harm: str, told: str, tmp_path: Path) -> None:
    attempt = running(Store(tmp_path))
    name, _, how = harm.partition(" ")
    if how == "removed":
        (attempt.path / name).unlink()
    elif how == "added":
        (attempt.path / name).write_text("")
    elif how == "broken":
        with attempt.rank_path(0).open("a") as log:
            log.write('{"kind":"st')
    elif how == "of another run":
        (attempt.path / name).write_text(json.dumps({**CONFIG, "seed": 1}))
    elif how == "too large":
        (attempt.path / name).write_text(json.dumps({**CONFIG, "more": "x" * 2**20}))
    elif name == "closed":
        attempt.fail("the cat", "killed")
    else:
        attempt.finish(2, STEPS)
    before = attempt.manifest
    with pytest.raises(Disturbed, match=told):
        attempt.finish(2, STEPS)
    assert attempt.manifest == before


def test_a_manifest_that_was_removed_is_not_made_up_again(tmp_path: Path) -> None:
    attempt = running(Store(tmp_path))
    (attempt.path / "run.json").unlink()
    with pytest.raises(Disturbed, match=r"run\.json was removed or damaged"):
        attempt.update(state="running")
    attempt.fail("its run.json was removed", "disturbed")
    assert attempt.manifest["run_id"] == run_id(CONFIG)
    assert attempt.manifest["key"] == run_key(CONFIG)


def test_what_was_taken_up_again_forgets_why_it_had_ended(tmp_path: Path) -> None:
    attempt = running(Store(tmp_path))
    attempt.fail("worker 1 was killed", "killed")
    with pytest.raises(Disturbed):
        attempt.check_open()
    attempt.update(state="submitted")
    attempt.check_open()
    attempt.start(0, "here")
    attempt.finish(2, STEPS)
    assert not {"why", "failure", "step"} & attempt.manifest.keys()
    attempt.fail("the cat", "error")  # too late
    assert attempt.is_valid(verify=True)


def test_what_others_put_beside_a_record_is_not_taken_for_ours(tmp_path: Path) -> None:
    """Systems that show folders leave files in them, and people copies."""
    attempt = running(Store(tmp_path))
    (attempt.checkpoints / "20").mkdir(parents=True)
    (attempt.checkpoints / "20" / "whole.json").write_text("{}")
    for name in ("checkpoints/.DS_Store", "checkpoints/notes/whole.json", "rank0 (copy).jsonl", ".DS_Store"):
        (attempt.path / name).parent.mkdir(exist_ok=True)
        (attempt.path / name).write_text("")
    assert attempt.saved_step() == 20
    assert [path.name for path in attempt.rank_paths()] == ["rank0.jsonl", "rank1.jsonl"]
    attempt.finish(2, STEPS)
    assert attempt.is_valid()
