"""The picture and the page of the benchmark of selections, drawn from its records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench import _steps as steps
from experiments.bench.select import __main__ as select
from experiments.bench.select import figure as select_figure
from experiments.bench.select.records import LOOKS, read, text_of
from experiments.config.folders import Folders
from tests.bench.conftest import Benched
from tests.conftest import ROOT


def test_every_row_has_a_look() -> None:
    assert set(LOOKS) == set(steps.ROWS)


def test_picture_and_page_are_drawn(benched: Benched) -> None:
    store = benched.store
    assert (benched.results / "figures" / f"{store.stem}.png").read_bytes().startswith(b"\x89PNG")
    page = (benched.results / "figures" / f"{store.stem}.md").read_text()
    assert "## n = 20,000, density 0.001, normal" in page
    assert "| eager |" in page
    assert "paper_kernel not run: needs a GPU" in page


def test_records_from_before_there_was_an_add_are_drawn_against_the_copy(
    tmp_path: Path, benched: Benched
) -> None:
    newer = ("cpu_ms", "over_add", "eager_hugepages_over", "cpu_over_add", "cpu_eager_over")
    records = [json.loads(line) for line in benched.store.read_text().splitlines()]
    for record in records:
        for name in newer:
            record.pop(name, None)
    store = tmp_path / benched.store.name
    store.write_text(text_of([record for record in records if record.get("row") != "add"]))
    select_figure.draw_one(store, tmp_path)
    page = (tmp_path / f"{store.stem}.md").read_text()
    assert "as a multiple of a copy that moves 12n bytes" in page
    assert "| eager |" in page


def test_the_figure_needs_no_torch(tmp_path: Path, benched: Benched) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom experiments.bench.select import figure\n"
        f"print(figure.draw_one(Path({str(benched.store)!r}), Path({str(tmp_path)!r})))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).exists()


def test_shipped_are_the_newest_rows_and_figures_are_drawn_from_them(
    tmp_path: Path, benched: Benched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folders, "shipped", tmp_path / "shipped")
    folders, store = Folders(tmp_path), benched.store
    for path in select.ship(store, folders):
        assert path.exists()
    assert read(tmp_path / "shipped" / "bench" / store.name) == read(store)
    assert select_figure.redraw(folders) == [tmp_path / "figures" / f"{store.stem}.png"]
    page = f"{store.stem}.md"
    assert (folders.figures / page).read_text() == (benched.results / "figures" / page).read_text()
