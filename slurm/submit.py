"""Tasks -> running processes, through submitit: at once on this machine, or as arrays of SLURM jobs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import submitit
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmExecutor, _make_sbatch_string

from slurm import environment, queue
from slurm.task import RunTask, exit_codes

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
            return Ended(exit_codes(self.folder), self.size)
        codes = exit_codes(self.folder)
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
        pids = [json.loads(path.read_text())["pid"] for path in self.folder.glob("worker*.json")]
        return [pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)]


def is_zombie(pid: int) -> bool:
    """Has it ended, and only waits for its parent to notice?"""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_local(task: RunTask, folder: Path, tasks: int, gpus: int = 0) -> LocalJob:
    """Start a task's workers as processes of this machine; returns at once.

    Args:
        folder: the only run's folder, for logs and notes.
    """
    with errors_into(folder / "controller_log.err"):
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(tasks_per_node=tasks, gpus_per_node=gpus, timeout_min=A_YEAR_MIN, nodes=1)
        job = executor.submit(task)
    return LocalJob(job, folder, tasks)


def submit_array(
    tasks: Sequence[RunTask], folder: Path, options: Mapping[str, Any], python: str, slurm_conf: str | None
) -> list[str]:
    """One array of SLURM jobs, a job for each task; returns their ids at once.

    Args:
        folder: for submitit's files and the logs; on a file system that the nodes share.
        options: from `cluster.parameters`.
        python: on the nodes.

    Raises:
        ValueError: SLURM refused; its words are in the message, and the field to change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    queue.command("sbatch", "--version")  # says in a sentence when there is no SLURM
    executor = SlurmExecutor(folder, python=shlex.quote(python))
    executor.update_parameters(**options)
    said = io.StringIO()
    try:
        with submitit.helpers.clean_env(), contextlib.redirect_stderr(said):
            environment.use_slurm(slurm_conf)  # it is one of the variables that were hidden
            with executor.batch():
                jobs = [executor.submit(task) for task in tasks]
    except FailedJobError as error:
        raise ValueError(queue.refusal(str(error) or said.getvalue())) from error
    return [job.job_id for job in jobs]


def sbatch_text(folder: Path, options: Mapping[str, Any], python: str, tasks: int) -> str:
    """The very text that `submit_array` hands to sbatch; needs no SLURM."""
    command = " ".join([shlex.quote(python), "-u -m submitit.core._submit", shlex.quote(str(folder))])
    return _make_sbatch_string(command, folder, map_count=tasks if tasks > 1 else None, **options)


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
