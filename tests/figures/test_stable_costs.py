"""The table of communication overheads: what is read from records, and what is drawn and judged of it."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest
import torch

import sparsify
from analysis.records.frames import Frames, empty, runs_frame, typed
from experiments import figures
from experiments.figures import _predicted
from experiments.figures import zhang_stable_costs as item
from sparsify import cost
from sparsify.core.selections import Generated, Statistics
from sparsify.replay import Replay
from sparsify.types import Sparse

N = 10_000


def frames() -> Frames:
    """Records as runs leave them, of exchanges that send what the formulas say."""
    rows, steps = list[dict[str, Any]](), list[dict[str, Any]]()
    for size in (2, 8, 64):
        for name, scheme in item.SCHEMES.items():
            key, k = f"{name}{size}", 100
            rows.append({
                "key": key, "run_id": key, "group": f"g{size}", "variant": name, "method.name": name,
                "method.density": None if name == "dense" else 0.01, "task.name": "vector", "workers": size,
                "task.elements": N, "cluster.where": "virtual", "cluster.link.name": "ethernet_10g",
                "cluster.link.alpha_s": 5e-5, "cluster.link.beta_s_per_byte": 8e-10, "simulated": True,
                "timing.mode": "serialised", "timing.warmup_steps": 1, "provenance_json": json.dumps({}),
                "task.batch_size": None,
            })  # fmt: skip
            _, most, messages = cost.published(scheme, N, k, size)
            words = float(most) + item.ANNOUNCED.get(name, 0) * (size - 1)
            for step in range(3):
                sent = {"wire_bytes": 4 * words, "messages": messages, "block": min(step, 1)}
                steps.append({"key": key, "rank": 0, "step": step, "epoch": 0, "step_s": 0.1, **sent})
    return empty()._replace(runs=runs_frame(rows), steps=typed("steps", pd.DataFrame(steps)))


def test_counting_against_a_formula_is_a_law_and_no_claim() -> None:
    assert figures.judge("stable-costs", frames()) == []


def test_a_median_step_is_what_counts() -> None:
    found = frames()
    found.steps.loc[found.steps["block"] == 0, "wire_bytes"] = 1e9  # the first step takes thresholds
    rows = item.counted(found)
    assert (rows.loc[rows["method"] == "dense", "words"] == rows.loc[rows["method"] == "dense", "most"]).all()


def test_it_is_drawn_with_times_that_are_called_simulated() -> None:
    figure = item.draw(frames(), "laptop")
    assert any("simulated" in axes.get_ylabel() for axes in figure.axes)
    assert "*simulated*" in figures.caption("stable-costs", frames(), "laptop")


@pytest.mark.parametrize("name", item.ANNOUNCED)
def test_announcements_are_what_exchanges_send_besides_selections(name: str) -> None:
    """Of nothing selected only lengths travel: in a step that re-uses thresholds."""
    size, method = 4, sparsify.build(name, density=0.01)
    replay = Replay(method, N, size)
    replay.next(Generated(Statistics(0.01, 0.3), N, size))
    nothing = [Sparse(torch.empty(0, dtype=torch.int64), torch.empty(0))] * size
    sent = max(replay.next(nothing, k=100).sent_bytes)
    assert sent == _predicted.WORD * item.ANNOUNCED[name] * (size - 1)
