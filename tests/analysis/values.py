"""Values with both ends of their interval, and samples that resemble their neighbours."""

from __future__ import annotations

import numpy as np

from analysis.stats import Estimate
from tests.conftest import there


def interval(value: Estimate | None) -> tuple[float, float]:
    """Return both ends."""
    found = there(value)
    return there(found.low), there(found.high)


def correlated(r: float, n: int, draws: np.random.Generator) -> np.ndarray:
    """Return an AR(1) series with mean 0 and variance 1, whose neighbours correlate by r."""
    series = draws.normal(size=n)
    for i in range(1, n):
        series[i] = r * series[i - 1] + np.sqrt(1 - r**2) * series[i]
    return series
