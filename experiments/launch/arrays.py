"""Planned runs -> arrays of SLURM jobs. Returns at once; what was submitted stands in a file.

results/sweeps/<name>/sweep.json     the arrays, their jobs' ids, and the runs of each job
                      a<n>/          of one array: its specs, submitit's files, the jobs' logs
"""

from __future__ import annotations

import contextlib
import json
import random
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from analysis.files import Damaged, read_as, write_json
from analysis.records import now, run_id
from analysis.schemas import Sweep
from experiments.config import code_version
from experiments.config.folders import Folders
from experiments.config.measured import missing
from experiments.config.plan import PlannedRun
from experiments.launch import code_copy, status
from experiments.launch.attempt import begin_attempt, worker_command
from experiments.launch.bad_nodes import unreliable
from slurm import cluster as clusters
from slurm import environment
from slurm.cluster import Shape

if TYPE_CHECKING:
    from slurm.task import RunTask

LOCK_TIMEOUT_S = 300  # another process that submits a thousand runs takes some seconds


@dataclass(frozen=True)
class Array:
    """Jobs of one shape; each carries out one run, or in block mode all of them."""

    shape: Shape
    jobs: list[list[PlannedRun]]

    @property
    def cluster(self) -> dict[str, Any]:
        return dict(self.jobs[0][0].config["cluster"])

    @property
    def python(self) -> str:
        return self.cluster["python"] or sys.executable

    @property
    def node_hours(self) -> float:
        """At most: what the jobs take if each needs its whole time limit."""
        return float(self.shape.nodes * len(self.jobs) * self.cluster["time_min"] / 60)

    def options(self, name: str, folder: Path, cwd: Path, exclude: Sequence[str] = ()) -> dict[str, Any]:
        """What sbatch is told; see `clusters.parameters`."""
        # Of an array each job has its own number, of a single job there is none.
        spec = f"{shlex.quote(str(folder))}/task${{SLURM_ARRAY_TASK_ID:-0}}.json"
        call = f"{shlex.quote(self.python)} -u -m experiments.launch.job_hooks"
        options = clusters.parameters(
            self.cluster, self.shape, name, cwd, after=f"{call} end {spec}", exclude=exclude
        )
        options["setup"] = [*(options["setup"] or []), f"{call} begin {spec} || exit"]
        return options


def arrays(planned: Sequence[PlannedRun], block: bool) -> list[Array]:
    """Grouped by what they ask SLURM for: all tasks of an array get the same. No array exceeds the cluster's
    limit."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in planned:
        config = run.config
        clusters.check(config["cluster"])
        asks = {name: config[name] for name in ("cluster", "container", "workers", "threads", "device")}
        groups.setdefault(json.dumps(asks, sort_keys=True), []).append(run)
    found = []
    for group in groups.values():
        config = group[0].config
        shape = clusters.shape(
            config["cluster"], config["workers"], config["threads"], config["device"] == "cuda"
        )
        jobs = [in_random_order(group)] if block else [[run] for run in group]
        limit = config["cluster"]["max_array"]
        found += [Array(shape, jobs[start : start + limit]) for start in range(0, len(jobs), limit)]
    return found


def in_random_order(planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The order for one allocation: repetition by repetition, the methods of each in a random order.

    Within a repetition runs compare on the same nodes at about the same time; a drift falls on each method
    alike in the mean. The order follows from the runs, so that planning it again gives the same.
    """
    by_seed: dict[int, list[PlannedRun]] = {}
    for run in sorted(planned, key=lambda run: run_id(run.config)):
        by_seed.setdefault(run.config["seed"], []).append(run)
    chance = random.Random("".join(sorted(run_id(run.config) for run in planned)))
    ordered = []
    for _, group in sorted(by_seed.items()):
        chance.shuffle(group)
        ordered += group
    return ordered


def sbatch_texts(found: Sequence[Array], folders: Folders, name: str) -> list[str]:
    """What `submit` would hand to sbatch, and below it what each task starts as a worker."""
    from slurm.submit import sbatch_text

    texts, code = [], folders.code / code_version.digest()
    for number, array in enumerate(found):
        folder = folders.sweeps / name / f"a{number}"
        options = array.options(f"{name}-a{number}", folder, code)
        worker = worker_command(array.jobs[0][0], folders, code).text()
        text = sbatch_text(folder, options, array.python, len(array.jobs))
        texts.append(f"{text}\n\n# Each task of srun starts a worker:\n# {worker}\n")
    return texts


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
    with _alone(folders):
        environment.use_slurm(planned[0].config["cluster"]["slurm_conf"])
        todo = _not_under_way(planned, folders, say, force)
        if not todo:
            return None
        found = arrays(todo, block=todo[0].config["launch"]["block"])
        code = code_copy.take(folders.code)
        sweep = _new_folder(folders.sweeps, name)
        record: dict[str, Any] = {
            "name": sweep.name, "words": [*words], "created": now(), "arrays": [],
            "slurm_conf": planned[0].config["cluster"]["slurm_conf"],
        }  # fmt: skip
        for number, array in enumerate(found):
            try:
                _submit_array(array, sweep, number, record, folders, code, force)
            except ValueError:
                if number == 0:  # nothing was queued, so there is no sweep
                    shutil.rmtree(sweep)
                raise
        return sweep


def _submit_array(
    array: Array, sweep: Path, number: int, record: dict[str, Any], folders: Folders, code: Path, force: bool
) -> None:
    from slurm.submit import submit_array

    folder = sweep / f"a{number}"
    folder.mkdir(parents=True)
    name = f"{sweep.name}-a{number}"
    options = array.options(name, folder, code, unreliable(folders.scratch / "node-failures.jsonl"))
    attempts, tasks = [], []
    for index, job in enumerate(array.jobs):
        begun = [
            begin_attempt(
                planned, folders, anew=force, starts=True, exclusive=bool(array.cluster["exclusive"]),
                sweep=sweep.name, array=f"{name}:{index}",
            )
            for planned in job
        ]  # fmt: skip
        entries = [run.entry for run in begun]
        tasks.append(slurm_task(folder / f"task{index}.json", entries, job[0], folders, code))
        attempts.append([run.attempt for run in begun])
    entry: dict[str, Any] = {
        "name": name, "folder": folder.name, "shape": str(array.shape), "nodes": array.shape.nodes,
        "time_min": array.cluster["time_min"],
        "jobs": [{"id": None, "runs": [attempt.run_id for attempt in job]} for job in attempts],
    }  # fmt: skip
    record["arrays"].append(entry)
    write_json(sweep / "sweep.json", record)
    try:
        ids = submit_array(tasks, folder, options, array.python, array.cluster["slurm_conf"])
    except ValueError as error:
        for attempt in (attempt for job in attempts for attempt in job):
            if attempt.has_checkpoint():
                attempt.update(state="preempted", why=str(error))
            else:
                attempt.fail(str(error), "bad_input")
        raise
    for noted, identity in zip(entry["jobs"], ids, strict=True):
        noted["id"] = identity
    write_json(sweep / "sweep.json", record)
    for of_job, identity in zip(attempts, ids, strict=True):
        for attempt in of_job:
            # Its job may have begun already, and written to the manifest; only this file is ours.
            attempt.note_job(identity)


def slurm_task(
    spec: Path, runs: Sequence[Mapping[str, str]], planned: PlannedRun, folders: Folders, code: Path
) -> RunTask:
    """What one SLURM job does: these runs, one after the other, all of the shape of `planned`.

    Args:
        spec: the file to describe it in.
        runs: `Begun.entry` of each.
        code: the copy of the code to run.
    """
    from slurm.task import write_spec  # submitit comes with it, which redrawing figures must not need

    requeues = planned.config["cluster"].get("requeues", 0)
    command = worker_command(planned, folders, code)
    return write_spec(spec, runs, command, tasks=planned.num_processes, requeues=requeues)


def _not_under_way(
    planned: Sequence[PlannedRun], folders: Folders, say: Callable[[str], None], force: bool
) -> list[PlannedRun]:
    """The runs that need a job. Attempts whose job is gone and left no note are closed here, so that they can
    go on or begin anew.
    """
    newest = [last for run in planned if (last := folders.store.last(run.config)) is not None]
    view = status.StatusView.settled(folders, newest, say)
    todo, under_way = [], 0
    wanted = planned if force else missing(planned, folders, say)
    for run in {run_id(run.config): run for run in wanted}.values():
        last = folders.store.last(run.config)
        if last is not None and last.state in ("submitted", "running", "preempted"):
            now_is = view.of_attempt(last)
            if now_is.under_way or last.writer():
                under_way += 1
                continue
            if last.state != "preempted":
                last.fail(now_is.why, now_is.kind)
        todo.append(run)
    if under_way:
        say(f"{under_way} of these runs are queued or running already; `status` shows them")
    return todo


def _new_folder(root: Path, name: str) -> Path:
    """<name>-001, -002, ...; two processes never get the same one."""
    root.mkdir(parents=True, exist_ok=True)
    number = len(list(root.glob(f"{name}-*")))
    while True:
        number += 1
        try:
            (folder := root / f"{name}-{number:03d}").mkdir()
            return folder
        except FileExistsError:
            continue


@contextlib.contextmanager
def _alone(folders: Folders) -> Iterator[None]:
    """While nobody else submits."""
    folders.scratch.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folders.scratch / "submit.lock", timeout=LOCK_TIMEOUT_S)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"another process has been submitting for {LOCK_TIMEOUT_S} s; if there is none, remove "
            f"{lock.lock_file}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def sweeps(folders: Folders, say: Callable[[str], None]) -> list[Sweep]:
    """All sweeps that were submitted, the oldest first; says which are left out."""
    found = list[Sweep]()
    for path in sorted(folders.sweeps.glob("*/sweep.json")):
        try:
            found += filter(None, [read_as(path, Sweep)])
        except Damaged as damage:
            say(f"left out {path.parent.name}: {damage.brief}")
    return sorted(found, key=lambda sweep: sweep.created)
