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
FILE = Path(__file__).with_name("v2.yaml")
FLOORS = Path(__file__).with_name("floors.yaml")
SMOKE_TIER = "smoke"  # for tests and for trying


class FrozenTask(Struct, frozen=True):
    """A frozen task."""

    about: str
    lr: float  # which the rates of trials multiply
    held_out: int  # examples of the training set on which trials are validated, and of the test set later
    settings: Mapping[str, Any]


class LinkRules(Struct, frozen=True):
    """The launches over a link.

    Args:
        workers: numbers of workers that are timed over it.
        launches: numbers of launches, in lists of one day each.
        settings: of every run that is timed over it.
    """

    workers: Sequence[int]
    launches: Sequence[Sequence[int]]
    settings: Mapping[str, Any] = {}

    @property
    def launch_numbers(self) -> list[int]:
        """The numbers of all launches."""
        return [number for numbers in self.launches for number in numbers]

    def count_day(self, number: int) -> int:
        """Return the day of a launch, counted from 0."""
        return next(day for day, numbers in enumerate(self.launches) if number in numbers)


class Tier(Struct, frozen=True):
    """A size of all: results of two tiers are never in one table.

    Args:
        links: by choices of conf/link; OWN is a cluster's own.
        profile: of its runs; its name, if that is one.
        lengths: of trainings, in steps, where they are not those of all tiers.
        baseline_length: the same of the baseline's trainings, and of trials.
    """

    links: Mapping[str, LinkRules]
    tasks: Mapping[str, FrozenTask]
    settings: Mapping[str, Any] = {}  # of every run
    timed: Mapping[str, Any] = {}  # of every launch besides
    profile: str = ""
    lengths: Sequence[int] = ()
    baseline_length: int = 0

    @property
    def workers(self) -> list[int]:
        """All numbers of workers."""
        return sorted({workers for link in self.links.values() for workers in link.workers})

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


class TrialRules(Struct, frozen=True):
    number: int
    workers: int
    seed: int


class Rules(Struct, frozen=True):
    """A version of the benchmark's rules."""

    version: int
    lengths: Sequence[int]
    baseline_length: int
    budget: float
    validations: int
    trials: TrialRules
    seeds: Sequence[int]
    rates: Sequence[float]
    epoch_steps: int
    decay_share: float
    most_numbers: int
    round_steps: int
    trained: Mapping[str, Any]
    timed: Mapping[str, Any]
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
        return replace(
            tier,
            timed={**tier.timed, "cluster": cluster} if cluster else tier.timed,
            lengths=tier.lengths or self.lengths,
            baseline_length=tier.baseline_length or self.baseline_length,
        )


@cache
def rules() -> Rules:
    """Return the rules of version 2."""
    return convert(yaml.decode(FILE.read_bytes()), Rules)


def rules_digest(tier: str) -> str:
    """Return the SHA-256 of the rules of a tier. Entries by other rules are not compared."""
    own = rules().tiers[tier.partition(AT)[0]]
    return hashlib.sha256(json.encode(replace(rules(), tiers={tier: own}))).hexdigest()


def training_settings(tier: Tier, task: FrozenTask, workers: int, length: int) -> RunSettings:
    """Return the settings of a training of this task, whoever enters."""
    epochs = length // rules().epoch_steps
    return {
        **rules().trained,
        **tier.settings,
        **task.settings,
        "workers": workers,
        "train.epoch_steps": rules().epoch_steps,
        "train.epochs": epochs,
        "train.lr_decay_epochs": rules().decay_share * epochs,
        "train.validate_every": max(1, epochs // rules().validations),
        "train.validate_on": task.held_out,
        "train.steps": None,
    }


def launch_settings(tier: Tier, task: FrozenTask, workers: int, link: str) -> RunSettings:
    """Return the settings of a launch, in which entries take turns."""
    shared = {**rules().timed, **tier.settings, **task.settings, **tier.timed, "workers": workers}
    return {**shared, **tier.links[link].settings, **({} if link == OWN else {"link": link})}


def longest_affordable_length(tier: Tier, speed: float) -> int:
    """Return the longest training that fits into the budget in time; the shortest one where none does.

    Args:
        speed: the baseline's seconds of a step over the entry's.
    """
    affordable_steps = rules().budget * tier.baseline_length * speed
    return max((length for length in tier.lengths if length <= affordable_steps), default=min(tier.lengths))


def floors_by_task(tier: str) -> dict[str, float]:
    """Return the losses that need no network, by task; tasks without one on record are left out."""
    floors: dict[str, float] = yaml.decode(FLOORS.read_bytes())
    tasks = rules().parse_tier(tier).tasks
    names = {name: task.settings["task"] for name, task in tasks.items()}
    return {name: floors[setting] for name, setting in names.items() if setting in floors}
