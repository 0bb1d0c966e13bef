"""A run that is told to stop goes on to the same weights, every step recorded once.

Whatever becomes of its checkpoints. Over virtual ranks, in this process.
"""

from __future__ import annotations

import itertools
import random
import re
import resource
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

import sparsify
from analysis.records.store import Attempt, Store
from experiments.training import checkpoint
from experiments.training.stop_signal import Preempted
from experiments.worker import errors, run
from experiments.worker.orders import RunOrders
from sparsify.wrappers.engine import NonFiniteGradientError
from tests.worker.runs import StopAt, carry_out, orders, recorded, stopped_and_straight

STEPS = 12
VIRTUAL = ("method=topk", "method.density=0.02", "cluster=virtual", "workers=2", f"train.steps={STEPS}")


@pytest.mark.usefixtures("every_step")
@pytest.mark.parametrize("name", sparsify.names())
def test_every_method_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    words = [f"method={name}", "cluster=virtual", "workers=3", f"train.steps={STEPS}"]
    choices = {"density": "0.02", "every": "5"}  # so that it stops in mid-round
    known = sparsify.defaults(name)
    words += [f"method.{key}={value}" for key, value in choices.items() if key in known]
    stop = 3 * random.Random(name).randrange(2, STEPS - 2)
    stopped_and_straight(tmp_path, stop, *words, "task.lr_warmup_epochs=0.1")


@pytest.mark.usefixtures("every_step")
def test_a_nan_that_nobody_has_looked_at_is_never_saved(tmp_path: Path) -> None:
    """In production its flags are read when a window closes; a checkpoint closes it first."""
    own = ("timing.mode=production", "train.validate=never", "task.lr=1e30", "launch.checkpoint_min=1e-6")
    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL, *own)
    with pytest.raises(NonFiniteGradientError, match=r"rank 0, step \d: .* go back to the last checkpoint"):
        carry_out(told, attempt, tmp_path / "a")
    for path in attempt.checkpoint_folder.glob("*/rank*.pt"):
        assert torch.load(path, weights_only=True)["aggregator"]["step"] <= 1, path


@pytest.fixture
def interrupted(tmp_path: Path, every_step: None) -> tuple[RunOrders, Attempt]:
    """Return a run of `STEPS` steps that was told to stop.

    It saved after most steps, and kept two checkpoints.
    """
    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL, "launch.checkpoint_min=1e-6")
    with pytest.raises(Preempted):
        carry_out(told, attempt, tmp_path / "a", StopAt(16))
    assert len(saved_steps(attempt)) == 2
    return told, attempt


def saved_steps(attempt: Attempt) -> list[int]:
    return sorted(int(path.parent.name) for path in attempt.checkpoint_folder.glob("*/whole.json"))


def goes_on(told: RunOrders, attempt: Attempt, folder: Path) -> list[int]:
    """Finish the run; return the steps from which it went on.

    It must come to the weights of a run that nothing happened to, every step recorded once.
    """
    carry_out(told, attempt, folder / "b")
    assert attempt.manifest["weights"] == straight_weights()
    for rank in range(2):
        assert [line["step"] for line in recorded(attempt, rank)] == list(range(STEPS))
    return [again["step"] for again in attempt.manifest["resumed"]]


@cache
def straight_weights() -> str:
    """Return the weights of a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        told, straight = orders(Store(Path(folder) / "runs"), *VIRTUAL)
        carry_out(told, straight, Path(folder) / "start")
        return str(straight.manifest["weights"])


def test_a_checkpoint_is_plain_data_and_a_foreign_file_beside_it_is_let_be(
    interrupted: tuple[RunOrders, Attempt], tmp_path: Path
) -> None:
    told, attempt = interrupted
    saved = torch.load(next(attempt.checkpoint_folder.glob("*/rank1.pt")), weights_only=True)
    assert saved["aggregator"]["rank"] == 1
    steps = saved_steps(attempt)
    shared = attempt.checkpoint_folder.glob("*/shared*.pt")  # what all ranks share is there once
    assert [path.name for path in shared] == ["shared0.pt"] * len(steps)
    assert not list(attempt.path.rglob("*.part"))
    (attempt.checkpoint_folder / ".DS_Store").write_text("")
    assert goes_on(told, attempt, tmp_path) == [steps[-1]]


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def of_another_rank(note: Path) -> None:
    note.write_text(note.read_text().replace('"same_as": 0', '"same_as": 7'))


# By name: a file beside rank 1's state, what becomes of it, and why the checkpoint is passed over.
HARMS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "cut short": ("rank1.pt", shorter, "bytes instead of"),
    "changed": ("rank1.pt", changed, "was changed"),
    "removed": ("rank1.pt", Path.unlink, "is missing"),
    "shared part removed": ("shared0.pt", Path.unlink, "is missing"),
    "no whole.json": ("whole.json", Path.unlink, ""),  # killed while it was saving
    "whole.json damaged": ("whole.json", of_another_rank, ""),
    "log cut short": ("../../rank1.jsonl", shorter, "its log is shorter"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_broken_checkpoint_is_passed_over_for_the_one_before(
    harm: str, interrupted: tuple[RunOrders, Attempt], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told, attempt = interrupted
    older, newest = saved_steps(attempt)
    name, act, why = HARMS[harm]
    act(attempt.checkpoint_folder / str(newest) / name)
    assert goes_on(told, attempt, tmp_path) == [older]
    if why:
        (fault,) = attempt.manifest["faulty_checkpoints"]
        assert fault["step"] == newest
        assert re.search(rf"{why}.*\(rank [01]\)", fault["why"])
        assert f"the checkpoint of step {newest} is passed over" in capsys.readouterr().err


def test_ranks_that_drifted_apart_save_everything_of_their_own(
    tmp_path: Path, every_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = map(str, itertools.count())
    monkeypatch.setattr(checkpoint, "state_digest", lambda state: next(digests))
    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL)
    with pytest.raises(Preempted) as stopped:
        carry_out(told, attempt, tmp_path / "a", StopAt(10))
    folder = attempt.checkpoint_folder / str(stopped.value.step)
    assert len(list(folder.glob("shared*.pt"))) == 2
    goes_on(told, attempt, tmp_path)


def test_without_a_whole_checkpoint_the_run_begins_again(
    interrupted: tuple[RunOrders, Attempt], tmp_path: Path
) -> None:
    told, attempt = interrupted
    for path in attempt.checkpoint_folder.glob("*/shared0.pt"):
        path.write_bytes(b"")
    assert goes_on(told, attempt, tmp_path) == [0]


def act_after(monkeypatch: pytest.MonkeyPatch, last: int, act: Callable[[], None]) -> None:
    """Do something after this step."""
    progress = run.ProgressFile.__call__

    def note(self: run.ProgressFile, step: int) -> None:
        progress(self, step)
        if step == last:
            act()

    monkeypatch.setattr(run.ProgressFile, "__call__", note)


def test_a_killed_run_goes_on_from_its_last_save(
    tmp_path: Path, every_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that were logged after the save are measured again."""

    def die() -> None:
        raise KeyboardInterrupt

    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL, "launch.checkpoint_min=1e-6")
    act_after(monkeypatch, 9, die)
    with pytest.raises(KeyboardInterrupt):
        carry_out(told, attempt, tmp_path / "a")
    monkeypatch.undo()
    with attempt.rank_log_path(0).open("a") as log:
        log.write('{"kind":"step","st')
    newest = saved_steps(attempt)[-1]
    assert newest < 9
    assert goes_on(told, attempt, tmp_path) == [newest]


def test_a_full_disk_leaves_the_older_checkpoints_and_is_named(
    tmp_path: Path, every_step: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of files stands for the disk: the same error, from the same call."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL, "launch.checkpoint_min=1e-6")
    act_after(monkeypatch, 7, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1])))
    try:
        with pytest.raises(OSError, match="too large") as full:
            carry_out(told, attempt, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert errors.explain_failure(full.value) == ("disk", errors.FILE_LIMIT)
    assert len(saved_steps(attempt)) == len([*attempt.checkpoint_folder.iterdir()]) == 2
    goes_on(told, attempt, tmp_path)
