"""Items whose times are predicted: what they take from records, and what follows from it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.records.frames import Frames, empty, runs_frame, typed
from experiments import figures
from experiments.figures import _predicted, shi2019_shi_scaling, survey_crossover, zhang_stable_dgc
from experiments.figures._predicted import MODEL, Work, ethernet, exchange_s
from sparsify import cost
from tests.conftest import there

COMPUTE_S = 0.5
SELECT_S = {
    "topk": 0.3, "topk-fused": 0.02, "gaussiank": 0.2, "dgc": 0.1, "randomk-hash": 0.01, "oktopk": 0.05,
}  # fmt: skip
ITEMS = {"stable-dgc": zhang_stable_dgc, "shi-scaling": shi2019_shi_scaling, "crossover": survey_crossover}


def frames() -> Frames:
    """Records of two processes whose methods took turns, as both kinds of runs leave them."""
    rows, steps = list[dict[str, Any]](), list[dict[str, Any]]()
    for name in ("dense", *SELECT_S):
        rows.append({
            "key": name, "run_id": name, "group": "g", "variant": name, "method.name": name.partition("-")[0],
            "method.density": None if name == "dense" else 0.001, "task.name": "vector", "workers": 2,
            "task.elements": MODEL, "cluster.where": "local", "cluster.link.name": "loopback",
            "simulated": False, "timing.mode": "serialised", "timing.warmup_steps": 1, "seed": 0,
            "alternate.block_steps": 3, "alternate.limit_min": 1, "alternated.half_width": 0.04,
            "alternated.stopped": "half-width", "provenance_json": json.dumps({}),
        })  # fmt: skip
        for rank in range(2):
            for step in range(8):
                select_s = SELECT_S.get(name, 0.0) * (1 + 0.01 * step)
                took = {"forward_s": COMPUTE_S / 2, "backward_s": COMPUTE_S / 2, "select_s": select_s,
                        "wait_s": 0.03, "transfer_s": 0.07}  # fmt: skip
                steps.append({
                    "key": name, "rank": rank, "step": step, "epoch": 0, "block": (step + 1) // 2,
                    "step_s": sum(took.values()), **took,
                })  # fmt: skip
    return empty()._replace(runs=runs_frame(rows), steps=typed("steps", pd.DataFrame(steps)))


@pytest.mark.parametrize("item", ITEMS)
def test_it_is_drawn_and_told_as_simulated(item: str) -> None:
    figure = ITEMS[item].draw(frames(), "laptop")
    assert all(axes.has_data() for axes in figure.axes)
    assert any("simulated" in axes.get_ylabel() for axes in figure.axes)
    assert "*Simulated*" in figures.caption(item, frames(), "laptop")
    assert all("imulated" in table.title for table in figures.tables(item, frames()))


@pytest.mark.parametrize("item", ["stable-dgc", "shi-scaling"])
def test_what_is_simulated_is_never_called_reproduced(item: str) -> None:
    words = {verdict.word for verdict in figures.judge(item, frames())}
    assert words <= {"indicated", "not comparable"}
    assert all("simulated" in verdict.claim.text for verdict in figures.judge(item, frames()))


def test_waiting_and_transferring_are_left_out_of_what_was_measured() -> None:
    parts = there(_predicted.measured(frames(), "topk"))
    assert parts.compute_s == pytest.approx(COMPUTE_S)
    assert parts.select_s == pytest.approx(SELECT_S["topk"], rel=0.06)
    twice = there(_predicted.measured(frames(), "topk", 2 * MODEL))
    assert twice.select_s == pytest.approx(2 * parts.select_s)
    assert _predicted.measured(frames(), "sparcml") is None


def test_an_exchange_takes_what_the_published_words_take() -> None:
    link = ethernet(1)
    k, size = int(0.001 * MODEL), 8
    assert exchange_s("topk", MODEL, 0.001, size, link) == pytest.approx(8 * k * (size - 1) * 8e-9 + 3 * 5e-5)
    assert exchange_s("dense", MODEL, 1.0, size, link) == link.seconds(cost.all_reduce(4 * MODEL, size))


@pytest.mark.parametrize("name", survey_crossover.SPARSE)
@pytest.mark.parametrize("workers", survey_crossover.WORKERS)
def test_at_the_break_even_bandwidth_both_take_as_long(name: str, workers: int) -> None:
    gbit_s = survey_crossover.break_even(name, 0.05, 0.0005, workers)
    assert 0 < gbit_s < math.inf
    link = ethernet(gbit_s)
    own = 0.05 + exchange_s(name, MODEL, 0.0005, workers, link)
    assert own == pytest.approx(exchange_s("dense", MODEL, 1.0, workers, link), rel=1e-6)


def test_where_more_is_sent_than_dense_there_is_no_break_even() -> None:
    assert survey_crossover.break_even("topk", 0.05, 0.1, 256) == 0
    assert survey_crossover.break_even("topk", 0.0, 0.0001, 4) == math.inf


def test_the_quickest_is_dense_on_fast_links_and_another_one_on_slow_links() -> None:
    winners = survey_crossover.quickest({"topk": 0.3, "topk-fused": 0.02}, 4)
    assert winners[-1, 0] == 0
    assert winners[0, 0] == 2


def test_a_free_selection_on_a_free_link_scales_perfectly() -> None:
    fast = shi2019_shi_scaling.efficiency(Work(100.0, 0.0), "topk", 1e6)
    assert fast == pytest.approx(100, abs=0.01)
    slow = shi2019_shi_scaling.efficiency(Work(0.5, 0.0), "dense", 1)
    assert (np.diff(slow) < 0).all()


def test_dgc_gains_less_the_faster_the_link_is() -> None:
    parts = Work(0.5, 0.1)
    gains = [zhang_stable_dgc.speedup(parts, link)[2] for link in _predicted.LINKS.values()]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < 1


def test_the_two_items_share_their_runs() -> None:
    assert shi2019_shi_scaling.runs("laptop") == zhang_stable_dgc.runs("laptop")
