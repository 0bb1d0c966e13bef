"""The tasks of a SLURM job, each one worker of the job's runs.

    srun python -m slurm.task SPEC

A task runs on the host, needs no torch, starts the container as its child and forwards the stop signal. It
leaves two notes in a run's start folder, worker<rank>.json when it starts and exit<rank>.json when it ends:
whoever submitted the job reads these. submitit pickles a `WorkerTask`; its own result is not used.
"""

from __future__ import annotations

import hashlib
import math
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from slurm import environment
from slurm.environment import WorkerPlace
from slurm.worker_process import (
    ORDERS_FILE,
    STOP_SIGNALS,
    STOPPED,
    JobSpec,
    WorkerCommand,
    WorkerStartSpec,
    current_start_folder,
    read_exit_code_by_rank,
    undo_shell_exit_code,
    write_exit_note,
    write_note_atomically,
)

POLL_S = 0.1
GRACE_S = 30.0  # that a worker gets to end by itself once another one has ended badly
BAD_INPUT = 2


@dataclass(frozen=True)
class WorkerTask:
    """A task of a SLURM job, which is one worker, by its number, in each run of a spec.

    A failed run does not keep the next one from being tried; a stop signal does. A spec that changed since
    it was submitted is refused.
    """

    spec_file: str
    spec_sha256: str

    @classmethod
    def from_spec_file(cls, path: Path) -> WorkerTask:
        """Return the task for a spec as its file has it now."""
        return cls(str(path), hashlib.sha256(path.read_bytes()).hexdigest())

    def __call__(self) -> int:
        place = environment.read_rank_variables("srun")
        assert place is not None, "srun starts this"
        stop = StopSignalForwarder()
        raw = Path(self.spec_file).read_bytes()
        is_unchanged = hashlib.sha256(raw).hexdigest() == self.spec_sha256
        spec = msgspec.json.decode(raw, type=JobSpec)
        first_bad_code = 0
        for run_folder in spec.run_folders:
            folder = current_start_folder(run_folder)
            folder.mkdir(parents=True, exist_ok=True)
            if not is_unchanged:
                why = (
                    f"{self.spec_file} was changed after it was submitted; submit again instead of editing it"
                )
                write_note_atomically(
                    folder / f"failure{place.rank}.json", rank=place.rank, kind="bad_input", why=why
                )
                code = BAD_INPUT
            elif stop.was_received:
                code = STOPPED
            else:
                code = run_worker(spec.command, str(Path(run_folder, ORDERS_FILE)), folder, place, stop)
            write_exit_note(folder, place.rank, code)
            first_bad_code = first_bad_code or code
        return first_bad_code


def run_worker(
    command: WorkerCommand, orders: str, folder: Path, place: WorkerPlace, stop: StopSignalForwarder
) -> int:
    """Run one worker's process from start to end, and return its exit code.

    Once another worker has ended badly, this one gets GRACE_S: it may be waiting for that one.
    """
    # sys.stdout is the log of this task; the child writes there, and shares our end.
    worker = WorkerStartSpec(orders, folder, place, sys.stdout.fileno(), sys.stderr.fileno())
    child = command.start(worker)
    worker.write_start_note(child.pid)
    stop.forward_to(child)
    kill_at = math.inf
    try:
        while child.poll() is None:
            time.sleep(POLL_S)
            codes = read_exit_code_by_rank(folder)
            codes.pop(place.rank, None)
            if any(codes.values()):
                kill_at = min(kill_at, time.monotonic() + GRACE_S)
            if time.monotonic() > kill_at:
                child.kill()
        code = undo_shell_exit_code(child.wait())
        # The signal came before the worker could take it: it had done nothing yet, so it has stopped.
        return STOPPED if stop.was_received and -code in STOP_SIGNALS else code
    finally:
        stop.forward_to(None)


@dataclass
class StopSignalForwarder:
    """A receiver of SIGUSR2 (SLURM's announcement) and the like, which passes them to the child process.

    They do not end this process. It replaces submitit's own handlers, which would requeue the job from here,
    and count whatever happens in a short job as a time-out. SLURM signals the child as well; workers take a
    second signal calmly.
    """

    was_received: bool = False
    child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)

    def forward_to(self, child: subprocess.Popen[bytes] | None) -> None:
        """Pass signals on to this process, also one that has come already; None: to no process."""
        self.child = child
        if child is not None and self.was_received:
            child.send_signal(signal.SIGUSR2)

    def _receive(self, number: int, frame: object) -> None:
        self.was_received = True
        self.forward_to(self.child)


if __name__ == "__main__":
    sys.exit(WorkerTask.from_spec_file(Path(sys.argv[1]))())
