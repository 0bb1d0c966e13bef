"""The stop signal: SLURM's warning before it takes the nodes away. A worker notes it and goes on; the workers
agree at the end of a step on what to do about it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from types import FrameType

# SLURM sends SIGUSR2 to every process of a job step, and whoever started the workers may forward it: it comes
# once, twice, or to some workers only. SIGTERM means the same.
STOP_SIGNALS = (signal.SIGUSR2, signal.SIGTERM)
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: stopped as told, and can go on later
ALONE_S = 20.0  # after the signal, a worker that nobody has joined waits no longer


class Preempted(Exception):
    """The run was told to stop, and can go on from `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"told to stop; it can go on from step {step}")
        self.step = step


@dataclass
class Stop:
    """Has this process been told to stop? A signal to one forked from it does not count."""

    told_at: float | None = None
    process: int = 0

    def listen(self) -> Stop:
        """Take the stop signals from now on. Whoever started this process may have blocked them until now."""
        self.process = os.getpid()
        for number in STOP_SIGNALS:
            signal.signal(number, self._take)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        return self

    @property
    def told(self) -> bool:
        return self.told_at is not None

    def is_overdue(self) -> bool:
        """Has it been too long for a worker that still waits for the others to come?"""
        return self.told_at is not None and time.monotonic() - self.told_at > ALONE_S

    def _take(self, number: int, frame: FrameType | None) -> None:
        # A forked child, as a DataLoader's worker is, inherits this handler, and SLURM signals it too.
        if os.getpid() == self.process and self.told_at is None:
            self.told_at = time.monotonic()


def ignore_in_child(worker: int = 0) -> None:
    """A DataLoader's `worker_init_fn`: its workers, forked or spawned, must outlive the stop signal, or the
    main process fails before it has saved.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
