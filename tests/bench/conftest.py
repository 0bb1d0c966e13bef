"""Run benchmarks in this process; that of selections once, small, for all tests that look at what it left."""

from __future__ import annotations

import io
import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from experiments.__main__ import main
from experiments.bench import _launches
from experiments.bench._select_steps import STEP_KINDS
from tests.conftest import THE_USERS

SMALL = ("--n", "20000", "--flush", "1", "--device", "cpu", "--threads", "1", "--repeats", "2")
ROWS = [name for name in STEP_KINDS if name != "compile"]  # which takes half a minute
Record = dict[str, Any]
RunBench = Callable[..., Record]


def lines_of(results: Path, name: str) -> list[Record]:
    """Return all lines of a benchmark's records."""
    (store,) = (results / "bench").glob(f"{name}-*.jsonl")
    return [json.loads(line) for line in store.read_text().splitlines()]


def last_of(printed: str) -> Record:
    """Return the object that a benchmark printed last."""
    found: Record = json.loads(printed.splitlines()[-1])
    return found


def call_bench(results: Path, *words: str) -> str:
    """Return what `bench` printed, with these results. Its workers are forked from a process with torch."""
    multiprocessing.set_forkserver_preload([_launches.__name__])
    start = partial(start_processes, start_method="forkserver")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        for name in THE_USERS:
            patch.delenv(name, raising=False)
        patch.setenv("SPARSIFY_RESULTS", str(results))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setattr(_launches, "spawn", start)
        assert main(["bench", *words]) == 0
    return printed.getvalue()


@pytest.fixture(autouse=True)
def threads_stay() -> Iterator[None]:
    """Keep torch's number of threads from what a benchmark sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(tmp_path: Path) -> RunBench:
    """Return a function that runs a benchmark in a folder of its own and returns its last object."""
    return lambda *words: last_of(call_bench(tmp_path, *words))


class Benched(NamedTuple):
    """A benchmark that was run: its results, and what it printed."""

    results: Path
    printed: str

    @property
    def store(self) -> Path:
        """The records."""
        (store,) = (self.results / "bench").glob("*-cpu-*.jsonl")
        return store


@pytest.fixture(scope="session")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    """Return what `make bench BENCH=select` left and printed."""
    results = tmp_path_factory.mktemp("results")
    return Benched(results, call_bench(results, "select", *SMALL, "--rows", *ROWS))
