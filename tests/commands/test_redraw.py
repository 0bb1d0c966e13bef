"""Figures from stored records: no torch, no runs, the same picture."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.records.files import write_json
from analysis.records.frames import empty_frames
from experiments import figures
from experiments.commands import _drawing
from experiments.config.folders import ResultFolders
from experiments.figures.runs import required_configs
from tests.analysis import synthetic
from tests.conftest import ROOT, Command, environment_for, fine, python, refused

WITHOUT_TORCH = """
import sys
class Absent:  # as where it is not installed, in every process
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "greenlet", "submitit", "sklearn", "psutil"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""


SHIPPED = ROOT / "results" / "shipped" / "figures"


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """Provide the folder of drawn figures."""
    return tmp_path / "results" / "figures"


@pytest.mark.parametrize(
    "items", [["fig1", "fig4-logs", "speed-fast"], pytest.param([], marks=pytest.mark.extended)]
)
def test_figures_are_drawn_from_the_shipped_records_without_torch(
    items: list[str], drawn: Path, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_TORCH)
    around = environment_for(tmp_path / "results", PYTHONPATH=str(tmp_path / "site"))
    fine(python("-m", "experiments", "figures", *items, env=around))
    stems = {
        f"{item}-laptop" if figures.load(item).needs_runs else item
        for item in items or figures.repository_items()
    }
    there = {path.stem for path in SHIPPED.glob("*.tex")}
    assert {"fig1-laptop", "fig4-logs"} <= stems & there
    for stem in stems & there:
        for kind in ("png", "pdf", "svg"):
            assert (drawn / f"{stem}.{kind}").exists(), (stem, kind)
        for kind in ("md", "csv", "tex"):
            ours, shipped = (text_of(folder / f"{stem}.{kind}") for folder in (drawn, SHIPPED))
            assert ours == shipped, (stem, kind)


def text_of(path: Path) -> str:
    """Return a file's text, but not when and where it was drawn; nothing where it is not there."""
    return path.read_text().split("Drawn from")[0] if path.exists() else ""


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let figures be drawn by two processes, however few they are."""
    monkeypatch.setattr(_drawing, "count_usable_cores", lambda: 2)
    monkeypatch.setattr(_drawing, "FIGURES_PER_PROCESS", 1)


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("processes", [1, 2])
def test_figures_that_can_not_be_written_are_named_and_stop_no_others(
    here: Command, drawn: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(_drawing, "count_usable_cores", lambda: processes)
    (drawn / "fig3-logs.csv").mkdir(parents=True)  # a folder where a file belongs
    done = here("figures", "fig3-logs", "eghlidi-table1-published")
    refused(done, f"fig3-logs-published can't be written: {drawn / 'fig3-logs.csv'}", code=1)
    whole = drawn / "eghlidi-table1-published"
    assert f"{whole.name}: {whole}.png" in done.stdout
    assert whole.with_suffix(".csv").read_bytes() == (SHIPPED / f"{whole.name}.csv").read_bytes()
    assert whole.with_suffix(".svg").read_text().rstrip().endswith("</svg>")


@pytest.mark.usefixtures("two_cores")
def test_processes_that_are_killed_leave_their_figures_to_the_first(tmp_path: Path) -> None:
    names = [(figures.load(item), "published") for item in ("eghlidi-table1-published", "fig3-logs") * 4]
    folders = ResultFolders(tmp_path / "results")
    killed = []

    def stored() -> Iterator[_drawing.FigureRecords | None]:
        for name in names:
            for process in multiprocessing.active_children():
                process.kill()
                killed.append(process)
            yield _drawing.find_figure_records(*name, folders, empty_frames())

    found = [*_drawing.write_figures_in_parallel(names, stored(), tmp_path)]
    assert killed
    assert [isinstance(each, _drawing.RenderedFigure) and each.picture.exists() for each in found] == [
        True
    ] * len(names)


def test_a_bad_line_of_a_benchmark_is_left_out_and_a_bad_file_too(
    here: Command, drawn: Path, tmp_path: Path
) -> None:
    bench = tmp_path / "results" / "bench"
    bench.mkdir(parents=True)
    (shipped,) = (ROOT / "results" / "shipped" / "bench").glob("select-*.jsonl")
    row = shipped.read_text().splitlines()[1]
    bad = ["5", "{", '{"schema": 1, "kind": "row"}', row.replace('"n": ', '"n": -')]
    (bench / shipped.name).write_text("\n".join([*bad, shipped.read_text()]))
    os.mkfifo(bench / "select-fifo.jsonl")
    done = fine(here("figures", "select"))
    assert f"left out {len(bad)} lines of {bench / shipped.name}" in done.stderr
    assert "select-fifo.jsonl is a FIFO and no file" in done.stderr
    assert done.stdout.split() == [str(drawn / f"{shipped.stem}.png")]


def test_damaged_shipped_records_are_named_and_stop_no_figure_of_ones_own(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ResultFolders, "shipped", property(lambda self: tmp_path / "shipped"))
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "runs.parquet").write_bytes(b"PAR1 and then nothing")
    folders = ResultFolders(tmp_path / "results")
    runs = [
        synthetic.learned(folders.store, config).run_id
        for config in required_configs(figures.load("fig3"), "smoke")
    ]
    folders.index.mkdir(parents=True)
    write_json(folders.index / "fig3-smoke.json", {"runs": runs})
    done = fine(here("figures", "fig3"))
    assert "runs.parquet is not a whole Parquet file" in done.stderr
    assert "fig3-smoke.png (from this machine's runs)" in done.stdout
