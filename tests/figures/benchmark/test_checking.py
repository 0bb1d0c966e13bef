"""How far a training may be from its record on another machine."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.benchmark.cells import COLUMN
from experiments.figures.benchmark.checking import _apart

LOSSES = [2.8 - 0.05 * at for at in range(20)]


def curve(off_at: int | None = None, off: float = 0.0, sent: float = 1e6) -> pd.DataFrame:
    losses = [*LOSSES]
    if off_at is not None:
        losses[off_at] *= 1 + off
    steps = range(30, 601, 30)
    found: pd.DataFrame = pd.DataFrame({"step": steps, COLUMN: losses, "wire_bytes": [sent] * len(LOSSES)})
    return found


@pytest.mark.parametrize(
    ("at", "off", "is_near"), [(0, 0.001, True), (0, 0.006, False), (4, 0.006, True), (19, 0.06, False)]
)
def test_roundings_may_grow_and_begin_small(at: int, off: float, is_near: bool) -> None:
    assert (_apart(curve(at, off), curve()) == 0) == is_near


def test_other_bytes_and_other_steps_are_never_near() -> None:
    assert _apart(curve(sent=1.2e6), curve()) == np.inf
    assert _apart(curve().iloc[:19], curve()) == np.inf
