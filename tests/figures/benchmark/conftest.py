"""A checkout of one's own, in which methods can be added: all that is not changed are links."""

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
    folder = tmp_path_factory.mktemp("own")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for name in ("sparsify", "experiments"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "results" / "shipped").mkdir(parents=True)
    for name in (
        "runs.parquet",
        "epochs.parquet",
        "steps.parquet",
        "spans.parquet",
        "looks.parquet",
        "verdicts.csv",
    ):
        file = f"results/shipped/{name}"
        (folder / file).symlink_to(ROOT / file)
    return folder


@pytest.fixture(scope="session")
def command(own_checkout: Path) -> Command:
    """Calls a command in that checkout."""

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
