"""The benchmark of selections run once, small, for all tests that look at what it left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from experiments.bench import _steps as steps
from tests.conftest import ROOT, environment_for

SMALL = ("--n", "20000", "--flush", "1", "--device", "cpu", "--threads", "1", "--repeats", "2")
ROWS = [name for name in steps.ROWS if name != "compile"]  # which takes half a minute


class Benched(NamedTuple):
    results: Path
    done: subprocess.CompletedProcess[str]

    @property
    def store(self) -> Path:
        """The records."""
        (store,) = (self.results / "bench").glob("select-cpu-*-1-threads.jsonl")
        return store


@pytest.fixture(scope="session")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """`make bench BENCH=select`, with results of its own."""
    results = tmp_path_factory.mktemp("results")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.bench.select", *SMALL, "--rows", *ROWS],
        cwd=ROOT, env=environment_for(results), capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return Benched(results, done)
