"""Which runs a command means, and what each needs before it can start. Without torch or pandas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from experiments import figures
from experiments.config import choices, compose, data_root
from slurm.gpus import has_gpu
from sparsify.ranges import unknown


@dataclass(frozen=True)
class PlannedRun:
    """A run to be made."""

    config: dict[str, Any]  # resolved
    data_root: Path | None  # the folder of its data set; None where that needs no files

    @property
    def is_timing(self) -> bool:
        """Is it made for its step times? Then nothing else may run at the same time.

        A run that validates every epoch is made for its learning curve.
        """
        is_curve = self.config["train"]["validate"] == "epoch"
        return not is_curve or self.config["timing"]["mode"] == "as_published"

    @property
    def num_processes(self) -> int:
        """How many processes the run is; virtual ranks share one."""
        return 1 if self.config["cluster"]["where"] == "virtual" else int(self.config["workers"])

    @property
    def workers_per_node(self) -> int:
        """All, where the cluster does not say it."""
        return int(self.config["cluster"].get("workers_per_node", self.config["workers"]))

    @property
    def num_nodes(self) -> int:
        """How many nodes of that many workers."""
        return math.ceil(int(self.config["workers"]) / self.workers_per_node)

    @property
    def cores(self) -> int:
        return self.num_processes * int(self.config["threads"])

    @property
    def gpu(self) -> Fraction:
        """How much it takes of this machine's GPUs; what is timed, and what has several processes, takes
        all.
        """
        if self.config["device"] == "cpu":
            return Fraction(0)
        shares = not self.is_timing and self.num_processes == 1
        return Fraction(1, self.config["launch"]["runs_per_gpu"] if shares else 1)


def default_profile(overrides: Sequence[str]) -> str:
    """paper where there is a GPU, here or on the cluster that the words choose, else laptop."""
    if cluster := [word for word in overrides if word.startswith("cluster=")]:
        chosen = compose.resolve(cluster[-1:])["cluster"]
        if chosen["where"] == "slurm":
            return "laptop" if chosen["gpu"] == "none" else "paper"
    return "paper" if has_gpu() else "laptop"


def configs_of(item: str, profile: str, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The resolved configs of the runs that a figure needs."""
    return _resolved(figures.load(item).runs(profile), overrides)


def more_configs_of(item: str, profile: str, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Those of the runs that make a figure firmer, mostly with more seeds: drawn where they are there. How
    long the item's other runs take turns is none of their business.
    """
    figure = figures.load(item)
    if not hasattr(figure, "more_runs"):
        return []
    runs, own = figure.more_runs(profile), list(overrides)
    if _in_turns(figure.runs(profile)) and not _in_turns(runs):
        own = [word for word in overrides if not word.startswith("alternate.")]
    return _resolved(runs, own)


def _in_turns(runs: Sequence[Sequence[str]]) -> bool:
    return any(word.startswith("variants=") for run in runs for word in run)


def _resolved(runs: Sequence[Sequence[str]], overrides: Sequence[str]) -> list[dict[str, Any]]:
    extra = [word for word in overrides if not word.startswith("profile=")]
    return [compose.resolve([*run, *extra]) for run in runs]


def profile_of(overrides: Sequence[str]) -> str:
    """The profile that the words ask for, else this machine's default."""
    given = [word.partition("=")[2] for word in overrides if word.startswith("profile=")]
    profile = given[-1] if given else default_profile(overrides)
    if profile not in choices.options("profile"):
        raise ValueError(unknown("profile", profile, choices.options("profile")))
    return profile


def plan_runs(wanted: Sequence[dict[str, Any]], say: Callable[[str], None]) -> list[PlannedRun]:
    """Runs whose data sets were found, and whose GPU is there where it is to be this machine's.

    Raises:
        ValueError: no data, or no GPU.
    """
    here = [config for config in wanted if config["cluster"]["where"] != "slurm"]
    on_gpus = [config for config in here if config["device"] == "cuda"]
    if on_gpus and not has_gpu():
        what, instead = ("device=cuda", "device=cpu")
        if on_gpus[0]["profile"] == "paper":
            what, instead = ("profile=paper (device=cuda)", "profile=laptop")
        raise ValueError(f"{what} needs an NVIDIA GPU, and there is none; take {instead}")
    said = set[str]()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    return [PlannedRun(*data_root.find(config, say_once)) for config in wanted]
