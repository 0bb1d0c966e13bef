"""The rules as numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, json, yaml
from msgspec.structs import replace

from experiments.config.run import RunSettings
from sparsify.ranges import describe_unknown

OWN, AT = "own", "@"
FILE = Path(__file__).with_name("v1.yaml")
FLOORS = Path(__file__).with_name("floors.yaml")


class FrozenTask(Struct, frozen=True):
    """A frozen task."""

    about: str
    lr: float  # which the rates of trials multiply
    held_out: int  # examples of the training set on which trials are validated, and of the test set later
    settings: Mapping[str, Any]
    # Of version 1, and of no score any more: dense's loss at `share` of its budget, by number of workers.
    targets: Mapping[int, float] = {}


class Tier(Struct, frozen=True):
    """A size of all: results of two tiers are never in one table.

    Args:
        links: choices of conf/link, each with what launches over it have besides; OWN is a cluster's own.
        profile: of its runs; its name, if that is one.
    """

    workers: Sequence[int]
    links: Mapping[str, Mapping[str, Any]]
    tasks: Mapping[str, FrozenTask]
    settings: Mapping[str, Any] = {}  # of every run
    trained: Mapping[str, Any] = {}  # of every training besides
    timed: Mapping[str, Any] = {}  # of every launch besides
    profile: str = ""

    @property
    def is_emulated(self) -> bool:
        """Tell whether links are between namespaces of one machine."""
        return self._where == "netns"

    @property
    def is_virtual(self) -> bool:
        """Tell whether links are simulated."""
        return self._where == "virtual"

    @property
    def _where(self) -> object:
        return {**rules().timed, **self.timed}["cluster"]

    @property
    def is_of_cluster(self) -> bool:
        """Tell whether times are a cluster's."""
        return OWN in self.links


class WallClockTrainingRule(Struct, frozen=True):
    """A training in real time as a whole."""

    entry: str
    task: str
    workers: int
    link: str


class TrialRules(Struct, frozen=True):
    number: int
    workers: int
    seed: int


class Rules(Struct, frozen=True):
    """A version of the benchmark's rules."""

    version: int
    steps: int
    epoch_steps: int
    trials: TrialRules
    seeds: Sequence[int]
    launches: Sequence[int]
    share: float
    rates: Sequence[float]
    most_numbers: int
    every: int
    trained: Mapping[str, Any]
    timed: Mapping[str, Any]
    whole: Sequence[WallClockTrainingRule]
    tiers: Mapping[str, Tier]

    def parse_tier(self, tier_at_cluster: str) -> Tier:
        """Return the tier of a word: a tier's name, or `cluster@NAME` for one that is timed on a cluster.

        Raises:
            ValueError: there is none, with those that there are; or a cluster is missing, or too much.
        """
        base, _, cluster = tier_at_cluster.partition(AT)
        if base not in self.tiers:
            raise ValueError(describe_unknown("tier of the benchmark", base, list(self.tiers)))
        tier = self.tiers[base]
        if tier.is_of_cluster and not cluster:
            raise ValueError(f"profile={base} is timed on a cluster's own link: name it, cluster=mine")
        if cluster and not tier.is_of_cluster:
            raise ValueError(
                f"cluster={cluster}: tier {base} is timed on one machine; profile=cluster is for clusters"
            )
        return replace(tier, timed={**tier.timed, "cluster": cluster}) if cluster else tier


@cache
def rules() -> Rules:
    """Return the rules of version 1."""
    return convert(yaml.decode(FILE.read_bytes()), Rules)


def rules_digest(tier: str) -> str:
    """Return the SHA-256 of the rules of a tier, without its targets, which are its baseline's.

    Entries by other rules are not compared.
    """
    own = rules().tiers[tier.partition(AT)[0]]
    tasks = {name: replace(task, targets={}) for name, task in own.tasks.items()}
    text = json.encode(replace(rules(), tiers={tier: replace(own, tasks=tasks)}))
    return hashlib.sha256(text).hexdigest()


def training_settings(tier: Tier, task: FrozenTask, workers: int) -> RunSettings:
    """Return the settings of a training of this task, whoever enters."""
    shared = {**rules().trained, **tier.settings, **task.settings, **tier.trained}
    return {**shared, "workers": workers, "train.validate_on": task.held_out}


def launch_settings(tier: Tier, task: FrozenTask, workers: int, link: str) -> RunSettings:
    """Return the settings of a launch, in which entries take turns."""
    shared = {**rules().timed, **tier.settings, **task.settings, **tier.timed, "workers": workers}
    return {**shared, **link_settings(tier, link)}


def link_settings(tier: Tier, link: str) -> RunSettings:
    """Return the settings of a run that is timed over a link."""
    return {**tier.links[link], **({} if link == OWN else {"link": link})}


def floors_by_task(tier: str) -> dict[str, float]:
    """Return the losses that need no network, by task; tasks without one on record are left out."""
    floors: dict[str, float] = yaml.decode(FLOORS.read_bytes())
    tasks = rules().parse_tier(tier).tasks
    names = {name: task.settings["task"] for name, task in tasks.items()}
    return {name: floors[setting] for name, setting in names.items() if setting in floors}
