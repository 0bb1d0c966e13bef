"""Runs on this machine: starts what is missing, watches it, and says in a sentence what went wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass

from filelock import FileLock, Timeout

from analysis import schemas
from analysis.files import Watched, read_note
from analysis.records import Attempt, run_id
from experiments.config.folders import ROOT, Folders
from experiments.config.plan import PlannedRun
from experiments.launch.attempt import begin_attempt, worker_command
from experiments.launch.diagnosis import Interrupted, RunFailed, diagnose
from experiments.launch.end_signals import EndSignals
from experiments.launch.progress_bar import ProgressBar, RunProgress, labels_of
from slurm.emulated.network import EmulatedNetwork, check
from slurm.local import Ended, LocalWorkers

POLL_S = 0.1


@dataclass
class Running:
    """A run whose workers were started."""

    planned: PlannedRun
    attempt: Attempt
    workers: LocalWorkers
    lock: FileLock
    folder: Watched  # of the attempt

    @property
    def progress(self) -> RunProgress:
        """What the worker has said."""
        note = read_note(self.workers.folder / "progress.json", schemas.Progress)
        return RunProgress(self.attempt.run_id, note or schemas.Progress())

    def fail(self, why: str, kind: str) -> None:
        """Mark the attempt as failed, if it is still ours; whatever becomes of that, the user is told."""
        if self.folder.is_there():
            with contextlib.suppress(OSError):  # a full disk may refuse even this
                self.attempt.fail(why, kind)

    def release(self) -> None:
        """Let others have it."""
        self.lock.release()
        self.folder.close()


def run_here(missing: Sequence[PlannedRun], folders: Folders, force: bool = False) -> None:
    """Make all these runs, with a progress display.

    Raises:
        RunFailed: the first run that failed; the others were stopped.
        ValueError: this machine can't emulate a link that one of them asks for.
    """
    check_networks(missing)
    progress = ProgressBar(labels_of(missing))
    try:
        run_side_by_side(missing, folders, progress, force)
    finally:
        progress.close()


def run_side_by_side(
    planned: Sequence[PlannedRun], folders: Folders, progress: ProgressBar, force: bool = False
) -> None:
    """Make all these runs, those that share the machine side by side, one to a core, and on a GPU as many as
    they say.

    A run that another process is making is waited for, and its record used. A signal to end lets the workers
    save; a second one does not. Whatever else ends this early, the workers are stopped first and the
    attempt's manifest says why.

    Raises:
        RunFailed: the first run that failed; the others were stopped.
        Interrupted: by a signal.
    """
    began = time.time()
    waiting, running, saved = list(planned), list[Running](), list[Attempt]()
    with EndSignals() as signals:
        try:
            while running or (waiting and not signals.told):
                while waiting and not signals.told and has_room(waiting[0], [run.planned for run in running]):
                    if new := _begin(waiting[0], folders, progress, signals, began if force else None):
                        running.append(new)
                    elif signals.told:
                        break
                    waiting.pop(0)
                if signals.pass_on():
                    progress.say("ending: the workers save; a second signal ends them at once")
                    for run in running:
                        run.workers.tell_to_stop()
                for run in list(running):
                    if ended := run.workers.poll():
                        running.remove(run)
                        if _finish(run, ended, signals):
                            progress.finished(run.attempt.run_id)
                        else:
                            saved.append(run.attempt)
                progress.show([run.progress for run in running], len(waiting))
                time.sleep(POLL_S)
        except BaseException as error:
            signals.ignore()  # the clean-up is not left half done
            why = "interrupted" if signals.told else "stopped because another run failed"
            for run in running:
                run.workers.cancel()
                if run.attempt.state != "preempted":
                    run.fail(why, "interrupted")
                run.release()
            if isinstance(error, Interrupted):
                begun = [*saved, *(run.attempt for run in running)]
                raise Interrupted(_what_is_kept(begun, len(waiting))) from None
            raise
        if signals.told:
            raise Interrupted(_what_is_kept(saved, len(waiting)))


def _what_is_kept(begun: Sequence[Attempt], waiting: int) -> str:
    steps = ((attempt.run_id, attempt.saved_step()) for attempt in begun)
    kept = [f"{run} saved at step {step:,}" if step else f"{run} had saved nothing" for run, step in steps]
    kept += [f"{waiting} runs had not begun"] * bool(waiting)
    return f"interrupted: {'; '.join([*kept, 'what was finished is kept'])}; run again to go on"


def has_room(planned: PlannedRun, running: Sequence[PlannedRun]) -> bool:
    """Is there room for one more beside those that are running?"""
    if not running:
        return True
    together = [planned, *running]
    if any(run.is_timing for run in together):
        return False
    return sum(run.gpu for run in together) <= 1 and sum(run.cores for run in together) <= cores()


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(
    planned: PlannedRun,
    folders: Folders,
    progress: ProgressBar,
    signals: EndSignals,
    newer_than: float | None,
) -> Running | None:
    """Start a run, or return None because another process has just made it, or a signal came first."""
    name = run_id(planned.config)
    lock = run_lock(folders, name)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress.say(f"{name}: another process is measuring this run; waiting for it")
        while not _acquired(lock):
            if signals.told:
                return None
        newer_than = None  # what it measured meanwhile is as fresh as anything we could measure
    with contextlib.ExitStack() as undo:
        undo.callback(lock.release)
        if newer_than is None and folders.store.valid(planned.config) is not None:
            progress.finished(name)
            return None
        if network := network_of(planned):
            undo.callback(network.close)
        begun = begin_attempt(
            planned,
            folders,
            anew=newer_than is not None,
            same_host=True,
            network=network.facts if network else None,
        )
        command = worker_command(planned, folders, ROOT)
        workers = LocalWorkers(
            command, begun.orders, begun.folder, planned.num_processes, network, planned.workers_per_node
        )
        undo.pop_all()
    return Running(planned, begun.attempt, workers, lock, Watched(begun.attempt.path))


def network_of(planned: PlannedRun) -> EmulatedNetwork | None:
    """Begin the network of a run with cluster=netns; None for other runs."""
    cluster = planned.config["cluster"]
    return EmulatedNetwork(cluster["link"], planned.num_nodes) if cluster["where"] == "netns" else None


def check_networks(runs: Sequence[PlannedRun]) -> None:
    """
    Raises:
        ValueError: this machine can't emulate a link that one of these runs asks for.
    """
    emulated = [run for run in runs if run.config["cluster"]["where"] == "netns"]
    for run in {run.config["cluster"]["link"]["name"]: run for run in emulated}.values():
        check(run.config["cluster"]["link"], max(each.num_nodes for each in emulated))


def run_lock(folders: Folders, name: str) -> FileLock:
    """The lock that a process holds while it makes the run of this name on this machine."""
    path = folders.scratch / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path)


def _acquired(lock: FileLock) -> bool:
    try:
        lock.acquire(timeout=1)
    except Timeout:
        return False
    return True


def _finish(run: Running, ended: Ended, signals: EndSignals) -> bool:
    """Accept a run that ended well; False for one that was told to stop, and did.

    Raises:
        RunFailed: it ended in any other way.
    """
    attempt, folder = run.attempt, run.workers.folder
    try:
        if run.folder.is_there() and attempt.is_valid():
            # Notes and logs of a run that ended well have no reader.
            shutil.rmtree(folder, ignore_errors=True)
            return True
        if run.folder.is_there() and attempt.state == "preempted":
            if signals.told:
                return False
            why = f"told to stop, saved at step {attempt.saved_step():,}: run again to go on"
            raise RunFailed(why, "preempted", attempt)
        kind, why = diagnose(folder, ended.codes, ended.size)
        if not run.folder.is_there():
            kind, why = "disturbed", f"{attempt.path} was removed while the run was under way"
        elif kind != "held":  # else its manifest is another's
            run.fail(why, kind)
        raise RunFailed(why, kind, attempt)
    finally:
        run.release()
