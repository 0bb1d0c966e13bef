"""How long runs that are planned should take, from the step times of runs that are like them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.numbers import brief
from experiments.launch.arrays import Array

# What a step's time depends on most. Of a run's seed, density and learning rate it does not, or hardly.
ALIKE = ("method.name", "task.name", "task.batch_size", "workers", "device", "cluster.name", "cluster.gpu")


def hours(array: Array, node_hours: float) -> str:
    """'44 node-hours'; of nodes with GPUs '44 node-hours (352 GPU-hours)'."""
    gpus = array.shape.gpus_per_node
    on_gpus = f" ({brief(gpus * node_hours)} GPU-hours)" if gpus else ""
    return f"{brief(node_hours)} node-hours{on_gpus}"


class Expected:
    """From `Frames.runs`, which is asked once."""

    def __init__(self, runs: pd.DataFrame) -> None:
        known = all(name in runs for name in (*ALIKE, "step_s", "steps_per_epoch", "simulated"))
        self.runs: pd.DataFrame = runs.head(0)
        if known:
            self.runs = runs.loc[runs["step_s"].notna() & ~_simulated(runs)]

    def sentence(self, array: Array) -> str:
        """'expected: 0.4 node-hours', and by how many runs' step times."""
        used, unknown, node_s = set[str](), 0, 0.0
        for run in (run for job in array.jobs for run in job):
            like = self.like(run.config)
            seconds = self.seconds(run.config, like)
            if seconds is None:
                unknown += 1
            else:
                node_s += array.shape.nodes * seconds
                used |= set(like["run_id"])
        if not used:
            return "expected node-hours are not known: no run like these was measured there"
        rest = f"; not known of {unknown} runs, none like them was measured there" if unknown else ""
        return (
            f"expected: {hours(array, node_s / 3600)}, by the times of {len(used)} runs like these; "
            f"what starting and validating take comes on top{rest}"
        )

    def like(self, config: Mapping[str, Any]) -> pd.DataFrame:
        """The runs that measured the same method and network on the same machines."""
        found = self.runs
        for name in ALIKE if len(found) else ():
            found = found.loc[found[name] == _leaf(config, name)]
        return found

    def seconds(self, config: Mapping[str, Any], like: pd.DataFrame) -> float | None:
        """Of the run's steps; None where none like it was measured, or where its length is open."""
        if not len(like) or config.get("variants"):
            return None
        train = config["train"]
        per_epoch = train["epoch_steps"] or like["steps_per_epoch"].median()
        whole = train["epochs"] * per_epoch
        steps = min(train["steps"], whole) if train["steps"] else whole
        return float(steps * like["step_s"].median())


def _simulated(runs: pd.DataFrame) -> pd.Series[bool]:
    found: pd.Series[bool] = runs["simulated"].map(lambda value: value is True)
    return found


def _leaf(config: Mapping[str, Any], dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = value[part]
    return value
