"""What a SLURM job's tasks do, each as one worker of the job's runs: srun python -m slurm.task SPEC

It runs on the host, needs no torch, starts the container as its child and forwards the stop signal. What it
leaves in a run's start folder are notes, worker<rank>.json when it starts and exit<rank>.json when it ends:
whoever started it reads these. submitit pickles a `RunTask`; its own result is not used.
"""

from __future__ import annotations

import hashlib
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
    WorkerStart,
    read_exit_codes,
    start_folder,
    worker_exit_code,
    write_exit_note,
    write_note,
)

POLL_S = 0.1
GRACE_S = 30.0  # that a worker gets to end by itself once another one has ended badly
BAD_INPUT = 2


@dataclass(frozen=True)
class RunTask:
    """Be the worker that SLURM's task number says, in each run of a spec.

    A failed run does not keep the next one from being tried; a stop signal does. A spec that changed since
    it was submitted is refused.
    """

    spec: str
    sha256: str

    @classmethod
    def of(cls, spec: Path) -> RunTask:
        """The task for a spec as it is now."""
        return cls(str(spec), hashlib.sha256(spec.read_bytes()).hexdigest())

    def __call__(self) -> int:
        where, stop = environment.read_place("srun"), StopSignal()
        assert where is not None, "srun starts this"
        raw, code = Path(self.spec).read_bytes(), 0
        spec = msgspec.json.decode(raw, type=JobSpec)
        is_same = hashlib.sha256(raw).hexdigest() == self.sha256
        for starts in spec.runs:
            folder, orders = start_folder(starts), str(Path(starts, ORDERS_FILE))
            folder.mkdir(parents=True, exist_ok=True)
            if not is_same:
                why = f"{self.spec} was changed after it was submitted; submit again instead of editing it"
                write_note(folder / f"failure{where.rank}.json", rank=where.rank, kind="bad_input", why=why)
                ended = BAD_INPUT
            else:
                ended = STOPPED if stop.told else run_worker(spec.command, orders, folder, where, stop)
            write_exit_note(folder, where.rank, ended)
            code = code or ended
        return code


def run_worker(
    command: WorkerCommand, orders: str, folder: Path, where: WorkerPlace, stop: StopSignal
) -> int:
    """One worker's process from start to end; returns its exit code. Once another worker has ended badly, it
    gets GRACE_S: it may be waiting for that one.
    """
    # sys.stdout is the log of this task; the child writes there, and shares our end.
    child = command.start(WorkerStart(orders, folder, where, sys.stdout.fileno(), sys.stderr.fileno()))
    stop.forward_to(child)
    alone_since: float | None = None
    try:
        while child.poll() is None:
            time.sleep(POLL_S)
            if alone_since is None and any(
                code for other, code in read_exit_codes(folder).items() if other != where.rank
            ):
                alone_since = time.monotonic()
            if alone_since is not None and time.monotonic() - alone_since > GRACE_S:
                child.kill()
        code = worker_exit_code(child.wait())
        # The signal came before the worker could take it: it had done nothing yet, and has stopped as told.
        return STOPPED if stop.told and -code in STOP_SIGNALS else code
    finally:
        stop.forward_to(None)


@dataclass
class StopSignal:
    """SIGUSR2 (SLURM's announcement) and the like, kept from ending this process and passed to its child.

    It replaces submitit's own handlers, which would requeue the job from here, and count whatever happens
    in a short job as a time-out. SLURM signals the child as well; workers take a second signal calmly.
    """

    told: bool = False
    child: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._tell)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)

    def forward_to(self, child: subprocess.Popen[bytes] | None) -> None:
        """Pass the signal on to this process, also one that has come already."""
        self.child = child
        if child is not None and self.told:
            child.send_signal(signal.SIGUSR2)

    def _tell(self, number: int, frame: object) -> None:
        self.told = True
        self.forward_to(self.child)


if __name__ == "__main__":
    sys.exit(RunTask.of(Path(sys.argv[1]))())
