"""The occasions on which launches were begun: those of one resemble each other."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

ENOUGH_OCCASIONS = 2
OCCASION_GAP_MIN = 30.0  # minutes between the first launches of two occasions


def occasion_starts(launch_times: Iterable[datetime]) -> list[datetime]:
    """Return the beginning of each occasion, of launches that were begun at these times.

    The first launch begins an occasion, and so does each first launch half an hour or more after that.
    """
    starts = list[datetime]()
    for launch_time in sorted(launch_times):
        if not starts or launch_time - starts[-1] >= timedelta(minutes=OCCASION_GAP_MIN):
            starts.append(launch_time)
    return starts
