"""What submitit pickles: a small callable that holds the path of a spec, and runs one worker of its runs.

It runs on the host, needs no torch, starts the container as its child and forwards the stop signal. What it
leaves in a run's start folder are notes, worker<rank>.json when it starts and exit<rank>.json when it ends:
whoever started it reads these; submitit's own result is not used. A spec is a JSON file, see `write_spec`.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from submitit import JobEnvironment

from slurm import environment
from slurm.environment import Place
from slurm.worker_process import STOP_SIGNALS, STOPPED, WorkerCommand, exit_code, exit_codes, note, note_exit

POLL_S = 0.1
GRACE_S = 30.0  # that a worker gets to end by itself once another one has ended badly
BAD_INPUT = 2


def write_spec(path: Path, runs: Sequence[Mapping[str, str]], command: WorkerCommand, **more: Any) -> RunTask:
    """The task for these runs, one after the other, each with a process per worker.

    Args:
        path: the spec, written here.
        runs: of each the files "orders" (given to the worker) and "folder" (in which starts get their own).
        command: of every worker.
        more: what the starting side wants to find in the spec again.
    """
    content = {**more, "runs": [dict(run) for run in runs], **command.as_json()}
    raw = json.dumps(content, indent=1, sort_keys=True).encode()
    path.write_bytes(raw)
    return RunTask(str(path), hashlib.sha256(raw).hexdigest())


def start_folder(run: Mapping[str, str]) -> Path:
    """The same on all workers: a job that is requeued starts in a folder of its own."""
    return Path(run["folder"]) / f"start-{environment.start_name()}"


@dataclass(frozen=True)
class RunTask:
    """Be the worker that submitit's task number says, in each run of a spec.

    A failed run does not keep the next one from being tried; a stop signal does. A spec that changed since
    it was submitted is refused.
    """

    spec: str
    sha256: str

    def __call__(self) -> int:
        job = JobEnvironment()
        where = Place(job.global_rank, job.num_tasks, job.local_rank)
        stop = StopSignal()
        raw = Path(self.spec).read_bytes()
        spec = json.loads(raw)
        if hashlib.sha256(raw).hexdigest() != self.sha256:
            why = f"{self.spec} was changed after it was submitted; submit again instead of editing it"
            for run in spec["runs"]:
                folder = start_folder(run)
                folder.mkdir(parents=True, exist_ok=True)
                note(folder / f"failure{where.rank}.json", rank=where.rank, kind="bad_input", why=why)
                note_exit(folder, where.rank, BAD_INPUT)
            return BAD_INPUT
        command, code = WorkerCommand.from_json(spec), 0
        for run in spec["runs"]:
            folder = start_folder(run)
            folder.mkdir(parents=True, exist_ok=True)
            ended = STOPPED if stop.told else run_worker(command, run["orders"], folder, where, stop)
            note_exit(folder, where.rank, ended)
            code = code or ended
        return code


def run_worker(command: WorkerCommand, orders: str, folder: Path, where: Place, stop: StopSignal) -> int:
    """One worker's process from start to end; returns its exit code."""
    # sys.stdout is submitit's log of this task; the child writes there, and shares our end.
    child = command.start(orders, folder, where, sys.stdout.fileno(), sys.stderr.fileno())
    stop.forward_to(child)
    try:
        code = exit_code(_wait(child, folder, where))
        # The signal came before the worker could take it: it had done nothing yet, and has stopped as told.
        return STOPPED if stop.told and -code in STOP_SIGNALS else code
    finally:
        stop.forward_to(None)


def _wait(child: subprocess.Popen[bytes], folder: Path, where: Place) -> int:
    """Until it ends; once another worker has ended badly, not for long: it may be waiting for that one."""
    alone_since: float | None = None
    while (code := child.poll()) is None:
        time.sleep(POLL_S)
        if alone_since is None and another_failed(folder, where.rank):
            alone_since = time.monotonic()
        if alone_since is not None and time.monotonic() - alone_since > GRACE_S:
            child.kill()
            return child.wait()
    return code


def another_failed(folder: Path, rank: int) -> bool:
    codes = exit_codes(folder)
    return any(code for other, code in codes.items() if other != rank)


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
        self.child = child
        if child is not None and self.told:
            child.send_signal(signal.SIGUSR2)

    def _tell(self, number: int, frame: object) -> None:
        self.told = True
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(signal.SIGUSR2)


def main(spec: str) -> int:
    """Without submitit: `srun python -m slurm.task SPEC` in an allocation that is there already."""
    return RunTask(spec, hashlib.sha256(Path(spec).read_bytes()).hexdigest())()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
