"""Runs on this machine: starts what is missing, watches it, and says in a sentence what went wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from analysis.records import locks, schema
from analysis.records.configs import run_id
from analysis.records.files import Watched, read_note
from analysis.records.locks import Lock
from analysis.records.store import Attempt
from experiments.config.folders import ROOT, Folders
from experiments.config.machines import EmulatedCluster
from experiments.config.plan import PlannedRun
from experiments.launch.attempt import run_lock, start_attempt, wait_for_lock, worker_command
from experiments.launch.diagnosis import POLICIES, Interrupted, RunFailed, diagnose
from experiments.launch.fork_server import ForkingCommand
from experiments.launch.progress_bar import ProgressBar, RunProgress, UnfinishedRuns
from experiments.worker.cores import spare
from slurm.emulated.network import DelayMethod, EmulatedLink, EmulatedNetwork, check_emulation
from slurm.local import LocalWorkers

NETWORK_LOST = "the emulated network ended: what joins its nodes was killed; the workers were stopped"
SAVE_S = 60.0  # without a step after a signal: then the workers are ended, one of which may be stopped itself
EMULATION = "emulation"  # the lock of who emulates links
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndSignals:
    """Ctrl-C and its like in the process that starts workers: the first is passed on, the second ends all.

    It takes END_SIGNALS inside a `with` block. The first one sets `told`; the next one raises Interrupted.
    What this process was started to ignore stays ignored, as SIGHUP under `nohup`.
    """

    def __init__(self) -> None:
        self.told = self.passed_on = False
        self.before: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> EndSignals:
        if threading.current_thread() is threading.main_thread():
            wanted = {number: signal.getsignal(number) for number in END_SIGNALS}
            self.before = {number: how for number, how in wanted.items() if how is not signal.SIG_IGN}
        self._handle_by(self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, how in self.before.items():
            signal.signal(number, how)

    def pass_on(self) -> bool:
        """Tell, once, whether the first signal has come and was not passed on yet."""
        due = self.told and not self.passed_on
        self.passed_on = self.passed_on or due
        return due

    def ignore(self) -> None:
        """Ignore signals from now on to the end of the block."""
        self._handle_by(signal.SIG_IGN)

    def _handle_by(self, how: signal._HANDLER) -> None:
        for number in self.before:
            signal.signal(number, how)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.told:
            raise Interrupted
        self.told = True


@dataclass
class LocalRun:
    """A run whose workers were started on this machine."""

    planned: PlannedRun
    attempt: Attempt
    workers: LocalWorkers
    lock: Lock
    folder: Watched  # of the attempt

    @property
    def progress(self) -> RunProgress:
        """The progress that the worker has told."""
        note = read_note(self.workers.folder / "progress.json", schema.Progress)
        return RunProgress(self.attempt.run_id, note or schema.Progress())

    def fail(self, why: str, kind: str) -> None:
        """Mark the attempt as failed, if it is still ours; whatever becomes of that, the user is told."""
        if self.folder.is_there():
            with contextlib.suppress(OSError):  # a full disk may refuse even this
                self.attempt.fail(why, kind)

    def release(self) -> None:
        """Let others have it."""
        self.lock.release()
        self.folder.close()


class LocalBackend:
    """This machine: runs that share it go side by side, one to a core, and on a GPU as many as they say.

    A run that fails stops no other, unless what ended it would end them as well; those that failed before
    are tried last. A run that another process is making is waited for, and its record used. A signal to end
    lets the workers save; a second one does not. Whatever else ends this early, the workers are stopped first
    and the attempt's manifest says why.

    Raises:
        ValueError: this machine can't emulate a link that one of the runs asks for, or another process does
            so already.
    """

    def __init__(
        self, planned: Sequence[PlannedRun], folders: Folders, progress: ProgressBar, force: bool = False
    ) -> None:
        emulated = dict.fromkeys(asked for run in planned if (asked := emulation_request(run)))
        for asked in emulated:
            check_emulation(*asked)
        self.held = contextlib.ExitStack()  # until all have ended
        if emulated:
            self.held.enter_context(hold_emulation_lock())
        self.running, self.saved = list[LocalRun](), list[Attempt]()
        self.folders, self.progress, self.force = folders, progress, force
        self.waiting = sorted(planned, key=self._has_failed)
        self.failures = list[RunFailed]()
        self.signals = EndSignals()
        self.last_steps = list[RunProgress]()  # since a signal came
        self.last_change = 0.0
        self.are_alone = len(planned) == 1  # nothing of what a process loads would be shared

    def _has_failed(self, planned: PlannedRun) -> bool:
        last = self.folders.store.last(planned.config)
        return last is not None and last.state == "failed"

    @contextlib.contextmanager
    def attended(self) -> Iterator[None]:
        """Take signals inside the block; its early end stops all workers.

        Raises:
            RunFailed: at its end, the first run that failed.
        """
        with self.held, self.signals:
            try:
                yield
            except BaseException as error:
                self.signals.ignore()  # the clean-up is not left half done
                why = "interrupted" if self.signals.told else "stopped because another run failed"
                for run in self.running:
                    run.workers.cancel()
                    if run.attempt.state != "preempted":
                        run.fail(why, "interrupted")
                    run.release()
                if isinstance(error, Interrupted):
                    raise Interrupted(self._what_is_kept()) from None
                raise
            if self.failures:
                raise self.failures[0]

    def look(self) -> UnfinishedRuns | None:
        """Begin the runs that there is room for, accept those that have ended well, and tell what has not
        ended; None once nothing is under way.

        Raises:
            RunFailed: a run failed from what would end the others as well.
            Interrupted: a signal came, and all workers have saved.
        """
        while (
            self.waiting
            and not self.signals.told
            and has_room_for(self.waiting[0], [run.planned for run in self.running])
        ):
            self._begin()
        if self.signals.pass_on():
            self.progress.say("ending: the workers save; a second signal ends them at once")
            for run in self.running:
                run.workers.tell_to_stop()
        for run in list(self.running):
            if (codes := run.workers.poll()) is not None:
                self.running.remove(run)
                self._ended(run, codes)
        if self.signals.told and not self.running:
            raise Interrupted
        if self.signals.told and self._has_stalled():
            self.progress.say(
                f"ended: the workers have made no step for {SAVE_S:.0f} s, so they could not save"
            )
            raise Interrupted
        if not self.running and not self.waiting:
            return None
        return UnfinishedRuns([run.progress for run in self.running], len(self.waiting))

    def _has_stalled(self) -> bool:
        """Tell whether nothing that runs has come any further for SAVE_S."""
        steps = [run.progress for run in self.running]
        if steps != self.last_steps:
            self.last_steps = steps
            self.last_change = time.monotonic()
        return time.monotonic() - self.last_change > SAVE_S

    def _begin(self) -> None:
        """Begin the first run that waits, unless another process has just made it, or a signal comes."""
        planned, anew = self.waiting[0], self.force
        name, size = run_id(planned.config), planned.config.num_processes
        lock = run_lock(self.folders, name)
        if not lock.acquire(patience_s=0):
            if not wait_for_lock(lock, name, self.progress.say, lambda: self.signals.told):
                return
            anew = False  # what it measured meanwhile is as fresh as anything we could measure
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            if not anew and self.folders.store.valid(planned.config) is not None:
                self.progress.report_done(name)
                self.waiting.pop(0)
                return
            if network := start_network(planned):
                undo.callback(network.close)
            begun = start_attempt(
                planned, self.folders, anew=anew, network=network.facts if network else None,
                relay=str(network.statistics) if network and network.statistics else None,
            )  # fmt: skip
            command, per_node = worker_command(planned, self.folders, ROOT), planned.config.workers_per_node
            warm = ForkingCommand.of(command) if can_be_forked(planned, self.are_alone) else None
            workers = LocalWorkers(warm or command, begun.orders, begun.folder, size, network, per_node)
            undo.pop_all()
        self.waiting.pop(0)
        watched = Watched(begun.attempt.path)
        self.running.append(LocalRun(planned, begun.attempt, workers, lock, watched))

    def _ended(self, run: LocalRun, codes: dict[int, int]) -> None:
        try:
            if self._accept(run, codes):
                ended = run.attempt.manifest.get("diverged") or {}
                self.progress.report_done(run.attempt.run_id, ended.get("why", ""))
            else:
                self.saved.append(run.attempt)
        except RunFailed as failure:
            if POLICIES[failure.kind].stops:
                raise
            self.failures.append(failure)
            if self.waiting or self.running:
                self.progress.say(f"{run.attempt.run_id} failed: {failure}; the others go on")

    def _accept(self, run: LocalRun, codes: dict[int, int]) -> bool:
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
                if self.signals.told:
                    return False
                why = f"told to stop, saved at step {attempt.saved_step():,}: run again to go on"
                raise RunFailed(why, "preempted", attempt)
            kind, why = diagnose(folder, codes, run.workers.size)
            if run.workers.has_lost_network:
                kind, why = "killed", NETWORK_LOST
            if not run.folder.is_there():
                kind, why = "disturbed", f"{attempt.path} was removed while the run was under way"
            elif kind != "held":  # else its manifest is another's
                run.fail(why, kind)
            raise RunFailed(why, kind, attempt)
        finally:
            run.release()

    def _what_is_kept(self) -> str:
        begun = [*self.saved, *(run.attempt for run in self.running)]
        steps = ((attempt.run_id, attempt.saved_step()) for attempt in begun)
        kept = [
            f"{run} saved at step {step:,}" if step else f"{run} had saved nothing" for run, step in steps
        ]
        kept += [f"{len(self.waiting)} runs had not begun"] * bool(self.waiting)
        return f"interrupted: {'; '.join([*kept, 'what was finished is kept'])}; run again to go on"


def can_be_forked(planned: PlannedRun, is_alone: bool) -> bool:
    """Tell whether the workers of a run begin from what one process has loaded for several runs."""
    return not (planned.is_timing or is_alone)


def has_room_for(planned: PlannedRun, running: Sequence[PlannedRun]) -> bool:
    """Tell whether there is room for one more beside those that are running."""
    if not running:
        return True
    together = [planned, *running]
    if any(run.is_timing for run in together):
        return False
    return sum(run.gpu for run in together) <= 1 and sum(run.cores for run in together) <= usable_cores()


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def hold_emulation_lock() -> Iterator[None]:
    """Nobody else of this user emulates links on this machine inside the block: two runs at once would take
    each other's cores, and neither would find its link.

    Raises:
        ValueError: somebody does.
    """
    lock = Lock(locks.folder_of_machine() / f"{EMULATION}.lock")
    if not lock.acquire(patience_s=0):
        raise ValueError(
            f"{locks.holder(lock.path) or 'another process'} has a run with cluster=netns under way, and two "
            "at once would take each other's cores, so that neither finds its link; begin when it has ended, "
            "or take cluster=virtual, which simulates the link"
        )
    try:
        yield
    finally:
        lock.release()


def emulation_request(planned: PlannedRun) -> tuple[EmulatedLink, int, DelayMethod] | None:
    """The links, nodes and delaying of a run with cluster=netns; None for other runs."""
    cluster = planned.config.cluster
    if not isinstance(cluster, EmulatedCluster):
        return None
    own = {name: getattr(cluster.link, name) for name in EmulatedLink._fields if hasattr(cluster.link, name)}
    link = EmulatedLink(**own, windows=cluster.windows)
    return link, planned.config.num_nodes, cluster.by


def start_network(planned: PlannedRun) -> EmulatedNetwork | None:
    """Begin the network of a run with cluster=netns; None for other runs.

    What its workers compute with is theirs; where there is one more core, its relay has that.
    """
    asked, config = emulation_request(planned), planned.config
    return EmulatedNetwork(*asked, spare(config.num_processes * config.threads)) if asked else None
