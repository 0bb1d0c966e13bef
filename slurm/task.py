"""What submitit pickles: a small callable that holds a command, and runs it as one worker's process."""

from __future__ import annotations

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from submitit import JobEnvironment

from slurm import environment
from slurm.environment import Place

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Between fork and exec: let the kernel kill this process when its parent is killed. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class RunTask:
    """Run `command` in `cwd` as the worker that submitit's task number says, and leave a note of how it
    ended.

    The note, <folder>/exit<rank>.json, is what the starting side reads; submitit's own result is not used.
    """

    command: tuple[str, ...]
    cwd: str
    folder: str
    threads: int
    same_host: bool

    def __call__(self) -> int:
        job = JobEnvironment()
        where = Place(job.global_rank, job.num_tasks, job.local_rank)
        # sys.stdout is submitit's log of this task; the child writes there, and shares our end.
        child = subprocess.Popen(
            self.command,
            cwd=self.cwd,
            env=environment.of_worker(where, self.threads, self.same_host),
            stdout=sys.stdout.fileno(),
            stderr=sys.stderr.fileno(),
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
        (Path(self.folder) / f"worker{where.rank}.pid").write_text(str(child.pid))
        try:
            code = child.wait()
        except (
            KeyboardInterrupt
        ):  # the terminal has told the child as well; give it a moment to write its log
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller is about to tell us once more
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=0.7)
            child.kill()
            code = child.wait()
        note = Path(self.folder) / f"exit{where.rank}.json"
        part = note.with_suffix(".part")
        part.write_text(json.dumps({"rank": where.rank, "code": code}))
        part.replace(note)
        return code
