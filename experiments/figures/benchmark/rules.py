"""The rules as numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, yaml

from experiments.config.run import RunSettings
from sparsify.ranges import unknown

FILE = Path(__file__).with_name("v1.yaml")


class FrozenTask(Struct, frozen=True):
    """A frozen task."""

    about: str
    lr: float  # which the rates of trials multiply
    held_out: int  # examples of the training set on which trials are validated, and of the test set later
    settings: Mapping[str, Any]
    # The target by number of workers: the loss that dense has at `share` of its budget, median of its seeds.
    targets: Mapping[int, float] = {}


class Tier(Struct, frozen=True):
    """A size of all: results of two tiers are never in one table."""

    workers: Sequence[int]
    links: Sequence[str]
    tasks: Mapping[str, FrozenTask]
    settings: Mapping[str, Any] = {}  # of every run
    trained: Mapping[str, Any] = {}  # of every training besides
    timed: Mapping[str, Any] = {}  # of every launch besides


class Trials(Struct, frozen=True):
    number: int
    workers: int
    seed: int


class Rules(Struct, frozen=True):
    """A version."""

    version: int
    steps: int
    epoch_steps: int
    trials: Trials
    seeds: Sequence[int]
    launches: Sequence[int]
    share: float
    rates: Sequence[float]
    most_numbers: int
    every: int
    trained: Mapping[str, Any]
    timed: Mapping[str, Any]
    tiers: Mapping[str, Tier]

    def tier(self, name: str) -> Tier:
        """A tier, by the name of its profile.

        Raises:
            ValueError: there is none; with those that there are.
        """
        if name not in self.tiers:
            raise ValueError(unknown("tier of the benchmark", name, list(self.tiers)))
        return self.tiers[name]


@cache
def rules() -> Rules:
    """Version 1."""
    return convert(yaml.decode(FILE.read_bytes()), Rules)


def digest() -> str:
    """SHA-256 of the rules, targets included: entries by other rules are not compared."""
    return hashlib.sha256(FILE.read_bytes()).hexdigest()


def training(tier: Tier, task: FrozenTask, workers: int) -> RunSettings:
    """What a training of this task has, whoever enters."""
    shared = {**rules().trained, **tier.settings, **task.settings, **tier.trained}
    return {**shared, "workers": workers, "train.validate_on": task.held_out}


def launch(tier: Tier, task: FrozenTask, workers: int, link: str) -> RunSettings:
    """What a launch has, in which entries take turns."""
    shared = {**rules().timed, **tier.settings, **task.settings, **tier.timed}
    return {**shared, "workers": workers, "link": link}
