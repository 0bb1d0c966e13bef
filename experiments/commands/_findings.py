"""The findings that the README and the report show: findings.yaml."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec


class CitedClaim(msgspec.Struct, frozen=True):
    """A claim that carries a finding, in fewer words, and the picture on whose page it is."""

    claim: str  # its id
    short: str
    page: str  # stem of its files in results/shipped/figures


class HeadlineFinding(msgspec.Struct, frozen=True):
    """A sentence, its picture, and the claims behind it."""

    says: str
    picture: str  # stem of its files
    claims: tuple[CitedClaim, ...]


@cache
def load_findings() -> tuple[HeadlineFinding, ...]:
    """Return all findings, in their order."""
    content = Path(__file__).with_name("findings.yaml").read_bytes()
    return msgspec.yaml.decode(content, type=tuple[HeadlineFinding, ...])
