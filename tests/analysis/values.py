"""Values that must be there, with both ends of their interval."""

from __future__ import annotations

from analysis.stats import Value
from tests.conftest import there


def interval(value: Value | None) -> tuple[float, float]:
    """Both ends."""
    found = there(value)
    return there(found.low), there(found.high)
