"""One worker's process: how it is started on this machine, in its container, and what its end means."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec

from slurm import container, environment
from slurm.environment import Place

PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a worker that saved and stopped as told
# SLURM's announcement, and what ends other programs; SIGUSR2 is what a starter passes on.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class WorkerCommand:
    """What the workers of a run are started by, wherever that is. Plain data: it travels as JSON.

    Args:
        command: of a worker; its run's orders and the folder of this start follow it.
        cwd: where the code is.
        threads: of each worker.
        container: a choice of conf/container.
        binds: folders that the container needs.
        gpu: does the run use GPUs?
        enter: words before it, that put it onto an emulated network.
    """

    command: list[str]
    cwd: str
    threads: int
    container: dict[str, Any]
    binds: list[str]
    gpu: bool
    enter: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> WorkerCommand:
        """The same again, from an object that may have other fields as well."""
        return cls(**{name: content[name] for name in cls.__dataclass_fields__})

    def text(self) -> str:
        """The command line of a worker, in its container, as a shell takes it; for people."""
        words = [*self.command, "ORDERS", "FOLDER"]
        binds = [Path(bind) for bind in self.binds]
        return shlex.join(container.planned(self.container, words, binds, Path(self.cwd), self.gpu))

    def start(
        self,
        orders: str,
        folder: Path,
        place: Place,
        stdout: int,
        stderr: int,
        same_host: bool = False,
        interface: str | None = None,
        enter: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start the worker at `place`; leaves worker<rank>.json in `folder`.

        It ends with this process, whatever ends that: by the kernel's hand on Linux, and by `lifeline`, which
        enters containers as well. Stop signals wait until it takes them.

        Args:
            folder: of this start, shared by all its workers.
            stdout, stderr: file descriptors.
            same_host: all workers are on this machine.
            interface: of the network on which workers meet.
            enter: words before the command, of a program that starts it elsewhere on this machine.
        """
        variables = environment.of_worker(place, self.threads, interface)
        if same_host and not self.gpu:
            variables["CUDA_VISIBLE_DEVICES"] = ""  # no memory and no start of a GPU that is not used
        command = container.wrap(
            self.container,
            [*self.command, orders, str(folder)],
            [Path(bind) for bind in self.binds],
            Path(self.cwd),
            variables,
            self.gpu,
        )
        bare = self.container["name"] == container.NONE  # a runtime has to take signals itself
        child = subprocess.Popen(
            [*enter, *self.enter, *command],
            cwd=self.cwd,
            env=variables,
            stdin=lifeline(),
            stdout=stdout,
            stderr=stderr,
            preexec_fn=partial(before_exec, os.getpid(), STOP_SIGNALS if bare else ()),
        )
        note(folder / f"worker{place.rank}.json", rank=place.rank, pid=child.pid, node=environment.node())
        return child


def exit_code(code: int) -> int:
    """The worker's own exit code, negative for a signal, from what its process ended with: a container says
    128 + signal of a process that was killed in it, as shells do.
    """
    return 128 - code if code > 128 else code


def note_exit(folder: Path, rank: int, code: int) -> None:
    """Leave exit<rank>.json, for `exit_codes`."""
    note(folder / f"exit{rank}.json", rank=rank, code=code)


class ExitNote(msgspec.Struct):
    """exit<rank>.json"""

    rank: int
    code: int


def exit_codes(folder: Path) -> dict[int, int]:
    """Exit code by rank, negative for a signal; only of workers that ended by themselves."""
    codes = {}
    for path in folder.glob("exit*.json"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # of a damaged note nothing is known
            found = msgspec.json.decode(path.read_bytes(), type=ExitNote)
            codes[found.rank] = found.code
    return codes


def note(path: Path, **content: Any) -> None:
    """Leave a note that is either whole or not there."""
    part = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}.part")
    part.write_text(json.dumps(content))
    part.replace(path)


@cache
def lifeline() -> int:
    """The standard input of workers: nothing comes from it, and it ends when this process does."""
    reading, _writing = os.pipe()
    return reading


def before_exec(parent: int, held_back: Sequence[signal.Signals]) -> None:
    """Between fork and exec: let Linux kill this process when its parent ends; block these signals."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before it could be watched
            os.kill(os.getpid(), signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_BLOCK, held_back)
