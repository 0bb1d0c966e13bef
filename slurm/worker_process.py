"""Processes of workers on this machine: started each in its container, and their exit codes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slurm import container, environment, pyxis
from slurm.environment import WorkerPlace
from slurm.images import ContainerConfig

ORDERS_FILE = "launch.json"  # the orders of a run's workers, in the folder of its starts
POLL_S = 1.0  # between two looks whether the starter is there
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a worker that saved and stopped as told
# SLURM sends SIGUSR2 to every process of a job step, and their starter may forward it: it comes once, twice,
# or to some workers only. The others mean a stop as well; a terminal sends them to its whole group.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WorkerStartSpec(NamedTuple):
    """Specification of the start of a worker: orders, place and file descriptors."""

    orders_file: str
    start_folder: Path  # of this start of the run, shared by all its workers
    place: WorkerPlace
    stdout_fd: int
    stderr_fd: int
    interface: str | None = None  # of the network on which workers of this machine meet; None: on several
    enter: Sequence[str] = ()  # words of a program that starts it elsewhere on this machine

    def write_start_note(self, pid: int) -> None:
        """Write worker<rank>.json, on the process that was started."""
        rank = self.place.rank
        path = self.start_folder / f"worker{rank}.json"
        write_note_atomically(path, rank=rank, pid=pid, node=environment.node_name())


class WorkerCommand(msgspec.Struct, frozen=True):
    """The command that starts the workers of a run, wherever that is. Plain data: it travels as JSON.

    Args:
        command: words that start a worker; its run's orders and the folder of this start follow them.
        cwd: where the code is.
        threads: number of threads of each worker.
        container: container that workers run in; None: in none.
        binds: folders that the container needs.
        gpu: does the run use GPUs?
        enter: words before the command, that put it onto an emulated network.
    """

    command: list[str]
    cwd: str
    threads: int
    container: ContainerConfig | None
    binds: list[str]
    gpu: bool
    enter: list[str] = []

    def format_for_display(self) -> str:
        """Return the command line of a worker, in its container, as a shell takes it."""
        return shlex.join(self._wrap(["ORDERS", "FOLDER"], {}, for_display=True))

    def srun_pyxis_options(self) -> list[str]:
        """Return the options by which srun makes the containers of its tasks; none without pyxis."""
        if not pyxis.is_pyxis(self.container):
            return []
        folders = container.folders_to_mount([*map(Path, self.binds), Path(self.cwd)])
        return pyxis.srun_options(self.container, folders, Path(self.cwd))

    @property
    def task_python(self) -> str:
        """The Python of SLURM's tasks, each of which starts a worker."""
        image_python = self.container.python if pyxis.is_pyxis(self.container) else None
        return image_python or self.command[0]

    def _wrap(self, words: list[str], variables: dict[str, str], for_display: bool = False) -> list[str]:
        return container.wrap_command(
            self.container,
            [*self.command, *words],
            [*map(Path, self.binds)],
            Path(self.cwd),
            variables,
            self.gpu,
            for_display,
        )

    def start(self, worker: WorkerStartSpec) -> subprocess.Popen[bytes]:
        """Start a worker.

        The worker ends with this process, whatever ends that: by the kernel's hand on Linux, and by
        `open_lifeline_pipe`, which enters containers as well. Stop signals wait until the worker takes them.
        """
        variables = environment.worker_variables(worker.place, self.threads, worker.interface)
        if worker.interface and not self.gpu:
            variables["CUDA_VISIBLE_DEVICES"] = ""  # no memory and no start of a GPU that is not used
        has_runtime = self.container is not None and not pyxis.is_pyxis(self.container)
        blocked = () if has_runtime else STOP_SIGNALS  # a runtime has to take signals itself
        words = [worker.orders_file, str(worker.start_folder)]
        return subprocess.Popen(
            [*worker.enter, *self.enter, *self._wrap(words, variables)],
            cwd=self.cwd,
            env=variables,
            stdin=open_lifeline_pipe(),
            stdout=worker.stdout_fd,
            stderr=worker.stderr_fd,
            preexec_fn=partial(die_with_parent_and_block_signals, os.getpid(), blocked),
        )


def current_start_folder(run_folder: str) -> Path:
    """Return the folder of this start of a run, in the folder of all its starts.

    All workers have the same; once SLURM has requeued the job, it is another one.
    """
    return Path(run_folder) / f"start-{environment.job_start_name()}"


class JobSpec(msgspec.Struct, frozen=True):
    """The work of one SLURM job: these runs, one after the other, each with a process per worker."""

    run_folders: list[str]  # of each run the folder of its starts, which holds its orders
    command: WorkerCommand
    num_tasks: int
    max_requeues: int  # how often the job may go on after a stop

    @property
    def node_python(self) -> str:
        """The Python that the nodes run."""
        return self.command.command[0]

    def write(self, path: Path) -> None:
        """Write the spec for the job to read."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1))


def undo_shell_exit_code(code: int) -> int:
    """Return a worker's own exit code, negative for a signal, from the exit code of its process.

    A container says 128 + signal of a process that was killed in it, as shells do.
    """
    return 128 - code if code > 128 else code


class ExitNote(msgspec.Struct):
    """The note exit<rank>.json on the end of a worker."""

    rank: int
    code: int


def write_exit_note(folder: Path, rank: int, code: int) -> None:
    """Write exit<rank>.json, for `read_exit_code_by_rank`."""
    write_note_atomically(folder / f"exit{rank}.json", rank=rank, code=code)


def read_exit_code_by_rank(start_folder: Path) -> dict[int, int]:
    """Return exit codes by rank, negative for a signal, of the workers that ended by themselves."""
    code_by_rank = {}
    for path in start_folder.glob("exit*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # of a damaged note nothing is known
            note = msgspec.json.decode(path.read_bytes(), type=ExitNote)
            code_by_rank[note.rank] = note.code
    return code_by_rank


def write_note_atomically(path: Path, **content: Any) -> None:
    """Write a note that is either whole or not there."""
    part = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.part")
    part.write_text(json.dumps(content))
    part.replace(path)


@cache
def open_lifeline_pipe() -> int:
    """Return a silent descriptor for the standard input of workers, which ends when this process does."""
    read_fd, _write_fd = os.pipe()
    return read_fd


def die_with_parent_and_block_signals(parent_pid: int, blocked: Sequence[signal.Signals]) -> None:
    """Let Linux kill this process when its parent ends, and block these signals; called after fork."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # it ended before it could be watched
            os.kill(os.getpid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)


@contextlib.contextmanager
def exclude_loaded_objects_from_gc() -> Iterator[None]:
    """Exclude what is loaded inside the block from garbage collection, for good.

    Collecting now takes a sixth of torch's time to load; in the middle of a step, it would delay the step.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# A worker ends when its starter does, whatever ends that: nobody would watch it any more, or stop it.


def kill_self_when_stdin_closes() -> None:
    """Kill this process, later, when its standard input, `open_lifeline_pipe`, ends with its starter."""
    kill_self_after(_wait_for_end_of_input)


def kill_self_when_parent_ends() -> None:
    """Kill this process, later, when the one that started it ends: torchrun, mpirun or srun."""
    kill_self_after(partial(_wait_for_process, os.getppid()))


def kill_self_after(wait: Callable[[], None]) -> None:
    """Kill this process when `wait`, called in a thread, returns; takes no time until then."""

    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _wait_for_end_of_input() -> None:
    while os.read(0, 1):
        pass


def _wait_for_process(pid: int) -> None:
    """Wait for the end of the parent process."""
    try:
        select.select([os.pidfd_open(pid)], [], [])
    except (AttributeError, OSError):  # neither every system nor every Linux has it
        while os.getppid() == pid:
            time.sleep(POLL_S)
