"""The item straggler: lines through invented steps whose communication is known, and what it measures."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.records.attempts import load_valid_attempts
from analysis.records.frames import Frames
from analysis.records.store import Store
from experiments import figures
from experiments.figures import yoon2022_straggler as straggler
from tests.analysis import synthetic
from tests.analysis.values import interval
from tests.conftest import there

pytestmark = pytest.mark.usefixtures("one_launch_decides")

SLOPE, INTERCEPT_MS = 0.75, 3.0


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    """Return steps whose communication is SLOPE x lateness + INTERCEPT_MS, and a little noise."""
    timing = {"mode": "serialised", "warmup_steps": 2, "span_steps": None}
    store = Store(tmp_path_factory.mktemp("runs"))
    attempt = synthetic.alternated(
        store, ["dense", "topk", "randomk"], blocks=40, block_steps=12, timing=timing
    )
    records = load_valid_attempts([attempt])[0]
    steps = records.steps
    draws = np.random.default_rng(0)
    per_step = pd.Series(64e-3 * draws.random(int(steps["step"].max()) + 1))
    late = (steps["rank"] == 1) * steps["step"].map(per_step)
    excess = steps["step"].map(per_step) / 2  # over the mean of both ranks
    wait = 1e-3 * INTERCEPT_MS + SLOPE * excess + 1e-4 * draws.standard_normal(len(steps))
    return records._replace(steps=steps.assign(late_s=late, wait_s=wait, transfer_s=0.0))


def judged(frames: Frames) -> list[str]:
    """Return the words on the slope, and on what it is caused by."""
    return [verdict.word for verdict in figures.load("straggler").judge(frames)]


def test_slope_and_intercept_are_those_of_the_steps(frames: Frames) -> None:
    for method in straggler.METHODS:
        for estimate, true in (
            (straggler.communication_per_lateness(frames, method), SLOPE),
            (straggler.communication_ms_at_no_lateness(frames, method), INTERCEPT_MS),
        ):
            low, high = interval(estimate)
            assert low < true < high
            assert there(estimate).value == pytest.approx(true, rel=0.01)
            assert there(estimate)[3:5] == (40, "blocks")


def test_a_slope_far_from_the_published_one_is_not_reproduced(frames: Frames) -> None:
    slope, *causes = judged(frames)
    assert slope == "not reproduced"
    assert set(causes) == {"holds"}
    steeper = frames.steps.assign(wait_s=frames.steps["wait_s"] / SLOPE)
    assert judged(frames._replace(steps=steeper))[0] == "reproduced"
    draws = np.random.default_rng(1)
    aimless = frames.steps.assign(wait_s=0.05 * draws.random(len(frames.steps)))
    assert set(judged(frames._replace(steps=aimless))[1:]) == {"does not hold"}
