"""Items of the other papers' trainings: what their claims say of made-up records, and of the opposite."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.claims import Verdict
from analysis.records.attempts import from_attempts
from analysis.records.frames import Frames, empty, restrict
from analysis.records.parquet import read_parquet, write_parquet
from analysis.records.schema import REGIONS, SLICES
from analysis.records.store import Store
from experiments import figures
from experiments.config.config import Config
from experiments.figures import shi2019_shi_distribution as distribution
from experiments.figures import zhang_stable_sweep as sweep
from experiments.figures.runs import configs_of, more_configs_of
from tests.analysis import synthetic
from tests.conftest import there

LOOKED = ("shi-distribution", "shi-bound", "stable-heatmap")
TRAINED = ("shi-convergence", "stable-sweep", "eghlidi-table1")
TENSOR = "large.weight"


@cache
def all_configs(item: str) -> list[Config]:
    """Of all seeds."""
    return [*configs_of(item, "laptop"), *more_configs_of(item, "laptop")]


def trained(folder: Path, item: str, end: Callable[[Config], tuple[float, float]]) -> Frames:
    """The item's own runs, which end with the accuracy and loss that `end` gives them."""
    store = Store(folder)
    return from_attempts([synthetic.ended(store, config, *end(config)) for config in all_configs(item)])[0]


def looked(folder: Path, looks: Sequence[dict[str, Any]]) -> Frames:
    store = Store(folder)
    return from_attempts([synthetic.looked(store, config, [*looks]) for config in all_configs("shi-bound")])[
        0
    ]


def look(step: int, what: str, of: str, values: dict[float, float]) -> dict[str, Any]:
    return {"step": step, "what": what, "of": of, "xs": [*map(float, values)], "values": [*values.values()]}


def values(bell: bool) -> dict[float, float]:
    """The density of values like a bell with heavy tails, or with two peaks."""
    x = np.linspace(-5.9, 5.9, 60)
    density = np.exp(-np.abs(x) * 1.4) if bell else np.exp(-((np.abs(x) - 1) ** 2))
    return dict(zip(x, density / (density.sum() * (x[1] - x[0])), strict=True))


def looks(bell: bool = True, left_out: float = 0.5, regions: float = 0.9, elements: float = 0.4) -> list[Any]:
    """Values like a bell, or not; what Top-k leaves out, as a share of the bound; the share of regions and of
    elements that is selected again.
    """
    bound = {at: left_out * (1 - at) ** 2 for at in (0.001, 0.01, 0.1)}
    found = [look(0, "size", TENSOR, {0.0: 50_000}), look(0, "size", "all", {0.0: 60_000})]
    for step in (0, 50, 100):
        found += [
            look(step, "histogram", "all", values(bell)),
            look(step, "histogram", TENSOR, values(bell)),
            look(step, "left_out", "all", bound),
            look(step, "heat", TENSOR, {at: 0.01 * at for at in range(SLICES)}),
        ]
        for size in REGIONS:
            again = elements if size == 1 else regions
            found.append(look(step, "kept", f"{TENSOR}/{size}", {10: again, 100: again}))
            found.append(look(step, "shuffled", f"{TENSOR}/{size}", {10: 0.1, 100: 0.1}))
    return found


def words(item: str, frames: Frames, begins: str) -> set[str]:
    """The verdicts on the claims that begin so."""
    found = [each for each in figures.judge(item, frames) if each.claim.text.startswith(begins)]
    assert found, f"{item} has no claim {begins!r}"
    return {each.word for each in found}


def verdict(item: str, frames: Frames, begins: str) -> Verdict:
    (found,) = (each for each in figures.judge(item, frames) if each.claim.text.startswith(begins))
    return found


@pytest.mark.parametrize("item", LOOKED)
def test_items_of_looks_are_drawn_from_records_and_from_parquet(item: str, tmp_path: Path) -> None:
    frames = looked(tmp_path / "runs", looks())
    write_parquet(frames, tmp_path)
    first, second = (figures.tables(item, source) for source in (frames, read_parquet(tmp_path)))
    assert [table.markdown() for table in first] == [table.markdown() for table in second]
    figure = figures.load(item).draw(frames, "laptop")
    assert all(axes.has_data() for axes in figure.axes)
    tasks = {run.settings["task"] for run in figures.load(item).runs("laptop")}
    assert len(figure.axes) % len(tasks) == 0


def test_one_bell_is_told_from_two(tmp_path: Path) -> None:
    one, two = looked(tmp_path / "1", looks()), looked(tmp_path / "2", looks(bell=False))
    (good,), (bad,) = (
        words("shi-distribution", each, "gradient plus residual of every") for each in (one, two)
    )
    assert good != bad
    (near,), (far,) = (
        words("shi-distribution", each, "gradient plus residual of the") for each in (one, two)
    )
    assert near != far


@pytest.mark.parametrize(("size", "counts"), [(distribution.LARGE, True), (distribution.LARGE - 1, False)])
def test_the_tensor_that_is_least_like_a_bell_counts_if_it_is_large(
    tmp_path: Path, size: int, counts: bool
) -> None:
    other = [look(0, "size", "other", {0.0: size}), look(0, "histogram", "other", values(bell=False))]
    frames = looked(tmp_path, [*looks(), *other])
    rises = [distribution.worst_rise(restrict(frames, [key])) for key in frames.runs["key"]]
    assert all((rise > 5) == counts for rise in rises)


def test_near_zero_is_so_at_every_distance() -> None:
    """Of a sharp peak more lies within 0.2 RMS than of a normal distribution, and less within 1."""
    side = [0.5, 0.3, 0.3, 0.25, 0.2, *[0.95 / 6] * 6]  # the density, from 0 outwards
    same = {"key": "a", "step": 0, "what": "histogram", "of": "all"}
    rows = pd.DataFrame([
        same | {"x": sign * (0.1 + 0.2 * at), "value": value}
        for sign in (-1, 1)
        for at, value in enumerate(side)
    ])  # fmt: skip
    run = empty()._replace(looks=rows)
    assert distribution.within(run, 0.2) > distribution.normal_within(0.2)
    assert distribution.above_normal(run) < 0
    assert [distribution.normal_within(edge) for edge in (1.0, 2.0)] == pytest.approx(
        [68.27, 95.45], abs=0.005
    )


def test_a_bound_that_is_exceeded_once_is_refuted(tmp_path: Path) -> None:
    (good,) = words("shi-bound", looked(tmp_path / "1", looks(left_out=0.99)), "Top-k keeps more")
    over = [*looks(left_out=0.5), look(150, "left_out", "all", {0.01: 1.01 * 0.99**2})]
    (bad,) = words("shi-bound", looked(tmp_path / "2", over), "Top-k keeps more")
    assert good != bad


def test_stable_regions_are_more_than_chance_and_more_than_elements(tmp_path: Path) -> None:
    stable = looked(tmp_path / "1", looks())
    noise = looked(tmp_path / "2", looks(regions=0.05, elements=0.4))
    for begins in ("regions of the", "single elements of the"):
        (good,), (bad,) = (words("stable-heatmap", each, begins) for each in (stable, noise))
        assert good != bad


def test_trainings_are_drawn_and_told(tmp_path: Path) -> None:
    for item in TRAINED:
        frames = trained(tmp_path / item, item, lambda config: (70.0, 1.0))
        figure = figures.load(item).draw(frames, "laptop")
        assert all(axes.has_data() for axes in figure.axes)
        (table,) = figures.tables(item, frames)
        assert len(table.frame) == {"shi-convergence": 12, "stable-sweep": 18, "eghlidi-table1": 48}[item]


def test_no_obvious_loss_is_one_point(tmp_path: Path) -> None:
    def end(config: Config) -> tuple[float, float]:
        lost = {"topk": 0.3, "gaussiank": 5.0, "randomk": 9.0}
        return 90 - lost.get(config["method"]["name"], 0), 1.0

    frames = trained(tmp_path, "shi-convergence", end)
    for task in ("FNN-3", "LeNet-5", "small LSTM"):
        topk, gaussian = (
            verdict("shi-convergence", frames, f"{method} loses no obvious accuracy, {task}")
            for method in ("Top-k", "Gaussian-k")
        )
        assert (there(topk.ours).value, there(gaussian.ours).value) == pytest.approx((0.3, 5.0))
        assert topk.word != gaussian.word


def test_the_whole_sweep_tells_small_buckets_and_rare_selection(tmp_path: Path) -> None:
    """Single elements end twice as high as larger buckets, 200 steps between selections three times as high.
    What diverged counts with four times Ok-Topk's loss.
    """

    def end(config: Config) -> tuple[float, float]:
        size, period = config["method"].get("block"), config["method"].get("every")
        own = {"dense": 1.0, "oktopk": 2.0}.get(config["method"]["name"])
        return 50.0, own or 1.25 * (2 if size == 1 else 1) * (3 if period == 200 else 1)

    small, seldom, better, nearly, hurts = (
        there(each.ours) for each in figures.judge("stable-sweep", trained(tmp_path, "stable-sweep", end))
    )
    assert small.value == pytest.approx(2)
    assert seldom.value == pytest.approx(3)
    assert (better.value, nearly.value, hurts.value) == pytest.approx((2 / 1.25, 1.25, 2))

    def far(config: Config) -> tuple[float, float]:
        top1, loss = end(config)
        return top1, 1e9 if config["method"].get("every") == 200 else loss

    _, diverged, *_ = figures.judge("stable-sweep", trained(tmp_path / "far", "stable-sweep", far))
    counted = {1: 8 / 2.5, 10: 8 / 1.25, 100: 8 / 1.25, 500: 8 / 1.25}
    assert there(diverged.ours).value == pytest.approx(np.prod([*counted.values()]) ** (1 / len(counted)))


def test_the_best_cell_of_a_seed_is_chosen_by_the_others(tmp_path: Path) -> None:
    """Each seed has a cell in which it alone trains to a half: chosen for others, it does not help them."""

    def end(config: Config) -> tuple[float, float]:
        if config["method"]["name"] != "stable_topk":
            return 50.0, 1.0
        cell = (config["method"]["block"], config["method"]["every"])
        is_lucky = cell == (1, sweep.PERIODS[config["seed"]])
        return 50.0, 0.5 if is_lucky else 1.0

    _, _, _, nearly, _ = figures.judge("stable-sweep", trained(tmp_path, "stable-sweep", end))
    assert there(nearly.ours).value == pytest.approx(1.0)


def table_1(folder: Path, of_seed: Sequence[float] = (0, 0, 0)) -> Frames:
    """Its trainings: Block-random-k with allReduce loses twice as much, layer-wise is a point above global.

    Args:
        of_seed: what Random-k with allReduce gets besides, layer-wise, with four workers.
    """

    def end(config: Config) -> tuple[float, float]:
        method, size = config["method"], config["workers"]
        own = {"dense": 90.0, "topk": 80.0, "randomk": 75.0, "blockrandomk": 70.0}[method["name"]]
        reduced = method.get("exchange") == "allreduce"
        lost = size * (2 if reduced and method["name"] == "blockrandomk" else 1)
        margin = 1.0 if method.get("scope") == "layer" else 0.0
        if method["name"] == "randomk" and reduced and size == 4:
            margin *= 1 + of_seed[config["seed"]]
        return own - lost + margin, 1.0

    return trained(folder, "eghlidi-table1", end)


@pytest.fixture(scope="module")
def as_printed(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    return table_1(tmp_path_factory.mktemp("table-1"))


def test_each_cell_of_table_1_is_its_own_scheme_scope_and_size(as_printed: Frames) -> None:
    judged = figures.judge("eghlidi-table1", as_printed)
    for begins, top1 in {
        "test accuracy, Standard SGD, layer-wise, W = 8": 82.1,  # seeds are a tenth apart
        "test accuracy, Top-k, layer-wise, W = 1": 80.1,
        "test accuracy, Random-k (allGather), global, W = 4": 71.1,
        "test accuracy, Block-random-k (allReduce), global, W = 2": 66.1,
        "test accuracy, Block-random-k (allGather), layer-wise, W = 2": 69.1,
        "Block-random-k with allReduce, global, loses": 14.0,
        "Block-random-k, layer-wise, loses more": 7.0,
        "Top-k layer-wise ends above": 1.0,
        "Top-k ends above every other sparse scheme, global": 5.0,
        "Random-k ends alike": 0.0,
        "every row ends lower": 7.0,
    }.items():
        (found,) = (each for each in judged if each.claim.text.startswith(begins))
        assert there(found.ours).value == pytest.approx(top1), begins
        assert there(found.ours).n == 3


def test_always_is_said_of_each_seed_and_every_pair(as_printed: Frames, tmp_path: Path) -> None:
    begins = "layer-wise selection ends above global in every pair"
    always = verdict("eghlidi-table1", as_printed, begins)
    once = verdict("eghlidi-table1", table_1(tmp_path, (0, -3, -3)), begins)
    assert there(always.ours).value == pytest.approx(1.0)
    assert there(once.ours).value == pytest.approx((1.0 - 2.0 - 2.0) / 3)
    assert always.word != once.word


def test_the_table_sees_the_images_as_often_whatever_the_number_of_workers() -> None:
    configs = all_configs("eghlidi-table1")
    assert len(configs) == 3 * 44
    assert len({config["train"]["epochs"] for config in configs}) == 1
    assert {config["train"]["epoch_steps"] for config in configs} == {None}
    assert len({config["task"]["lr"] for config in configs}) == 1


def test_the_survey_chooses_rates_by_seed_0_and_compares_seed_by_seed(tmp_path: Path) -> None:
    survey = figures.load("methods")
    tops = {"dense": 70.0, "topk": 60.0, "topk_layerwise": 55.0, "blockrandomk": 50.0}

    def end(config: Config) -> tuple[float, float]:
        method, rate = config["method"], config["task"]["lr"]
        is_first = rate == survey.VARIANTS[survey.label(json.dumps(config, default=dict))].rates[0]
        return tops.get(method["name"], 40.0) + is_first - config["seed"] * (method["name"] == "topk"), 1.0

    frames = trained(tmp_path, "methods", end)
    found = survey.chosen(frames)
    assert list(found) == list(survey.VARIANTS)
    assert {name: each.rate for name, each in found.items()} == {
        name: variant.rates[0] for name, variant in survey.VARIANTS.items()
    }
    assert {len(each.keys) for each in found.values()} == {3}
    close = there(verdict("methods", frames, "Top-k global ends close to dense").ours)
    assert close.n == 3
    assert close.value == pytest.approx(10 + 1, abs=0.01)  # Top-k's seeds lose 0, 1 and 2 points
    assert all(axes.has_data() for axes in survey.draw(frames, "laptop").axes)


@pytest.mark.parametrize(("dense", "word"), [(91.0, "holds"), (89.0, "does not hold")])
def test_the_level_is_asked_of_dense(dense: float, word: str, tmp_path: Path) -> None:
    def end(config: Config) -> tuple[float, float]:
        behind = {"topk": 1.5 if config["method"].get("density") == 0.001 else 0.5, "randomk": 20.0}
        return dense - behind.get(config["method"]["name"], 0), 1.0

    frames = trained(tmp_path, "fig3-level", end)
    level = verdict("fig3-level", frames, "dense reaches the paper's level, 90 % top-1")
    assert there(level.ours).value == pytest.approx(dense - 90, abs=0.2)
    assert level.word == word
    found = {each.claim.id: there(each.ours).value for each in figures.judge("fig3-level", frames)}
    assert found["fig3-level.dense-ends-above"] == pytest.approx(1.5)
    assert found["fig3-level.randomk-ends-below"] == pytest.approx(18.5)
    assert found["fig3-level.denser-is-nearer"] == pytest.approx(1.0)


@pytest.mark.parametrize("item", [*LOOKED, *TRAINED])
def test_without_records_nothing_is_judged_as_measured(item: str) -> None:
    assert {each.word for each in figures.judge(item, empty())} <= {"not run"}
    assert list(islice(figures.load(item).runs("smoke"), 1))
