"""A command and a number of workers -> running processes, through submitit."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import submitit

from slurm.task import RunTask

A_YEAR_MIN = 365 * 24 * 60  # the local executor wants a limit; ours ends when its work does
GRACE_S = 10.0  # that the other workers get to end by themselves once one has failed


@dataclass(frozen=True)
class Ended:
    """How a group of workers ended."""

    codes: dict[int, int]  # exit code by rank, negative for a signal; only those that ended by themselves
    size: int

    @property
    def ok(self) -> bool:
        return len(self.codes) == self.size and not any(self.codes.values())

    @property
    def killed(self) -> dict[int, int]:
        """Signal by rank."""
        return {rank: -code for rank, code in self.codes.items() if code < 0}


@dataclass
class LocalJob:
    """A group of worker processes on this machine."""

    job: Any
    folder: Path
    size: int
    failed_at: float | None = None

    def poll(self) -> Ended | None:
        """None while workers run. Once one has failed the others get a moment, then they are stopped."""
        if self.job.done():
            return Ended(self._codes(), self.size)
        codes = self._codes()
        if any(codes.values()):
            self.failed_at = self.failed_at or time.monotonic()
            if time.monotonic() - self.failed_at > GRACE_S:
                self.cancel()
                return Ended(codes, self.size)  # those that were stopped did not fail
        return None

    def cancel(self) -> None:
        """Stop all workers, and return when they are gone."""
        self.job.cancel()
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not (self.job.done() and not self._alive()):
            time.sleep(0.05)
        for pid in self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _alive(self) -> list[int]:
        """The workers' processes that have not ended."""
        pids = [int(text) for path in self.folder.glob("worker*.pid") if (text := path.read_text())]
        return [pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)]

    def _codes(self) -> dict[int, int]:
        codes = {}
        for path in self.folder.glob("exit*.json"):
            note = json.loads(path.read_text())
            codes[note["rank"]] = note["code"]
        return codes


def is_zombie(pid: int) -> bool:
    """Has it ended, and only waits for its parent to notice?"""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_local(
    command: Sequence[str], cwd: Path, folder: Path, tasks: int, threads: int, gpus: int = 0
) -> LocalJob:
    """Start `tasks` processes of `command` with submitit's local executor; returns at once."""
    folder.mkdir(parents=True, exist_ok=True)
    with errors_into(folder / "controller_log.err"):
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(tasks_per_node=tasks, gpus_per_node=gpus, timeout_min=A_YEAR_MIN, nodes=1)
        job = executor.submit(RunTask(tuple(command), str(cwd), str(folder), threads, same_host=True))
    return LocalJob(job, folder, tasks)


@contextlib.contextmanager
def errors_into(path: Path) -> Iterator[None]:
    """What is started meanwhile writes its errors to `path`: submitit's controller, told to stop, prints a
    traceback to the standard error that it inherits, which is the user's terminal."""
    sys.stderr.flush()
    terminal = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)
