"""Planned runs -> arrays of SLURM jobs. Returns at once; what was submitted stands in a file.

results/sweeps/<name>/sweep.json     the arrays, their jobs' ids, and the runs of each job
                      a<n>/          of one array: its specs, submitit's files, the jobs' logs
"""

from __future__ import annotations

import json
import random
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from analysis.records import Attempt, now, read_json, run_id, write_json
from experiments import snapshot, standing
from experiments.diagnosis import CANCEL
from experiments.job import unreliable
from experiments.orders import Planned, attempt_for, task_of, write_orders
from experiments.planning import Folders
from slurm import cluster as clusters
from slurm import environment, queue
from slurm.cluster import Shape

LOCK_TIMEOUT_S = 300  # another process that submits a thousand runs takes some seconds


@dataclass(frozen=True)
class Array:
    """Jobs of one shape; each carries out one run, or in block mode all of them."""

    shape: Shape
    jobs: list[list[Planned]]

    @property
    def cluster(self) -> dict[str, Any]:
        return dict(self.jobs[0][0].config["cluster"])

    @property
    def python(self) -> str:
        return self.cluster["python"] or sys.executable

    @property
    def node_hours(self) -> float:
        """At most: what the jobs take if each needs its whole time limit."""
        return self.shape.nodes * len(self.jobs) * self.cluster["time_min"] / 60

    def options(self, name: str, folder: Path, cwd: Path, exclude: Sequence[str] = ()) -> dict[str, Any]:
        """What sbatch is told; see `clusters.parameters`."""
        # Of an array each job has its own number, of a single job there is none.
        spec = f"{shlex.quote(str(folder))}/task${{SLURM_ARRAY_TASK_ID:-0}}.json"
        call = f"{shlex.quote(self.python)} -u -m experiments.job"
        options = clusters.parameters(
            self.cluster, self.shape, name, cwd, after=f"{call} end {spec}", exclude=exclude
        )
        options["setup"] = [*(options["setup"] or []), f"{call} begin {spec} || exit"]
        return options


def arrays(planned: Sequence[Planned], block: bool) -> list[Array]:
    """Grouped by what they ask SLURM for: all tasks of an array get the same. No array exceeds the cluster's
    limit."""
    groups: dict[str, list[Planned]] = {}
    for one in planned:
        config = one.config
        clusters.check(config["cluster"])
        asks = {name: config[name] for name in ("cluster", "container", "workers", "threads", "device")}
        groups.setdefault(json.dumps(asks, sort_keys=True), []).append(one)
    found = []
    for group in groups.values():
        config = group[0].config
        shape = clusters.shape(
            config["cluster"], config["workers"], config["threads"], config["device"] == "cuda"
        )
        jobs = [in_random_order(group)] if block else [[one] for one in group]
        limit = config["cluster"]["max_array"]
        found += [Array(shape, jobs[start : start + limit]) for start in range(0, len(jobs), limit)]
    return found


def in_random_order(planned: Sequence[Planned]) -> list[Planned]:
    """For one allocation: repetition by repetition, the methods of each in an order of its own.

    Within a repetition runs compare on the same nodes at about the same time; a drift falls on each method
    alike in the mean. The order follows from the runs, so that planning it again gives the same.
    """
    by_seed: dict[int, list[Planned]] = {}
    for one in sorted(planned, key=lambda one: run_id(one.config)):
        by_seed.setdefault(one.config["seed"], []).append(one)
    chance = random.Random("".join(sorted(run_id(one.config) for one in planned)))
    ordered = []
    for _, group in sorted(by_seed.items()):
        chance.shuffle(group)
        ordered += group
    return ordered


def sbatch_texts(found: Sequence[Array], folders: Folders, name: str) -> list[str]:
    """What `submit` would hand to sbatch, to read or to submit by hand after `submit` has prepared it."""
    from slurm.submit import sbatch_text

    texts = []
    for number, array in enumerate(found):
        folder = folders.sweeps / name / f"a{number}"
        options = array.options(f"{name}-a{number}", folder, folders.code / snapshot.digest())
        texts.append(sbatch_text(folder, options, array.python, len(array.jobs)))
    return texts


def submit(
    planned: Sequence[Planned],
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
        code = snapshot.take(folders.code)
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
        started = [(one, attempt_for(one.config, folders.store, force)) for one in job]
        entries = [write_orders(one, attempt, _folder(folders, attempt), False) for one, attempt in started]
        tasks.append(task_of(folder / f"task{index}.json", entries, job[0], folders.store, code, False))
        attempts.append([attempt for _, attempt in started])
        for one, attempt in started:
            attempt.note_job(None)  # that of an earlier submission
            alone = one.is_timing and bool(array.cluster["exclusive"])
            attempt.update(
                state="submitted", sweep=sweep.name, array=f"{name}:{index}", alone=alone,
                why=None, failure=None,
            )  # fmt: skip
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
    for job, identity in zip(entry["jobs"], ids, strict=True):
        job["id"] = identity
    write_json(sweep / "sweep.json", record)
    for job, identity in zip(attempts, ids, strict=True):
        for attempt in job:
            # Its job may have begun already, and written to the manifest; only this field is ours.
            attempt.note_job(identity)


def _folder(folders: Folders, attempt: Attempt) -> Path:
    folder = folders.launch(attempt)
    (folder / CANCEL).unlink(missing_ok=True)
    return folder


def _not_under_way(
    planned: Sequence[Planned], folders: Folders, say: Callable[[str], None], force: bool
) -> list[Planned]:
    """Those that need a job. What ended without a word is closed here, so that it can go on or begin anew."""
    view = standing.View.of(folders, queue.queue())
    todo, under_way = [], 0
    for one in {run_id(one.config): one for one in planned}.values():
        last = folders.store.last(one.config)
        if not force and folders.store.valid(one.config):
            continue
        if last is not None and last.state in ("submitted", "running", "preempted"):
            now_is = view.of_attempt(last)
            if now_is.under_way:
                under_way += 1
                continue
            if last.state != "preempted":
                last.fail(now_is.why, now_is.kind)
        todo.append(one)
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


def _alone(folders: Folders) -> FileLock:
    folders.scratch.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folders.scratch / "submit.lock", timeout=LOCK_TIMEOUT_S)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"another process has been submitting for {LOCK_TIMEOUT_S} s; if there is none, remove "
            f"{lock.lock_file}"
        ) from error
    return lock


def sweeps(folders: Folders) -> list[dict[str, Any]]:
    """All sweeps that were submitted, the oldest first."""
    found = [read_json(path) for path in sorted(folders.sweeps.glob("*/sweep.json"))]
    return sorted((sweep for sweep in found if sweep), key=lambda sweep: str(sweep["created"]))
