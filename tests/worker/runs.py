"""Runs as tests make them: their orders, their processes, and what they recorded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from msgspec.structs import replace

from analysis.records.log import read_json_lines
from analysis.records.store import Attempt, Store
from experiments.config import compose
from experiments.config.config import Config
from experiments.training.stop_signal import Preempted, StopSignal
from experiments.worker import run
from experiments.worker.orders import RunOrders
from slurm.environment import WorkerPlace
from slurm.worker_process import STOP_SIGNALS, open_lifeline_pipe
from tests.conftest import ROOT, environment_for

CLOCKS = ("start_s", "step_s", "phases", "spans", "wall_s")  # of a record, what differs from run to run


def orders(store: Store, *words: str) -> tuple[RunOrders, Attempt]:
    """Return the orders of a run's workers, and the attempt that they are to fill."""
    config = compose.resolve(["task=cnn_digits", "profile=smoke", *words])
    attempt = store.create_attempt(config)
    return RunOrders(config.as_dict(), str(attempt.path)), attempt


def claiming(on_mismatch: str, **cluster: Any) -> Config:
    """Return a config of nothing but what it claims of a cluster."""
    names = {group: {"name": "none"} for group in ("container", "method", "task")}
    return Config.from_dict({"cluster": cluster, "launch": {"on_mismatch": on_mismatch}, **names})


def carry_out(told: RunOrders, attempt: Attempt, folder: Path, stop: StopSignal | None = None) -> None:
    """Be the only worker of this run; virtual ranks need no other."""
    folder.mkdir(exist_ok=True)
    run.execute_run(
        replace(told, attempt_folder=str(attempt.path)), WorkerPlace(0, 1, 0), folder, stop or StopSignal()
    )


def stopped_and_straight(folder: Path, times: int, *words: str) -> tuple[Attempt, Attempt]:
    """Return the attempt of a run that was stopped and went on, and that of the same run straight.

    The first is told to stop when it was asked so many times. Both come to the same bits.
    """
    told, straight = orders(Store(folder / "runs"), *words)
    _, attempt = orders(Store(folder / "runs"), *words)
    carry_out(told, straight, folder / "straight")
    with pytest.raises(Preempted) as stopped:
        carry_out(told, attempt, folder / "a", StopAt(times))
    assert attempt.manifest["step"] == stopped.value.step > 0
    carry_out(told, attempt, folder / "a")
    assert straight.manifest["agreed"] == (told.config["method"]["name"] != "noloco")  # breaks it by design
    check_equal(attempt, straight)
    return attempt, straight


def check_equal(attempt: Attempt, other: Attempt) -> None:
    """Check that two runs came to the same weights by the same steps."""
    assert attempt.manifest["weights"] == other.manifest["weights"]
    for rank in range(attempt.config["workers"]):
        for kind in ("step", "epoch"):
            assert measured(recorded(attempt, rank, kind)) == measured(recorded(other, rank, kind))


class StopAt(StopSignal):
    """Tells to stop when it was asked so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.asked = times, 0

    @property
    def is_set(self) -> bool:
        self.asked += 1
        return self.asked > self.times


def recorded(attempt: Attempt, rank: int, kind: str = "step") -> list[dict[str, Any]]:
    """Return a rank's recorded lines of this kind."""
    lines, broken = read_json_lines(attempt.rank_log_path(rank))
    assert not broken
    return [line for line in lines if line["kind"] == kind]


def measured(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines without the fields that depend on clocks."""
    return [{key: value for key, value in line.items() if key not in CLOCKS} for line in lines]


def manifests(results: Path) -> list[dict[str, Any]]:
    """Return the manifests of every attempt in a folder of results."""
    return [json.loads(path.read_text()) for path in sorted(results.glob("runs/*/*/run.json"))]


def wait_for(folder: Path, name: str, count: int = 1, timeout_s: float = 120) -> None:
    """Wait until there are so many files of such a name, and something in them."""
    deadline = time.monotonic() + timeout_s
    while sum(path.stat().st_size > 0 for path in folder.glob(name)) < count:
        assert time.monotonic() < deadline, f"no {name}"
        time.sleep(0.01)


# --- a run's processes
# ----------------------------------------------------------------------------------------


class Workers(NamedTuple):
    """A started run's processes, by rank."""

    processes: list[subprocess.Popen[bytes]]

    def end(self) -> list[int]:
        """Return their exit codes."""
        try:
            return [process.wait(timeout=150) for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()


def start_workers(told: RunOrders, folder: Path, size: int) -> Workers:
    """Start the run's workers, as a launcher starts them."""
    folder.mkdir()
    told.write(folder / "launch.json")
    command = [sys.executable, "-m", "experiments.worker", str(folder / "launch.json"), str(folder)]
    common = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "SPARSIFY_SIZE": str(size)}
    processes = []
    for rank in range(size):
        place = {"SPARSIFY_RANK": str(rank), "SPARSIFY_LOCAL_RANK": str(rank)}
        with (folder / f"{rank}.err").open("wb") as errors:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=common | place,
                    stdin=open_lifeline_pipe(),
                    stderr=errors,
                    preexec_fn=hold_signals_back,
                )
            )
    return Workers(processes)


def hold_signals_back() -> None:
    """Until the worker takes them: before that, they would end it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


# --- a command's processes
# ------------------------------------------------------------------------------------


def start_command(results: Path, *words: str, **extra: str) -> subprocess.Popen[str]:
    """`python -m experiments ...`, in a process group of its own, as a shell gives each job."""
    return start_python(results, "-m", "experiments", *words, **extra)


def start_python(results: Path, *words: str, **extra: str) -> subprocess.Popen[str]:
    """Start a Python program in a session of its own."""
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment_for(results, **extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heed_ctrl_c,
    )


def heed_ctrl_c() -> None:
    """Heed Ctrl-C, though these tests may run in the background, where shells let programs ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_command(process: subprocess.Popen[str]) -> None:
    """Whatever became of it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


def workers_of(results: Path) -> dict[int, int]:
    """Process number by rank of the workers whose launch folder lies under `results`."""
    found = {}
    for process in psutil.process_iter(["cmdline", "environ"]):
        words = process.info["cmdline"] or ()
        if "experiments.worker" in words and any(str(results) in word for word in words):
            found[int(process.info["environ"]["SPARSIFY_RANK"])] = process.pid
    return found
