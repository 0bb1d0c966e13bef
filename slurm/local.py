"""A run's workers as processes of this machine."""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path
from typing import Protocol

from slurm.emulated.network import EmulatedNetwork
from slurm.emulated.switch import INTERFACE
from slurm.environment import WorkerPlace
from slurm.worker_process import WorkerStart, worker_exit_code, write_exit_note

LOOPBACK = "lo"  # where gloo need not look up the host's name, which may fail
GRACE_S = 10.0  # that the other workers get to end by themselves once one has failed


class WorkerProcess(Protocol):
    """A process that was started."""

    @property
    def pid(self) -> int:
        """Its number."""

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""

    def send_signal(self, number: signal.Signals, /) -> None:
        """Unless it has ended."""

    def kill(self) -> None:
        """At once."""

    def wait(self) -> object:
        """Return when it has ended."""


class WorkerStarter(Protocol):
    """A command that starts workers, such as `WorkerCommand`."""

    def start(self, worker: WorkerStart, /) -> WorkerProcess:
        """Start this worker."""


class LocalWorkers:
    """The workers of one run, started at once.

    Args:
        orders: the run's file of orders.
        folder: of this start, for notes and logs.
        size: how many.
        network: on whose nodes they run, so many to a node; ended with them.
    """

    def __init__(
        self,
        command: WorkerStarter,
        orders: str,
        folder: Path,
        size: int,
        network: EmulatedNetwork | None = None,
        per_node: int = 1,
    ) -> None:
        self.folder, self.size, self.network = folder, size, network
        self.has_lost_network = False
        self.codes: dict[int, int] = {}
        self.failed_at: float | None = None
        self.processes: dict[int, WorkerProcess] = {}
        try:
            for rank in range(size):
                log = folder / f"worker{rank}_log"
                with log.with_suffix(".out").open("ab") as out, log.with_suffix(".err").open("ab") as err:
                    worker = WorkerStart(
                        orders, folder, WorkerPlace(rank, size, rank), out.fileno(), err.fileno(),
                        interface=INTERFACE if network else LOOPBACK,
                        enter=network.enter(rank // per_node) if network else (),
                    )  # fmt: skip
                    self.processes[rank] = command.start(worker)
        except BaseException:
            self.kill()
            raise

    def poll(self) -> dict[int, int] | None:
        """Exit code by rank, negative for a signal, once all have ended; None while workers run.

        Once one has failed the others get a moment, then they are stopped: those did not fail, and have none.
        So are all whose network has ended.
        """
        self.has_lost_network = self.has_lost_network or (self.network is not None and self.network.is_gone)
        for rank, process in self.processes.items():
            if rank not in self.codes and (code := process.poll()) is not None:
                self.codes[rank] = worker_exit_code(code)
                with contextlib.suppress(FileNotFoundError):  # the folder was removed: its owner will see
                    write_exit_note(self.folder, rank, self.codes[rank])
        if len(self.codes) < self.size:
            if not any(self.codes.values()) and not self.has_lost_network:
                return None
            self.failed_at = self.failed_at or time.monotonic()
            if time.monotonic() - self.failed_at <= GRACE_S:
                return None
        self.kill()
        return self.codes

    def request_stop(self) -> None:
        """Let all workers save and end; `poll` tells when they have."""
        for process in self.processes.values():
            process.send_signal(signal.SIGUSR2)

    def kill(self) -> None:
        """Kill all workers, and return when they are gone. What they have saved is whole."""
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()
        if self.network is not None:
            self.network.close()
