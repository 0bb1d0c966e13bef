"""A link in a results folder of others leads to no file that is read, written or removed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.records.files import Damaged, open_for_append, read_bytes
from analysis.records.store import Attempt, Store
from analysis.report import pages
from experiments import figures
from experiments.config import code_version, compose
from experiments.config.folders import Folders
from experiments.launch import bad_nodes
from tests.analysis import synthetic
from tests.conftest import Command, fine, process, refused
from tests.worker.runs import carry_out, orders

WORDS = ("method=topk", "task=cnn_digits", "profile=smoke", "cluster=local")
VIRTUAL = ("method=topk", "cluster=virtual", "workers=2", "train.steps=4", "train.validate=never")
SECRET = "nobody else's business"


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """A folder outside of the results, which no command may change."""
    folder = tmp_path / "precious"
    (folder / "2024").mkdir(parents=True)
    (folder / "5").mkdir()
    for name in ("secret", "2024/photo.js", "5/whole.json"):
        (folder / name).write_text(SECRET)
    return folder


def content(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder, and what its files hold."""
    paths = folder.rglob("*")
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


# --- pages of the report
# --------------------------------------------------------------------------------------


def made_report(folder: Path) -> pages.Site:
    site = pages.Site(folder)
    site.begin()
    site.data("run/a", {})
    return site


def test_a_report_removes_the_link_and_not_the_folder(
    here: Command, precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folders, "shipped", property(lambda self: tmp_path / "shipped"))
    monkeypatch.setattr(figures, "items", dict)
    before = content(precious)
    folder = tmp_path / "results" / "report"
    made_report(folder)
    (folder / "data" / "run" / "a.js").unlink()
    (folder / "data" / "run").rmdir()
    for name in ("data/run", "pages/link", "kept/link", "index.html"):
        (folder / name).symlink_to(precious)
    fine(here("report", "--drawn"))
    assert content(precious) == before
    assert not (folder / "data" / "run").is_symlink()


def test_a_runs_data_that_are_a_link_are_written_again(precious: Path, tmp_path: Path) -> None:
    site = made_report(tmp_path / "report")
    assert site.has_runs(["a"])
    script = tmp_path / "report" / "data" / "run" / "a.js"
    script.unlink()
    script.symlink_to(precious / "secret")
    assert not site.has_runs(["a"])
    site.begin(["a"])
    assert not script.is_symlink()
    (script.parent).rmdir()
    script.parent.symlink_to(precious)
    assert not site.has_runs(["a"])


@pytest.mark.parametrize("name", ["", "data", f"data/{pages.OURS}"])
def test_a_report_in_a_link_is_refused(name: str, here: Command, precious: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "report"
    made_report(folder)
    path = folder / name
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    before = content(tmp_path / "moved") if name != f"data/{pages.OURS}" else {}
    refused(here("report", "--drawn"), str(folder / Path(name).parts[0] if name else folder))
    assert before == (content(tmp_path / "moved") if before else {})


def test_a_kept_figure_that_is_a_link_is_not_copied(
    here: Command, precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = figures.items()
    monkeypatch.setattr(figures, "items", lambda: {"speed-logs": every["speed-logs"]})
    folder = tmp_path / "results" / "figures"
    folder.mkdir(parents=True)
    (profile, *_) = figures.profiles("speed-logs")
    for kind in ("svg", "png", "csv", "md"):
        (folder / f"{figures.stem('speed-logs', profile)}.{kind}").symlink_to(precious / "secret")
    done = fine(here("report", "--drawn"))
    assert "is left out: it is a link" in done.stderr
    made = content(tmp_path / "results" / "report")
    assert not [name for name, raw in made.items() if raw and SECRET.encode() in raw]


# --- runs
# --------------------------------------------------------------------------------------


def preempted(store: Store) -> Attempt:
    """An attempt that `run` would take up again."""
    attempt = store.begin(compose.resolve(WORDS))
    attempt.update(state="preempted", code=code_version.digest())
    return attempt


def with_checkpoint(attempt: Attempt) -> None:
    (attempt.checkpoints / "5").mkdir(parents=True)
    (attempt.checkpoints / "5" / "whole.json").write_text("{}")


def log_as_link(attempt: Attempt, precious: Path) -> Path:
    with_checkpoint(attempt)
    attempt.rank_path(0).symlink_to(precious / "secret")
    return attempt.rank_path(0)


def log_as_dangling_link(attempt: Attempt, precious: Path) -> Path:
    with_checkpoint(attempt)
    attempt.rank_path(1).symlink_to(precious / "new")
    return attempt.rank_path(1)


def log_as_fifo(attempt: Attempt, precious: Path) -> Path:
    with_checkpoint(attempt)
    os.mkfifo(attempt.rank_path(0))
    return attempt.rank_path(0)


def checkpoints_as_link(attempt: Attempt, precious: Path) -> Path:
    attempt.checkpoints.symlink_to(precious)
    return attempt.checkpoints


def attempt_as_link(attempt: Attempt, precious: Path) -> Path:
    with_checkpoint(attempt)
    attempt.path.rename(precious / "attempt")
    attempt.path.symlink_to(precious / "attempt")
    return attempt.path


def launch_folder_as_link(attempt: Attempt, precious: Path) -> Path:
    with_checkpoint(attempt)
    folder = Folders().launch(attempt)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(precious)
    return folder


IN_ATTEMPTS = [
    log_as_link, log_as_dangling_link, log_as_fifo, checkpoints_as_link, attempt_as_link,
    launch_folder_as_link,
]  # fmt: skip


@pytest.mark.parametrize("plant", IN_ATTEMPTS)
def test_a_run_writes_through_no_link(
    plant: Callable[[Attempt, Path], Path], here: Command, precious: Path, tmp_path: Path
) -> None:
    path = plant(preempted(Store(tmp_path / "results" / "runs")), precious)
    before = content(precious)
    what = "is a FIFO and no file" if path.is_fifo() else "is a link, and no link is followed here"
    refused(here("run", *WORDS), str(path), what)
    assert content(precious) == before


@pytest.mark.parametrize("names", [["7"], ["3"], ["007", "3"], ["003", "3", "2"]])
def test_a_checkpoint_that_is_a_link_is_unlinked(names: list[str], precious: Path, tmp_path: Path) -> None:
    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL, "launch.checkpoint_min=1e-9")
    before = content(precious)
    attempt.checkpoints.mkdir()
    for name in names:
        (attempt.checkpoints / name).symlink_to(precious / "5")
    carry_out(told, attempt, tmp_path / "start")
    assert attempt.is_valid()
    assert content(precious) == before


def test_workers_refuse_a_folder_of_checkpoints_that_is_a_link(precious: Path, tmp_path: Path) -> None:
    told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL)
    before = content(precious)
    attempt.checkpoints.symlink_to(precious)
    with pytest.raises(Damaged, match="is a link, and no link is followed here"):
        carry_out(told, attempt, tmp_path / "start")
    assert content(precious) == before


def test_a_lock_that_is_a_link_is_named_as_what_it_is(here: Command, precious: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results" / "launch" / "locks"
    folder.mkdir(parents=True)
    run = Store(tmp_path / "results" / "runs").begin(compose.resolve(WORDS)).run_id
    lock = folder / f"{run}.lock"
    for target, what in (
        (precious / "secret", f"is a link to {precious / 'secret'}, and no link is followed here"),
        (precious / "nothing", f"is a link to {precious / 'nothing'}, and no link is followed here"),
        (lock, "is a link that leads to itself"),
    ):
        lock.symlink_to(target)
        refused(here("run", *WORDS), str(lock), what, code=1)
        lock.unlink()


def test_the_log_of_a_worker_that_is_a_link_is_not_shown(
    here: Command, precious: Path, tmp_path: Path
) -> None:
    attempt = synthetic.made(Store(tmp_path / "results" / "runs"), compose.resolve(WORDS).as_dict())
    folder = Folders().launch(attempt)
    folder.mkdir(parents=True)
    (folder / "worker0_log.err").symlink_to(precious / "secret")
    done = fine(here("logs", attempt.run_id))
    assert SECRET not in done.stdout
    assert "worker0_log.err is a link, and no link is followed here" in done.stdout
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "moved")
    (tmp_path / "moved" / "worker0_log.err").unlink()
    (tmp_path / "moved" / "worker0_log.err").write_text(SECRET)
    assert SECRET not in here("logs", attempt.run_id).stdout


# --- files that are appended to
# --------------------------------------------------------------------------------------

INSTEAD_OF_FILES: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, precious: path.symlink_to(precious / "secret"),
    "dangling link": lambda path, precious: path.symlink_to(precious / "new"),
    "link to itself": lambda path, precious: path.symlink_to(path),
    "FIFO": lambda path, precious: os.mkfifo(path),
    "link to a FIFO": lambda path, precious: path.symlink_to(_fifo(path.with_name("fifo"))),
}


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("what", INSTEAD_OF_FILES)
def test_only_a_file_is_appended_to(
    what: str, precious: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / bad_nodes.LEDGER
    INSTEAD_OF_FILES[what](ledger, precious)
    before = content(precious)
    kind = "is a FIFO and no file" if what == "FIFO" else "is a link, and no link is followed here"
    with pytest.raises(Damaged, match=kind):
        open_for_append(ledger)
    bad_nodes.note_failure(ledger, "n1", "7", "2026-01-01T10:00:00Z")
    assert f"the failure of n1 is not noted: {ledger} {kind}" in capsys.readouterr().err
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    done = process("sh", str(bad_nodes.BEGIN), "/no/python", "spec", str(ledger), env=env, timeout_s=20)
    assert done.returncode == 1
    assert f"{ledger} is a link or no file" in done.stderr
    assert content(precious) == before


def test_a_fifo_that_somebody_reads_is_refused_too(tmp_path: Path) -> None:
    path = _fifo(tmp_path / "log")
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(Damaged, match="is a FIFO and no file"):
            open_for_append(path)
    finally:
        os.close(reader)


def test_a_file_is_appended_to_and_made(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    path = tmp_path / "link" / "log"  # a folder above may be a link
    for text in (b"a", b"b"):
        with open_for_append(path) as file:
            file.write(text)
    assert read_bytes(path, follows_link=False) == b"ab"
