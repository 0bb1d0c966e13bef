"""Expected steps, durations and memory of runs, here and on clusters, from records of earlier runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from analysis.pictures.numbers import format_count, format_number
from analysis.records.loading import OWN
from experiments.config.config import Config
from experiments.config.machines import VirtualCluster
from experiments.launch.arrays import JobArray

MEMORY = "memory.host_gib"
GPU_MEMORY = "memory.gpu_gib"
# Runs are compared that have the same network, batch and place.
COMPARED_SETTINGS = ("task.name", "task.batch_size", "cluster.where", "timing.mode", "device")
# Real processes share cores and a link: these must be equal, too.
COMPARED_OF_PROCESSES = ("workers", "cluster.link.name")
TURN_SETTINGS = ("alternate.block_steps", "alternate.blocks", "alternate.limit_min", "alternate.until")
# Runs on a cluster are compared that have these in common.
COMPARED_ON_CLUSTERS = (
    "method.name", "task.name", "task.batch_size", "workers", "device", "cluster.name", "cluster.gpu",
)  # fmt: skip
LIKE_THESE = "of the same task, batch and place"


class Machine(NamedTuple):
    """The facts by which records of two machines are comparable."""

    cpu: str
    cores: int


class StepCounter:
    """A counter of the steps of whole runs; records of whole epochs tell how many samples an epoch has."""

    def __init__(self, runs: pd.DataFrame) -> None:
        factors = ["task.batch_size", "workers", "steps_per_epoch"]
        columns = runs.reindex(columns=["task.name", *factors, "train.epoch_steps", "train.held_out"])
        whole = columns[columns["train.epoch_steps"].isna() & columns["steps_per_epoch"].notna()]
        samples = whole[factors].apply(pd.to_numeric).prod(axis=1)
        held_out = pd.to_numeric(whole["train.held_out"]).fillna(0)
        self.samples_by_task_and_held_out: dict[tuple[str, int], float] = (
            samples.groupby([whole["task.name"], held_out]).median().dropna().to_dict()
        )

    def count_steps(self, config: Config) -> int | None:
        """Return the steps of a whole run; None where nothing says how many steps an epoch has."""
        train = config.train
        if train.steps:  # whatever the epochs are, as experiments/worker/build.py has it
            return int(train.steps)
        if train.epoch_steps:
            return int(train.epochs * train.epoch_steps)
        samples = self.samples_by_task_and_held_out.get((config.task.name, train.held_out))
        if samples is None:
            return None
        samples_per_step = config.workers * config.get_setting("task.batch_size")
        return int(train.epochs * math.ceil(samples / samples_per_step))


class DurationEstimate(NamedTuple):
    """The expected duration of a run, and the runs that it is estimated from."""

    seconds: float
    compared_runs: pd.DataFrame
    is_same_method: bool


class DurationModel:
    """Durations of runs from their start to their end, from `Frames.runs`."""

    def __init__(self, runs: pd.DataFrame, this_machine: Machine) -> None:
        self.step_counter = StepCounter(runs)
        is_complete = {
            *COMPARED_SETTINGS, *COMPARED_OF_PROCESSES, "method.name", "took_s", "steps_total"
        } <= {*runs}  # fmt: skip
        timed = runs[runs["took_s"].notna()] if is_complete else runs.iloc[:0]
        self.turns = _turn_seconds(timed)
        rows = timed.drop_duplicates("run_id")  # variants that took turns are one run
        used_columns = rows.reindex(
            columns=[
                "steps_total", "workers", "took_s", "cluster.where", "provenance.cpu", "provenance.cores",
                "variant",
            ]
        )  # fmt: skip
        numbers = used_columns[["steps_total", "workers", "took_s"]].apply(pd.to_numeric)
        sequential = numbers["workers"].where(used_columns["cluster.where"].eq("virtual"), 1)
        derived = {
            "sequential_step_s": numbers["took_s"] / (numbers["steps_total"] * sequential),
            "in_turns": used_columns["variant"].notna(),
            # A node of an emulated link has some of the machine's cores, and its workers record these.
            "is_this_machine": used_columns["provenance.cpu"].eq(this_machine.cpu)
            & (
                used_columns["provenance.cores"].eq(this_machine.cores)
                | used_columns["cluster.where"].eq("netns")
            ),
        }
        # Not assigned one by one: pandas warns of that where there are a hundred columns.
        rows = pd.concat([rows, pd.DataFrame(derived, index=rows.index)], axis=1)
        self.rows_by_settings = dict(list(rows.groupby([*COMPARED_SETTINGS]))) if is_complete else {}

    def find_comparable_runs(self, config: Config) -> pd.DataFrame | None:
        """Return the runs whose time per step is that of this config; None without any.

        Runs whose variants take turns are compared only with each other.
        """
        rows = self.rows_by_settings.get(tuple(config.get_setting(name) for name in COMPARED_SETTINGS))
        if rows is None:
            return None
        rows = rows[rows["in_turns"] == bool(config.variants)]
        if config.variants or not isinstance(config.cluster, VirtualCluster):
            for name in COMPARED_OF_PROCESSES:
                rows = rows[rows[name] == config.get_setting(name)]
        return rows if len(rows) else None

    def estimate(self, config: Config) -> DurationEstimate | None:
        """Return the expected duration by the nearest of the comparable runs.

        The nearest runs are on a machine like this one; of these, runs of the same method are nearer, then
        those with as many workers, then this checkout's own. Of runs in turns, those with turns of the same
        length come first.

        Returns:
            None without comparable runs, or where the number of steps is not known.
        """
        rows = self.find_comparable_runs(config)
        if rows is None:
            return None
        is_same_method = rows["method.name"] == config.method.name
        turns = {name: config.get_setting(name) for name in TURN_SETTINGS} if config.variants else {}
        requested = pd.Series(turns, dtype=object)
        recorded = rows.reindex(columns=[*turns]).astype(object)
        for is_near in (
            (recorded == requested).all(axis=1),
            rows["is_this_machine"],
            is_same_method,
            rows["workers"] == config.workers,
            rows["source"] == OWN,
        ):
            near = rows[is_near.loc[rows.index]]
            rows = near if len(near) else rows
        is_same = bool(is_same_method.loc[rows.index].all())
        if config.variants:  # turns decide how many steps there are
            return DurationEstimate(self._seconds_in_turns(config, rows), rows, is_same)
        steps = self.step_counter.count_steps(config)
        if steps is None:
            return None
        sequential = config.workers if isinstance(config.cluster, VirtualCluster) else 1
        seconds = steps * sequential * float(rows["sequential_step_s"].median())
        return DurationEstimate(seconds, rows, is_same)

    def _seconds_in_turns(self, config: Config, rows: pd.DataFrame) -> float:
        """Return the duration of a run in turns, from others' turns of the same methods.

        A method without recorded turns counts as much as the mean of all methods.
        """
        took_s = rows.set_index("run_id")["took_s"]
        turns = self.turns[self.turns["run_id"].isin(took_s.index)]
        if turns.empty:
            return float(took_s.median())
        seconds_by_run = turns.groupby("run_id")["seconds"]
        seconds_by_method = turns.groupby("method.name")["seconds"].median()
        besides_s = float((took_s - seconds_by_run.sum()).median())
        methods = [variant.config.method.name for variant in config.variants]
        own_turns = seconds_by_method.reindex(methods).fillna(seconds_by_run.mean().median())
        return besides_s + float(own_turns.sum())

    def max_memory_gib_or_zero(self, config: Config) -> float:
        """Return the memory that all processes of a run may have, by runs like it; 0 without a record."""
        rows = self.find_comparable_runs(config)
        if rows is None or MEMORY not in rows:
            return 0.0
        largest = rows.loc[rows["workers"] == config.workers, MEMORY].max()
        return 0.0 if pd.isna(largest) else float(config.num_processes * largest)


def _turn_seconds(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the seconds of all steps of each variant that took turns in a run."""
    rows = runs.reindex(columns=["run_id", "method.name", "variant", "step_s", "steps_total"])
    # Files of entries share the baseline's turns.
    rows = rows[rows["variant"].notna()].drop_duplicates(["run_id", "variant"])
    seconds = rows[["step_s", "steps_total"]].apply(pd.to_numeric).prod(axis=1, skipna=False)
    turns: pd.DataFrame = rows[["run_id", "method.name"]].assign(seconds=seconds).dropna()
    return turns


def describe_basis(estimates: Sequence[DurationEstimate]) -> str:
    """Return what estimates rest on: '9 runs of the same task, batch and place, ...'."""
    basis = pd.concat([estimate.compared_runs for estimate in estimates]).drop_duplicates("run_id")
    num_here = int(basis["is_this_machine"].sum())
    here_text = "all" if num_here == len(basis) else str(num_here or "none")
    num_others = sum(not estimate.is_same_method for estimate in estimates)
    other_methods = f"; {format_count(num_others, 'runs')} by those of other methods" if num_others else ""
    scaled = "" if basis["in_turns"].all() else ", scaled to as many steps"  # turns end by the clock
    return (
        f"{format_count(len(basis), 'runs')} {LIKE_THESE}{scaled}; "
        f"{here_text} of them on a machine like this one{other_methods}"
    )


def format_node_hours(array: JobArray, node_hours: float) -> str:
    """Return '44 node-hours'; of nodes with GPUs '44 node-hours (352 GPU-hours)'."""
    gpus = array.blocked_gpus_per_node
    gpu_hours = f" ({format_number(gpus * node_hours)} GPU-hours)" if gpus else ""
    return f"{format_number(node_hours)} node-hours{gpu_hours}"


class ClusterCostModel:
    """Expected node-hours and memory on a cluster, from the records of `Frames.runs`."""

    def __init__(self, runs: pd.DataFrame) -> None:
        is_complete = {*COMPARED_ON_CLUSTERS, "step_s", "simulated"} <= {*runs}
        measured = runs[runs["step_s"].notna() & runs["simulated"].ne(True)] if is_complete else None
        self.step_counter = StepCounter(runs)
        self.rows_by_settings = (
            {} if measured is None else dict(list(measured.groupby([*COMPARED_ON_CLUSTERS])))
        )

    def find_similar_runs(self, config: Config) -> pd.DataFrame | None:
        """Return the runs of the same method and network on the same machines; None without any."""
        return self.rows_by_settings.get(tuple(config.get_setting(name) for name in COMPARED_ON_CLUSTERS))

    def describe_expected_node_hours(self, array: JobArray) -> str:
        """Return 'expected: 0.4 node-hours', and the number of runs by whose step times."""
        used_run_ids = set[str]()
        num_unknown = 0
        node_s = 0.0
        for run in (run for job in array.jobs for run in job):
            similar_runs = self.find_similar_runs(run.config)
            steps = self.step_counter.count_steps(run.config)
            # The length of a run whose variants take turns is open.
            if similar_runs is None or steps is None or run.config.variants:
                num_unknown += 1
            else:
                node_s += array.shape.nodes * steps * float(similar_runs["step_s"].median())
                used_run_ids |= set(similar_runs["run_id"])
        if not used_run_ids:
            return "expected node-hours are not known: no run like these was measured there"
        unknown = f"; of {format_count(num_unknown, 'runs')} not known" if num_unknown else ""
        return (
            f"expected: {format_node_hours(array, node_s / 3600)}, "
            f"by the step times of {format_count(len(used_run_ids), 'runs')} like these, measured "
            f"there{unknown}; what starting and validating take comes on top"
        )

    def describe_expected_memory(self, array: JobArray) -> str:
        """Return 'up to 2 GiB of a node and 5 GiB of each GPU'; empty without a record of like runs."""
        similar_runs = [self.find_similar_runs(run.config) for job in array.jobs for run in job]
        if all(rows is None for rows in similar_runs):
            return ""
        records = pd.concat(similar_runs).reindex(columns=[MEMORY, GPU_MEMORY])
        parts = []
        for column, count, owner in (
            (MEMORY, array.shape.tasks_per_node, "a node"),
            (GPU_MEMORY, 1, "each GPU"),
        ):
            largest_gib = records[column].max()
            if pd.notna(largest_gib):
                parts.append(f"{format_number(count * largest_gib, 2)} GiB of {owner}")
        return f"up to {' and '.join(parts)}" if parts else ""
