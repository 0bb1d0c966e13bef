"""Statements of entries, which their files have beside the tables; the fields' names are those of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

NAME_PATTERN = r"[A-Za-z0-9][\w-]{0,39}"  # of an entry: it is a part of files' names
# Keys of runs, as in the tables: of a training its own, of a launch the variant's.
Keys = Sequence[str]


class Trial(Struct, frozen=True):
    """A trial of a learning rate and of searched values."""

    rate: float  # times the task's
    searched: Mapping[str, Any]  # its values
    key: str


class LawResult(Struct, frozen=True):
    """A law, and whether it holds."""

    name: str
    holds: bool
    why: str = ""


class WallClockTraining(Struct, frozen=True):
    """A training in real time as a whole."""

    workers: int
    link: str
    key: str


class EntryTaskStatement(Struct, frozen=True):
    """An entry on one task."""

    about: str
    trials: Sequence[Trial]
    lr: float  # chosen
    searched: Mapping[str, Any]  # chosen
    trainings: Mapping[int, Keys]  # by workers
    launches: Mapping[int, Mapping[str, Keys]]  # by workers and link
    baseline: Mapping[int, Mapping[str, Keys]]  # the same of the baseline, which took turns with it
    whole: Sequence[WallClockTraining] = ()


class EntryStatement(Struct, frozen=True):
    """The statement of an entry, which its file has beside its tables."""

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
