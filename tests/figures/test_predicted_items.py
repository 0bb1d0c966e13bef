"""Items whose times are predicted: what they take from records, and what follows from it."""

from __future__ import annotations

import math

import pytest
import torch

import sparsify
from analysis.records.frames import Frames
from experiments import figures
from experiments.figures import _predicted, zhang_stable_costs
from experiments.figures._predicted import VGG16_PARAMETERS, ethernet_link, predicted_exchange_s
from sparsify import cost
from sparsify.core.synthetic_selections import SelectionStatistics, SyntheticSelections
from sparsify.replay import ExchangeReplay
from sparsify.types import SparseVector
from tests.conftest import there
from tests.figures.made_up import TURNS, RecordBuilder, page, settings_of

COMPUTE_S = 0.5
SELECT_S = {
    "topk": 0.3, "topk-fused": 0.02, "gaussiank": 0.2, "dgc": 0.1, "randomk-hash": 0.01, "oktopk": 0.05,
}  # fmt: skip


def frames() -> Frames:
    """Return records of two processes whose methods took turns, as both kinds of runs leave them."""
    words = f"""
    group=g task.name=vector workers=2 task.elements={VGG16_PARAMETERS}
    cluster.where=local cluster.link.name=loopback timing.mode=serialised timing.warmup_steps=1
    """
    records = RecordBuilder(TURNS, settings_of(words))
    for name, select_s in {"dense": 0.0, **SELECT_S}.items():
        density = None if name == "dense" else 0.001
        settings = {"variant": name, "method.name": name.partition("-")[0], "method.density": density}
        parts = {"forward_s": COMPUTE_S / 2, "backward_s": COMPUTE_S / 2, "wait_s": 0.03, "transfer_s": 0.07}
        steps = [parts | {"select_s": select_s * (1 + 0.01 * step)} for step in range(8)]
        records.add_run(name, settings, steps, steps, block_steps=2, first_block=0)
    return records.frames()


@pytest.mark.parametrize("item", ["stable-dgc", "shi-scaling"])
def test_what_is_simulated_is_drawn_and_told_as_such_and_never_called_reproduced(item: str) -> None:
    figure = figures.load(item).draw(frames(), "laptop")
    assert any("simulated" in axes.get_ylabel() for axes in figure.axes)
    assert "*Simulated*" in page(item, frames())
    for verdict in figures.load(item).judge(frames()):
        assert verdict.word in ("indicated", "not comparable")
        assert "simulated" in verdict.claim.text


def test_waiting_and_transferring_are_left_out_of_what_was_measured() -> None:
    for elements, times in ((VGG16_PARAMETERS, 1), (2 * VGG16_PARAMETERS, 2)):
        parts = there(_predicted.measured_compute_and_select(frames(), "topk", elements))
        assert parts.select_s == pytest.approx(times * SELECT_S["topk"], rel=0.06)
    assert there(_predicted.measured_compute_and_select(frames(), "topk")).compute_s == pytest.approx(
        COMPUTE_S
    )
    assert _predicted.measured_compute_and_select(frames(), "sparcml") is None


def test_an_exchange_takes_what_the_published_words_take() -> None:
    link = ethernet_link(1)
    k, size = int(0.001 * VGG16_PARAMETERS), 8
    assert predicted_exchange_s("topk", VGG16_PARAMETERS, 0.001, size, link) == pytest.approx(
        8 * k * (size - 1) * 8e-9 + 3 * 5e-5
    )
    assert predicted_exchange_s("dense", VGG16_PARAMETERS, 1.0, size, link) == link.transfer_seconds(
        cost.all_reduce(4 * VGG16_PARAMETERS, size)
    )
    sent = 4 * 2 * 10_000 * (size - 1) // size  # of values without indices
    took_s = predicted_exchange_s("stable_topk", 1_000_000, 0.01, size, link)
    assert took_s == pytest.approx(6 * _predicted.ALPHA_S + sent * 8e-9)


@pytest.mark.parametrize("name", zhang_stable_costs.ANNOUNCED)
def test_announcements_are_what_exchanges_send_besides_selections(name: str) -> None:
    """Where nothing is selected, only lengths travel: in a step that re-uses thresholds."""
    size, method = 4, sparsify.build(name, density=0.01)
    replay = ExchangeReplay(method, 10_000, size)
    replay.replay_step(SyntheticSelections(SelectionStatistics(0.01, 0.3), 10_000, size))
    nothing = [SparseVector(torch.empty(0, dtype=torch.int64), torch.empty(0))] * size
    sent = max(replay.replay_step(nothing, k=100).sent_bytes)
    assert sent == _predicted.WORD_BYTES * zhang_stable_costs.ANNOUNCED[name] * (size - 1)


def test_at_the_break_even_bandwidth_both_take_as_long() -> None:
    for name in ("topk", "randomk-hash", "oktopk"):
        for workers in (4, 32, 256):
            gbit_s = _predicted.predicted_break_even_gbit_s(name, 0.05, 0.0005, workers)
            assert 0 < gbit_s < math.inf
            link = ethernet_link(gbit_s)
            method_s = 0.05 + predicted_exchange_s(name, VGG16_PARAMETERS, 0.0005, workers, link)
            assert method_s == pytest.approx(
                predicted_exchange_s("dense", VGG16_PARAMETERS, 1.0, workers, link), rel=1e-6
            )
    # Where more is sent than dense, and where selecting takes no time:
    assert _predicted.predicted_break_even_gbit_s("topk", 0.05, 0.1, 256) == 0
    assert _predicted.predicted_break_even_gbit_s("topk", 0.0, 0.0001, 4) == math.inf
