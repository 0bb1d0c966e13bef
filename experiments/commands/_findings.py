"""What was found, as the README and the report tell it: findings.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec


class Chosen(NamedTuple):
    """A claim that carries a finding, in fewer words, and the picture on whose page it is."""

    claim: str  # its id
    short: str
    page: str  # stem of its files in results/shipped/figures


class Headline(NamedTuple):
    """A sentence, its picture, and the claims behind it."""

    says: str
    picture: str  # stem of its files
    claims: tuple[Chosen, ...]


@cache
def findings() -> tuple[Headline, ...]:
    """All, in their order."""
    rows = msgspec.yaml.decode(Path(__file__).with_name("findings.yaml").read_bytes())
    return tuple(
        Headline(row["says"], row["picture"], tuple(Chosen(**claim) for claim in row["claims"]))
        for row in rows
    )


def chosen() -> list[Chosen]:
    """The claims of all findings."""
    return [claim for finding in findings() for claim in finding.claims]
