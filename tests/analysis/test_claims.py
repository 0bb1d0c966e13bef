"""Verdicts: each word is reached by data for which it is right, and a flip of the data flips the verdict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from analysis import claims
from analysis.claims import Claim, Kind, judge, reduced
from analysis.frames import Frames, empty, from_attempts
from analysis.records import Store
from analysis.stats import Value
from experiments import figures
from tests import synthetic


def claim(kind: Kind, paper: float | None, tolerance: float, ours: Value | None, **more: Any) -> Claim:
    return Claim("text", paper, "ms", "source", kind, tolerance, "reason.", lambda frames: ours, **more)


def word(judged: Claim, frames: Frames | None = None, scale: str = "") -> str:
    return judge([judged], frames or empty(), scale)[0].text


@pytest.mark.parametrize(
    ("kind", "paper", "tolerance", "ours", "expected"),
    [
        ("absolute", 92.99, 0.6, Value(92.5), "reproduced"),
        ("absolute", 92.99, 0.6, Value(92.5, 92.4, 92.6), "reproduced"),
        ("absolute", 92.99, 0.6, Value(92.5, 92.2, 92.8), "inconclusive"),
        ("absolute", 92.99, 0.6, Value(92.0, 91.9, 92.1), "partly"),
        ("absolute", 92.99, 0.6, Value(80.0, 79.0, 81.0), "not reproduced"),
        ("ratio", 4.67, 0.1, Value(4.5), "reproduced"),
        ("ratio", 4.67, 0.1, Value(5.3), "partly"),
        ("ratio", 4.67, 0.1, Value(1.2, 1.1, 1.3), "not reproduced"),
        ("ordering", 20.54, 5.0, Value(12.0, 11.0, 13.0), "reproduced"),
        ("ordering", 20.54, 5.0, Value(5.5, 4.0, 7.0), "inconclusive"),
        ("ordering", 20.54, 5.0, Value(3.0), "partly"),
        ("ordering", 20.54, 5.0, Value(-6.6), "not reproduced"),
        ("ordering", None, 0.0, Value(0.0), "not reproduced"),
        ("ordering", None, 0.0, Value(math.nan), "inconclusive"),
        ("ordering", None, 0.0, Value(True), "reproduced"),
        ("ordering", None, 0.0, Value(False), "not reproduced"),
        ("shape", 1.47, 2.1, Value(1.5), "reproduced"),
        ("shape", 1.47, 2.1, Value(-3.0), "reproduced"),
        ("shape", 1.47, 2.1, Value(12.0), "not reproduced"),
        ("absolute", 245, 147, Value(math.inf), "not reproduced"),
        ("absolute", 92.99, 0.6, None, "not run"),
    ],
)
def test_each_word_is_reached_by_the_data_that_deserve_it(
    kind: Kind, paper: float | None, tolerance: float, ours: Value | None, expected: str
) -> None:
    assert word(claim(kind, paper, tolerance, ours)) == expected


def test_a_reduced_scale_never_gives_a_bare_word() -> None:
    holds = claim("ordering", 1.0, 0.0, Value(1.0))
    assert word(holds, scale="reduced scale: tiny") == "reproduced (reduced scale: tiny)"
    assert word(claim("ordering", 1.0, 0.0, None), scale="reduced scale: tiny") == "not run"


def test_a_claim_at_paper_scale_is_not_comparable_below_it_but_shows_our_number() -> None:
    accuracy = claim("absolute", 92.99, 0.6, Value(92.9), needs="paper scale")
    assert word(accuracy) == "reproduced"
    (verdict,) = judge([accuracy], empty(), "reduced scale: tiny")
    assert verdict.text == "not comparable"
    assert "92.9 ms" in claims.ours_text(verdict)


def on_gpu(tmp_path: Path, gpu: str, where: str = "local") -> Frames:
    config = synthetic.config()
    config["cluster"] = config["cluster"] | {"where": where}
    attempt = synthetic.timed(Store(tmp_path / gpu / where), config, gpu=gpu)
    return from_attempts([attempt])[0]


def test_a_hardware_number_is_judged_on_that_hardware_only(tmp_path: Path) -> None:
    speed = claim("ratio", 16.86, 0.1, Value(16.0), needs="paper hardware", hardware="A100", timed=True)
    assert word(speed, on_gpu(tmp_path, "NVIDIA A100-SXM4-40GB")) == "reproduced"
    assert word(speed, on_gpu(tmp_path, "NVIDIA H200")) == "not comparable"
    assert word(speed, on_gpu(tmp_path, "NVIDIA A100-SXM4-40GB", "virtual")) == "not comparable"
    assert word(speed, on_gpu(tmp_path, "NVIDIA A100-SXM4-40GB"), "reduced scale: tiny") == "not comparable"


def test_times_of_virtual_ranks_are_called_simulated(tmp_path: Path) -> None:
    frames = on_gpu(tmp_path, "NVIDIA H200", "virtual")
    timed = claim("ordering", None, 0.0, Value(1.0), timed=True)
    accuracy = claim("ordering", None, 0.0, Value(1.0))
    assert word(timed, frames) == "reproduced (simulated times)"
    assert word(accuracy, frames) == "reproduced"
    assert "*simulated*" in claims.ours_text(judge([timed], frames, "")[0])


def test_the_scale_is_told_from_the_records(tmp_path: Path) -> None:
    frames, _ = from_attempts(synthetic.item_store(tmp_path).all_valid())
    learned = frames._replace(runs=frames.runs[frames.runs["workers"] == 8])
    assert reduced(learned, "paper") == ""
    assert (
        reduced(learned, "laptop") == "reduced scale: cnn_cifar10, 8 virtual workers x batch 16, 3900 steps"
    )
    assert reduced(empty(), "laptop") == "reduced scale"


def test_the_table_shows_item_paper_ours_interval_and_n() -> None:
    value = Value(91.0, 90.0, 92.0, 3)
    text = claims.table([("fig3", judge([claim("absolute", 92.99, 0.6, value)], empty(), "")[0])])
    assert (
        text.splitlines()[-1] == "| fig3 | text | 92.99 ms | 91 ms [90, 92] (n = 3 runs) | not reproduced |"
    )


@pytest.mark.parametrize("item", sorted(figures.items()))
def test_without_runs_every_claim_is_not_run(item: str) -> None:
    verdicts = figures.judge(item, empty(), "laptop")
    assert verdicts
    assert {verdict.text for verdict in verdicts} == {"not run"}


@pytest.mark.parametrize("item", sorted(figures.items()))
def test_every_claim_says_where_its_number_is_from_and_why_its_tolerance(item: str) -> None:
    published = figures.load(item).claims()
    for statement in published:
        assert statement.source
        assert statement.reason.endswith(".")
    assert len({statement.text for statement in published}) == len(published)


def verdicts(item: str, frames: Frames) -> dict[str, str]:
    return {verdict.claim.text: verdict.word for verdict in figures.judge(item, frames, "laptop")}


def test_the_verdict_on_random_k_flips_when_the_curves_flip(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for method in ("dense", "topk", "randomk"):
        synthetic.learned(store, synthetic.learning_config(method))
    frames, _ = from_attempts(store.all_valid())
    text = "Random-k (no feedback) ends clearly below Top-k in top-1"
    assert verdicts("fig3", frames)[text] == "reproduced"
    swap = {"topk": "randomk", "randomk": "topk", "dense": "dense"}
    swapped = frames.runs.assign(**{"method.name": frames.runs["method.name"].map(swap)})
    assert verdicts("fig3", frames._replace(runs=swapped))[text] == "not reproduced"


def test_the_verdict_on_speed_flips_when_top_k_gets_faster(tmp_path: Path) -> None:
    text = "dense trains faster than Top-k: how much longer Top-k's iteration is"
    for slow, expected in ((1.0, "reproduced"), (0.5, "not reproduced")):
        store = Store(tmp_path / expected)
        timing = {"mode": "production", "warmup_steps": 4, "span_steps": 0}
        synthetic.timed(store, synthetic.config("dense", timing=timing))
        synthetic.timed(store, synthetic.config("topk", timing=timing), slow=slow)
        frames, _ = from_attempts(store.all_valid())
        assert verdicts("speed", frames)[text] == expected


def test_the_verdict_on_compression_flips_when_selection_dominates(tmp_path: Path) -> None:
    store = Store(tmp_path)
    synthetic.timed(store, synthetic.config("topk"))
    frames, _ = from_attempts(store.all_valid())
    text = "compression dominates Top-k's iteration (its margin over FP + BP)"
    assert verdicts("fig4", frames)[text] == "not reproduced"
    more = 10 * frames.steps["select_s"]
    steps = frames.steps.assign(select_s=more, step_s=frames.steps["step_s"] + 0.9 * more)
    assert verdicts("fig4", frames._replace(steps=steps))[text] == "reproduced"
