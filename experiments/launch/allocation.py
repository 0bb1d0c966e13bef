"""Inside an allocation that somebody made with sbatch or salloc: all runs one after the other, on its nodes.

The door for people who do not want submitit: `sbatch slurm/sweep.sbatch WORD ...`. The job is what block mode
submits, with the same tasks, records and requeueing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

from analysis.files import read_json, write_json
from analysis.records import now, run_id
from experiments.config import compose, sweeps
from experiments.config.folders import Folders
from experiments.config.grid import expand, name_and_configs
from experiments.config.measured import missing
from experiments.config.plan import PlannedRun, plan_runs
from experiments.launch import code_copy, job_hooks
from experiments.launch.arrays import in_random_order, slurm_task
from experiments.launch.attempt import begin_attempt
from experiments.launch.status import StatusView
from slurm import environment, queue


def run_in_allocation(words: Sequence[str], say: Callable[[str], None], more: bool = False) -> int:
    """Carry out the grid's missing runs here; returns the exit code of the job.

    Args:
        more: of figures, also the runs that make them firmer.

    Raises:
        ValueError: this is no allocation, or not one for these runs.
    """
    here = environment.allocation()
    if here is None:
        raise ValueError(
            "sweep works inside an allocation: `sbatch slurm/sweep.sbatch WORD ...`; elsewhere use `submit`"
        )
    _check_cluster(words)
    job, folders = environment.job_id(), Folders()
    configs = name_and_configs(_fitted(words, here), more)[1]
    planned = in_random_order(plan_runs(configs, say))
    sweeps.note(folders, sweeps.named(words)[0], configs)
    for run in planned:
        _check(run, here)
    todo = _missing(planned, folders, job, say)
    say(
        f"{len(planned)} runs, {len(todo)} to make on {here.nodes} nodes x {here.tasks // here.nodes} workers"
    )
    if not todo:
        return 0
    folder = folders.sweeps / f"sbatch-{job}"
    folder.mkdir(parents=True, exist_ok=True)
    code, exclusive = code_copy.take(folders.code), queue.has_nodes_alone(job)
    begun = [
        begin_attempt(run, folders, starts=True, exclusive=exclusive, job=job, sweep=folder.name)
        for run in todo
    ]
    spec = folder / "task0.json"
    slurm_task(spec, [run.entry for run in begun], todo[0], folders, code)
    record = {
        "name": folder.name, "words": [*words], "created": now(), "slurm_conf": None,
        "arrays": [{
            "name": folder.name, "folder": "", "shape": str(here), "nodes": here.nodes, "time_min": None,
            "jobs": [{"id": job, "runs": [run.attempt.run_id for run in begun]}],
        }],
    }  # fmt: skip
    write_json(folder / "sweep.json", record)
    content = read_json(spec)
    assert content is not None, spec
    if job_hooks.begin(content) == job_hooks.LEAVE:
        return 0
    srun = ["srun", "--unbuffered", f"--ntasks={here.tasks}", f"--cpus-per-task={here.cpus_per_task}"]
    with environment.as_submitit():
        subprocess.run([*srun, sys.executable, "-u", "-m", "slurm.task", str(spec)], cwd=code, check=False)
    return job_hooks.end(content)


def _check_cluster(words: Sequence[str]) -> None:
    """Refuse clusters that are none of SLURM's: they have no fields for what an allocation decides."""
    for point in expand([word for word in words if word.startswith("cluster=")]):
        cluster = compose.resolve(point)["cluster"]
        if cluster["where"] != "slurm":
            raise ValueError(f"cluster={cluster['name']} is no SLURM cluster, but this is one")


def _check(run: PlannedRun, here: environment.Allocation) -> None:
    """Refuse a run that this allocation is not for."""
    if run.num_processes != here.tasks:
        raise ValueError(
            f"workers={run.num_processes} were asked for, but this allocation has {here.tasks} tasks; ask "
            f"sbatch for --ntasks={run.num_processes}, or leave out workers="
        )


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


def _missing(
    planned: Sequence[PlannedRun], folders: Folders, job: str, say: Callable[[str], None]
) -> list[PlannedRun]:
    """Those without a record that no other job is making. This very job may have been requeued."""
    todo = missing(planned, folders, say)
    newest = {run_id(run.config): folders.store.last(run.config) for run in todo}
    others = [last for last in newest.values() if last is not None and last.job != job]
    view = StatusView.settled(folders, others, say)
    taken = {last.run_id for last in others if view.of_attempt(last).under_way}
    return [run for run in todo if run_id(run.config) not in taken]
