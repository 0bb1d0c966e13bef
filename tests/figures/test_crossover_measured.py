"""crossover-measured: where a line of ratios crosses 1, what lies outside the links, what is predicted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.claims import Verdict
from analysis.records.configs import variant_configs
from analysis.records.frames import Frames, empty, keys_of, restrict, runs_frame, typed
from analysis.stats import Mixed
from experiments import figures
from experiments.figures import _crossing
from experiments.figures import survey_crossover_measured as item
from experiments.figures._predicted import ethernet, exchange_s
from experiments.figures.runs import configs_of
from tests.conftest import there

TASK, BATCH, ELEMENTS = "vgg16_cifar10", 8, 14_728_266
GBIT_S = {
    "ethernet_100m": 0.1,
    "ethernet_200m": 0.2,
    "ethernet_500m": 0.5,
    "ethernet_1g": 1,
    "ethernet_2g": 2,
}
DELIVERED = 0.96  # of what is asked for
FORWARD_S, BACKWARD_S, SELECT_S = 0.1, 0.2, {"topk": 0.2, "topk-fused": 0.05}
SLOPE, AT = 0.7, {"topk": 0.4, "topk-fused": 0.8}  # of the ratio in both logarithms, and where it is 1
Line = Callable[[str, float, int], float]  # of method, bandwidth found and launch


def line(method: str, gbit_s: float, launch: int) -> float:
    """Launches cross 5 % apart."""
    return float((gbit_s / (AT[method] * 1.05 ** (launch - 1))) ** SLOPE)


def frames(ratio: Line = line, launches: int = 3, batches: Sequence[int] = (BATCH,)) -> Frames:
    """Launches over each link in which a step of dense takes a second; serialised ones have parts."""
    rows, steps = list[dict[str, Any]](), list[dict[str, Any]]()
    for launch, batch, (link, asked) in (
        (launch, batch, of_link)
        for launch in range(launches)
        for batch in batches
        for of_link in GBIT_S.items()
    ):
        group = f"{link}-{batch}-{launch}"
        shared = {
            "run_id": group, "group": group, "task.name": TASK, "task.batch_size": batch, "workers": 2,
            "seed": launch, "parameters": ELEMENTS, "cluster.where": "netns", "cluster.link.name": link,
            "cluster.link.beta_s_per_byte": 8e-9 / asked, "simulated": False, "timing.warmup_steps": 0,
            "provenance.machine.link.together_gbit_s": DELIVERED * asked, "provenance_json": json.dumps({}),
            "train.validate": "never", "alternate.block_steps": 2, "alternate.limit_min": 1,
            "alternated.half_width": 0.01, "alternated.stopped": "half-width",
        }  # fmt: skip
        parts: dict[str, dict[str, float]] = {item.DENSE: {"forward_s": 1.0}}
        for method in item.SELECTIONS:
            parts[method] = {"forward_s": ratio(method, DELIVERED * asked, launch)}
            serialised = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S, "transfer_s": 0.3}
            parts[f"{method}-serialised"] = {**serialised, "select_s": SELECT_S[method]}
        for name, took in parts.items():
            key = f"{group}-{name}"
            rows.append(shared | {
                "key": key, "variant": name, "method.name": name.partition("-")[0],
                "method.density": None if name == item.DENSE else 0.001,
                "timing.mode": "serialised" if name in item.SERIALISED else "production",
            })  # fmt: skip
            steps += [
                {"key": key, "rank": 0, "step": step, "epoch": 0, "block": 1 + step // 2,
                 "step_s": sum(took.values()), **took}
                for step in range(8)
            ]  # fmt: skip
    return empty()._replace(runs=runs_frame(rows), steps=typed("steps", pd.DataFrame(steps)))


def judged(of: Frames, *words: str) -> Verdict:
    """The verdict of a claim on this task and batch whose id has these words."""
    (found,) = [
        each for each in figures.judge("crossover-measured", of)
        if each.claim.id.partition(".")[2] == ".".join(words)
    ]  # fmt: skip
    return found


# --- the law


@pytest.mark.parametrize("at", [0.1, 0.3, 0.5, 1.7, 2])
def test_a_line_in_both_logarithms_crosses_where_it_is_1(at: float) -> None:
    gbit_s = np.array([*GBIT_S.values()])
    assert _crossing.crossing(gbit_s, (gbit_s / at) ** SLOPE) == pytest.approx(at)


def test_only_the_two_links_around_1_count() -> None:
    gbit_s = [*GBIT_S.values()]
    assert _crossing.crossing(gbit_s, [0.1, 0.8, 0.8, 1.25, 9.0]) == pytest.approx(math.sqrt(0.5))


def test_what_is_faster_or_slower_on_every_link_lies_outside() -> None:
    gbit_s = [*GBIT_S.values()]
    assert _crossing.crossing(gbit_s, [0.1, 0.2, 0.4, 0.6, 0.99]) == _crossing.ABOVE
    assert _crossing.crossing(gbit_s, [1.01, 1.2, 1.3, 1.4, 1.5]) == _crossing.BELOW


def test_ratios_are_made_to_rise_by_least_squares() -> None:
    assert _crossing.rising(np.array([1.0, 2.0, 5.0])) == pytest.approx([1, 2, 5])
    assert _crossing.rising(np.array([1.0, 4.0, 2.0, 6.0, 3.0])) == pytest.approx([1, 3, 3, 4.5, 4.5])
    assert _crossing.rising(np.array([3.0, 2.0, 1.0])) == pytest.approx([2, 2, 2])


# --- of records


def test_each_launch_is_one_estimate_at_the_bandwidths_that_were_found() -> None:
    found = item.crossings(frames(), TASK, BATCH, "topk")
    assert found == pytest.approx({launch: 0.4 * 1.05 ** (launch - 1) for launch in range(3)})
    value = there(_crossing.mean(found))
    assert value.value == pytest.approx(0.4)
    assert (value.n, value.of) == (3, "launches")
    assert there(value.low) < 0.4 < there(value.high)


def test_a_launch_that_lacks_a_link_is_no_estimate() -> None:
    whole = frames()
    lost = whole.runs["group"].eq(f"ethernet_2g-{BATCH}-1")
    part = whole._replace(runs=whole.runs[~lost].reset_index(drop=True))
    assert sorted(item.crossings(part, TASK, BATCH, "topk")) == [0, 2]


def test_at_the_predicted_bandwidth_both_take_as_long() -> None:
    own = item.cell(frames(), TASK, BATCH)
    of = restrict(own, keys_of(own, {"seed": item.seeds(frames(), TASK, BATCH)[0]}))
    for method in item.SELECTIONS:
        parts = there(item.parts(of, method))
        assert parts[:3] == pytest.approx((FORWARD_S, BACKWARD_S, SELECT_S[method]))
        gbit_s = item.predicted_crossing(parts, method)
        assert item.predicted_ratio(parts, method, gbit_s) == pytest.approx(1)
        dense = exchange_s("dense", ELEMENTS, 1.0, 2, ethernet(gbit_s))
        assert dense > BACKWARD_S, "what hides behind backward is less than all"


def equal_at(crossing: float) -> Line:
    """Ratios that are 1 at this bandwidth."""
    return lambda method, gbit_s, launch: (gbit_s / crossing) ** SLOPE


@pytest.mark.usefixtures("one_launch_decides")
def test_the_factor_to_the_prediction_is_at_least_1_either_way() -> None:
    parts = there(item.parts(item.cell(frames(), TASK, BATCH), "topk"))
    predicted = item.predicted_crossing(parts, "topk")
    for times in (1.3, 1 / 1.3):
        value = there(item.off_by(frames(equal_at(predicted * times)), TASK, BATCH, "topk"))
        assert value[:3] == pytest.approx((1.3, 1.3, 1.3))
    noisy = frames(lambda method, gbit_s, launch: (gbit_s / predicted / 1.4 ** (launch - 1)) ** SLOPE)
    value = there(item.off_by(noisy, TASK, BATCH, "topk"))
    assert value[:2] == pytest.approx((1, 1))
    assert there(value.high) > 1.4


def test_without_a_crossing_nothing_is_compared_and_why_is_told() -> None:
    faster = frames(lambda method, gbit_s, launch: 0.5)
    with pytest.raises(Mixed, match=r"above 1.92 Gbit/s in 3 of 3 launches; predicted 1.18"):
        item.off_by(faster, TASK, BATCH, "topk")
    verdict = judged(faster, "fused-higher", "vgg16-8")
    assert (verdict.word, verdict.ours) == ("not comparable", None)
    assert "above 1.92 Gbit/s in 3 of 3 launches" in verdict.reason


def test_of_a_crossing_outside_the_links_the_nearest_counts() -> None:
    of = frames(lambda method, gbit_s, launch: 0.5 if method == "topk-fused" else line(method, gbit_s, 1))
    value = there(item.higher(of, TASK, BATCH, "topk", "topk-fused"))
    assert value.value == pytest.approx(DELIVERED * 2 / AT["topk"])
    below = frames(lambda method, gbit_s, launch: 2.0 if method == "topk" else line(method, gbit_s, 1))
    value = there(item.higher(below, TASK, BATCH, "topk", "topk-fused"))
    assert value.value == pytest.approx(AT["topk-fused"] / (DELIVERED * 0.1))


def test_the_higher_crossing_is_paired_by_launch() -> None:
    value = there(item.higher(frames(), TASK, BATCH, "topk", "topk-fused"))
    assert (value.value, value.low, value.high) == pytest.approx((2, 2, 2))


def test_the_slowest_link_answers_where_bandwidth_is_narrow() -> None:
    verdict = judged(frames(), "narrow", "vgg16-8", "topk")
    assert verdict.claim.text.startswith("over 0.1 Gbit/s, a step of Top-k")
    mean_ratio = (DELIVERED * 0.1 / AT["topk"]) ** SLOPE
    assert there(verdict.ours).value == pytest.approx(1 / mean_ratio)
    assert verdict.claim.answers == ("yoon2022.14",)
    assert {each.word for each in figures.judge("crossover-measured", empty())} == {"not run"}


def test_picture_and_tables_have_each_cell_and_link() -> None:
    of = frames(batches=item.BATCHES)
    figure = item.draw(of, "laptop")
    assert [axes.get_title() for axes in figure.axes] == ["VGG-16, batch 8", "VGG-16, batch 32"]
    crossed, at_links = figures.tables("crossover-measured", of)
    assert len(crossed.frame) == 2 * len(item.SELECTIONS)
    assert list(at_links.frame["found"]) == [DELIVERED * asked for asked in GBIT_S.values()] * 2
    outside = item.table(frames(lambda method, gbit_s, launch: 2.0))[0].frame
    assert list(outside["as long as dense at"]) == [None, None]
    assert set(outside["outside"]) == {"below 0.096 Gbit/s in 3 of 3 launches"}
    assert "density 0.001" in figures.caption("crossover-measured", of, "laptop")
    with pytest.raises(ValueError, match="nothing to draw"):
        item.draw(empty(), "laptop")


@pytest.mark.parametrize("profile", ["smoke", "laptop", "paper"])
def test_overlapped_dense_comes_first_and_has_several_buckets(profile: str) -> None:
    for config in configs_of("crossover-measured", profile):
        dense = variant_configs(config)[item.DENSE]
        assert next(iter(variant_configs(config))) == item.DENSE
        assert dense["overlap"]
        assert (config["cluster"]["where"], config["workers"], config["device"]) == ("netns", 2, "cpu")
        assert dense["method"]["scope"] > 0
