"""Figures from stored records: no torch, no runs, the same picture."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from experiments import figures
from tests.conftest import ROOT, environment_for

WITHOUT_TORCH = """
import sys
class Absent:  # as where it is not installed
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision", "greenlet", "submitit", "sklearn", "psutil"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from experiments.__main__ import main
sys.exit(main(["figures"]))
"""


def test_all_figures_are_drawn_from_the_shipped_records_without_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        cwd=ROOT,
        env=environment_for(tmp_path / "results"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in (tmp_path / "results" / "figures").iterdir()}
    assert drawn >= {f"{item}-laptop.{kind}" for item in figures.items() for kind in ("png", "pdf", "md")}
    for item in figures.items():
        ours = tmp_path / "results" / "figures" / f"{item}-laptop.md"
        shipped = ROOT / "results" / "shipped" / "figures" / f"{item}-laptop.md"
        assert ours.read_text().split("Drawn from")[0] == shipped.read_text().split("Drawn from")[0]
