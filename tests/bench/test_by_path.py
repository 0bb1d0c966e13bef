"""Benchmarks that are run as files, as in an image."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

BENCH = ROOT / "experiments/bench"
FILES = sorted(path.name for path in BENCH.glob("*.py") if not path.name.startswith("_"))
AS_FILES = f"""
import runpy, sys
for name in {FILES}:
    sys.path.insert(0, {str(BENCH)!r})
    runpy.run_path({str(BENCH)!r} + "/" + name)
    assert {str(BENCH)!r} not in sys.path
"""


def test_operators_is_run_by_its_path(tmp_path: Path) -> None:
    """Beside it lies a folder named as a module that torch imports."""
    words = ("--n", "1000", "--density", "0.01", "--repeats", "1", "--device", "cpu", "--only", "topk")
    done = subprocess.run(
        [sys.executable, str(BENCH / "operators.py"), *words],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout)["k"] == 10


def test_every_benchmark_finds_what_it_imports_when_run_by_its_path(tmp_path: Path) -> None:
    assert "operators.py" in FILES
    subprocess.run([sys.executable, "-c", AS_FILES], cwd=tmp_path, check=True)
