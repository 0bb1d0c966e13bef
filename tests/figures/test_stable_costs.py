"""The table of communication overheads: what is read from records, and what exchanges announce."""

from __future__ import annotations

import pytest
import torch

import sparsify
from experiments import figures
from experiments.figures import _predicted
from experiments.figures import zhang_stable_costs as item
from sparsify import cost
from sparsify.core.selections import Generated, Statistics
from sparsify.replay import Replay
from sparsify.types import Sparse
from tests.figures.made_up import RecordBuilder

N = 10_000


def test_a_median_step_is_counted_against_a_formula_which_is_no_claim() -> None:
    records = RecordBuilder({
        "task.name": "vector", "task.elements": N, "cluster.where": "virtual", "simulated": True,
        "cluster.link.name": "ethernet_10g", "cluster.link.alpha_s": 5e-5, "timing.warmup_steps": 1,
        "cluster.link.beta_s_per_byte": 8e-10, "timing.mode": "serialised",
    })  # fmt: skip
    for size in (2, 8, 64):
        for name, scheme in item.SCHEMES.items():
            _, most, messages = cost.published(scheme, N, 100, size)
            words = float(most) + item.ANNOUNCED.get(name, 0) * (size - 1)
            usual = {"wire_bytes": 4 * words, "messages": messages, "step_s": 0.1}
            density = None if name == "dense" else 0.01
            settings = {"group": f"g{size}", "variant": name, "workers": size, "method.density": density}
            taking_thresholds = usual | {"wire_bytes": 1e9}
            steps = [taking_thresholds, usual, usual]
            records.add_run(f"{name}{size}", settings | {"method.name": name}, steps, first_block=0)
    frames = records.frames()
    rows = item.counted(frames)
    assert (rows.loc[rows["method"] == "dense", "words"] == rows.loc[rows["method"] == "dense", "most"]).all()
    assert figures.judge("stable-costs", frames) == []
    assert any("simulated" in axes.get_ylabel() for axes in item.draw(frames, "laptop").axes)


@pytest.mark.parametrize("name", item.ANNOUNCED)
def test_announcements_are_what_exchanges_send_besides_selections(name: str) -> None:
    """Of nothing selected only lengths travel: in a step that re-uses thresholds."""
    size, method = 4, sparsify.build(name, density=0.01)
    replay = Replay(method, N, size)
    replay.next(Generated(Statistics(0.01, 0.3), N, size))
    nothing = [Sparse(torch.empty(0, dtype=torch.int64), torch.empty(0))] * size
    sent = max(replay.next(nothing, k=100).sent_bytes)
    assert sent == _predicted.WORD * item.ANNOUNCED[name] * (size - 1)
