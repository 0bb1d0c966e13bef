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

from analysis.records import parquet
from analysis.records.files import read_as
from analysis.records.frames import Frames
from analysis.records.parquet import read_parquet
from analysis.records.schema import RunIndex
from analysis.report.pages import PARTS
from experiments import figures
from experiments.commands import report
from experiments.commands._draw import runs_of
from experiments.config.folders import Folders
from tests.analysis import synthetic
from tests.analysis.report.test_pages import HOSTILE
from tests.conftest import Command, fine, refused, there

ITEMS = ("fig1", "speed-logs")  # one of runs and one of published tables, both quickly drawn


@pytest.fixture
def two_items(monkeypatch: pytest.MonkeyPatch) -> None:
    every = figures.items()
    monkeypatch.setattr(figures, "items", lambda: {item: every[item] for item in ITEMS})


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is shipped the runs of one figure: pages of hundreds take their time."""
    monkeypatch.setattr(report.Shipped, "frames", runs_of_one_figure())


@cache
def runs_of_one_figure() -> Frames:
    folder = Folders().shipped
    index = there(read_as(folder / "figures" / "fig1-laptop.json", RunIndex))
    return runs_of(read_parquet(folder), index.runs)


@pytest.fixture
def nothing_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout with this machine's runs alone, and without figures that need none."""
    monkeypatch.setattr(Folders, "shipped", property(lambda self: tmp_path / "shipped"))
    monkeypatch.setattr(figures, "items", dict)


def data(report: Path, name: str) -> Any:
    """What a script of data hands to its page."""
    text = (report / "data" / f"{name}.js").read_text()
    return json.loads(text.removeprefix("report.received(...").removesuffix(");\n"))[1]


def rows(report: Path) -> list[dict[str, Any]]:
    columns = data(report, "runs")
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.usefixtures("nothing_shipped")
@pytest.mark.parametrize("part", PARTS)
def test_a_folder_that_no_report_made_is_never_removed(here: Command, tmp_path: Path, part: str) -> None:
    theirs = tmp_path / "results" / "report" / part / "theirs"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("a year's work")
    refused(here("report"), str(theirs.parent), "no report made it")
    assert tree(tmp_path / "results" / "report") == {f"{part}/theirs": b"a year's work"}


@pytest.mark.usefixtures("nothing_shipped")
def test_what_lies_beside_a_reports_own_folders_stays(here: Command, tmp_path: Path) -> None:
    report = tmp_path / "results" / "report"
    (report / "notes").mkdir(parents=True)
    (report / "notes" / "mine").write_text("mine")
    for _ in range(2):
        fine(here("report"))
        assert (report / "notes" / "mine").read_text() == "mine"
    (tmp_path / "elsewhere").mkdir()
    (report / "data").rename(tmp_path / "elsewhere" / "data")
    (report / "data").symlink_to(tmp_path / "elsewhere" / "data")
    refused(here("report"), "no report made it")
    assert [*(tmp_path / "elsewhere" / "data").iterdir()]


@pytest.mark.usefixtures("two_items", "few_runs")
def test_shipped_records_make_a_whole_report_and_the_same_again(here: Command, tmp_path: Path) -> None:
    done = here("report")
    report = tmp_path / "results" / "report"
    assert (done.returncode, done.stdout.strip()) == (0, str(report / "index.html"))
    assert (report / "index.html").stat().st_size < 5_000_000
    assert {row["origin"] for row in rows(report)} == {"shipped"}
    assert all((report / "data" / "run" / f"{row['id']}.js").is_file() for row in rows(report))
    drawn = [row for row in rows(report) if "fig1-laptop" in row["items"]]
    assert data(report, f"run/{drawn[0]['id']}")["timeline"]
    page = (report / "pages" / "item-fig1-laptop.html").read_text()
    assert "python -m experiments reproduce fig1 profile=laptop" in page
    kinds = {path.suffix for path in (report / "files").glob("fig1-laptop.*")}
    assert kinds >= {".pdf", ".png", ".csv", ".tex", ".md", ".bib"}
    first = tree(report)
    assert here("report").returncode == 0
    assert tree(report) == first


@pytest.mark.usefixtures("nothing_shipped")
def test_failed_and_damaged_runs_are_shown_as_such_and_stop_nothing(here: Command, tmp_path: Path) -> None:
    folders = Folders(tmp_path / "results")
    whole = synthetic.timed(folders.store, synthetic.config("topk"))
    failed = folders.store.begin(synthetic.config("dense"))
    failed.fail(f"out of memory {HOSTILE}", "out_of_memory")
    said = folders.launch(failed) / "1_0_log.err"
    said.parent.mkdir(parents=True)
    said.write_text(f"Traceback\n{HOSTILE}")
    damaged = synthetic.timed(folders.store, synthetic.config("randomk"))
    (damaged.path / "run.json").write_text("{")
    altered = synthetic.timed(folders.store, synthetic.config("topk", seed=1))  # as long, and other digits
    log = altered.rank_path(1)
    log.write_text(log.read_text().replace("1", "2"))
    (folders.store.root / f"{HOSTILE.replace('/', '')}" / "001").mkdir(parents=True)
    fine(here("report"))
    report = tmp_path / "results" / "report"
    own = {row["run"]: row for row in rows(report) if row["origin"] == "this machine"}
    assert own[whole.run_id]["state"] == "done"
    assert own[whole.run_id]["step_ms"] > 0
    assert (own[failed.run_id]["state"], own[failed.run_id]["why"]) == ("failed", f"out of memory {HOSTILE}")
    assert data(report, f"run/{own[failed.run_id]['id']}")["logs"] == [
        {"name": "1_0_log.err", "lines": f"Traceback\n{HOSTILE}".splitlines()}
    ]
    assert own[damaged.run_id]["state"] == "damaged"
    assert (own[altered.run_id]["state"], own[altered.run_id]["step_ms"]) == ("damaged", None)
    assert "another digest" in own[altered.run_id]["why"]
    assert damaged.run_id in (report / "index.html").read_text()
    assert len(own) == 5
    assert {row["id"] for row in own.values()} >= {whole.key}
    assert "<script>" not in (report / "index.html").read_text()


@pytest.mark.usefixtures("two_items", "few_runs")
def test_of_shipped_records_the_shipped_pictures_are_shown(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures.load("fig1"), "draw", None)  # nobody calls it
    fine(here("report"))
    report = tmp_path / "results" / "report"
    shipped = Folders(tmp_path).shipped / "figures" / "fig1-laptop.png"
    assert (report / "files" / "fig1-laptop.png").read_bytes() == shipped.read_bytes()
    assert not (tmp_path / "results" / "figures").exists()


@pytest.mark.usefixtures("two_items", "few_runs")
def test_a_figure_that_fails_is_told_on_its_page_and_the_others_are_drawn(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: dict[str, Any] = {}
    monkeypatch.setattr(figures.load("fig1"), "table", lambda frames: nothing["nothing"])
    done = here("report")
    assert done.returncode == 0
    assert "fig1 (laptop) is left out: KeyError: 'nothing'" in done.stderr
    pages = tmp_path / "results" / "report" / "pages"
    assert "KeyError" in (pages / "item-fig1-laptop.html").read_text()
    assert "Not drawn" not in (pages / "item-speed-logs.html").read_text()


@pytest.mark.usefixtures("two_items")
def test_damaged_shipped_tables_are_named_in_the_report(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folders, "shipped", property(lambda self: tmp_path / "shipped"))
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "runs.parquet").write_bytes(b"PAR1 and then nothing")
    assert here("report").returncode == 0
    text = (tmp_path / "results" / "report" / "index.html").read_text()
    assert "is not a whole Parquet file" in text


def test_a_trace_is_written_plain_or_compressed(here: Command, tmp_path: Path) -> None:
    store = Folders(tmp_path / "results").store
    run = synthetic.timed(store, synthetic.config("topk")).run_id
    plain, packed = tmp_path / "a.json", tmp_path / "a.json.gz"
    for path in (plain, packed):
        done = here("trace", run, "--out", str(path))
        assert (done.returncode, done.stdout.strip()) == (0, str(path))
    assert json.loads(plain.read_text()) == json.loads(gzip.decompress(packed.read_bytes()))
    assert json.loads(plain.read_text())["otherData"] == {"run": run, "times": "measured"}


def test_a_trace_needs_one_run_that_is_whole(here: Command, tmp_path: Path) -> None:
    store = Folders(tmp_path / "results").store
    failed = store.begin(synthetic.config("dense"))
    failed.fail("out of memory")
    refused(here("trace", "nothing-of-this-name"), "0 runs match", failed.run_id)
    refused(here("trace", failed.run_id), "has no valid attempt", "why")


@pytest.mark.usefixtures("nothing_shipped")
def test_a_report_follows_what_runs_do(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = Folders(tmp_path / "results")
    written = list[Any]()
    attempt = synthetic.timed(folders.store, synthetic.config("topk"))

    def wait(_: float) -> None:
        written.append((rows(folders.report)[0]["state"], data(folders.report, "written")))
        if len(written) == 2:
            attempt.update(state="failed", why="a disk")
        if len(written) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(time, "sleep", wait)
    fine(here("report", "--follow"))
    assert [state for state, _ in written] == ["done", "done", "failed", "failed"]
    assert len({stamp for _, stamp in written}) == 2  # by which open pages know


@pytest.mark.usefixtures("nothing_shipped")
@pytest.mark.parametrize(
    ("bound", "at_most", "together"), [("RUNS_OF_A_PART", 2, 2), ("BYTES_OF_A_PART", 1, 1)]
)
def test_runs_are_read_in_batches_each_once(
    bound: str, at_most: int, together: int, here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of so many runs, and of so many bytes: long trainings take gigabytes together."""
    monkeypatch.setattr(parquet, bound, at_most)
    store = Folders(tmp_path / "results").store
    made = [synthetic.timed(store, synthetic.config("topk", seed=seed)) for seed in range(5)]
    batches = [*parquet.shares(store, store.runs())]
    assert [run for batch in batches for run in batch] == store.runs()
    assert {*map(len, batches[:-1])} == {together}
    again = store.begin(synthetic.config("topk", seed=0))
    again.fail("out of memory")
    assert here("report").returncode == 0
    found = {row["run"]: row for row in rows(tmp_path / "results" / "report")}
    assert set(found) == {attempt.run_id for attempt in made}
    states = {run: row["state"] for run, row in found.items()}
    assert states == {attempt.run_id: "done" for attempt in made} | {made[0].run_id: "failed"}
    assert found[made[0].run_id]["why"] == "an older attempt is done, whose numbers these are"
    assert "| failed |" in here("list", "seed=0").stdout  # no two of them tell of it otherwise
