"""How many steps a run will have, and how long it will take on this machine, by runs that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.pictures.numbers import format_count
from analysis.records.loading import OWN
from experiments.config.config import Config
from experiments.config.machines import VirtualCluster

VIRTUAL, MEMORY, GPU_MEMORY = "virtual", "memory.host_gib", "memory.gpu_gib"
# Runs are compared that have these in common: of a network, a batch and a place.
SAME = ("task.name", "task.batch_size", "cluster.where", "timing.mode", "device")
TOGETHER = ("workers", "cluster.link.name")  # real processes share cores and a link: of those also these
TURNS = ("alternate.block_steps", "alternate.blocks", "alternate.limit_min", "alternate.until")
DATA = ("task.name", "train.held_out")  # how many samples an epoch has
LIKE_THESE = "of the same task, batch and place"


class Machine(NamedTuple):
    """What makes runs of two machines comparable, as records name it."""

    cpu: str
    cores: int


class StepCounts:
    """Steps of whole runs; how many an epoch has is known by records of epochs of all samples."""

    def __init__(self, runs: pd.DataFrame) -> None:
        columns = ("task.name", "task.batch_size", "workers", "steps_per_epoch")
        told = runs.reindex(columns=[*columns, "train.epoch_steps", "train.held_out"])
        whole = told[told["train.epoch_steps"].isna() & told["steps_per_epoch"].notna()]
        numbers = [pd.to_numeric(whole[name]) for name in columns[1:]]
        samples = pd.Series(np.prod(numbers, axis=0), whole.index)
        held_out = pd.to_numeric(whole["train.held_out"]).fillna(0)
        self.samples: dict[tuple[str, int], float] = (
            samples.groupby([whole["task.name"], held_out.rename(DATA[1])]).median().dropna().to_dict()
        )

    def steps(self, config: Config) -> int | None:
        """Steps that a run has from its start to its end; None where nothing says how many an epoch has."""
        train = config.train
        if train.steps:  # whatever the epochs are, as experiments/worker/build.py has it
            return int(train.steps)
        if train.epoch_steps:
            return int(train.epochs * train.epoch_steps)
        samples = self.samples.get((config.task.name, train.held_out))
        if samples is None:
            return None
        return int(train.epochs * math.ceil(samples / (config.workers * config.leaf("task.batch_size"))))


class Estimate(NamedTuple):
    """The expected duration of a run, and the runs by whose durations."""

    seconds: float
    by: pd.DataFrame
    same_method: bool


class DurationModel:
    """How long runs took from their start to their end, from `Frames.runs`."""

    def __init__(self, runs: pd.DataFrame, here: Machine) -> None:
        self.lengths = StepCounts(runs)
        known = {*SAME, *TOGETHER, "method.name", "took_s", "steps_total"} <= {*runs}
        timed = runs[runs["took_s"].notna()] if known else runs.iloc[:0]
        self.turns = _turns(timed)
        rows = timed.drop_duplicates("run_id")  # variants that took turns are one run
        steps, workers, took_s = (
            pd.to_numeric(rows.reindex(columns=[name])[name]) for name in ("steps_total", "workers", "took_s")
        )
        is_virtual = rows.reindex(columns=["cluster.where"])["cluster.where"].eq(VIRTUAL)
        machine = rows.reindex(columns=["provenance.cpu", "provenance.cores"])
        found = {
            "unit_s": took_s / (steps * workers.where(is_virtual, 1)),  # see `work`
            "in_turns": rows.reindex(columns=["variant"])["variant"].notna(),
            "is_here": machine["provenance.cpu"].eq(here.cpu) & machine["provenance.cores"].eq(here.cores),
        }
        # Not assigned one by one: pandas warns of that where there are a hundred columns.
        rows = pd.concat([rows, pd.DataFrame(found, index=rows.index)], axis=1)
        self.alike = dict(list(rows.groupby([*SAME]))) if known else {}

    def comparable(self, config: Config) -> pd.DataFrame | None:
        """Runs whose time a step tells that of this config, however many steps they had; None without any.

        Those of which each took turns of its variants are compared with such only.
        """
        found = self.alike.get(tuple(config.leaf(name) for name in SAME))
        if found is None:
            return None
        found = found[found["in_turns"] == bool(config.variants)]
        if config.variants or not isinstance(config.cluster, VirtualCluster):
            for name in TOGETHER:
                found = found[found[name] == config.leaf(name)]
        return found if len(found) else None

    def estimate(self, config: Config) -> Estimate | None:
        """By the nearest of the comparable runs; None without any, or where the number of steps is not known.

        Nearest are those of a machine like this one, of these those of the same method, then those with as
        many workers, then this checkout's own; of runs in turns first those whose turns are as long.
        """
        found = self.comparable(config)
        if found is None:
            return None
        same_method = found["method.name"] == config.method.name
        asked = pd.Series(
            {name: config.leaf(name) for name in TURNS} if config.variants else {}, dtype=object
        )
        turns = found.reindex(columns=[*asked.index]).astype(object)
        for nearer in (
            (turns == asked).all(axis=1), found["is_here"], same_method,
            found["workers"] == config.workers, found["source"] == OWN,
        ):  # fmt: skip
            near = nearer.loc[found.index]
            found = found[near] if near.any() else found
        is_same = bool(same_method.loc[found.index].all())
        if config.variants:  # turns decide how many steps there are
            return Estimate(self._in_turns(config, found.set_index("run_id")["took_s"]), found, is_same)
        steps = self.lengths.steps(config)
        if steps is None:
            return None
        return Estimate(work(config, steps) * float(found["unit_s"].median()), found, is_same)

    def _in_turns(self, config: Config, took_s: pd.Series[float]) -> float:
        """Seconds of a run in turns, by others' turns of the same methods, or by their mean where none is."""
        turns = self.turns[self.turns["run_id"].isin(took_s.index)]
        of_runs, seconds = (
            turns.groupby("run_id")["seconds"],
            turns.groupby("method.name")["seconds"].median(),
        )
        if turns.empty:
            return float(took_s.median())
        beside = float((took_s - of_runs.sum()).median())
        names = [each.config.method.name for each in config.variants]
        return beside + float(seconds.reindex(names).fillna(of_runs.mean().median()).sum())

    def memory_gib(self, config: Config) -> float:
        """What all processes of a run may have together, by runs like it; 0 where none has recorded it."""
        found = self.comparable(config)
        if found is None or MEMORY not in found:
            return 0.0
        largest = found.loc[found["workers"] == config.workers, MEMORY].max()
        return 0.0 if pd.isna(largest) else float(config.num_processes * largest)


def _turns(runs: pd.DataFrame) -> pd.DataFrame:
    """How long the steps of each variant of a run in turns took together."""
    rows = runs.reindex(columns=["run_id", "method.name", "variant", "step_s", "steps_total"])
    # Files of entries share the baseline's turns.
    rows = rows[rows["variant"].notna()].drop_duplicates(["run_id", "variant"])
    seconds = pd.to_numeric(rows["step_s"]) * pd.to_numeric(rows["steps_total"])
    found: pd.DataFrame = rows[["run_id", "method.name"]].assign(seconds=seconds).dropna()
    return found


def work(config: Config, steps: int) -> int:
    """Steps that are computed one after another: virtual workers take turns, real processes do not."""
    return steps * (config.workers if isinstance(config.cluster, VirtualCluster) else 1)


def basis(estimates: Sequence[Estimate]) -> str:
    """What estimates rest on: '9 runs of the same task, batch and place, by steps; 2 on a machine ...'."""
    by = pd.concat([estimate.by for estimate in estimates]).drop_duplicates("run_id")
    here, others = int(by["is_here"].sum()), sum(not estimate.same_method for estimate in estimates)
    where = "all" if here == len(by) else (str(here) if here else "none")
    of_others = f"; {format_count(others, 'runs')} by those of other methods" if others else ""
    scaled = "" if by["in_turns"].all() else ", scaled to as many steps"  # turns end by the clock
    return (
        f"{format_count(len(by), 'runs')} {LIKE_THESE}{scaled}; "
        f"{where} of them on a machine like this one{of_others}"
    )
