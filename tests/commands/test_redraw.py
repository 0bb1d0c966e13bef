"""Figures from stored records: no torch, no runs, the same picture."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from analysis.records.files import write_json
from analysis.records.frames import empty
from experiments import figures
from experiments.commands import _draw
from experiments.config.folders import Folders
from experiments.figures.runs import configs_of
from tests.analysis import synthetic
from tests.conftest import ROOT, Command, environment_for, fine, python

WITHOUT_TORCH = """
import sys
class Absent:  # as where it is not installed, in every process
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "greenlet", "submitit", "sklearn", "psutil"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""


def test_all_figures_are_drawn_from_the_shipped_records_without_torch(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_TORCH)
    around = environment_for(tmp_path / "results", PYTHONPATH=str(tmp_path / "site"))
    fine(python("-m", "experiments", "figures", env=around))
    drawn = {path.name for path in (tmp_path / "results" / "figures").iterdir()}
    shipped_runs = {path.stem for path in (ROOT / "results" / "shipped" / "figures").glob("*.json")}
    names = [f"{item}-laptop" if figures.has_runs(item) else item for item in figures.shipped()]
    names = [name for name in names if name in shipped_runs or name in figures.items()]
    assert {"fig1-laptop", "fig3-laptop", "speed-laptop", "fig4-logs"} <= set(names)
    assert drawn >= {f"{name}.{kind}" for name in names for kind in ("png", "pdf", "svg", "md")}
    for name in names:
        ours = tmp_path / "results" / "figures" / f"{name}.md"
        shipped = ROOT / "results" / "shipped" / "figures" / f"{name}.md"
        assert ours.read_text().split("Drawn from")[0] == shipped.read_text().split("Drawn from")[0]
        for kind in ("csv", "tex"):
            assert_same(ours.with_suffix(f".{kind}"), shipped.with_suffix(f".{kind}"))


@pytest.mark.parametrize("processes", [1, 2])
def test_figures_that_can_not_be_written_are_named_and_stop_no_others(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    monkeypatch.setattr(_draw, "cores", lambda: processes)
    monkeypatch.setattr(_draw, "WORTH_A_PROCESS", 1)
    drawn = tmp_path / "results" / "figures"
    (drawn / "fig3-logs.csv").mkdir(parents=True)  # a folder where a file belongs
    done = here("figures", "fig3-logs", "eghlidi-table1-published")
    assert done.returncode == 1
    assert f"fig3-logs-published can't be written: {drawn / 'fig3-logs.csv'}" in done.stderr
    assert f"eghlidi-table1-published: {drawn / 'eghlidi-table1-published.png'}" in done.stdout
    whole = drawn / "eghlidi-table1-published.csv"
    shipped = ROOT / "results" / "shipped" / "figures" / whole.name
    assert whole.read_bytes() == shipped.read_bytes()
    assert whole.with_suffix(".svg").read_text().rstrip().endswith("</svg>")


def test_processes_that_are_killed_leave_their_figures_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_draw, "cores", lambda: 2)
    monkeypatch.setattr(_draw, "WORTH_A_PROCESS", 1)
    names = [(item, "published") for item in ("eghlidi-table1-published", "fig3-logs") * 4]
    folders = Folders(tmp_path)
    killed = list[object]()

    def found() -> Iterator[_draw.Stored | None]:
        for name in names:
            for process in multiprocessing.active_children():
                process.kill()
                killed.append(process)
            yield _draw.stored(*name, folders, empty())

    drawn = list(_draw.draw_each(names, found(), tmp_path))
    assert killed
    assert [(each.item, each.picture.exists()) for each in drawn if isinstance(each, _draw.Drawn)] == [
        (item, True) for item, _ in names
    ]


def test_a_figure_that_takes_long_keeps_no_other_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_draw, "cores", lambda: 2)
    signs = [tmp_path / str(at) for at in range(12)]
    calls: list[Callable[[], object]] = [
        partial(seen, signs[-1]),
        *(partial(touched, sign) for sign in signs),
    ]
    assert [*_draw.over_cores(calls, len(calls))] == [True, *signs]


def seen(sign: Path) -> bool:
    """Whether it is there within a minute."""
    end = time.monotonic() + 60
    while time.monotonic() < end and not sign.exists():
        time.sleep(0.05)
    return sign.exists()


def touched(sign: Path) -> Path:
    sign.touch()
    return sign


def assert_same(ours: Path, shipped: Path) -> None:
    """The same text, or neither is there."""
    assert ours.exists() == shipped.exists()
    assert not ours.exists() or ours.read_text() == shipped.read_text()


def test_a_bad_line_of_a_benchmark_is_left_out_and_a_bad_file_too(here: Command, tmp_path: Path) -> None:
    bench = tmp_path / "results" / "bench"
    bench.mkdir(parents=True)
    (shipped,) = (ROOT / "results" / "shipped" / "bench").glob("select-*.jsonl")
    row = shipped.read_text().splitlines()[1]
    bad = ["5", "null", "{", '{"schema": 1}', '{"schema": 1, "kind": "row"}', row.replace('"n": ', '"n": -')]
    (bench / shipped.name).write_text("\n".join([*bad, shipped.read_text()]))
    os.mkfifo(bench / "select-fifo.jsonl")
    done = fine(here("figures", "select"))
    assert f"left out {len(bad)} lines of {bench / shipped.name}" in done.stderr
    assert "select-fifo.jsonl is a FIFO and no file" in done.stderr
    assert done.stdout.split() == [str(tmp_path / "results" / "figures" / f"{shipped.stem}.png")]


def test_damaged_shipped_records_are_named_and_stop_no_figure_of_ones_own(
    here: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folders, "shipped", property(lambda self: tmp_path / "shipped"))
    (tmp_path / "shipped").mkdir()
    (tmp_path / "shipped" / "runs.parquet").write_bytes(b"PAR1 and then nothing")
    folders = Folders(tmp_path / "results")
    runs = [synthetic.learned(folders.store, config).run_id for config in configs_of("fig3", "smoke")]
    folders.index.mkdir(parents=True)
    write_json(folders.index / "fig3-smoke.json", {"runs": runs})
    done = fine(here("figures", "fig3"))
    assert "runs.parquet is not a whole Parquet file" in done.stderr
    assert "fig3-smoke.png (from this machine's runs)" in done.stdout
