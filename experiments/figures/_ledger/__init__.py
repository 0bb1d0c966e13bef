"""What the papers state, statement by statement, and which claims of which items answer it: a file a paper.

The statements are numbered through all papers. One that no item answers says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

LEDGERS = ("yoon2022", "shi2019", "zhang", "eghlidi2020")  # in the order of the numbers


@dataclass(frozen=True)
class Statement:
    """One statement of a paper."""

    number: int
    says: str  # in our words; numbers as published
    where: str  # in the paper
    answers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # item -> how its claims begin
    why: str = ""  # where nothing answers it, or something is left open


def statements() -> dict[str, list[Statement]]:
    """Of each paper, in the order of the numbers."""
    return {name: list(import_module(f"{__name__}.{name}").STATEMENTS) for name in LEDGERS}
