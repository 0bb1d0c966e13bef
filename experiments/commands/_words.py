"""What words behind a command may be: types that signatures name, help shows and completion knows."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any, get_args


class Kind(Enum):
    """A kind of word, and what help calls it."""

    ITEM = "ITEM"  # a figure or a table of a paper
    SETTING = "KEY=VALUE"  # in Hydra's grammar
    RUN = "RUN"  # part of a run's name
    SWEEP = "SWEEP"  # part of a sweep's name
    FILTER = "FILTER"  # what a run must be: method=topk, sweep=thesis, fig3, part of its name


Items = Annotated[Sequence[str], Kind.ITEM]
Settings = Annotated[Sequence[str], Kind.SETTING]
ItemsAndSettings = Annotated[Sequence[str], Kind.ITEM, Kind.SETTING]
Runs = Annotated[Sequence[str], Kind.RUN]
SweepsAndRuns = Annotated[Sequence[str], Kind.SWEEP, Kind.RUN]
Filters = Annotated[Sequence[str], Kind.FILTER]
RunName = Annotated[str, Kind.RUN]


def kinds(allowed: Any) -> list[Kind]:
    """The kinds of words that a parameter takes, from its annotation; none of a number or a choice."""
    parts = get_args(allowed)
    own = [part for part in parts if isinstance(part, Kind)]
    return own + [kind for part in parts if not isinstance(part, Kind) for kind in kinds(part)]
