"""Why ranks wait: parts of a wait add up to it, and whoever is late in one part is blamed for that part."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest

from analysis.records.frames import Frames, empty_frames, order_and_type_columns
from analysis.times.attribution import (
    COMMUNICATION,
    PHASES_BY_CAUSE,
    REST,
    mean_wait_ms_by_cause,
    wait_percent_explained,
    wait_s_by_step_and_cause,
)
from tests.conftest import there

RANKS, BLOCKS, PER_BLOCK = 4, 40, 3
PARTS = ("io", "forward", "backward", "select")
TRANSFER_S = 0.002


def recorded(spread_s: Mapping[str, float], begin_s: float = 0.0) -> Frames:
    """Return steps whose ranks take 10 ms for each part and at random up to `spread_s` more.

    Nobody is late elsewhere, unless ranks begin up to `begin_s` apart.
    """
    noise = np.random.default_rng(0)
    rows: list[pd.DataFrame] = []
    for step in range(1 + BLOCKS * PER_BLOCK):
        took = {f"{part}_s": 0.01 + spread_s.get(part, 0.0) * noise.random(RANKS) for part in PARTS}
        arrival = sum(took.values(), begin_s * noise.random(RANKS))
        block = -(-step // PER_BLOCK)  # the first step is before all blocks
        rows.append(pd.DataFrame({
            "key": "k", "rank": range(RANKS), "step": step, "epoch": 1, "block": block, **took,
            "wait_s": arrival.max() - arrival, "transfer_s": TRANSFER_S, "step_s": arrival.max() + TRANSFER_S,
        }))  # fmt: skip
    runs = pd.DataFrame([{"key": "k", "run_id": "r", "group": "g", "timing.warmup_steps": 1, "seed": 0}])
    return empty_frames()._replace(
        runs=order_and_type_columns("runs", runs), steps=order_and_type_columns("steps", pd.concat(rows))
    )


def share(frames: Frames, cause: str) -> float:
    """Return the percentage of the wait that a cause explains."""
    return there(wait_percent_explained(frames, ["k"], cause)).value


def test_the_parts_add_up_to_the_wait() -> None:
    frames = recorded(dict.fromkeys(PARTS, 0.005), begin_s=0.003)
    table = there(wait_s_by_step_and_cause(frames, "k"))
    np.testing.assert_allclose(table[[*PHASES_BY_CAUSE, REST]].sum(axis="columns"), table["wait"], atol=1e-12)
    waits = mean_wait_ms_by_cause(frames, ["k"])
    assert waits[[*PHASES_BY_CAUSE, REST]].sum() == pytest.approx(waits["wait"])


def test_who_is_late_in_one_part_only_is_blamed_for_it_alone() -> None:
    blamed = {"io": "input", "forward": "FP + BP", "backward": "FP + BP", "select": "selection"}
    for part, cause in blamed.items():
        frames = recorded({part: 0.02})
        shares = {each: share(frames, each) for each in (*PHASES_BY_CAUSE, REST)}
        assert shares == pytest.approx({each: 100.0 * (each == cause) for each in shares}, abs=1e-6)
    assert share(recorded({}, begin_s=0.01), REST) == pytest.approx(100)  # which no part measures


def test_of_communication_only_the_wait_is_explained() -> None:
    frames = recorded({"select": 0.02})
    share = wait_percent_explained(frames, ["k"], "selection", COMMUNICATION)
    wait = mean_wait_ms_by_cause(frames, ["k"])["wait"]
    assert there(share).value == pytest.approx(100 * wait / (wait + 1e3 * TRANSFER_S))


def test_phases_that_were_not_timed_explain_nothing() -> None:
    frames = recorded({"select": 0.02})
    frames.steps["forward_s"] = np.nan
    assert wait_s_by_step_and_cause(frames, "k") is None
    assert wait_percent_explained(frames, ["k"], "selection") is None
    assert not len(mean_wait_ms_by_cause(frames, ["k"]))
