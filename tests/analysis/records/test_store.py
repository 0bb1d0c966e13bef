"""The store: records are written as a whole or not at all, keyed by what is measured, and never lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from analysis.records.configs import run_id, run_key
from analysis.records.log import InterferenceError, RankLog
from analysis.records.store import Attempt, Store
from tests.analysis import synthetic

CONFIG = synthetic.config("topk", data={"root": "somewhere"}, profile="laptop", recipe="yoon2022")
STEPS = 3


def finished(store: Store, loss: float = 1.0) -> Attempt:
    attempt = running(store, loss=loss)
    attempt.check_logs_and_mark_whole(CONFIG["workers"], STEPS, simulated=False)
    return attempt


def running(store: Store, steps: Iterable[int] = range(STEPS), loss: float = 1.0) -> Attempt:
    """Return an attempt whose workers have logged these steps, and have not ended."""
    attempt = store.create_attempt(CONFIG)
    attempt.mark_running(0, "here")
    for rank in range(CONFIG["workers"]):
        with RankLog(attempt.rank_log_path(rank)) as log:
            for step in steps:
                log.add_line("step", step=step, loss=loss)
            log.add_line("epoch", epoch=1, step=STEPS, loss=loss)
            log.flush(durable=True)
    return attempt


def test_the_key_changes_where_the_run_does_and_not_with_names_and_places() -> None:
    elsewhere = {**CONFIG, "data": {"root": "elsewhere"}, "profile": "paper", "recipe": "none"}
    assert run_key(elsewhere) == run_key(CONFIG)
    assert run_key({**CONFIG, "seed": 1}) != run_key(CONFIG)
    assert run_id(CONFIG).startswith("topk-vgg16_cifar10-2w-local-")
    train = {"epochs": 1, "steps": 2, "validate": "never"}

    def key_with(**later: object) -> str:
        return run_key({**CONFIG, "train": train | later})

    assert key_with(epoch_steps=None, held_out=0) == key_with()  # leaves that came later
    assert key_with(held_out=100) != key_with()


def test_a_finished_run_is_found_by_its_config_and_a_new_attempt_hides_nothing_until_it_is_whole(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    assert store.find_newest_valid_of_config(CONFIG) is None
    old = finished(store)
    assert store.find_newest_valid_of_config({**CONFIG, "seed": 1}) is None
    new = store.create_attempt(CONFIG)
    assert (old.number, new.number) == (1, 2)
    new.update_manifest(state="running")
    assert store.find_newest_valid_of_config(CONFIG) == old
    new.mark_failed_unless_whole("the cat", "error")
    assert store.find_newest_valid_of_config(CONFIG) == old
    newest = finished(store, loss=2.0)
    assert store.find_newest_valid_of_config(CONFIG) == newest
    assert store.list_attempts(run_id(CONFIG)) == [old, new, newest]


DAMAGE: dict[str, Callable[[Attempt], object]] = {
    "missing": lambda attempt: attempt.rank_log_path(0).unlink(),
    "truncated": lambda attempt: attempt.rank_log_path(0).write_bytes(
        attempt.rank_log_path(0).read_bytes()[:-5]
    ),
    "unfinished": lambda attempt: attempt.update_manifest(state="running"),
    "garbled manifest": lambda attempt: (attempt.path / "run.json").write_text('{"state": "o'),
    "other schema": lambda attempt: attempt.update_manifest(schema=99),
}


def test_a_damaged_attempt_does_not_count(tmp_path: Path) -> None:
    for name, damage in DAMAGE.items():
        store = Store(tmp_path / name)
        damage(finished(store))
        assert store.find_newest_valid_of_config(CONFIG) is None, name
    attempt = finished(Store(tmp_path / "changed"))
    path = attempt.rank_log_path(0)
    path.write_text(path.read_text().replace("1.0", "2.0"))
    assert attempt.is_valid()  # the length is the same
    assert not attempt.is_valid(verify_digests=True)
    assert "somewhere" not in json.dumps(attempt.config), "a folder of the machine"


def test_a_record_is_whole_when_each_rank_has_each_step_once_in_order(tmp_path: Path) -> None:
    attempt = running(Store(tmp_path))
    for steps, different in (
        ([0, 2], 2),
        ([0, 1, 1, 2], 3),  # two wrote it
        ([1, 0, 2], 3),
        ([0, 1, 2, 3], 3),
        ([], 0),
    ):
        attempt.rank_log_path(1).write_text("".join(f'{{"kind":"step","step":{step}}}\n' for step in steps))
        found = f"rank1.jsonl holds {len(steps)} lines for {different} of 3 steps"
        with pytest.raises(InterferenceError, match=found):
            attempt.check_logs_and_mark_whole(2, STEPS)
        assert attempt.state == "running"


HARM: tuple[tuple[str, str | None, str], ...] = (  # a file, what stands there now, and what is said of it
    ("rank1.jsonl", None, "holds rank0.jsonl for 2 workers"),
    ("rank2.jsonl", "", "holds rank0.jsonl, rank1.jsonl, rank2.jsonl for 2 workers"),
    ("rank0.jsonl", '{"kind":"st', "and 1 that are broken"),
    ("config.json", None, "config.json was changed"),
    ("config.json", json.dumps({**CONFIG, "seed": 1}), "config.json was changed"),
    ("config.json", "x" * 2**20 + "x", "config.json was changed .* no such file has more than 1,048,576"),
    ("run.json", None, "run.json was removed or damaged"),
)


def test_finish_does_not_believe_what_lies_there(tmp_path: Path) -> None:
    for at, (name, content, reason) in enumerate(HARM):
        attempt = running(Store(tmp_path / str(at)))
        if content is None:
            (attempt.path / name).unlink()
        else:
            (attempt.path / name).write_text(content)
        before = attempt.manifest
        with pytest.raises(InterferenceError, match=reason):
            attempt.check_logs_and_mark_whole(2, STEPS)
        assert attempt.manifest == before
    closed = running(Store(tmp_path / "closed"))
    closed.mark_failed_unless_whole("the cat", "killed")
    for attempt, reason in (
        (closed, "marked as failed .the cat. by another process"),
        (finished(Store(tmp_path / "whole")), "marked as ok by another process"),
    ):
        with pytest.raises(InterferenceError, match=reason):
            attempt.check_logs_and_mark_whole(2, STEPS)


def test_a_manifest_that_was_removed_is_not_made_up_again(tmp_path: Path) -> None:
    attempt = running(Store(tmp_path))
    (attempt.path / "run.json").unlink()
    with pytest.raises(InterferenceError, match=r"run\.json was removed or damaged"):
        attempt.update_manifest(state="running")
    attempt.mark_failed_unless_whole("its run.json was removed", "disturbed")
    assert attempt.manifest.items() >= {"run_id": run_id(CONFIG), "key": run_key(CONFIG)}.items()


def test_what_was_taken_up_again_forgets_why_it_had_ended(tmp_path: Path) -> None:
    attempt = running(Store(tmp_path))
    attempt.mark_failed_unless_whole("worker 1 was killed", "killed")
    with pytest.raises(InterferenceError):
        attempt.check_not_closed()
    attempt.update_manifest(state="submitted")
    attempt.check_not_closed()
    attempt.mark_running(0, "here")
    attempt.check_logs_and_mark_whole(2, STEPS)
    assert not {"why", "failure", "step"} & attempt.manifest.keys()
    attempt.mark_failed_unless_whole("the cat", "error")  # too late
    assert attempt.is_valid(verify_digests=True)


def test_what_others_put_beside_a_record_is_not_taken_for_ours(tmp_path: Path) -> None:
    """Systems that show folders leave files in them, and people copies."""
    attempt = running(Store(tmp_path))
    (attempt.checkpoint_folder / "20").mkdir(parents=True)
    (attempt.checkpoint_folder / "20" / "whole.json").write_text("{}")
    for name in ("checkpoints/.DS_Store", "checkpoints/notes/whole.json", "rank0 (copy).jsonl", ".DS_Store"):
        (attempt.path / name).parent.mkdir(exist_ok=True)
        (attempt.path / name).write_text("")
    assert attempt.newest_whole_checkpoint_step_or_zero() == 20
    assert [path.name for path in attempt.find_rank_logs()] == ["rank0.jsonl", "rank1.jsonl"]
    attempt.check_logs_and_mark_whole(2, STEPS)
    assert attempt.is_valid()
