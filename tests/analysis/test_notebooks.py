"""The notebooks run from what the repository ships, without torch, and are kept without what they showed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

FOLDER = ROOT / "analysis" / "notebooks"
SOURCES = sorted(FOLDER.glob("*.ipynb"))
NO_TORCH = "import sys\nassert 'torch' not in sys.modules"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_notebook_runs_without_torch_and_shows_its_figures_and_none_are_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSIFY_RESULTS", str(tmp_path / "results"))  # nobody's own runs
    notebook = nbformat.read(source, as_version=4)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
    notebook.cells.append(nbformat.v4.new_code_cell(NO_TORCH))
    where = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    drawn = [cell for cell in notebook.cells if cell.source.endswith("\nfigure")]
    assert drawn
    for cell in drawn:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs)
    written = {path.suffix for path in tmp_path.rglob("accuracy-against-bytes.*")}
    assert written == ({".svg", ".pdf", ".png", ".tex"} if source.stem == "own_figure" else set())
