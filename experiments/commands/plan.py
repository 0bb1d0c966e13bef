from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from analysis.pictures.numbers import brief, counted
from analysis.records.configs import run_id
from analysis.records.loading import OWN
from experiments.commands._find import check_on_slurm
from experiments.commands._listing import every_run
from experiments.commands._make import say
from experiments.commands._words import ItemsAndSettings
from experiments.config.config import Config
from experiments.config.folders import Folders
from experiments.config.machines import SlurmCluster
from experiments.config.plan import PlannedRun, missing, plan_runs
from experiments.figures.runs import name_and_configs
from experiments.launch.arrays import JobArray, arrays, sbatch_texts
from experiments.launch.attempt import lacking
from experiments.launch.local import cores
from experiments.launch.progress_bar import labels_of

GROUP = "cluster"
MEMORY = "memory.host_gib"
LISTED = 30  # jobs that are described one by one
# What a step's time depends on most. Of a run's seed, density and learning rate it does not, or hardly.
SAME = ("task.name", "task.batch_size", "workers", "cluster.where", "cluster.link.name", "timing.mode")
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
    name, configs = name_and_configs(words, all)
    try:
        planned = plan_runs(configs, say)
    except ValueError as error:
        say(f"before `submit`: {error}")
        planned = [PlannedRun(config, None) for config in configs]
    folders, block = Folders(), planned[0].config.launch.block
    if not sbatch and not any(isinstance(run.config.cluster, SlurmCluster) for run in planned):
        _print_here(name, planned, missing(planned, folders, say), folders)
        return 0
    found = arrays(check_on_slurm(planned), block)
    if sbatch:
        print("\n".join(sbatch_texts(found, folders, f"{name}-001")))
        return 0
    for trouble in lacking(planned):
        say(f"before `submit`: {trouble}")
    todo = missing(planned, folders, say)
    where = planned[0].config["cluster"]["name"]
    print(f"{name} on {where}: {len(planned)} runs, {len(todo)} not measured yet")
    names, expected = labels_of(todo), Expected(every_run(folders)) if todo else None
    for number, array in enumerate(arrays(todo, block)):
        _print_array(number, array, names)
        if expected is not None:
            print(f"    {expected.sentence(array)}")
    print("`--sbatch` shows what sbatch is given; `submit` with the same words submits")
    return 0


def _print_here(
    name: str, planned: Sequence[PlannedRun], todo: Sequence[PlannedRun], folders: Folders
) -> None:
    """Runs of this machine, and how long they would take together."""
    print(f"{name} on this machine: {len(planned)} runs, {len(todo)} not measured yet")
    took = Took(every_run(folders)) if todo else None
    expected_s, unknown, used = 0.0, 0, set[str]()
    for run in todo:
        assert took is not None
        like = took.like(run.config)
        if like is None:
            unknown += 1
            continue
        used |= set(like["run_id"])
        share = 1.0 if run.is_timing else min(1.0, run.cores / cores())  # of the machine
        expected_s += share * took.seconds(run.config, like)
    if used:
        minutes = brief(expected_s / 60, 2)
        print(f"    expected: {minutes} min, by the durations of {counted(len(used), 'runs')} like these")
        assert took is not None
        if largest := max(took.memory_gib(run.config) for run in todo):
            print(f"    memory: up to {brief(largest, 2)} GiB a run, as the largest like these had")
    if unknown:
        print(f"    not known of {counted(unknown, 'runs')}: none like them was measured")
    print("`run` or `reproduce` with the same words makes them")


class Took:
    """How long runs took from their start to their end, from `Frames.runs`."""

    def __init__(self, runs: pd.DataFrame) -> None:
        known = {*SAME, "took_s", "steps_total"} <= {*runs}
        measured = runs[runs["took_s"].notna()] if known else None
        # Variants that took turns are one run.
        self.alike = (
            {} if measured is None else dict(list(measured.drop_duplicates("run_id").groupby([*SAME])))
        )

    def like(self, config: Config) -> pd.DataFrame | None:
        """Runs of the same problem, of this machine if there are any."""
        found = self.alike.get(tuple(config.leaf(name) for name in SAME))
        if found is None:
            return None
        in_turns = found["variant"].notna() if "variant" in found else pd.Series(False, found.index)
        found = found[in_turns == bool(config.variants)]
        own = found[found["source"] == OWN]
        return (own if len(own) else found) if len(found) else None

    @staticmethod
    def seconds(config: Config, like: pd.DataFrame) -> float:
        """By steps, unless turns decide how many there are."""
        if config.variants:
            return float(like["took_s"].median())
        train = config.train
        whole = train.epochs * (train.epoch_steps or like["steps_per_epoch"].median())
        steps = min(train.steps, whole) if train.steps else whole
        return float(steps * (like["took_s"] / like["steps_total"]).median())

    def memory_gib(self, config: Config) -> float:
        """What all processes of a run may have together, by runs like it; 0 where none has recorded it."""
        like = self.like(config)
        if like is None or MEMORY not in like or not like[MEMORY].notna().any():
            return 0.0
        return float(config.num_processes * like[MEMORY].max())


def _print_array(number: int, array: JobArray, names: Mapping[str, str]) -> None:
    limit = f"{array.cluster.time_min} min and {hours(array, array.node_hours)} at most"
    print(f"  array {number}: {len(array.jobs)} jobs of {array.shape}, {limit}")
    used, blocked = array.shape.gpus_per_node, array.gpus_blocked
    if blocked > used:
        print(
            f"    cluster.exclusive=true blocks {blocked} GPUs of a node, and a job computes on {used}: "
            f"{brief(blocked * array.node_hours)} GPU-hours are billed for {brief(used * array.node_hours)}; "
            "cluster.exclusive=false shares them where nothing is timed"
        )
    for job in array.jobs[:LISTED]:
        print("    " + ", ".join(names[run_id(run.config)] for run in job))
    if len(array.jobs) > LISTED:
        print(f"    ... and {len(array.jobs) - LISTED} more")


def hours(array: JobArray, node_hours: float) -> str:
    """'44 node-hours'; of nodes with GPUs '44 node-hours (352 GPU-hours)'."""
    gpus = array.gpus_blocked
    on_gpus = f" ({brief(gpus * node_hours)} GPU-hours)" if gpus else ""
    return f"{brief(node_hours)} node-hours{on_gpus}"


class Expected:
    """Expected durations, from `Frames.runs`, which is asked once."""

    def __init__(self, runs: pd.DataFrame) -> None:
        known = {*ALIKE, "step_s", "steps_per_epoch", "simulated"} <= {*runs}
        measured = runs[runs["step_s"].notna() & runs["simulated"].ne(True)] if known else None
        # By what they have in common, ALIKE.
        self.alike = {} if measured is None else dict(list(measured.groupby([*ALIKE])))

    def sentence(self, array: JobArray) -> str:
        """'expected: 0.4 node-hours', and by how many runs' step times."""
        used, unknown, node_s = set[str](), 0, 0.0
        for run in (run for job in array.jobs for run in job):
            like = self.like(run.config)
            # The length of a run whose variants take turns is open.
            if like is None or run.config.variants:
                unknown += 1
            else:
                node_s += array.shape.nodes * seconds(run.config, like)
                used |= set(like["run_id"])
        if not used:
            return "expected node-hours are not known: no run like these was measured there"
        rest = f"; not known of {unknown} runs, none like them was measured there" if unknown else ""
        return (
            f"expected: {hours(array, node_s / 3600)}, by the times of {len(used)} runs like these; "
            f"what starting and validating take comes on top{rest}"
        )

    def like(self, config: Config) -> pd.DataFrame | None:
        """The runs that measured the same method and network on the same machines, if there are any."""
        return self.alike.get(tuple(config.leaf(name) for name in ALIKE))


def seconds(config: Config, like: pd.DataFrame) -> float:
    """The time of a run's steps, by those of runs like it."""
    train = config.train
    whole = train.epochs * (train.epoch_steps or like["steps_per_epoch"].median())
    return float((min(train.steps, whole) if train.steps else whole) * like["step_s"].median())
