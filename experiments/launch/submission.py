"""Runs -> jobs of SLURM. Submitting returns at once; a file lists what was submitted.

results/sweeps/<name>/sweep.json     the arrays, their jobs' ids, and the runs of each job
                      a<n>/          of one array: its specs, submitit's files, the jobs' logs
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from msgspec import structs

from analysis.records import locks
from analysis.records.configs import run_id
from analysis.records.files import DamagedFileError, read_struct_if_there, write_json
from analysis.records.schema import DIVERGED, Sweep
from analysis.records.store import Attempt, utc_timestamp
from experiments.config import code_version
from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun, find_unmeasured_runs
from experiments.launch.arrays import JobArray, JobShape, group_into_arrays
from experiments.launch.attempt import (
    UNFINISHED_STATES,
    PreparedAttempt,
    describe_missing_requirements,
    prepare_attempt,
    worker_command,
)
from experiments.launch.bad_nodes import LEDGER_FILE, unreliable_nodes
from experiments.launch.diagnosis import RunFailed
from experiments.launch.progress_bar import ProgressBar, RunProgress, UnfinishedRuns
from experiments.launch.status import ASK_S, SETTLE_S, StatusSnapshot, stuck_reasons
from slurm import commands, environment, jobs, partition
from slurm.task import WorkerTask
from slurm.worker_process import JobSpec

LOCK_TIMEOUT_S = 300  # another process that submits a thousand runs takes some seconds
BAD_STATES = ("failed", "stopped", "unknown")  # reported when all other runs have ended
READ_S = 1.0  # between two looks at the records, which are files


class SlurmBackend:
    """A backend that lets SLURM carry out runs: it submits them if needed, and watches until all have ended.

    The jobs go on without anybody who watches; the same command goes on watching them.
    """

    def __init__(
        self,
        planned: Sequence[PlannedRun],
        folders: ResultFolders,
        progress: ProgressBar,
        sweep_name: str,
        words: Sequence[str],
        force: bool = False,
    ) -> None:
        self.planned = planned
        self.folders = folders
        self.progress = progress
        self.sweep_name = sweep_name
        self.words = words
        self.force = force
        self.snapshot = StatusSnapshot(folders, None)
        self.attempts: list[Attempt] = []
        self.bad_attempts: list[Attempt] = []
        self.reported: set[str] = set()  # ids of runs that are done, reasons of waiting
        self.has_slurm_answered = True  # when it was asked last
        self.asked_at = 0.0
        self.read_at = 0.0
        self.idle_since: float | None = None  # nothing runs or waits any more
        self.unfinished: UnfinishedRuns | None = UnfinishedRuns([], 0)

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Submit the runs, all at once, before the block.

        Raises:
            RunFailed: at the end of the block, the first run that failed.
        """
        sweep = submit_missing_runs(
            self.planned, self.folders, self.sweep_name, self.words, self.progress.say, self.force
        )
        if sweep is not None:
            self.progress.say(
                f"submitted as {sweep.name}; Ctrl-C leaves the jobs alone, the same command goes on watching"
            )
        newest = (self.folders.store.find_newest_of_config(run.config) for run in self.planned)
        self.attempts = [attempt for attempt in newest if attempt]
        yield
        if self.bad_attempts:
            first = self.snapshot.run_status(self.bad_attempts[0])
            num_others = len(self.bad_attempts) - 1
            others = f" ({num_others} more failed: `status` lists them)" if num_others else ""
            raise RunFailed(f"{first.why}{others}", first.kind, self.bad_attempts[0])

    def poll_unfinished_runs(self) -> UnfinishedRuns | None:
        """Return the runs that have not ended, None once there are none.

        Records are read now and then, and SLURM is asked more rarely.
        """
        now_s = time.monotonic()
        if now_s - self.read_at > READ_S:
            if now_s - self.asked_at > ASK_S:
                self._ask_slurm()
                self.asked_at = time.monotonic()
            self.read_at = now_s
            self.unfinished = self._read_unfinished(now_s)
        return self.unfinished

    def _ask_slurm(self) -> None:
        """Ask for the jobs; a controller that does not answer says nothing of them, and they go on."""
        try:
            self.snapshot = StatusSnapshot.query(self.folders, self.attempts)
        except commands.SlurmError as error:
            has_answered = False
            line = f"SLURM is asked again until it answers: {error}"
        else:
            has_answered = True
            line = "SLURM answers again"
        if has_answered is not self.has_slurm_answered:
            self.progress.say(line)
        self.has_slurm_answered = has_answered

    def _read_unfinished(self, now_s: float) -> UnfinishedRuns | None:
        statuses = {attempt: self.snapshot.run_status(attempt) for attempt in self.attempts}
        for attempt, status in statuses.items():
            if status.state == "done" and attempt.run_id not in self.reported:
                self.reported.add(attempt.run_id)
                self.progress.report_run_done(attempt.run_id, status.why if status.kind == DIVERGED else "")
        for reason in stuck_reasons(statuses.values()) - self.reported:
            self.reported.add(reason)
            self.progress.say(f"waiting: {reason}")
        running = [
            RunProgress(attempt.run_id, self.snapshot.read_progress(attempt))
            for attempt, status in statuses.items()
            if status.state == "running"
        ]
        num_waiting = sum(status.state in ("queued", "requeued") for status in statuses.values())
        self.bad_attempts = [attempt for attempt, status in statuses.items() if status.state in BAD_STATES]
        if running or num_waiting:
            self.idle_since = None
            return UnfinishedRuns(running, num_waiting)
        self.idle_since = self.idle_since or now_s
        may_return = any(attempt.state in ("submitted", "running") for attempt in self.bad_attempts)
        return UnfinishedRuns([], 0) if may_return and now_s - self.idle_since <= SETTLE_S else None


def submit_missing_runs(
    planned: Sequence[PlannedRun],
    folders: ResultFolders,
    sweep_name: str,
    words: Sequence[str],
    say: Callable[[str], None],
    force: bool = False,
) -> Path | None:
    """Queue the runs that are neither measured nor queued; return the sweep's folder, or None without any.

    Two that submit the same runs at once make each run once: one of them waits, and then finds them queued.

    Raises:
        ValueError: SLURM refused, or there is none. What an earlier array of the sweep queued stays queued.
    """
    conf = slurm_cluster(planned[0]).slurm_conf
    with _acquire_submission_lock(folders, say):
        environment.set_slurm_conf_variable_if_given(conf)
        selected = select_runs_and_close_dead_attempts(planned, folders, say, force)
        if not selected:
            return None
        missing = describe_missing_requirements(selected)
        if missing:
            raise ValueError("; ".join(missing))
        arrays = group_into_arrays(selected, one_job_per_group=selected[0].config.launch.block)
        ledger = folders.scratch / LEDGER_FILE
        avoided = sorted({node for array in arrays for node in unreliable_nodes(ledger, array.node_python)})
        if avoided:
            say(f"avoiding {', '.join(avoided)}, which failed before; without {ledger} they are used again")
        code = code_version.ensure_code_copy(folders.code)
        sweep = SweepFile(_make_numbered_folder(folders.sweeps, sweep_name), words, conf)
        say_once = cache(say)
        for number, array in enumerate(arrays):
            try:
                _submit_array(array, sweep, f"a{number}", folders, code, force, say_once)
            except commands.UncertainSubmissionError:  # it may be queued
                raise
            except ValueError as error:
                if number == 0:  # nothing was queued, so there is no sweep
                    shutil.rmtree(sweep.folder)
                    raise
                raise ValueError(
                    f"{error}; of {len(arrays)} arrays the first {number} are queued: `cancel "
                    f"{sweep.folder.name}` ends them, the same `submit` once more queues the others"
                ) from error
        with contextlib.suppress(commands.SlurmError):  # the sweep is queued, whatever this answer
            if untested := partition.describe_untested_version():
                say(f"cluster={slurm_cluster(planned[0]).name}: {untested}")
        return sweep.folder


class SweepFile:
    """A writer of sweep.json, the file by which `status`, `cancel` and `logs` find a sweep's runs."""

    def __init__(self, folder: Path, words: Sequence[str], conf: str | None) -> None:
        self.folder = folder
        self.head = {"name": folder.name, "words": [*words], "created": utc_timestamp(), "slurm_conf": conf}
        self.array_by_name: dict[str, dict[str, Any]] = {}

    def write_array(
        self,
        name: str,
        folder: str,
        shape: JobShape | environment.Allocation,
        time_min: int | None,
        jobs: Sequence[Sequence[PreparedAttempt]],
        ids: Sequence[str | None],
    ) -> None:
        """Write the file with one more array, or with new ids of its jobs; None: SLURM has given none yet."""
        job_notes = [
            {"id": job_id, "runs": [run.attempt.run_id for run in job]}
            for job, job_id in zip(jobs, ids, strict=True)
        ]
        self.array_by_name[name] = {
            "name": name,
            "folder": folder,
            "shape": str(shape),
            "nodes": shape.nodes,
            "time_min": time_min,
            "jobs": job_notes,
        }
        write_json(self.folder / "sweep.json", {**self.head, "arrays": [*self.array_by_name.values()]})


def _submit_array(
    array: JobArray,
    sweep: SweepFile,
    array_name: str,
    folders: ResultFolders,
    code: Path,
    force: bool,
    say: Callable[[str], None],
) -> None:
    from slurm.submit import submit_array  # submitit comes with it

    folder = sweep.folder / array_name
    folder.mkdir(parents=True)
    name = f"{sweep.folder.name}-{array_name}"
    cluster = array.cluster
    worker = worker_command(array.jobs[0][0], folders, code)
    script = array.batch_script(name, folder, folders.scratch / LEDGER_FILE, worker)
    runs_by_job: list[list[PreparedAttempt]] = []
    tasks = []
    start = partial(
        prepare_attempt,
        force_new=force,
        alone_on_machines=cluster.exclusive,
        sweep=sweep.folder.name,
        cluster=jobs.query_cluster_name(),
    )
    for index, job in enumerate(array.jobs):
        runs = [start(planned, folders, array=f"{name}:{index}") for planned in job]
        path = folder / f"task{index}.json"
        job_spec(runs, folders, code).write(path)
        tasks.append(WorkerTask.from_spec_file(path))
        runs_by_job.append(runs)
    write_ids = partial(sweep.write_array, name, folder.name, array.shape, cluster.time_min, runs_by_job)
    write_ids([None] * len(tasks))
    try:
        queued = submit_array(tasks, folder, script, say)
    except commands.UncertainSubmissionError as error:
        raise commands.UncertainSubmissionError(
            f"{error}; `status {sweep.folder.name}` tells once SLURM answers"
        ) from error
    except ValueError as error:
        for attempt in (run.attempt for runs in runs_by_job for run in runs):
            if attempt.newest_whole_checkpoint_step_or_zero():
                attempt.update_manifest(state="preempted", why=str(error))
            else:
                attempt.mark_failed_unless_whole(str(error), "bad_input")
        raise
    write_ids(queued.job_ids)
    for runs, job_id in zip(runs_by_job, queued.job_ids, strict=True):
        for run in runs:
            # Its job may have begun already, and written to the manifest; only this file is ours.
            note = run.attempt.slurm_job
            run.attempt.store_slurm_job(
                structs.replace(note, id=job_id, cluster=queued.cluster or note.cluster)
            )


def job_spec(runs: Sequence[PreparedAttempt], folders: ResultFolders, code: Path) -> JobSpec:
    """Return the spec of one SLURM job: runs that have the shape of the first, one after the other.

    Args:
        code: the copy of the code to run.
    """
    first = runs[0].planned
    return JobSpec(
        run_folders=[str(run.folder) for run in runs],
        command=worker_command(first, folders, code),
        num_tasks=first.config.num_processes,
        max_requeues=slurm_cluster(first).requeues,
    )


def slurm_cluster(planned: PlannedRun) -> SlurmCluster:
    """Return the SLURM cluster that a run is for."""
    assert isinstance(planned.config.cluster, SlurmCluster), planned.config.cluster
    return planned.config.cluster


def select_runs_and_close_dead_attempts(
    planned: Sequence[PlannedRun],
    folders: ResultFolders,
    say: Callable[[str], None],
    force: bool = False,
    ignored_job: str | None = None,
) -> list[PlannedRun]:
    """Return the runs without a record, or with `force` all, that no other job is making.

    Attempts whose job is gone and left no note are marked as failed, so that they can go on or begin anew;
    runs of which SLURM knows nothing are only made with `force`.

    Args:
        ignored_job: id of a job that is no other: this very one, where it may have been requeued.
    """
    newest = (folders.store.find_newest_of_config(run.config) for run in planned)
    others = [last for last in newest if last and (ignored_job is None or last.slurm_job.id != ignored_job)]
    snapshot = StatusSnapshot.query_until_settled(
        folders, others, say
    )  # after that, what has ended is known as such
    unmeasured = planned if force else find_unmeasured_runs(planned, folders, say)
    wanted_by_id = {run_id(run.config): run for run in unmeasured}
    left_out = set[str]()
    reason_by_unknown_run = dict[str, str]()
    for last in others:
        if last.state not in UNFINISHED_STATES:
            continue
        status = snapshot.run_status(last)
        if status.is_under_way or last.describe_writer():
            left_out.add(last.run_id)
        elif status.state == "unknown":
            reason_by_unknown_run[last.run_id] = status.why
        elif last.state != "preempted":
            last.mark_failed_unless_whole(status.why, status.kind)
    if left_out & wanted_by_id.keys():
        num_left_out = len(left_out & wanted_by_id.keys())
        say(f"{num_left_out} of these runs are queued or running already; `status` shows them")
    unknown = [] if force else [name for name in wanted_by_id if name in reason_by_unknown_run]
    if unknown:
        reason = reason_by_unknown_run[unknown[0]]
        say(f"{len(unknown)} of these runs are left alone: {unknown[0]} is unknown: {reason}")
    return [run for name, run in wanted_by_id.items() if name not in {*left_out, *unknown}]


def describe_missing_slurm(planned: Sequence[PlannedRun]) -> list[str]:
    """Return a sentence on each SLURM cluster of these runs that does not answer here."""
    sentences = list[str]()
    for cluster in {slurm_cluster(run).name: slurm_cluster(run) for run in planned}.values():
        with environment.temporary_slurm_conf_if_given(cluster.slurm_conf):
            why = _find_slurm_problem()
        if why:
            sentences.append(
                f"cluster={cluster.name} needs SLURM: {why}; `make slurm-up` starts devcluster's"
            )
    return sentences


def _find_slurm_problem() -> str:
    """Return why SLURM can't be asked; empty where it answers."""
    if shutil.which("sinfo") is None:
        return "there is none on this machine"
    try:
        commands.run_command("sinfo", "--noheader")
    except commands.SlurmError as error:
        return f"it does not answer ({error})"
    return ""


def _make_numbered_folder(root: Path, name: str) -> Path:
    """Make <name>-001, <name>-002, ...; two processes never get the same one."""
    root.mkdir(parents=True, exist_ok=True)
    number = len(list(root.glob(f"{name}-*")))
    while True:
        number += 1
        folder = root / f"{name}-{number:03d}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder


def _acquire_submission_lock(folders: ResultFolders, say: Callable[[str], None]) -> locks.FileLock:
    """Return the lock of who submits, which this process now holds."""
    lock = locks.FileLock(folders.scratch / "submit.lock")
    if not lock.acquire(LOCK_TIMEOUT_S, say):
        holder = locks.describe_lock_holder(lock.path) or "another process"
        raise ValueError(f"{holder} has been submitting for {LOCK_TIMEOUT_S} s: wait for its end, or end it")
    if lock.is_machine_local:
        say(
            f"files in {folders.results} can't be locked: submit from one machine at a time, or set "
            f"SPARSIFY_RESULTS to {locks.ELSEWHERE}"
        )
    return lock


def read_sweeps(folders: ResultFolders, say: Callable[[str], None]) -> list[Sweep]:
    """Return all sweeps that were submitted, the oldest first; `say` which files can't be read."""
    sweeps = []
    for path in folders.sweeps.glob("*/sweep.json"):
        try:
            sweep = read_struct_if_there(path, Sweep)
        except DamagedFileError as damage:
            say(f"left out {path.parent.name}: {damage.message_without_folder}")
        else:
            sweeps += [sweep] if sweep else []
    return sorted(sweeps, key=lambda sweep: sweep.created)
