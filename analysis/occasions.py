"""The occasions on which launches were begun: those of one resemble each other."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

ENOUGH_OCCASIONS = 2
OCCASION_GAP_MIN = 30.0  # minutes between the first launches of two occasions


def occasion_starts(began: Iterable[datetime]) -> list[datetime]:
    """The beginning of each occasion, of launches that were begun then: the first launch, then the first that
    was begun half an hour or more after that, and so on.
    """
    found = list[datetime]()
    for at in sorted(began):
        if not found or at - found[-1] >= timedelta(minutes=OCCASION_GAP_MIN):
            found.append(at)
    return found
