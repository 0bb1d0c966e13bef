"""Trainings of this machine as processes forked from one that has loaded torch.

A run begins in a fraction of a second instead of several.

Trainings only. Launches of what is timed are repeated because processes that are started anew differ in their
memory, and forked ones would not.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NamedTuple

from slurm import environment
from slurm.environment import WorkerPlace
from slurm.local import WorkerStarter
from slurm.worker_process import WorkerCommand, WorkerStartSpec, kill_self_after

PRELOADED_MODULE = "experiments.worker.preload"


def forking_starter_or_command(command: WorkerCommand) -> WorkerStarter:
    """Return a starter that forks the workers of a command, where that is possible; else the command.

    Workers with an environment of their own are not forked: in a container, on a GPU, with another Python.
    """
    is_plain = command.container is None and not command.gpu and not command.enter
    return ForkingStarter(command) if is_plain and command.command[0] == sys.executable else command


class ForkingStarter(NamedTuple):
    """A starter of workers as `WorkerCommand` is, which forks them from a process that has loaded torch."""

    command: WorkerCommand

    def start(self, worker: WorkerStartSpec) -> ForkedWorker:
        """Fork a worker, which ends with this process. See `WorkerCommand.start`."""
        assert not worker.enter, "only a program of its own can enter another network"
        variables = environment.worker_variables(worker.place, self.command.threads, worker.interface)
        variables["CUDA_VISIBLE_DEVICES"] = ""
        process = ensure_fork_server(self.command.threads).Process(
            target=_run_worker,
            args=(
                variables,
                self.command.cwd,
                worker.orders_file,
                str(worker.start_folder),
                _PassedDescriptor(worker.stdout_fd),
                _PassedDescriptor(worker.stderr_fd),
            ),
        )
        process.start()
        return ForkedWorker(process)


class ForkedWorker(NamedTuple):
    """A worker's process, with what `subprocess.Popen` has of it."""

    process: ForkServerProcess

    @property
    def pid(self) -> int:
        """The process's number."""
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        """Return when the process has ended, or after so many seconds; see `poll`."""
        self.process.join(timeout)
        return self.poll()


class _PassedDescriptor:
    """A file descriptor that is passed to a process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach_descriptor, (DupFd(self.number),)


def _detach_descriptor(passed: Any) -> int:
    return int(passed.detach())


@cache
def ensure_fork_server(threads: int) -> ForkServerContext:
    """Start the process that workers are forked from, unless it runs already.

    That process has the environment of the first worker, for libraries look at their variables when they are
    loaded.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED_MODULE])
    previous_variables = dict(os.environ)
    os.environ.update(
        environment.worker_variables(WorkerPlace(0, 1, 0), threads, None), CUDA_VISIBLE_DEVICES=""
    )
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(previous_variables)
    return context


def _run_worker(
    variables: dict[str, str], cwd: str, orders: str, folder: str, stdout: int, stderr: int
) -> None:
    """Do in a forked process what `python -m experiments.worker ORDERS FOLDER` does."""
    from experiments.worker.__main__ import run_worker_process

    for descriptor, number in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what it said is there, whatever ends it
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    starter = multiprocessing.parent_process()
    assert starter is not None, "a worker is somebody's"
    sys.exit(run_worker_process(Path(orders), Path(folder), lambda: kill_self_after(starter.join)))
