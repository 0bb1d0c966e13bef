"""Statements of entries, as their files have them beside the tables; the fields are named as there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

NAME_PATTERN = r"[A-Za-z0-9][\w-]{0,39}"  # of an entry: it is a part of files' names
# Keys of runs, as in the tables: of a training its own, of a launch the variant's.
Keys = Sequence[str]


def enter_command(name: str, tier: str) -> str:
    """Return the command that enters an entry into a tier, as `cluster@mine` names one of a cluster."""
    base, _, cluster = tier.partition("@")
    where = f" profile={base}" + f" cluster={cluster}" * bool(cluster)
    return f"`python -m experiments enter {name}{where}`"


class TuningTrial(Struct, frozen=True):
    """A training that tried a learning rate and values of searched hyperparameters."""

    lr_factor: float = field(name="rate")  # times the task's
    searched: Mapping[str, Any]  # its values
    key: str  # of its run


class LawResult(Struct, frozen=True):
    """A law that methods must obey, and whether an entry's method does."""

    name: str
    holds: bool
    why: str = ""


class EntryTaskStatement(Struct, frozen=True):
    """The part of an entry's statement on one task: its trials, best settings, and keys of its runs."""

    about: str
    trials: Sequence[TuningTrial]
    lr: float  # chosen
    searched: Mapping[str, Any]  # chosen
    trainings: Mapping[int, Keys]  # by workers; of all lengths
    launches: Mapping[int, Mapping[str, Keys]]  # by workers and link
    baseline: Mapping[int, Mapping[str, Keys]]  # the same of the baseline, which took turns with it
    # By workers and link: the steps of the trainings that count there.
    lengths: Mapping[int, Mapping[str, int]] = {}


class EntryStatement(Struct, frozen=True):
    """The statement of an entry: its settings, laws, runs by task, and digests of its tables."""

    version: int
    rules: str  # SHA-256
    tier: str
    name: str
    about: str
    method: str
    settings: Mapping[str, Any]
    search: Mapping[str, Sequence[Any]]
    on: Mapping[str, Mapping[str, Any]]
    timed: Mapping[str, Any]
    claims: Sequence[str]
    laws: Sequence[LawResult]
    code: str  # the method's file
    tasks: Mapping[str, EntryTaskStatement]
    tables: Mapping[str, str] = {}  # SHA-256 of each
    written: str = ""
