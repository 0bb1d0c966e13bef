"""Differences that a training may show from its record on another machine."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis.benchmark.cells import LOSS_COLUMN
from experiments.figures.benchmark.checking import _share_apart

NUMBER = 20


def curve(off_at: int = 0, off: float = 0.0, sent: float = 1e6) -> pd.DataFrame:
    """Return a curve of losses, one of which is off by a share of it."""
    losses = [2.8 - 0.05 * at for at in range(NUMBER)]
    losses[off_at] *= 1 + off
    steps = [30 * at for at in range(1, NUMBER + 1)]
    found: pd.DataFrame = pd.DataFrame({"step": steps, LOSS_COLUMN: losses, "wire_bytes": NUMBER * [sent]})
    return found


def test_roundings_are_near_and_other_losses_bytes_and_steps_are_not() -> None:
    for off, is_near in ((0.011, True), (0.03, False), (-0.03, False), (np.nan, False)):
        assert (_share_apart(curve(1, off), curve()) == 0) == is_near, off
    for other in (curve(sent=1.2e6), curve().iloc[:-1]):
        assert _share_apart(other, curve()) == np.inf
