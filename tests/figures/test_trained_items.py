"""Items of the other papers' trainings: what their claims say of made-up records, and of the opposite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis.claims import Verdict
from analysis.records.attempts import from_attempts
from analysis.records.frames import Frames, empty
from analysis.records.parquet import read_parquet, write_parquet
from analysis.records.schema import REGIONS, SLICES
from analysis.records.store import Store
from experiments import figures
from experiments.config.config import Config
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


def looks(bell: bool = True, left_out: float = 0.5, regions: float = 0.9, elements: float = 0.4) -> list[Any]:
    """Values like a bell with heavy tails, or one with two peaks; what Top-k leaves out, as a share of the
    bound; the share of regions and of elements that is selected again.
    """
    x = np.linspace(-5.9, 5.9, 60)
    density = np.exp(-np.abs(x) * 1.4) if bell else np.exp(-((np.abs(x) - 1) ** 2))
    density /= density.sum() * (x[1] - x[0])
    bound = {at: left_out * (1 - at) ** 2 for at in (0.001, 0.01, 0.1)}
    found = [look(0, "size", TENSOR, {0.0: 50_000}), look(0, "size", "all", {0.0: 60_000})]
    for step in (0, 50, 100):
        found += [
            look(step, "histogram", "all", dict(zip(x, density, strict=True))),
            look(step, "left_out", "all", bound),
            look(step, "heat", TENSOR, {at: 0.01 * at for at in range(SLICES)}),
        ]
        for size in REGIONS:
            again = elements if size == 1 else regions
            found.append(look(step, "kept", f"{TENSOR}/{size}", {10: 0.95, 100: again}))
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
    (good,), (bad,) = (words("shi-distribution", each, "the values of the") for each in (one, two))
    assert good != bad
    (near,), (far,) = (words("shi-distribution", each, "most values of the") for each in (one, two))
    assert near != far


def test_a_bound_that_is_exceeded_once_is_refuted(tmp_path: Path) -> None:
    (good,) = words("shi-bound", looked(tmp_path / "1", looks(left_out=0.99)), "Top-k leaves out less")
    over = [*looks(left_out=0.5), look(150, "left_out", "all", {0.01: 1.01 * 0.99**2})]
    (bad,) = words("shi-bound", looked(tmp_path / "2", over), "Top-k leaves out less")
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
        assert len(table.frame) == {"shi-convergence": 12, "stable-sweep": 18, "eghlidi-table1": 24}[item]


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
        above = verdict("shi-convergence", frames, f"Top-k ends above Random-k, {task}")
        assert there(above.ours).value == pytest.approx(8.7)


def test_the_sweep_tells_small_buckets_and_rare_selection(tmp_path: Path) -> None:
    def end(config: Config) -> tuple[float, float]:
        size, period = config["method"].get("block"), config["method"].get("every")
        return 50.0, {"dense": 1.0, "oktopk": 1.2}.get(
            config["method"]["name"]
        ) or 1 + 1 / size + period / 100

    frames = trained(tmp_path, "stable-sweep", end)
    small, seldom, better = (each.ours and each.ours.value for each in figures.judge("stable-sweep", frames))
    assert small == pytest.approx(2.5 / 1.51)
    assert seldom == pytest.approx(3.01 / 1.11)
    assert better == pytest.approx(1.2 / 1.11)


def test_each_cell_of_table_1_is_its_own_scheme_scope_and_size(tmp_path: Path) -> None:
    def end(config: Config) -> tuple[float, float]:
        method, size = config["method"], config["workers"]
        own = {"dense": 90.0, "topk": 80.0, "blockrandomk": 70.0}[method["name"]]
        return own - size + (5 if method.get("scope") == "layer" else 0), 1.0

    frames = trained(tmp_path, "eghlidi-table1", end)
    for begins, top1 in {
        "test accuracy, Standard SGD, layer-wise, W = 8": 82.1,
        "test accuracy, Top-k, layer-wise, W = 1": 84.1,
        "test accuracy, Top-k, global, W = 4": 76.1,
        "test accuracy, Block-random-k (allReduce), global, W = 2": 68.1,
        "Block-random-k with allReduce, global, loses": 7.0,
        "Top-k layer-wise ends above": 5.0,
    }.items():
        found = verdict("eghlidi-table1", frames, begins)
        assert found.ours is not None, begins
        assert found.ours.value == pytest.approx(top1)
        assert found.ours.n == 3


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
