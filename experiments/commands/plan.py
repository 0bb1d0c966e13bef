from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from analysis.pictures.numbers import format_count, format_number
from analysis.records.configs import run_id
from experiments.commands._arguments import ItemsAndSettings
from experiments.commands._messages import say
from experiments.commands._named_runs import check_runs_are_for_slurm
from experiments.commands._run_table import load_all_runs
from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun, find_unmeasured_runs, plan_distinct_runs_and_ensure_data
from experiments.figures.runs import requested_runs
from experiments.launch.arrays import JobArray, group_into_arrays, sbatch_script_previews
from experiments.launch.attempt import describe_missing_requirements
from experiments.launch.local import count_usable_cores
from experiments.launch.progress_bar import label_by_run_id
from experiments.launch.submission import describe_missing_slurm
from experiments.prediction.run_durations import (
    LIKE_THESE,
    ClusterCostModel,
    DurationModel,
    Machine,
    describe_basis,
    format_node_hours,
)
from experiments.worker.cores import cpu_model

GROUP = "cluster"
MAX_LISTED = 30  # jobs that are described one by one


def plan(words: ItemsAndSettings, *, sbatch: bool = False, all: bool = False) -> int:
    """Show the arrays and node-hours that runs take on a SLURM cluster, or the minutes on this machine.

    Nothing is submitted, and nothing runs.

    Args:
        words: figures, with settings for their runs; or the settings of one run, or of a grid
            (method=topk,dgc seed=0,1,2).
        sbatch: show the scripts for sbatch.
        all: count also the runs that make a figure firmer, mostly with more seeds.
    """
    name, configs = requested_runs(words, include_additional=all)
    try:
        planned = plan_distinct_runs_and_ensure_data(configs, say)
    except ValueError as error:
        say(f"before `submit`: {error}")
        planned = [PlannedRun(config, None) for config in configs]
    folders = ResultFolders()
    on_slurm = [run for run in planned if isinstance(run.config.cluster, SlurmCluster)]
    here = [run for run in planned if not isinstance(run.config.cluster, SlurmCluster)]
    if sbatch:
        check_runs_are_for_slurm(on_slurm)
        arrays = group_into_arrays(on_slurm, one_job_per_group=on_slurm[0].config.launch.block)
        print("\n".join(sbatch_script_previews(arrays, folders, f"{name}-001")))
        return 0
    if here or not on_slurm:
        _print_runs_here(name, here, folders)
    if here and on_slurm:
        for sentence in describe_missing_slurm(on_slurm):
            say(f"before `reproduce`: {sentence}")
    if on_slurm:
        _print_runs_on_slurm(name, on_slurm, folders, "reproduce" if here else "submit")
    if here and on_slurm:
        print("`reproduce` with the same words makes them, one after the other")
    elif here or not on_slurm:
        print("`run` or `reproduce` with the same words makes them")
    else:
        print("`--sbatch` shows what sbatch is given; `submit` with the same words submits")
    return 0


def _print_runs_here(name: str, planned: Sequence[PlannedRun], folders: ResultFolders) -> None:
    todo = find_unmeasured_runs(planned, folders, say)
    print(f"{name} on this machine: {len(planned)} runs, {len(todo)} not measured yet")
    for line in _describe_expected_time(todo, folders) if todo else ():
        print(f"    {line}")


def _print_runs_on_slurm(
    name: str, planned: Sequence[PlannedRun], folders: ResultFolders, next_command: str
) -> None:
    for requirement in describe_missing_requirements(planned):
        say(f"before `{next_command}`: {requirement}")
    todo = find_unmeasured_runs(planned, folders, say)
    print(f"{name} on {planned[0].config.cluster.name}: {len(planned)} runs, {len(todo)} not measured yet")
    labels = label_by_run_id(todo)
    model = ClusterCostModel(load_all_runs(folders)) if todo else None
    arrays = group_into_arrays(todo, one_job_per_group=planned[0].config.launch.block)
    for number, array in enumerate(arrays):
        _print_array(number, array, labels)
        if model is not None:
            print(f"    {model.describe_expected_node_hours(array)}")
            memory = model.describe_expected_memory(array)
            if memory:
                print(f"    memory: {memory}, as the largest like these had")


def _describe_expected_time(todo: Sequence[PlannedRun], folders: ResultFolders) -> Iterator[str]:
    """Yield lines on the expected duration and memory of runs of this machine, and their basis."""
    model = DurationModel(load_all_runs(folders), Machine(cpu_model(), count_usable_cores()))
    estimates = [(run, model.estimate(run.config)) for run in todo]
    estimated_runs = [(run, estimate) for run, estimate in estimates if estimate]
    if estimated_runs:
        expected_s = 0.0
        # A timed run takes all of the machine, another the cores that it needs.
        for run, estimate in estimated_runs:
            share = 1.0 if run.is_timing else min(1.0, run.num_cores / count_usable_cores())
            expected_s += share * estimate.seconds
        minutes = f"{format_number(expected_s / 60, 2)} min"
        if len(estimated_runs) < len(todo):
            minutes = f"at least {minutes}, for {len(estimated_runs)} of {format_count(len(todo), 'runs')}"
        yield f"expected: {minutes}, while nothing else computes here"
        yield f"by the durations of {describe_basis([estimate for _, estimate in estimated_runs])}"
        largest_gib = max(model.max_memory_gib_or_zero(run.config) for run in todo)
        if largest_gib:
            yield f"memory: up to {format_number(largest_gib, 2)} GiB a run, as the largest like these had"
    unknown = [run.config for run, estimate in estimates if not estimate]
    num_comparable = sum(model.find_comparable_runs(config) is not None for config in unknown)
    num_unlike = len(unknown) - num_comparable
    if num_unlike:
        yield f"not known of {format_count(num_unlike, 'runs')}: none {LIKE_THESE} was measured"
    if num_comparable:
        runs = format_count(num_comparable, "runs")
        yield f"not known of {runs}: no record tells how many steps an epoch has"


def _print_array(number: int, array: JobArray, label_by_run: Mapping[str, str]) -> None:
    limit = f"{array.cluster.time_min} min and {format_node_hours(array, array.max_node_hours)} at most"
    print(f"  array {number}: {len(array.jobs)} jobs of {array.shape}, {limit}")
    used = array.shape.gpus_per_node
    blocked = array.blocked_gpus_per_node
    if blocked > used:
        print(
            f"    cluster.exclusive=true blocks {blocked} GPUs of a node, and a job computes on {used}: "
            f"{format_number(blocked * array.max_node_hours)} GPU-hours are billed for "
            f"{format_number(used * array.max_node_hours)}; "
            "cluster.exclusive=false shares them where nothing is timed"
        )
    for job in array.jobs[:MAX_LISTED]:
        print("    " + ", ".join(label_by_run[run_id(run.config)] for run in job))
    if len(array.jobs) > MAX_LISTED:
        print(f"    ... and {len(array.jobs) - MAX_LISTED} more")
