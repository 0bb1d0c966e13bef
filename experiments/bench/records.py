"""Collecting and listing many records."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from analysis.records.log import RankLog
from analysis.records.phases import NAMES
from analysis.records.store import Store
from experiments.bench._runner import Bench, Record
from experiments.bench._timing import device_of, facts
from experiments.config import compose
from experiments.config.folders import ROOT
from sparsify.ranges import PositiveInt

RANKS, STEPS = 8, 100
STARTED, ENDED = "2000-01-01T00:00:00Z", "2000-01-01T00:01:00Z"  # of invented runs
COMMANDS = ("collect", "list")


def records(*, runs: PositiveInt = 10_000) -> Bench:
    """The time that many records take: collected into tables, and listed.

    The records are invented, in a temporary folder: 100 steps on 8 ranks, with all phases, 0.4 MB a run. Wall
    time, and the CPU time of all processes.

    Args:
        runs: how many records.
    """

    def measure(case: Record) -> Iterator[Record]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            invent(Store(Path(folder) / "runs"), runs)
            for command in COMMANDS:
                wall_s, cpu_s = timed(command, Path(folder))
                yield {"command": command, "wall_s": wall_s, "cpu_s": cpu_s}

    return Bench(
        about=facts(device_of("cpu")),
        cases=[{"runs": runs}],
        measure=measure,
        heading="command | runs | s | s of CPU time",
        row="{command} | {runs:,} | {wall_s:.1f} | {cpu_s:.1f}",
        last=lambda rows: {row["command"]: {name: row[name] for name in ("wall_s", "cpu_s")} for row in rows},
    )


def timed(command: str, results: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one command over these results."""
    call, variables = [sys.executable, "-m", "experiments", command], {"SPARSIFY_RESULTS": str(results)}
    before = os.times()
    subprocess.run(call, cwd=ROOT, env=os.environ | variables, check=True, stdout=subprocess.DEVNULL)
    took = [after - earlier for after, earlier in zip(os.times(), before, strict=True)]
    _, _, user_s, system_s, wall_s = took  # the first two are of this process
    return wall_s, user_s + system_s


def invent(store: Store, runs: int) -> None:
    """Records that differ in their seed, every number of them made up."""
    config = compose.resolve(["method=topk", "task=cnn_digits", "profile=smoke", f"workers={RANKS}"])
    logs = list[bytes]()
    for seed in range(runs):
        attempt = store.begin({**config, "seed": seed})
        for rank in range(RANKS):
            if len(logs) == rank:
                logs.append(_log(attempt.rank_path(rank), rank))
            attempt.rank_path(rank).write_bytes(logs[rank])
        facts: dict[str, Any] = {"provenance": {"cpu": "invented"}, "started": STARTED, "ended": ENDED}
        attempt.update(state="ok", files=attempt.fingerprints(), steps=STEPS, simulated=True, **facts)


def _log(path: Path, rank: int) -> bytes:
    with RankLog(path) as log:
        for step in range(STEPS):
            phases = {phase: 0.001 * (1 + place) + 1e-6 * step for place, phase in enumerate(NAMES)}
            log.add(
                "step", step=step, epoch=1, start_s=100.0 * rank + 0.1 * step, step_s=sum(phases.values()),
                phases=phases, wire_bytes=117_824, host_syncs=0, sent_density=0.001, update_density=0.0018,
                residual_norm=1.0 + 0.1 * step, loss=2.3 - 0.01 * step, lr=0.1,
            )  # fmt: skip
        log.flush()
    return path.read_bytes()
