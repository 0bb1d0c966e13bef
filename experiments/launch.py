"""Configs in, finished attempts out: starts what is missing, watches it, and says in a sentence what went
wrong.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from analysis.records import Attempt, Store, read_json, run_id
from experiments import snapshot
from experiments.diagnosis import diagnose
from experiments.orders import Planned, attempt_for, task_of, write_orders
from experiments.progress import Progress

if TYPE_CHECKING:  # submitit comes with it, which redrawing figures must not need
    from slurm.submit import Ended, LocalJob

POLL_S = 0.1


class RunFailed(RuntimeError):
    """A run was started and did not end well. `kind` is the failure's class, `kind == "bad_input"` the
    user's.
    """

    def __init__(self, why: str, kind: str, attempt: Attempt) -> None:
        super().__init__(why)
        self.kind, self.attempt = kind, attempt


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
        attempt = attempt_for(config, store, anew=newer_than is not None)
        folder = scratch / f"{name}-{attempt.number:03d}"
        shutil.rmtree(folder, ignore_errors=True)
        entry = write_orders(planned, attempt, folder, same_host=True)
        task = task_of(folder / "spec.json", [entry], planned, store, snapshot.ROOT, same_host=True)
        attempt.update(state="submitted", alone=planned.is_timing, why=None, failure=None)
        gpus = planned.tasks if config["device"] == "cuda" else 0
        job = start_local(task, folder, planned.tasks, gpus)
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
        if one.attempt.state == "preempted":
            why = f"told to stop, saved at step {one.attempt.manifest.get('step', 0)}: run again to go on"
            raise RunFailed(why, "preempted", one.attempt)
        kind, why = diagnose(one.folder, ended.codes, ended.size)
        with contextlib.suppress(
            OSError
        ):  # a full disk may refuse even this; the sentence still reaches the user
            one.attempt.fail(why, kind)
        raise RunFailed(why, kind, one.attempt)
    finally:
        one.lock.release()


@contextlib.contextmanager
def _undisturbed() -> Any:
    """A second Ctrl-C must not leave the clean-up of the first half done."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
