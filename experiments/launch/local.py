"""Runs on this machine: started, watched, and judged when they have ended."""

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
from typing import NamedTuple

from analysis.records import locks, schema
from analysis.records.configs import run_id
from analysis.records.files import FolderReplacementDetector, try_read_struct
from analysis.records.locks import FileLock
from analysis.records.store import Attempt
from experiments.config.folders import ROOT, ResultFolders
from experiments.config.machines import EmulatedCluster
from experiments.config.plan import PlannedRun
from experiments.launch.attempt import prepare_attempt, run_lock, wait_to_acquire_run_lock, worker_command
from experiments.launch.diagnosis import POLICIES, CommandInterrupted, RunFailed, diagnose_failed_start
from experiments.launch.fork_server import forking_starter_or_command
from experiments.launch.progress_bar import ProgressBar, RunProgress, UnfinishedRuns
from experiments.worker.cores import last_core_cpus_if_spare, usable_cpus
from slurm.emulated.network import DelayMethod, EmulatedLink, EmulatedNetwork, check_emulation_by_trial
from slurm.local import LocalWorkers

NETWORK_LOST = "the emulated network ended: what joins its nodes was killed; the workers were stopped"
SAVE_S = 60.0  # without a step after a signal: then the workers are ended, one of which may be stopped itself
EMULATION = "emulation"  # the lock of who emulates links
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndSignalHandler:
    """A handler of END_SIGNALS in the process that starts workers: the second one ends all.

    Inside a `with` block the first signal sets `was_received`; the next one raises CommandInterrupted.
    Signals that this process was started to ignore stay ignored, as SIGHUP under `nohup`.
    """

    def __init__(self) -> None:
        self.was_received = False
        self.was_consumed = False
        self.previous_handlers: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> EndSignalHandler:
        if threading.current_thread() is threading.main_thread():
            for number in END_SIGNALS:
                handler = signal.getsignal(number)
                if handler is not signal.SIG_IGN:
                    self.previous_handlers[number] = handler
        self._handle_by(self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous_handlers.items():
            signal.signal(number, handler)

    def consume_first_signal(self) -> bool:
        """Tell whether the first signal has come; True once only."""
        is_new = self.was_received and not self.was_consumed
        self.was_consumed = self.was_received
        return is_new

    def ignore_further_signals(self) -> None:
        """Ignore signals from now on to the end of the block."""
        self._handle_by(signal.SIG_IGN)

    def _handle_by(self, handler: signal._HANDLER) -> None:
        for number in self.previous_handlers:
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.was_received:
            raise CommandInterrupted
        self.was_received = True


@dataclass
class LocalRun:
    """A run whose workers were started on this machine."""

    attempt: Attempt
    planned: PlannedRun
    workers: LocalWorkers
    lock: FileLock
    folder: FolderReplacementDetector  # of the attempt

    @property
    def progress(self) -> RunProgress:
        """The progress that the worker has noted."""
        note = try_read_struct(self.workers.folder / "progress.json", schema.Progress)
        return RunProgress(self.attempt.run_id, note or schema.Progress())

    def mark_failed_if_present(self, why: str, kind: str) -> None:
        """Mark the attempt as failed, if its folder is still this run's."""
        if self.folder.is_still_there():
            with contextlib.suppress(OSError):  # a full disk may refuse even this
                self.attempt.mark_failed_unless_whole(why, kind)

    def release_lock_and_folder(self) -> None:
        """Let other processes make the run."""
        self.lock.release()
        self.folder.close()


class LocalBackend:
    """Runs that this machine carries out: side by side, one to a core, and on a GPU as many as they say.

    A run that fails stops no other, unless what ended it would end them as well; those that failed before
    are tried last. A run that another process is making is waited for, and its record used. A signal to end
    lets the workers save; a second one does not. Whatever else ends this early, the workers are stopped first
    and the attempt's manifest says why.

    Raises:
        ValueError: this machine can't emulate a link that one of the runs asks for, or another process does
            so already.
    """

    def __init__(
        self,
        planned: Sequence[PlannedRun],
        folders: ResultFolders,
        progress: ProgressBar,
        force: bool = False,
    ) -> None:
        requests = {*filter(None, map(emulation_request, planned))}
        for request in requests:
            check_emulation_by_trial(*request)
        # It is held until all have ended.
        self.emulation_lock = acquire_emulation_lock_or_raise() if requests else contextlib.nullcontext()
        self.folders = folders
        self.progress = progress
        self.force = force
        self.is_single_run = len(planned) == 1  # nothing of what a process loads would be shared
        self.waiting = sorted(planned, key=self._has_failed)
        self.running: list[LocalRun] = []
        self.stopped: list[Attempt] = []  # by a signal
        self.failures: list[RunFailed] = []
        self.signals = EndSignalHandler()
        self.last_progress: list[RunProgress] = []  # since a signal came
        self.last_change_s = 0.0

    def _has_failed(self, planned: PlannedRun) -> bool:
        last = self.folders.store.find_newest_of_config(planned.config)
        return last is not None and last.state == "failed"

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Handle signals inside the block, and kill all workers if it ends early.

        Raises:
            RunFailed: at the end of the block, the first run that failed.
        """
        with self.emulation_lock, self.signals:
            try:
                yield
            except BaseException as error:
                self.signals.ignore_further_signals()  # the clean-up is not left half done
                why = "interrupted" if self.signals.was_received else "stopped because another run failed"
                for run in self.running:
                    run.workers.kill_and_close_network()
                    if run.attempt.state != "preempted":
                        run.mark_failed_if_present(why, "interrupted")
                    run.release_lock_and_folder()
                if isinstance(error, CommandInterrupted):
                    raise CommandInterrupted(self._describe_interruption()) from None
                raise
            if self.failures:
                raise self.failures[0]

    def poll_unfinished_runs(self) -> UnfinishedRuns | None:
        """Start runs that there is room for, accept those that have ended well, and return the others.

        Returns:
            the runs that have not ended; None once there is none.

        Raises:
            RunFailed: a run failed from what would end the others as well.
            CommandInterrupted: a signal came, and all workers have saved.
        """
        while (
            self.waiting
            and not self.signals.was_received
            and has_room_for(self.waiting[0], [run.planned for run in self.running])
        ):
            self._begin()
        if self.signals.consume_first_signal():
            self.progress.say("ending: the workers save; a second signal ends them at once")
            for run in self.running:
                run.workers.request_save_and_stop()
        for run in list(self.running):
            codes = run.workers.poll_exit_codes()
            if codes is not None:
                self.running.remove(run)
                self._finish(run, codes)
        if self.signals.was_received:
            if self.running and self._has_stalled():
                self.progress.say(
                    f"ended: the workers have made no step for {SAVE_S:.0f} s, so they could not save"
                )
                raise CommandInterrupted
            if not self.running:
                raise CommandInterrupted
        if not self.running and not self.waiting:
            return None
        return UnfinishedRuns([run.progress for run in self.running], len(self.waiting))

    def _has_stalled(self) -> bool:
        """Tell whether nothing that runs has come any further for SAVE_S."""
        progress = [run.progress for run in self.running]
        if progress != self.last_progress:
            self.last_progress = progress
            self.last_change_s = time.monotonic()
        return time.monotonic() - self.last_change_s > SAVE_S

    def _begin(self) -> None:
        """Start the first run that waits, unless another process has just made it, or a signal comes."""
        planned = self.waiting[0]
        force = self.force
        name = run_id(planned.config)
        lock = run_lock(self.folders, name)
        if not lock.acquire(timeout_s=0):
            if not wait_to_acquire_run_lock(lock, name, self.progress.say, lambda: self.signals.was_received):
                return
            force = False  # what it measured meanwhile is as fresh as anything we could measure
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            if not force and self.folders.store.find_newest_valid_of_config(planned.config) is not None:
                self.progress.report_run_done(name)
                self.waiting.pop(0)
                return
            network = start_network_if_emulated(planned)
            if network:
                undo.callback(network.close)
            started = prepare_attempt(planned, self.folders, force_new=force, network=network)
            command = worker_command(planned, self.folders, ROOT)
            is_forked = can_fork_workers(planned, self.is_single_run)
            workers = LocalWorkers(
                forking_starter_or_command(command) if is_forked else command,
                started.orders_file,
                started.folder,
                planned.config.num_processes,
                network,
                planned.config.workers_per_node,
            )
            undo.pop_all()
        self.waiting.pop(0)
        folder = FolderReplacementDetector(started.attempt.path)
        self.running.append(LocalRun(started.attempt, planned, workers, lock, folder))

    def _finish(self, run: LocalRun, codes: dict[int, int]) -> None:
        try:
            if self._accept(run, codes):
                divergence = run.attempt.manifest.get("diverged") or {}
                self.progress.report_run_done(run.attempt.run_id, divergence.get("why", ""))
            else:
                self.stopped.append(run.attempt)
        except RunFailed as failure:
            if POLICIES[failure.kind].stops_waiting_runs:
                raise
            self.failures.append(failure)
            if self.waiting or self.running:
                self.progress.say(f"{run.attempt.run_id} failed: {failure}; the others go on")
        finally:
            run.release_lock_and_folder()

    def _accept(self, run: LocalRun, codes: dict[int, int]) -> bool:
        """Accept a run that ended well; return False for one that was told to stop, and did.

        Raises:
            RunFailed: it ended in any other way.
        """
        attempt = run.attempt
        if not run.folder.is_still_there():
            why = f"{attempt.path} was removed while the run was under way"
            raise RunFailed(why, "disturbed", attempt)
        if attempt.is_valid():
            # Notes and logs of a run that ended well have no reader.
            shutil.rmtree(run.workers.folder, ignore_errors=True)
            return True
        if attempt.state == "preempted":
            if self.signals.was_received:
                return False
            step = attempt.newest_whole_checkpoint_step_or_zero()
            why = f"told to stop, saved at step {step:,}: run again to go on"
            raise RunFailed(why, "preempted", attempt)
        kind, why = diagnose_failed_start(run.workers.folder, codes, run.workers.size)
        if run.workers.has_lost_network:
            kind = "killed"
            why = NETWORK_LOST
        if kind != "held":  # else its manifest is another's
            run.mark_failed_if_present(why, kind)
        raise RunFailed(why, kind, attempt)

    def _describe_interruption(self) -> str:
        facts = []
        for attempt in [*self.stopped, *(run.attempt for run in self.running)]:
            step = attempt.newest_whole_checkpoint_step_or_zero()
            facts.append(f"{attempt.run_id} " + (f"saved at step {step:,}" if step else "had saved nothing"))
        if self.waiting:
            facts.append(f"{len(self.waiting)} runs had not begun")
        return f"interrupted: {'; '.join([*facts, 'what was finished is kept'])}; run again to go on"


def can_fork_workers(planned: PlannedRun, is_single_run: bool) -> bool:
    """Tell whether the workers of a run may be forked from a process that has loaded torch for several."""
    return not (planned.is_timing or is_single_run)


def has_room_for(planned: PlannedRun, running: Sequence[PlannedRun]) -> bool:
    """Tell whether a run may start beside those that are running."""
    if not running:
        return True
    runs = [planned, *running]
    if any(run.is_timing for run in runs):
        return False
    return (
        sum(run.gpu_share for run in runs) <= 1 and sum(run.num_cores for run in runs) <= count_usable_cores()
    )


def count_usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(usable_cpus()) or os.cpu_count() or 1


def acquire_emulation_lock_or_raise() -> FileLock:
    """Return the lock of who emulates links on this machine, which this process now holds.

    Two runs at once would take each other's cores, and neither would find its link.

    Raises:
        ValueError: another process does.
    """
    lock = FileLock(locks.machine_lock_folder() / f"{EMULATION}.lock")
    if not lock.acquire(timeout_s=0):
        holder = locks.describe_lock_holder(lock.path) or "another process"
        raise ValueError(
            f"{holder} has a run with cluster=netns under way, and two at once would take each other's "
            "cores, so that neither finds its link; begin when it has ended, or take cluster=virtual, which "
            "simulates the link"
        )
    return lock


class EmulationRequest(NamedTuple):
    """The network that a run with cluster=netns asks for."""

    link: EmulatedLink
    nodes: int
    by: DelayMethod


def emulation_request(planned: PlannedRun) -> EmulationRequest | None:
    """Return the network that a run asks for; None without cluster=netns."""
    cluster = planned.config.cluster
    if not isinstance(cluster, EmulatedCluster):
        return None
    fields = {
        name: getattr(cluster.link, name) for name in EmulatedLink._fields if hasattr(cluster.link, name)
    }
    link = EmulatedLink(**fields, windows=cluster.windows)
    return EmulationRequest(link, planned.config.num_nodes, cluster.by)


def start_network_if_emulated(planned: PlannedRun) -> EmulatedNetwork | None:
    """Start the emulated network of a run with cluster=netns; return None for other runs.

    The cores that its workers compute with are theirs; where there is one more, its relay has that.
    """
    request = emulation_request(planned)
    config = planned.config
    return (
        EmulatedNetwork(*request, last_core_cpus_if_spare(config.num_processes * config.threads))
        if request
        else None
    )
