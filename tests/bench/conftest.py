"""The benchmark of selections run once, small, for all tests that look at what it left."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from experiments.bench import _steps as steps
from tests.conftest import environment_for, python

SMALL = ("--n", "20000", "--flush", "1", "--device", "cpu", "--threads", "1", "--repeats", "2")
ROWS = [name for name in steps.ROWS if name != "compile"]  # which takes half a minute


def lines_of(results: Path, name: str) -> list[dict[str, Any]]:
    """All lines of a benchmark's records, in results of a test's own."""
    (store,) = (results / "bench").glob(f"{name}-*.jsonl")
    return [json.loads(line) for line in store.read_text().splitlines()]


def last_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The object that a benchmark printed last."""
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Benched(NamedTuple):
    results: Path
    done: subprocess.CompletedProcess[str]

    @property
    def store(self) -> Path:
        """The records."""
        (store,) = (self.results / "bench").glob("select-cpu-*-1-threads.jsonl")
        return store


def bench(results: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """`python -m experiments bench ...` as a process of its own."""
    return python("-m", "experiments", "bench", *words, env=environment_for(results, **extra))


@pytest.fixture(scope="session")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """`make bench BENCH=select`, with results of its own."""
    results = tmp_path_factory.mktemp("results")
    return Benched(results, bench(results, "select", *SMALL, "--rows", *ROWS))
