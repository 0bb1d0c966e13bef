"""A run's workers as processes of this machine."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from pathlib import Path
from typing import Protocol

from slurm.emulated.network import EmulatedNetwork
from slurm.emulated.switch import INTERFACE
from slurm.environment import WorkerPlace
from slurm.worker_process import WorkerStartSpec, undo_shell_exit_code, write_exit_note

LOOPBACK = "lo"  # where gloo need not look up the host's name, which may fail
GRACE_S = 10.0  # that the other workers get to end by themselves once one has failed


class WorkerProcess(Protocol):
    """The process of a worker that was started."""

    @property
    def pid(self) -> int:
        """The process's number."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""

    def send_signal(self, number: signal.Signals, /) -> None:
        """Send a signal, unless the process has ended."""

    def kill(self) -> None:
        """End the process at once."""

    def wait(self) -> object:
        """Return when the process has ended."""


class WorkerStarter(Protocol):
    """A command that starts workers, such as `WorkerCommand`."""

    def start(self, worker: WorkerStartSpec, /) -> WorkerProcess:
        """Start a worker."""


class LocalWorkers:
    """The workers of one run as processes of this machine, started at once.

    Args:
        orders: the run's file of orders.
        folder: folder of this start, for notes and logs.
        size: number of workers.
        network: emulated network on whose nodes they run, `workers_per_node` to a node; ended with them.
    """

    def __init__(
        self,
        starter: WorkerStarter,
        orders: str,
        folder: Path,
        size: int,
        network: EmulatedNetwork | None = None,
        workers_per_node: int = 1,
    ) -> None:
        self.folder = folder
        self.size = size
        self.network = network
        self.has_lost_network = False
        self.code_by_rank: dict[int, int] = {}
        self.kill_at = math.inf
        self.processes: list[WorkerProcess] = []
        try:
            for rank in range(size):
                log = folder / f"worker{rank}_log"
                with (
                    log.with_suffix(".out").open("ab") as stdout,
                    log.with_suffix(".err").open("ab") as stderr,
                ):
                    worker = WorkerStartSpec(
                        orders,
                        folder,
                        WorkerPlace(rank, size, rank),
                        stdout.fileno(),
                        stderr.fileno(),
                        interface=INTERFACE if network else LOOPBACK,
                        enter=network.nsenter_command(rank // workers_per_node) if network else (),
                    )
                    process = starter.start(worker)
                    self.processes.append(process)
                    worker.write_start_note(process.pid)
        except BaseException:
            self.kill_and_close_network()
            raise

    def poll_exit_codes(self) -> dict[int, int] | None:
        """Return exit codes by rank, negative for a signal, once all workers have ended; None while some run.

        Once one has failed the others get a moment; then they are killed, and have no exit code. All whose
        network has ended are killed, too.
        """
        self.has_lost_network = self.has_lost_network or (self.network is not None and self.network.has_ended)
        for rank, process in enumerate(self.processes):
            code = process.poll()
            if code is not None and rank not in self.code_by_rank:
                self.code_by_rank[rank] = undo_shell_exit_code(code)
                with contextlib.suppress(FileNotFoundError):  # the folder was removed: its owner will see
                    write_exit_note(self.folder, rank, self.code_by_rank[rank])
        if len(self.code_by_rank) < self.size:
            if any(self.code_by_rank.values()) or self.has_lost_network:
                self.kill_at = min(self.kill_at, time.monotonic() + GRACE_S)
            if time.monotonic() < self.kill_at:
                return None
        self.kill_and_close_network()
        return self.code_by_rank

    def request_save_and_stop(self) -> None:
        """Let all workers save and end; `poll_exit_codes` tells when they have."""
        for process in self.processes:
            process.send_signal(signal.SIGUSR2)

    def kill_and_close_network(self) -> None:
        """Kill all workers and their network, and return when they are gone. Saved files are whole."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        if self.network is not None:
            self.network.close()
