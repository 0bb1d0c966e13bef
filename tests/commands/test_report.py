"""The report from stored records: whole, damaged, failed, hostile; and a run's trace."""

from __future__ import annotations

import gzip
import json
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from analysis.records import attempts
from analysis.records.files import read_struct_if_there
from analysis.records.frames import Frames
from analysis.records.parquet import read_parquet
from analysis.records.schema import RunIdList
from analysis.report.pages import PARTS
from experiments import figures
from experiments.commands import report
from experiments.commands._drawing import select_rows_by_run_id
from experiments.config.folders import ResultFolders
from tests.analysis import synthetic
from tests.analysis.report.test_pages import HOSTILE
from tests.conftest import Command, fine, refused, there

ITEMS = ("fig1", "speed-logs")  # one of runs and one of published tables, both quickly drawn


@pytest.fixture
def two_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be two figures, and shipped runs of one: pages of hundreds take their time."""
    every = figures.files_by_item()
    monkeypatch.setattr(figures, "files_by_item", lambda: {item: every[item] for item in ITEMS})
    monkeypatch.setattr(report.ShippedRecords, "frames", runs_of_one_figure())


@cache
def runs_of_one_figure() -> Frames:
    folder = ResultFolders().shipped
    index = there(read_struct_if_there(folder / "figures" / "fig1-laptop.json", RunIdList))
    return select_rows_by_run_id(read_parquet(folder), index.runs)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ResultFolders:
    """Provide results of this machine alone, where nothing is shipped and no figure needs no runs."""
    monkeypatch.setattr(ResultFolders, "shipped", property(lambda self: tmp_path / "shipped"))
    monkeypatch.setattr(figures, "files_by_item", dict)
    return ResultFolders(tmp_path / "results")


def data(report: Path, name: str) -> Any:
    """Return what a script of data hands to its page."""
    text = (report / "data" / f"{name}.js").read_text()
    return json.loads(text.removeprefix("report.received(...").removesuffix(");\n"))[1]


def rows(report: Path) -> list[dict[str, Any]]:
    columns = data(report, "runs")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_no_report_made_is_never_removed(here: Command, folders: ResultFolders) -> None:
    for part in PARTS:
        theirs = folders.report / part / "theirs"
        theirs.parent.mkdir(parents=True)
        theirs.write_text("a year's work")
        refused(here("report"), str(theirs.parent), "no report made it")
        assert tree(folders.report) == {f"{part}/theirs": b"a year's work"}
        theirs.unlink()
        theirs.parent.rmdir()


def test_what_lies_beside_a_reports_own_folders_stays(here: Command, folders: ResultFolders) -> None:
    notes = folders.report / "notes" / "mine"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    for _ in range(2):
        fine(here("report"))
        assert notes.read_text() == "mine"


@pytest.mark.usefixtures("two_items")
def test_shipped_records_make_a_whole_report_and_the_same_again(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures.load("fig1").module, "draw", None)  # shipped pictures are shown
    report = tmp_path / "results" / "report"
    assert fine(here("report")).stdout.strip() == str(report / "index.html")
    assert (report / "index.html").stat().st_size < 5_000_000
    for row in rows(report):
        assert row["origin"] == "shipped"
        assert data(report, f"run/{row['id']}")["timeline"]
    page = (report / "pages" / "item-fig1-laptop.html").read_text()
    assert "python -m experiments reproduce fig1 profile=laptop" in page
    for path in (ResultFolders().shipped / "figures").glob("fig1-laptop.[!j]*"):
        assert (report / "files" / path.name).read_bytes() == path.read_bytes()
    assert not (tmp_path / "results" / "figures").exists()
    first = tree(report)
    fine(here("report"))
    assert tree(report) == first


def test_failed_and_damaged_runs_are_shown_as_such_and_stop_nothing(
    here: Command, folders: ResultFolders
) -> None:
    whole = synthetic.timed(folders.store, synthetic.config("topk"))
    failed = folders.store.create_attempt(synthetic.config("dense"))
    failed.mark_failed_unless_whole(f"out of memory {HOSTILE}", "out_of_memory")
    log = folders.launch_folder(failed) / "1_0_log.err"
    log.parent.mkdir(parents=True)
    log.write_text(f"Traceback\n{HOSTILE}")
    altered = synthetic.timed(folders.store, synthetic.config("topk", seed=1))  # as long, and other digits
    steps = altered.rank_log_path(1)
    steps.write_text(steps.read_text().replace("1", "2"))
    (folders.store.root / HOSTILE.replace("/", "") / "001").mkdir(parents=True)
    fine(here("report"))
    own = {row["run"]: row for row in rows(folders.report)}
    assert len(own) == 4
    states = [own[run.run_id]["state"] for run in (whole, failed, altered)]
    assert states == ["done", "failed", "damaged"]
    assert own[whole.run_id]["step_ms"] > 0
    assert own[failed.run_id]["why"] == f"out of memory {HOSTILE}"
    (shown,) = data(folders.report, f"run/{own[failed.run_id]['id']}")["logs"]
    assert shown == {"name": "1_0_log.err", "lines": f"Traceback\n{HOSTILE}".splitlines()}
    assert own[altered.run_id]["step_ms"] is None
    assert "another digest" in own[altered.run_id]["why"]
    assert "<script>" not in (folders.report / "index.html").read_text()


@pytest.mark.usefixtures("two_items")
def test_a_figure_that_fails_is_told_on_its_page_and_the_others_are_drawn(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures.load("fig1").module, "table", lambda frames: dict[str, str]()["nothing"])
    assert "fig1 (laptop) is left out: KeyError: 'nothing'" in fine(here("report")).stderr
    pages = tmp_path / "results" / "report" / "pages"
    assert "KeyError" in (pages / "item-fig1-laptop.html").read_text()
    assert "Not drawn" not in (pages / "item-speed-logs.html").read_text()


def test_damaged_shipped_tables_are_named_in_the_report(here: Command, folders: ResultFolders) -> None:
    folders.shipped.mkdir()
    (folders.shipped / "runs.parquet").write_bytes(b"PAR1 and then nothing")
    fine(here("report"))
    assert "is not a whole Parquet file" in (folders.report / "index.html").read_text()


def test_a_trace_of_a_whole_run_is_written_plain_or_compressed(
    here: Command, folders: ResultFolders, tmp_path: Path
) -> None:
    run = synthetic.timed(folders.store, synthetic.config("topk")).run_id
    plain = tmp_path / "a.json"
    packed = tmp_path / "a.json.gz"
    for path in (plain, packed):
        assert fine(here("trace", run, "--out", str(path))).stdout.strip() == str(path)
    assert json.loads(plain.read_text())["otherData"] == {"run": run, "times": "measured"}
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    failed = folders.store.create_attempt(synthetic.config("dense"))
    failed.mark_failed_unless_whole("out of memory")
    refused(here("trace", "nothing-of-this-name"), "0 runs match", failed.run_id)
    refused(here("trace", failed.run_id), "has no valid attempt", "why")


def test_a_report_follows_what_runs_do(
    here: Command, folders: ResultFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[Any]()
    attempt = synthetic.timed(folders.store, synthetic.config("topk"))

    def wait(_: float) -> None:
        written.append((rows(folders.report)[0]["state"], data(folders.report, "written")))
        if len(written) == 2:
            attempt.update_manifest(state="failed", why="a disk")
        if len(written) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(time, "sleep", wait)
    fine(here("report", "--follow"))
    assert [state for state, _ in written] == ["done", "done", "failed", "failed"]
    assert len({stamp for _, stamp in written}) == 2  # by which open pages know


@pytest.mark.parametrize(("bound", "at_most"), [("BATCH_RUNS", 2), ("BATCH_BYTES", 1)])
def test_runs_are_read_in_batches_each_once(
    bound: str, at_most: int, here: Command, folders: ResultFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read so many runs at a time, or so many bytes: long trainings take gigabytes together."""
    monkeypatch.setattr(attempts, bound, at_most)
    store = folders.store
    made = [synthetic.timed(store, synthetic.config("topk", seed=seed)) for seed in range(5)]
    batches = [*attempts.batch_runs_by_log_size(store, store.list_run_ids())]
    assert {*map(len, batches[:-1])} == {at_most}
    store.create_attempt(synthetic.config("topk", seed=0)).mark_failed_unless_whole("out of memory")
    fine(here("report"))
    shown = {row["run"]: row for row in rows(folders.report)}
    states = {attempt.run_id: "done" for attempt in made} | {made[0].run_id: "failed"}
    assert {run: row["state"] for run, row in shown.items()} == states
    assert shown[made[0].run_id]["why"] == "an older attempt is done, whose numbers these are"
    assert "| failed |" in here("list", "seed=0").stdout  # no two of them tell of it otherwise
