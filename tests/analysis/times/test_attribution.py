"""Why ranks wait: parts of a wait add up to it, and whoever is late in one part is blamed for that part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.records.frames import Frames, empty, typed
from analysis.times.attribution import CAUSES, COMMUNICATION, REST, explained, lateness, waits_ms
from tests.conftest import there

RANKS, BLOCKS, PER_BLOCK = 4, 40, 3
PARTS = ("io", "forward", "backward", "select")
TRANSFER_S = 0.002


def recorded(spread_s: Mapping[str, float], begin_s: float = 0.0, seed: int = 0) -> Frames:
    """Steps whose ranks take 10 ms for each part and at random up to `spread_s` more; nobody is late
    elsewhere, unless ranks begin up to `begin_s` apart.
    """
    noise = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for step in range(1 + BLOCKS * PER_BLOCK):
        took = {part: 0.01 + spread_s.get(part, 0.0) * noise.random(RANKS) for part in PARTS}
        arrival = sum(took.values(), begin_s * noise.random(RANKS))
        for rank in range(RANKS):
            phases = {f"{part}_s": times[rank] for part, times in took.items()}
            wait = arrival.max() - arrival[rank]
            block = 0 if step == 0 else 1 + (step - 1) // PER_BLOCK
            phases |= {"wait_s": wait, "transfer_s": TRANSFER_S, "step_s": arrival.max() + TRANSFER_S}
            rows.append({"key": "k", "rank": rank, "step": step, "epoch": 1, "block": block, **phases})
    runs = pd.DataFrame([{"key": "k", "run_id": "r", "group": "g", "timing.warmup_steps": 1, "seed": 0}])
    return empty()._replace(runs=typed("runs", runs), steps=typed("steps", pd.DataFrame(rows)))


def test_the_parts_add_up_to_the_wait() -> None:
    frames = recorded(dict.fromkeys(PARTS, 0.005), begin_s=0.003)
    table = there(lateness(frames, "k"))
    np.testing.assert_allclose(
        table[[*CAUSES, REST]].sum(axis="columns"), table["wait"], rtol=1e-9, atol=1e-12
    )
    waits = waits_ms(frames, ["k"])
    assert waits[[*CAUSES, REST]].sum() == pytest.approx(waits["wait"])


@pytest.mark.parametrize(
    ("part", "cause"),
    [("io", "input"), ("forward", "FP + BP"), ("backward", "FP + BP"), ("select", "selection")],
)
def test_who_is_late_in_one_part_only_is_blamed_for_it_alone(part: str, cause: str) -> None:
    frames = recorded({part: 0.02})
    for each in (*CAUSES, REST):
        share = there(explained(frames, ["k"], each))
        assert share.value == pytest.approx(100 if each == cause else 0, abs=1e-6)


def test_what_no_part_measures_is_the_rest() -> None:
    share = there(explained(recorded({}, begin_s=0.01), ["k"], REST))
    assert share.value == pytest.approx(100)


def test_several_causes_share_the_blame_by_their_spread() -> None:
    """Of two independent spreads, one three times as wide as the other, the wider explains most."""
    frames = recorded({"select": 0.03, "backward": 0.01})
    selection, passes = (there(explained(frames, ["k"], cause)) for cause in ("selection", "FP + BP"))
    assert selection.value + passes.value == pytest.approx(100)
    assert there(selection.low) > 50 > passes.value > 0
    assert (selection.n, selection.of) == (BLOCKS, "blocks")


def test_of_communication_only_the_wait_is_explained() -> None:
    frames = recorded({"select": 0.02})
    share = explained(frames, ["k"], "selection", COMMUNICATION)
    wait = waits_ms(frames, ["k"])["wait"]
    assert there(share).value == pytest.approx(100 * wait / (wait + 1e3 * TRANSFER_S))


def test_where_everybody_waits_for_a_rank_that_is_late_by_chance_a_slow_selection_is_not_blamed() -> None:
    """All ranks select for long, but equally long: that is no reason to wait."""
    frames = recorded({"backward": 0.02})
    frames.steps["select_s"] += 0.5
    share = there(explained(frames, ["k"], "selection"))
    assert share.value == pytest.approx(0, abs=1e-6)


def test_phases_that_were_not_timed_explain_nothing() -> None:
    frames = recorded({"select": 0.02})
    frames.steps[["forward_s", "backward_s"]] = np.nan
    assert lateness(frames, "k") is None
    assert explained(frames, ["k"], "selection") is None
    assert not len(waits_ms(frames, ["k"]))
