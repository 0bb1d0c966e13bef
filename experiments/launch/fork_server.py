"""Trainings of this machine as processes that are forked from one which has loaded torch: a run begins in a
fraction of a second instead of several.

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
from slurm.worker_process import WorkerCommand, WorkerStart, exit_after

PRELOADED_MODULE = "experiments.worker.warm"


class ForkingCommand(NamedTuple):
    """Starts workers as `WorkerCommand` does, but by forking."""

    command: WorkerCommand

    @classmethod
    def of(cls, command: WorkerCommand) -> ForkingCommand | None:
        """None where workers are to have an environment of their own: a container, a GPU, another Python."""
        is_plain = command.container is None and not command.gpu and not command.enter
        return cls(command) if is_plain and command.command[0] == sys.executable else None

    def start(self, worker: WorkerStart) -> ForkedWorker:
        """Start a worker; it ends with this process. See `WorkerCommand.start`."""
        assert not worker.enter, "only a program of its own can enter another network"
        variables = environment.worker_variables(worker.place, self.command.threads, worker.interface)
        variables["CUDA_VISIBLE_DEVICES"] = ""
        process = start_fork_server(self.command.threads).Process(
            target=_run_worker,
            args=(
                variables, self.command.cwd, worker.orders, str(worker.folder),
                _PassedDescriptor(worker.stdout), _PassedDescriptor(worker.stderr),
            ),
        )  # fmt: skip
        process.start()
        forked = ForkedWorker(process)
        worker.note(forked.pid)
        return forked


class ForkedWorker(NamedTuple):
    """A worker's process, with what `subprocess.Popen` has of it."""

    process: ForkServerProcess

    @property
    def pid(self) -> int:
        """Its number."""
        assert self.process.pid is not None, "it was started"
        return self.process.pid

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """At once."""
        self.process.kill()

    def wait(self, timeout: float | None = None) -> int | None:
        """Return when it has ended, or after so many seconds; see `poll`."""
        self.process.join(timeout)
        return self.poll()


class _PassedDescriptor:
    """A file descriptor that goes along to a process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach_descriptor, (DupFd(self.number),)


def _detach_descriptor(handed: Any) -> int:
    return int(handed.detach())


@cache
def start_fork_server(threads: int) -> ForkServerContext:
    """The process that others are forked from. It has the environment of the first, for libraries look at
    their variables when they are loaded.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED_MODULE])
    ours = dict(os.environ)
    os.environ.update(
        environment.worker_variables(WorkerPlace(0, 1, 0), threads, None), CUDA_VISIBLE_DEVICES=""
    )
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(ours)
    return context


def _run_worker(
    variables: dict[str, str], cwd: str, orders: str, folder: str, stdout: int, stderr: int
) -> None:
    """Be a worker: python -m experiments.worker ORDERS FOLDER, forked."""
    from experiments.worker.__main__ import main

    for opened, number in ((stdout, 1), (stderr, 2)):
        os.dup2(opened, number)
        os.close(opened)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # what it said is there, whatever ends it
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(cwd)
    starter = multiprocessing.parent_process()
    assert starter is not None, "a worker is somebody's"
    sys.exit(main(Path(orders), Path(folder), lambda: exit_after(starter.join)))
