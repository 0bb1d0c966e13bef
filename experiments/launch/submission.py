"""Runs -> SLURM's queue. Submitting returns at once; what was submitted stands in a file.

results/sweeps/<name>/sweep.json     the arrays, their jobs' ids, and the runs of each job
                      a<n>/          of one array: its specs, submitit's files, the jobs' logs
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from msgspec import structs

from analysis.records import locks
from analysis.records.configs import run_id
from analysis.records.files import Damaged, read_as, write_json
from analysis.records.schema import DIVERGED, Sweep
from analysis.records.store import Attempt, now
from experiments.config import code_version
from experiments.config.folders import Folders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun, missing
from experiments.launch.arrays import JobArray, JobShape, group_into_arrays
from experiments.launch.attempt import StartedAttempt, missing_requirements, start_attempt, worker_command
from experiments.launch.bad_nodes import LEDGER_FILE, unreliable_nodes
from experiments.launch.diagnosis import RunFailed
from experiments.launch.progress_bar import ProgressBar, RunProgress, UnfinishedRuns
from experiments.launch.status import ASK_S, SETTLE_S, StatusView, stuck_reasons
from slurm import commands, environment, jobs
from slurm.task import RunTask
from slurm.worker_process import JobSpec

LOCK_TIMEOUT_S = 300  # another process that submits a thousand runs takes some seconds
ENDED = ("failed", "stopped", "unknown")  # as nobody wants it: it is told when all others have ended
LOOK_S = 1.0  # between two looks at the records, which are files


class SlurmBackend:
    """SLURM: submits runs that are neither measured nor queued, and watches until none is under way.

    Its jobs go on without anybody who watches; the same command goes on watching them.
    """

    def __init__(
        self, planned: Sequence[PlannedRun], folders: Folders, progress: ProgressBar, name: str,
        words: Sequence[str], force: bool = False,
    ) -> None:  # fmt: skip
        self.planned, self.folders, self.progress = planned, folders, progress
        self.submission = name, words, force
        self.view, self.attempts = StatusView(folders, None), list[Attempt]()
        self.is_answered = True  # by SLURM, when it was asked last
        self.done, self.told, self.bad = set[str](), set[str](), list[Attempt]()
        self.looked = self.asked = 0.0
        self.quiet_since: float | None = None  # nothing runs or waits any more
        self.last: UnfinishedRuns | None = UnfinishedRuns([], 0)

    @contextlib.contextmanager
    def attended(self) -> Iterator[None]:
        """Submit its runs, all at once; those that failed are told when all have ended."""
        name, words, force = self.submission
        sweep = submit_missing(self.planned, self.folders, name, words, self.progress.say, force)
        if sweep is not None:
            self.progress.say(
                f"submitted as {sweep.name}; Ctrl-C leaves the jobs alone, the same command goes on watching"
            )
        self.attempts = [last for run in self.planned if (last := self.folders.store.last(run.config))]
        yield
        if self.bad:
            first = self.view.of_attempt(self.bad[0])
            others = f" ({len(self.bad) - 1} more failed: `status` lists them)" if len(self.bad) > 1 else ""
            raise RunFailed(f"{first.why}{others}", first.kind, self.bad[0])

    def look(self) -> UnfinishedRuns | None:
        """Look at the records now and then, and ask SLURM more rarely; None once nothing is under way."""
        now_s = time.monotonic()
        if now_s - self.looked > LOOK_S:
            if now_s - self.asked > ASK_S:
                self._ask()
                self.asked = time.monotonic()
            self.looked, self.last = now_s, self._under_way(now_s)
        return self.last

    def _ask(self) -> None:
        """A controller that does not answer for a while says nothing of the jobs, which go on."""
        try:
            self.view = StatusView.of(self.folders, self.attempts)
        except commands.SlurmError as error:
            answered, said = False, f"SLURM is asked again until it answers: {error}"
        else:
            answered, said = True, "SLURM answers again"
        if answered is not self.is_answered:
            self.progress.say(said)
        self.is_answered = answered

    def _under_way(self, now_s: float) -> UnfinishedRuns | None:
        states = {attempt: self.view.of_attempt(attempt) for attempt in self.attempts}
        for attempt, run in states.items():
            if run.state == "done" and attempt.run_id not in self.done:
                self.done.add(attempt.run_id)
                self.progress.report_done(attempt.run_id, run.why if run.kind == DIVERGED else "")
        for why in stuck_reasons(states.values()) - self.told:
            self.told.add(why)
            self.progress.say(f"waiting: {why}")
        running = [
            RunProgress(attempt.run_id, self.view.progress(attempt))
            for attempt, run in states.items()
            if run.state == "running"
        ]
        waiting = sum(run.state in ("queued", "requeued") for run in states.values())
        self.bad = [attempt for attempt, run in states.items() if run.state in ENDED]
        if running or waiting:
            self.quiet_since = None
            return UnfinishedRuns(running, waiting)
        self.quiet_since = self.quiet_since or now_s
        silent = any(attempt.state in ("submitted", "running") for attempt in self.bad)
        return UnfinishedRuns([], 0) if silent and now_s - self.quiet_since <= SETTLE_S else None


def submit_missing(
    planned: Sequence[PlannedRun],
    folders: Folders,
    name: str,
    words: Sequence[str],
    say: Callable[[str], None],
    force: bool = False,
) -> Path | None:
    """Queue what is neither measured nor queued; returns the sweep's folder, None where nothing was to do.

    Two that submit the same runs at once make each run once: one of them waits, and then finds them queued.

    Raises:
        ValueError: SLURM refused, or there is none. What an earlier array of the sweep queued stays queued.
    """
    conf = slurm_cluster(planned[0]).slurm_conf
    with _submission_lock(folders, say):
        environment.use_slurm_conf(conf)
        todo = select_runs_to_submit(planned, folders, say, force)
        if not todo:
            return None
        if troubles := missing_requirements(todo):
            raise ValueError("; ".join(troubles))
        found = group_into_arrays(todo, block=todo[0].config.launch.block)
        ledger = folders.scratch / LEDGER_FILE
        if bad := {node for array in found for node in unreliable_nodes(ledger, array.python)}:
            names = ", ".join(sorted(bad))
            say(f"avoiding {names}, which failed before; without {ledger} they are used again")
        code = code_version.copy_into(folders.code)
        sweep = SweepFile(_make_numbered_folder(folders.sweeps, name), words, conf)
        for number, array in enumerate(found):
            try:
                _submit_array(array, sweep, f"a{number}", folders, code, force, cache(say))
            except commands.UncertainSubmissionError:  # it may be queued
                raise
            except ValueError as error:
                if number == 0:  # nothing was queued, so there is no sweep
                    shutil.rmtree(sweep.folder)
                    raise
                raise ValueError(
                    f"{error}; of {len(found)} arrays the first {number} are queued: `cancel "
                    f"{sweep.folder.name}` ends them, the same `submit` once more queues the others"
                ) from error
        return sweep.folder


class SweepFile:
    """sweep.json, as it is written: what `status`, `cancel` and `logs` find a sweep's runs by."""

    def __init__(self, folder: Path, words: Sequence[str], conf: str | None) -> None:
        self.folder, self.arrays = folder, dict[str, dict[str, Any]]()
        self.head = {"name": folder.name, "words": [*words], "created": now(), "slurm_conf": conf}

    def note(
        self, name: str, folder: str, shape: JobShape | environment.Allocation, time_min: int | None,
        jobs: Sequence[Sequence[StartedAttempt]], ids: Sequence[str | None],
    ) -> None:  # fmt: skip
        """Note an array and the ids of its jobs, which are None as long as SLURM has given it none."""
        noted = [
            {"id": identity, "runs": [run.attempt.run_id for run in job]}
            for job, identity in zip(jobs, ids, strict=True)
        ]
        self.arrays[name] = {
            "name": name, "folder": folder, "shape": str(shape), "nodes": shape.nodes, "time_min": time_min,
            "jobs": noted,
        }  # fmt: skip
        write_json(self.folder / "sweep.json", {**self.head, "arrays": [*self.arrays.values()]})


def _submit_array(
    array: JobArray, sweep: SweepFile, part: str, folders: Folders, code: Path, force: bool,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    from slurm.submit import submit_array  # submitit comes with it

    folder, name = sweep.folder / part, f"{sweep.folder.name}-{part}"
    folder.mkdir(parents=True)
    cluster, worker = array.cluster, worker_command(array.jobs[0][0], folders, code)
    script = array.script(name, folder, folders.scratch / LEDGER_FILE, worker)
    begun, tasks = list[list[StartedAttempt]](), list[RunTask]()
    begin = partial(
        start_attempt,
        anew=force,
        exclusive=cluster.exclusive,
        sweep=sweep.folder.name,
        slurm=jobs.cluster_name(),
    )
    for index, job in enumerate(array.jobs):
        begun.append([begin(planned, folders, array=f"{name}:{index}") for planned in job])
        path = folder / f"task{index}.json"
        job_spec(begun[-1], folders, code).write(path)
        tasks.append(RunTask.of(path))
    note = partial(sweep.note, name, folder.name, array.shape, cluster.time_min, begun)
    note([None] * len(begun))
    try:
        ids, taken_by = submit_array(tasks, folder, script, say)
    except commands.UncertainSubmissionError as error:
        raise commands.UncertainSubmissionError(
            f"{error}; `status {sweep.folder.name}` tells once SLURM answers"
        ) from error
    except ValueError as error:
        for attempt in (run.attempt for job in begun for run in job):
            if attempt.saved_step():
                attempt.update(state="preempted", why=str(error))
            else:
                attempt.fail(str(error), "bad_input")
        raise
    note(ids)
    for job_runs, identity in zip(begun, ids, strict=True):
        for run in job_runs:
            # Its job may have begun already, and written to the manifest; only this file is ours.
            noted = run.attempt.job
            run.attempt.note_job(structs.replace(noted, id=identity, cluster=taken_by or noted.cluster))


def job_spec(runs: Sequence[StartedAttempt], folders: Folders, code: Path) -> JobSpec:
    """The work of one SLURM job: these runs, one after the other, all of the shape of the first.

    Args:
        code: the copy of the code to run.
    """
    first = runs[0].planned
    command, tasks = worker_command(first, folders, code), first.config.num_processes
    return JobSpec([str(run.folder) for run in runs], command, tasks, slurm_cluster(first).requeues)


def slurm_cluster(planned: PlannedRun) -> SlurmCluster:
    """The cluster that a run is for."""
    assert isinstance(planned.config.cluster, SlurmCluster), planned.config.cluster
    return planned.config.cluster


def select_runs_to_submit(
    planned: Sequence[PlannedRun],
    folders: Folders,
    say: Callable[[str], None],
    force: bool = False,
    own_job: str | None = None,
) -> list[PlannedRun]:
    """The runs without a record, or with `force` all, that no other job is making. Attempts whose job is gone
    and left no note are closed here, so that they can go on or begin anew; those of which SLURM knows nothing
    are only made with `force`.

    Args:
        own_job: this very job, where it may have been requeued.
    """
    newest = [last for run in planned if (last := folders.store.last(run.config))]
    others = [last for last in newest if own_job is None or last.job.id != own_job]
    view = StatusView.settled(folders, others, say)  # after that, what has ended is known as such
    wanted = planned if force else missing(planned, folders, say)
    under_way, unknown = set[str](), dict[str, str]()
    for last in others:
        if last.state in ("submitted", "running", "preempted"):
            status = view.of_attempt(last)
            if status.under_way or last.writer():
                under_way.add(last.run_id)
            elif status.state == "unknown":
                unknown[last.run_id] = status.why
            elif last.state != "preempted":
                last.fail(status.why, status.kind)
    by_id = {run_id(run.config): run for run in wanted}
    if taken := under_way & by_id.keys():
        say(f"{len(taken)} of these runs are queued or running already; `status` shows them")
    if not force and (left := [name for name in by_id if name in unknown]):
        say(f"{len(left)} of these runs are left alone: {left[0]} is unknown: {unknown[left[0]]}")
        under_way |= {*left}
    return [run for name, run in by_id.items() if name not in under_way]


def _make_numbered_folder(root: Path, name: str) -> Path:
    """<name>-001, -002, ...; two processes never get the same one."""
    root.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(len(list(root.glob(f"{name}-*"))) + 1):
        with contextlib.suppress(FileExistsError):
            (folder := root / f"{name}-{number:03d}").mkdir()
            break
    return folder


@contextlib.contextmanager
def _submission_lock(folders: Folders, say: Callable[[str], None]) -> Iterator[None]:
    """While nobody else submits."""
    lock = locks.Lock(folders.scratch / "submit.lock")
    if not lock.acquire(LOCK_TIMEOUT_S, say):
        who = locks.holder(lock.path) or "another process"
        raise ValueError(f"{who} has been submitting for {LOCK_TIMEOUT_S} s: wait for its end, or end it")
    try:
        if lock.of_this_machine:
            say(
                f"files in {folders.results} can't be locked: submit from one machine at a time, or set "
                f"SPARSIFY_RESULTS to {locks.ELSEWHERE}"
            )
        yield
    finally:
        lock.release()


def read_sweeps(folders: Folders, say: Callable[[str], None]) -> list[Sweep]:
    """All sweeps that were submitted, the oldest first; says which are left out."""
    found = list[Sweep]()
    for path in sorted(folders.sweeps.glob("*/sweep.json")):
        try:
            found += filter(None, [read_as(path, Sweep)])
        except Damaged as damage:
            say(f"left out {path.parent.name}: {damage.brief}")
    return sorted(found, key=lambda sweep: sweep.created)
