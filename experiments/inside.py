"""Inside an allocation that somebody made with sbatch or salloc: all runs one after the other, on its nodes.

The door for people who do not want submitit: `sbatch slurm/sweep.sbatch WORD ...`. The job is what block mode
submits, with the same tasks, records and requeueing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

from analysis.records import now, read_json, write_json
from experiments import job, snapshot, standing
from experiments.orders import Planned, attempt_for, task_of, write_orders
from experiments.planning import Folders, provide
from experiments.submission import in_random_order
from experiments.sweep import name_and_configs
from slurm import environment, queue


def sweep(words: Sequence[str], say: Callable[[str], None]) -> int:
    """Carry out the grid's missing runs here; returns the exit code of the job.

    Raises:
        ValueError: this is no allocation, or not one for these runs.
    """
    here = environment.allocation()
    if here is None:
        raise ValueError(
            "sweep works inside an allocation: `sbatch slurm/sweep.sbatch WORD ...`; elsewhere use `submit`"
        )
    identity, folders = environment.job_id(), Folders()
    planned = in_random_order(provide(name_and_configs(_fitted(words, here))[1], say))
    for one in planned:
        if one.config["cluster"]["where"] != "slurm":
            raise ValueError(f"cluster={one.config['cluster']['name']} is no SLURM cluster, but this is one")
        if one.tasks != here.tasks:
            raise ValueError(
                f"workers={one.tasks} were asked for, but this allocation has {here.tasks} tasks; ask sbatch "
                f"for --ntasks={one.tasks}, or leave out workers="
            )
    todo = _missing(planned, folders, identity)
    say(
        f"{len(planned)} runs, {len(todo)} to make on {here.nodes} nodes x {here.tasks // here.nodes} workers"
    )
    if not todo:
        return 0
    folder = folders.sweeps / f"sbatch-{identity}"
    folder.mkdir(parents=True, exist_ok=True)
    code = snapshot.take(folders.code)
    attempts = [attempt_for(one.config, folders.store) for one in todo]
    for attempt in attempts:
        attempt.note_job(identity)
        attempt.update(state="submitted", sweep=folder.name, array=None, why=None, failure=None)
    entries = [
        write_orders(one, attempt, folders.launch(attempt), same_host=False)
        for one, attempt in zip(todo, attempts, strict=True)
    ]
    spec = folder / "task0.json"
    task_of(spec, entries, todo[0], folders.store, code, same_host=False)
    record = {
        "name": folder.name, "words": [*words], "created": now(), "slurm_conf": None,
        "arrays": [{
            "name": folder.name, "folder": "", "shape": str(here), "nodes": here.nodes, "time_min": None,
            "jobs": [{"id": identity, "runs": [attempt.run_id for attempt in attempts]}],
        }],
    }  # fmt: skip
    write_json(folder / "sweep.json", record)
    content = read_json(spec)
    assert content is not None, spec
    if job.begin(content) == job.LEAVE:
        return 0
    srun = ["srun", "--unbuffered", f"--ntasks={here.tasks}", f"--cpus-per-task={here.cpus_per_task}"]
    with environment.as_submitit():
        subprocess.run([*srun, sys.executable, "-u", "-m", "slurm.task", str(spec)], cwd=code, check=False)
    return job.end(content)


def _fitted(words: Sequence[str], here: environment.Allocation) -> list[str]:
    """The words, with what the allocation decides where they say nothing of it."""
    given = {word.partition("=")[0] for word in words}
    decided = {
        "cluster": "generic_slurm",
        "workers": str(here.tasks),
        "cluster.workers_per_node": str(here.tasks // here.nodes),
        "cluster.cpus_per_worker": str(here.cpus_per_task),
    }
    return [*words, *(f"{key}={value}" for key, value in decided.items() if key not in given)]


def _missing(planned: Sequence[Planned], folders: Folders, identity: str) -> list[Planned]:
    """Those without a record that no other job is at. This very job may have been requeued."""
    view, todo = standing.View.of(folders, queue.queue()), []
    for one in planned:
        last = folders.store.last(one.config)
        taken = last is not None and last.job != identity and view.of_attempt(last).under_way
        if not taken and folders.store.valid(one.config) is None:
            todo.append(one)
    return todo
