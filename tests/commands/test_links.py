"""A link in a results folder of others leads to no file that is read, written or removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from analysis.records.files import DamagedFileError, open_for_append, read_bytes
from analysis.records.frames import empty_frames
from analysis.records.store import Store
from analysis.report import pages
from experiments import figures
from experiments.commands import report
from experiments.config import code_version, compose
from experiments.config.folders import ResultFolders
from experiments.launch import bad_nodes
from tests.analysis import synthetic
from tests.conftest import Command, fine, process, refused
from tests.worker.runs import carry_out, orders

WORDS = ("method=topk", "task=cnn_digits", "profile=smoke", "cluster=local")
VIRTUAL = ("method=topk", "cluster=virtual", "workers=2", "train.steps=4", "train.validate=never")
SECRET = "nobody else's business"
NOT_FOLLOWED = "is a link, and no link is followed here"


def content(folder: Path) -> dict[Path, bytes | None]:
    """Return all that is in a folder, and what its files hold."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """Provide a folder outside of the results, which no command may change."""
    folder = tmp_path / "precious"
    for name in ("secret", "2024/photo.js", "5/whole.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(SECRET)
    before = content(folder)
    yield folder
    assert content(folder) == before


# --- pages of the report
# --------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pages.ReportSite:
    """Provide a report of one run, where no other is shipped and figures need some."""
    monkeypatch.setattr(report.ShippedRecords, "frames", empty_frames())
    monkeypatch.setattr(figures, "files_by_item", dict)
    site = pages.ReportSite(tmp_path / "results" / "report")
    site.clear_stale_files_and_copy_assets()
    site.write_data_script("run/a", {})
    return site


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("name", ["data/run", "data/run/a.js"])
def test_a_report_removes_the_link_and_not_what_it_leads_to(
    name: str, here: Command, precious: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "results" / "report"
    (folder / name).rename(tmp_path / "moved")
    for link in (name, "pages/link", "kept/link", "index.html"):
        (folder / link).symlink_to(precious)
    fine(here("report", "--drawn"))
    assert not (folder / name).is_symlink()


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("name", ["", "data", f"data/{pages.MARKER_FILE}"])
def test_a_report_in_a_link_is_refused(name: str, here: Command, tmp_path: Path) -> None:
    path = tmp_path / "results" / "report" / name
    target = path.rename(tmp_path / "moved")
    path.symlink_to(target)
    before = content(target)
    refused(here("report", "--drawn"), str(path.parent if path.name == pages.MARKER_FILE else path))
    assert content(target) == before


def test_a_kept_figure_that_is_a_link_is_not_copied(
    here: Command, precious: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.ShippedRecords, "frames", empty_frames())
    monkeypatch.setattr(
        figures, "files_by_item", partial(dict, {"speed-logs": figures.files_by_item()["speed-logs"]})
    )
    folder = tmp_path / "results" / "figures"
    folder.mkdir(parents=True)
    for kind in ("svg", "png", "csv", "md"):
        (folder / f"speed-logs.{kind}").symlink_to(precious / "secret")
    assert "is left out: it is a link" in fine(here("report", "--drawn")).stderr
    written = content(tmp_path / "results" / "report").values()
    assert not [raw for raw in written if raw and SECRET.encode() in raw]


# --- runs
# --------------------------------------------------------------------------------------

# Links and FIFOs that a run would write through: a path, with {attempt} and {launch}, and where it leads.
IN_ATTEMPTS = {
    "{attempt}/rank0.jsonl": "secret",
    "{attempt}/rank1.jsonl": "new",
    "{attempt}/rank2.jsonl": "FIFO",
    "{attempt}/checkpoints": ".",
    "{attempt}": "attempt",
    "{launch}": ".",
}


def test_a_run_writes_through_no_link(here: Command, precious: Path, tmp_path: Path) -> None:
    folders = ResultFolders(tmp_path / "results")
    for template, target in IN_ATTEMPTS.items():
        attempt = folders.store.create_attempt(compose.resolve(WORDS))
        attempt.update_manifest(state="preempted", code=code_version.code_digest())
        (attempt.checkpoint_folder / "5").mkdir(parents=True)
        (attempt.checkpoint_folder / "5" / "whole.json").write_text("{}")
        path = Path(template.format(attempt=attempt.path, launch=folders.launch_folder(attempt)))
        path.parent.mkdir(parents=True, exist_ok=True)
        moved = path.rename(tmp_path / f"moved {path.name}") if path.exists() else precious / target
        if target == "FIFO":
            os.mkfifo(path)
        else:
            path.symlink_to(moved)
        before = content(moved)
        what = "is a FIFO and no file" if target == "FIFO" else NOT_FOLLOWED
        refused(here("run", *WORDS), str(path), what)
        assert content(moved) == before


def test_a_checkpoint_that_is_a_link_is_unlinked(precious: Path, tmp_path: Path) -> None:
    for names in (["7"], ["007", "3"], ["003", "3", "2"]):
        told, attempt = orders(Store(tmp_path / "runs"), *VIRTUAL, "launch.checkpoint_min=1e-9")
        attempt.checkpoint_folder.mkdir()
        for name in names:
            (attempt.checkpoint_folder / name).symlink_to(precious / "5")
        carry_out(told, attempt, tmp_path / "start")
        assert attempt.is_valid(), names


def test_a_lock_that_is_a_link_is_named_as_what_it_is(here: Command, precious: Path, tmp_path: Path) -> None:
    folders = ResultFolders(tmp_path / "results")
    run = folders.store.create_attempt(compose.resolve(WORDS)).run_id
    lock = folders.scratch / "locks" / f"{run}.lock"
    lock.parent.mkdir(parents=True)
    for target in (precious / "secret", precious / "nothing", lock):
        leads = "that leads to itself" if target == lock else f"to {target}, and no link is followed"
        lock.symlink_to(target)
        refused(here("run", *WORDS), f"{lock} is a link {leads}", code=1)
        lock.unlink()


def test_the_log_of_a_worker_that_is_a_link_is_not_shown(
    here: Command, precious: Path, tmp_path: Path
) -> None:
    folders = ResultFolders(tmp_path / "results")
    attempt = synthetic.made(folders.store, compose.resolve(WORDS).as_dict())
    folder = folders.launch_folder(attempt)
    log = folder / "worker0_log.err"
    folder.mkdir(parents=True)
    log.symlink_to(precious / "secret")
    shown = fine(here("logs", attempt.run_id)).stdout
    assert SECRET not in shown
    assert f"worker0_log.err {NOT_FOLLOWED}" in shown


# --- files that are appended to
# --------------------------------------------------------------------------------------


def test_only_a_file_is_appended_to(
    precious: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "FIFO")
    ledger = tmp_path / bad_nodes.LEDGER_FILE
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}
    for target in (precious / "secret", precious / "new", ledger, tmp_path / "FIFO", None):
        if target is None:
            os.mkfifo(ledger)
        else:
            ledger.symlink_to(target)
        kind = NOT_FOLLOWED if target else "is a FIFO and no file"
        with pytest.raises(DamagedFileError, match=kind):
            open_for_append(ledger)
        bad_nodes.append_node_failure(ledger, "n1", "7", "2026-01-01T10:00:00Z")
        assert f"the failure of n1 is not noted: {ledger} {kind}" in capsys.readouterr().err
        begin = ("sh", str(bad_nodes.BEGIN_SCRIPT), "/no/python", "spec", str(ledger))
        refused(process(*begin, env=env, timeout_s=20), f"{ledger} is a link or no file", code=1)
        if target:
            ledger.unlink()
    reader = os.open(ledger, os.O_RDONLY | os.O_NONBLOCK)  # somebody reads it
    with pytest.raises(DamagedFileError, match="is a FIFO and no file"):
        open_for_append(ledger)
    os.close(reader)


def test_a_file_is_appended_to_and_made_also_in_a_folder_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    path = tmp_path / "link" / "log"
    for text in (b"a", b"b"):
        with open_for_append(path) as file:
            file.write(text)
    assert read_bytes(path, follows_link=False) == b"ab"
