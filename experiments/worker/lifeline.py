"""A worker ends when its starter does, whatever ends that: nobody would watch it any more, or stop it.

A thread waits for the starter's end, and takes no time until it comes.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable

POLL_S = 1.0
CHUNK = 4096


def end_with_stdin() -> None:
    """For workers of our own starters, whose standard input ends with them (`worker_process.lifeline`)."""
    _end_after(_read_stdin)


def end_with_parent() -> None:
    """For workers that torchrun, mpirun or srun started."""
    parent = os.getppid()
    _end_after(lambda: _await_end(parent))


def _end_after(wait: Callable[[], None]) -> None:
    def watch() -> None:
        wait()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _read_stdin() -> None:
    while os.read(0, CHUNK):
        pass


def _await_end(parent: int) -> None:
    try:
        select.select([os.pidfd_open(parent)], [], [])
    except (AttributeError, OSError):  # neither every system nor every Linux has it
        while os.getppid() == parent:
            time.sleep(POLL_S)
