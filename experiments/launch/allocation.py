"""Runs in an allocation that somebody made with sbatch or salloc: one after the other, on its nodes.

This is the way for people who do not want submitit: `sbatch slurm/sweep.sbatch WORD ...`. The job is what
block mode submits, with the same tasks, records and requeueing.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from functools import partial

from experiments.config import code_version, compose, grid
from experiments.config.folders import ResultFolders
from experiments.config.grid import expand_grid
from experiments.config.machines import SlurmCluster
from experiments.config.plan import plan_distinct_runs_and_ensure_data
from experiments.figures.runs import attach_claim_rules, requested_runs
from experiments.launch import job_hooks
from experiments.launch.arrays import shuffle_runs_within_repetitions
from experiments.launch.attempt import prepare_attempt
from experiments.launch.submission import SweepFile, job_spec, select_runs_and_close_dead_attempts
from slurm import commands, environment


def run_in_allocation(
    words: Sequence[str], say: Callable[[str], None], *, include_additional: bool = False
) -> int:
    """Carry out the grid's missing runs in this job, and return its exit code.

    Args:
        include_additional: make also the runs that make figures firmer.

    Raises:
        ValueError: this is no allocation, or not one for these runs.
    """
    allocation = environment.current_allocation()
    if allocation is None:
        raise ValueError(
            "sweep works inside an allocation: `sbatch slurm/sweep.sbatch WORD ...`; elsewhere use "
            "`submit`, and on this machine `run`"
        )
    num_slots = environment.count_task_slots()
    if num_slots not in (None, allocation.tasks):
        raise ValueError(
            f"the job has places for {num_slots} tasks on {allocation.nodes} nodes, by --ntasks-per-node and "
            f"its like, but --ntasks={allocation.tasks}, which the script asks for where you do not: give "
            f"sbatch --ntasks={num_slots} too"
        )
    if allocation.tasks < allocation.nodes:
        raise ValueError(
            f"the job has {allocation.tasks} tasks on {allocation.nodes} nodes, and each task is a worker: "
            f"some nodes would have none; give sbatch --ntasks={allocation.nodes} or more, or "
            f"--nodes={allocation.tasks}"
        )
    all_words = _add_allocation_words(words, allocation)
    _check_clusters(all_words)
    job = environment.current_job_id_or_empty()
    folders = ResultFolders()
    configs = requested_runs(all_words, include_additional=include_additional).configs
    planned = shuffle_runs_within_repetitions(
        attach_claim_rules(plan_distinct_runs_and_ensure_data(configs, say), all_words)
    )
    grid.add_runs_to_sweep(folders, grid.split_sweep_name(words)[0], configs, say)
    for workers in {run.config.num_processes for run in planned} - {allocation.tasks}:
        raise ValueError(
            f"workers={workers} were asked for, but this allocation has {allocation.tasks} tasks; ask "
            f"sbatch for --ntasks={workers}, or leave out workers="
        )
    selected = select_runs_and_close_dead_attempts(planned, folders, say, ignored_job=job)
    say(
        f"{len(planned)} runs, {len(selected)} to make on {allocation.nodes} nodes x "
        f"{allocation.tasks // allocation.nodes} workers"
    )
    if not selected:
        return 0
    folder = folders.sweeps / f"sbatch-{job}"
    folder.mkdir(parents=True, exist_ok=True)
    code = code_version.ensure_code_copy(folders.code)
    start = partial(
        prepare_attempt,
        folders=folders,
        job=job,
        sweep=folder.name,
        cluster=environment.current_cluster_name(),
        alone_on_machines=commands.has_exclusive_nodes(job),
    )
    started = [start(run) for run in selected]
    spec = job_spec(started, folders, code)
    path = folder / "task0.json"
    spec.write(path)
    SweepFile(folder, words, None).write_array(folder.name, "", allocation, None, [started], [job])
    if not job_hooks.prepare_job_or_requeue(spec):
        return 0
    command = [
        "srun",
        "--unbuffered",
        "--export=ALL,PYTHONDONTWRITEBYTECODE=1",  # as code_version.WITHOUT_BYTECODE
        f"--ntasks={allocation.tasks}",
        f"--cpus-per-task={allocation.cpus_per_task}",
        *spec.command.srun_pyxis_options(),
        *(spec.command.task_python, "-u", "-m", "slurm.task", str(path)),
    ]
    variables, drop_notes = environment.variables_without_container_options()
    if drop_notes:
        say(f"exported, and set aside: {'; '.join(drop_notes)}")
    subprocess.run(command, cwd=code, env=variables, check=False)
    return 0 if job_hooks.finish_job_or_requeue(spec) else 1


def _check_clusters(words: Sequence[str]) -> None:
    """Refuse clusters that are none of SLURM's: they have no fields for what an allocation decides."""
    for point in expand_grid([word for word in words if word.startswith("cluster=")]):
        cluster = compose.resolve(point).cluster
        if not isinstance(cluster, SlurmCluster):
            raise ValueError(f"cluster={cluster.name} is no SLURM cluster, but this is one")


def _add_allocation_words(words: Sequence[str], allocation: environment.Allocation) -> list[str]:
    """Return the words, and those that follow from the allocation where they say nothing of it."""
    keys = {word.partition("=")[0] for word in words}
    if "cluster.more_sbatch" in keys:
        raise ValueError(
            "options behind -- are for sbatch, which has made this job already; give them before the name of "
            "the script, as in `sbatch --account=mine slurm/sweep.sbatch WORD ...`"
        )
    value_by_key = {
        "cluster": "generic_slurm",
        "workers": str(allocation.tasks),
        "cluster.workers_per_node": str(allocation.tasks // allocation.nodes),
        "cluster.cpus_per_worker": str(allocation.cpus_per_task),
    }
    return [*words, *(f"{key}={value}" for key, value in value_by_key.items() if key not in keys)]
