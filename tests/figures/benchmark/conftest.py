"""Make a checkout of one's own, in which methods can be added: all that is not changed are links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.config.folders import ROOT

Command = Callable[..., subprocess.CompletedProcess[str]]
LINKED = ("analysis", "conf", "docs", "slurm", "tests", "pyproject.toml", "constraints.txt", "requirements")


@pytest.fixture(scope="session")
def own_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of that checkout."""
    folder = tmp_path_factory.mktemp("own")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in ("sparsify", "experiments"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shipped = Path("results", "shipped")
    (folder / shipped).mkdir(parents=True)
    for file in [*(ROOT / shipped).glob("*.parquet"), ROOT / shipped / "verdicts.csv"]:
        (folder / shipped / file.name).symlink_to(file)
    return folder


@pytest.fixture(scope="session")
def command(own_checkout: Path) -> Command:
    """Return a function that calls a command in that checkout and checks its exit code."""

    def call(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "experiments", *words],
            cwd=own_checkout,
            env={**os.environ, "PYTHONPATH": str(own_checkout), "SPARSIFY_RESULTS": ""},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done

    return call
