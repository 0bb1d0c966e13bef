from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from analysis.pictures.numbers import format_brief, format_count
from analysis.records.configs import run_id
from experiments.commands._arguments import ItemsAndSettings
from experiments.commands._durations import (
    GPU_MEMORY,
    LIKE_THESE,
    MEMORY,
    DurationModel,
    Machine,
    StepCounts,
    basis,
)
from experiments.commands._messages import say
from experiments.commands._named_runs import check_slurm_cluster
from experiments.commands._run_table import load_runs
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun, find_unmeasured_runs, plan_runs
from experiments.figures.runs import requested_runs
from experiments.launch.arrays import JobArray, group_into_arrays, sbatch_texts
from experiments.launch.attempt import missing_requirements
from experiments.launch.local import usable_cores
from experiments.launch.progress_bar import labels_by_run
from experiments.worker.cores import cpu_model

GROUP = "cluster"
LISTED = 30  # jobs that are described one by one
ALIKE = ("method.name", "task.name", "task.batch_size", "workers", "device", "cluster.name", "cluster.gpu")


def plan(words: ItemsAndSettings, *, sbatch: bool = False, all: bool = False) -> int:
    """What these words would cost: of a SLURM cluster arrays and node-hours, of this machine minutes.
    Nothing is submitted, and nothing runs.

    Args:
        words: figures, with settings for their runs; or the settings of one run, or of a grid
            (method=topk,dgc seed=0,1,2).
        sbatch: show what sbatch is given.
        all: of a figure, also the runs that make it firmer, mostly with more seeds.
    """
    name, configs = requested_runs(words, all)
    try:
        planned = plan_runs(configs, say)
    except ValueError as error:
        say(f"before `submit`: {error}")
        planned = [PlannedRun(config, None) for config in configs]
    folders, block = ResultFolders(), planned[0].config.launch.block
    if not sbatch and not any(isinstance(run.config.cluster, SlurmCluster) for run in planned):
        _print_here(name, planned, find_unmeasured_runs(planned, folders, say), folders)
        return 0
    check_slurm_cluster(planned)
    found = group_into_arrays(planned, block)
    if sbatch:
        print("\n".join(sbatch_texts(found, folders, f"{name}-001")))
        return 0
    for trouble in missing_requirements(planned):
        say(f"before `submit`: {trouble}")
    todo = find_unmeasured_runs(planned, folders, say)
    where = planned[0].config["cluster"]["name"]
    print(f"{name} on {where}: {len(planned)} runs, {len(todo)} not measured yet")
    names, expected = labels_by_run(todo), Expected(load_runs(folders)) if todo else None
    for number, array in enumerate(group_into_arrays(todo, block)):
        _print_array(number, array, names)
        if expected is not None:
            print(f"    {expected.sentence(array)}")
            if memory := expected.memory(array):
                print(f"    memory: {memory}, as the largest like these had")
    print("`--sbatch` shows what sbatch is given; `submit` with the same words submits")
    return 0


def _print_here(
    name: str, planned: Sequence[PlannedRun], todo: Sequence[PlannedRun], folders: ResultFolders
) -> None:
    """Runs of this machine, and how long they would take together."""
    print(f"{name} on this machine: {len(planned)} runs, {len(todo)} not measured yet")
    if todo:
        for line in _expected_here(
            todo, DurationModel(load_runs(folders), Machine(cpu_model(), usable_cores()))
        ):
            print(f"    {line}")
    print("`run` or `reproduce` with the same words makes them")


def _expected_here(todo: Sequence[PlannedRun], took: DurationModel) -> Iterator[str]:
    """What is expected of runs of this machine, and what that rests on."""
    found = [(run, took.estimate(run.config)) for run in todo]
    known = [(run, estimate) for run, estimate in found if estimate]
    if known:
        # Of the machine a timed run takes all, another what it needs.
        shares = [1.0 if run.is_timing else min(1.0, run.cores / usable_cores()) for run, _ in known]
        expected_s = sum(share * estimate.seconds for share, (_, estimate) in zip(shares, known, strict=True))
        yield f"expected: {format_brief(expected_s / 60, 2)} min, while nothing else computes here"
        yield f"by the durations of {basis([estimate for _, estimate in known])}"
        if largest := max(took.memory_gib(run.config) for run in todo):
            yield f"memory: up to {format_brief(largest, 2)} GiB a run, as the largest like these had"
    unknown = [run.config for run, estimate in found if not estimate]
    comparable = sum(took.comparable(config) is not None for config in unknown)
    if none := len(unknown) - comparable:
        yield f"not known of {format_count(none, 'runs')}: none {LIKE_THESE} was measured"
    if comparable:
        yield f"not known of {format_count(comparable, 'runs')}: no record tells how many steps an epoch has"


def _print_array(number: int, array: JobArray, names: Mapping[str, str]) -> None:
    limit = f"{array.cluster.time_min} min and {hours(array, array.max_node_hours)} at most"
    print(f"  array {number}: {len(array.jobs)} jobs of {array.shape}, {limit}")
    used, blocked = array.shape.gpus_per_node, array.blocked_gpus_per_node
    if blocked > used:
        print(
            f"    cluster.exclusive=true blocks {blocked} GPUs of a node, and a job computes on {used}: "
            f"{format_brief(blocked * array.max_node_hours)} GPU-hours are billed for "
            f"{format_brief(used * array.max_node_hours)}; "
            "cluster.exclusive=false shares them where nothing is timed"
        )
    for job in array.jobs[:LISTED]:
        print("    " + ", ".join(names[run_id(run.config)] for run in job))
    if len(array.jobs) > LISTED:
        print(f"    ... and {len(array.jobs) - LISTED} more")


def hours(array: JobArray, node_hours: float) -> str:
    """'44 node-hours'; of nodes with GPUs '44 node-hours (352 GPU-hours)'."""
    gpus = array.blocked_gpus_per_node
    on_gpus = f" ({format_brief(gpus * node_hours)} GPU-hours)" if gpus else ""
    return f"{format_brief(node_hours)} node-hours{on_gpus}"


class Expected:
    """Expected durations, from `Frames.runs`, which is asked once."""

    def __init__(self, runs: pd.DataFrame) -> None:
        known = {*ALIKE, "step_s", "simulated"} <= {*runs}
        measured = runs[runs["step_s"].notna() & runs["simulated"].ne(True)] if known else None
        self.lengths = StepCounts(runs)
        # By what they have in common, ALIKE.
        self.alike = {} if measured is None else dict(list(measured.groupby([*ALIKE])))

    def sentence(self, array: JobArray) -> str:
        """'expected: 0.4 node-hours', and by how many runs' step times."""
        used, unknown, node_s = set[str](), 0, 0.0
        for run in (run for job in array.jobs for run in job):
            like, steps = self.like(run.config), self.lengths.steps(run.config)
            # The length of a run whose variants take turns is open.
            if like is None or steps is None or run.config.variants:
                unknown += 1
            else:
                node_s += array.shape.nodes * steps * float(like["step_s"].median())
                used |= set(like["run_id"])
        if not used:
            return "expected node-hours are not known: no run like these was measured there"
        rest = f"; of {format_count(unknown, 'runs')} not known" if unknown else ""
        return (
            f"expected: {hours(array, node_s / 3600)}, "
            f"by the step times of {format_count(len(used), 'runs')} like these, measured there{rest}; "
            "what starting and validating take comes on top"
        )

    def memory(self, array: JobArray) -> str:
        """'up to 2 GiB of a node and 5 GiB of each GPU'; empty where none like these has recorded it."""
        like = [found for job in array.jobs for run in job if (found := self.like(run.config)) is not None]
        parts = []
        for name, times, whose in (
            (MEMORY, array.shape.tasks_per_node, "a node"),
            (GPU_MEMORY, 1, "each GPU"),
        ):
            known = pd.concat([found[name] for found in like if name in found] or [pd.Series()]).dropna()
            parts += [f"{format_brief(times * known.max(), 2)} GiB of {whose}"] if len(known) else []
        return f"up to {' and '.join(parts)}" if parts else ""

    def like(self, config: Config) -> pd.DataFrame | None:
        """The runs that measured the same method and network on the same machines, if there are any."""
        return self.alike.get(tuple(config.leaf(name) for name in ALIKE))
