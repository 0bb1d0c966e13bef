"""Configs in, finished attempts out: starts what is missing, watches it, and says in a sentence what went
wrong.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from analysis.records import Attempt, Store, read_json, run_id, write_json
from experiments.progress import Progress
from experiments.worker import DISK_FULL, KINDS

if TYPE_CHECKING:  # submitit comes with it, which redrawing figures must not need
    from slurm.submit import Ended, LocalJob

ROOT = Path(__file__).parent.parent
POLL_S = 0.1
DISK_FULL_BYTES = 64 * 1024  # with less than that free, a worker can't even leave a note of how it ended
WORKER = (sys.executable, "-u", "-m", "experiments.worker")


class RunFailed(RuntimeError):
    """A run was started and did not end well. `kind` is the failure's class, `kind == "bad_input"` the
    user's.
    """

    def __init__(self, why: str, kind: str, attempt: Attempt) -> None:
        super().__init__(why)
        self.kind, self.attempt = kind, attempt


@dataclass(frozen=True)
class Planned:
    """A run to be made: its resolved config, and the folder of its data."""

    config: dict[str, Any]
    data_root: Path | None

    @property
    def is_timing(self) -> bool:
        """Is it there for its step times? Then nothing else may run beside it. A run that validates every
        epoch is there for its curve."""
        return self.config["train"]["validate"] == "never" or self.config["timing"]["mode"] == "as_published"

    @property
    def tasks(self) -> int:
        """Processes."""
        return 1 if self.config["cluster"]["where"] == "virtual" else int(self.config["workers"])

    @property
    def cores(self) -> int:
        return self.tasks * int(self.config["threads"])


@dataclass
class Running:
    """A run that was started."""

    planned: Planned
    attempt: Attempt
    job: LocalJob
    lock: FileLock
    folder: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder = self.job.folder

    @property
    def progress(self) -> tuple[int, int | None]:
        """Steps done, and steps in all once the worker has said how many."""
        note = read_json(self.folder / "progress.json") or {}
        return int(note.get("step", 0)), note.get("steps")


def carry_out(
    planned: Sequence[Planned], store: Store, scratch: Path, progress: Progress, force: bool = False
) -> None:
    """Make all these runs, those that share the machine side by side, one to a core.

    A run that another process is making is waited for, and its record used. Whatever ends this early, the
    workers are stopped first and the attempt's manifest says why.

    Args:
        scratch: a folder for locks, logs and submitit's files.

    Raises:
        RunFailed: the first run that failed; the others were stopped.
    """
    began = time.time()
    waiting, running = list(planned), list[Running]()
    try:
        while waiting or running:
            while waiting and _has_room(waiting[0], running):
                if one := _begin(waiting[0], store, scratch, progress, None if not force else began):
                    running.append(one)
                waiting.pop(0)
            for one in list(running):
                if ended := one.job.poll():
                    running.remove(one)
                    _finish(one, ended)
                    progress.finished(one.attempt.run_id)
            progress.show([(r.attempt.run_id, *r.progress) for r in running], len(waiting))
            time.sleep(POLL_S)
    except BaseException as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped because another run failed"
        for one in running:
            with _undisturbed():
                one.job.cancel()
                if one.attempt.state != "ok":
                    one.attempt.fail(why, "interrupted")
                one.lock.release()
        raise


def make(missing: Sequence[Planned], store: Store, scratch: Path, force: bool = False) -> None:
    """Carry out runs with a progress display."""
    progress = Progress(len(missing))
    try:
        carry_out(missing, store, scratch, progress, force)
    finally:
        progress.close()


def _has_room(planned: Planned, running: list[Running]) -> bool:
    if not running:
        return True
    if planned.is_timing or planned.config["device"] == "cuda" or any(r.planned.is_timing for r in running):
        return False
    return planned.cores + sum(r.planned.cores for r in running) <= cores()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(
    planned: Planned, store: Store, scratch: Path, progress: Progress, newer_than: float | None
) -> Running | None:
    """Start a run, or return None because another process has just made it."""
    from slurm.submit import start_local

    config, name = planned.config, run_id(planned.config)
    lock = FileLock(scratch / "locks" / f"{name}.lock")
    lock_path = Path(lock.lock_file)
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.say(f"{name}: another process is measuring this run; waiting for it")
        lock.acquire()
        newer_than = None  # what it measured meanwhile is as fresh as anything we could measure
    try:
        done = store.valid(config)
        if done is not None and newer_than is None:
            progress.finished(name)
            lock.release()
            return None
        attempt = store.begin(config)
        folder = scratch / f"{name}-{attempt.number:03d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        orders = {
            "config": config,
            "attempt": str(attempt.path),
            "data_root": str(planned.data_root) if planned.data_root else None,
        }
        write_json(folder / "launch.json", orders)
        gpus = planned.tasks if config["device"] == "cuda" else 0
        job = start_local((*WORKER, str(folder)), ROOT, folder, planned.tasks, config["threads"], gpus)
        attempt.update(state="submitted", alone=planned.is_timing)
        return Running(planned, attempt, job, lock)
    except BaseException:
        lock.release()
        raise


def _finish(one: Running, ended: Ended) -> None:
    """Accept a run that ended well; say why of one that did not."""
    try:
        if ended.ok and one.attempt.is_valid():
            shutil.rmtree(
                one.folder, ignore_errors=True
            )  # submitit's pickles and empty logs serve nobody now
            return
        kind, why = diagnose(one.folder, ended)
        with contextlib.suppress(
            OSError
        ):  # a full disk may refuse even this; the sentence still reaches the user
            one.attempt.fail(why, kind)
        raise RunFailed(why, kind, one.attempt)
    finally:
        one.lock.release()


def diagnose(folder: Path, ended: Ended) -> tuple[str, str]:
    """The failure's class and a sentence: the first cause, not its consequences on the other workers."""
    notes = [note for path in folder.glob("failure*.json") if (note := read_json(path))]
    causes = [note for note in notes if note["kind"] not in ("lost", "interrupted")]
    if causes:
        first = min(causes, key=lambda note: (KINDS.index(note["kind"]), note["rank"]))
        return str(first["kind"]), str(first["why"])
    if ended.killed:
        rank, number = min(ended.killed.items())
        others = "; the other workers were stopped" if ended.size > 1 else ""
        hint = (
            " (if nobody did that, the machine may have run out of memory)"
            if number == signal.SIGKILL
            else ""
        )
        return "killed", f"worker {rank} was killed by {signal.Signals(number).name}{hint}{others}"
    if notes:
        return str(notes[0]["kind"]), str(notes[0]["why"])
    silent = sorted(set(range(ended.size)) - set(ended.codes))
    if silent and shutil.disk_usage(folder).free < DISK_FULL_BYTES:
        return "disk", DISK_FULL
    if silent:
        return "killed", f"the process of worker {silent[0]} ended without a word"
    return (
        "error",
        f"a worker ended with exit code {next(c for c in ended.codes.values() if c)} and no explanation",
    )


@contextlib.contextmanager
def _undisturbed() -> Any:
    """A second Ctrl-C must not leave the clean-up of the first half done."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
