"""Laws of the statistics: warm-up is dropped by rule, parts add up, intervals cover, and n is always told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis import stats
from analysis.frames import Frames, from_attempts
from analysis.records import Store
from analysis.stats import Value, warm_up
from tests import synthetic


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    return from_attempts(synthetic.item_store(tmp_path_factory.mktemp("runs"), seeds=3).all_valid())[0]


def key(frames: Frames, method: str, mode: str = "serialised", workers: int = 2) -> str:
    runs = frames.runs
    found = runs[
        (runs["method.name"] == method) & (runs["timing.mode"] == mode) & (runs["workers"] == workers)
    ]
    return str(found["key"].iloc[0])


def learned(frames: Frames, method: str) -> list[str]:
    runs = frames.runs[(frames.runs["workers"] == 8) & (frames.runs["method.name"] == method)]
    return list(runs["key"])


def test_steady_steps_lose_only_the_declared_warm_up() -> None:
    assert warm_up([1.0] * 20, at_least=4) == 4


def test_warm_up_lasts_until_the_rolling_median_settles() -> None:
    falling = [10 * 0.8**i for i in range(8)] + [1.0] * 32
    dropped = warm_up(falling, at_least=0)
    assert 3 <= dropped <= 8
    assert np.median(falling[dropped : dropped + stats.WINDOW]) == pytest.approx(1.0, rel=0.5)


def test_warm_up_never_takes_more_than_half() -> None:
    assert warm_up([2.0**-i for i in range(20)], at_least=0) == 10
    assert warm_up([1.0] * 6, at_least=50) == 3
    assert warm_up([], at_least=5) == 0


def test_one_slow_step_is_no_warm_up() -> None:
    times = np.ones(30)
    times[9] = 50.0
    assert warm_up(times, at_least=4) == 4


def test_a_step_lasts_as_long_as_its_slowest_rank(frames: Frames) -> None:
    steps = frames.steps[frames.steps["key"] == key(frames, "topk")]
    slowest = steps.pivot_table(index="step", columns="rank", values="step_s").max(axis="columns")
    np.testing.assert_array_equal(stats.step_seconds(frames, key(frames, "topk")), slowest.iloc[4:])


def test_phases_and_the_unaccounted_add_up_to_the_step(frames: Frames) -> None:
    parts = stats.breakdown(frames, [key(frames, "topk")])
    assert parts.drop("step").sum() == pytest.approx(parts["step"], rel=1e-12)
    assert parts["unaccounted"] == pytest.approx(synthetic.UNACCOUNTED_MS * 1e-3, rel=1e-6)


def test_dense_has_no_selection_rather_than_a_selection_of_zero(frames: Frames) -> None:
    assert "select" not in stats.breakdown(frames, [key(frames, "dense")])
    assert stats.of_phases(frames, [key(frames, "dense")], ["select"], lambda s: s) is None


def test_a_phase_of_one_rank_counts_as_zero_on_the_others(frames: Frames) -> None:
    steps = frames.steps.assign(validate_s=np.where(frames.steps["rank"] == 0, 0.2, np.nan))
    parts = stats.breakdown(frames._replace(steps=steps), [key(frames, "topk")])
    assert parts["validate"] == pytest.approx(0.1)  # of two ranks
    assert parts.drop("step").sum() == pytest.approx(parts["step"])


def test_throughput_is_samples_of_all_workers_over_the_mean_step(frames: Frames) -> None:
    run = key(frames, "dense", "production")
    speed = stats.throughput(frames, [run])
    assert speed.value == pytest.approx(2 * 32 / stats.step_seconds(frames, run).mean())
    assert speed.low < speed.value < speed.high
    assert (speed.n, speed.of) == (16, "steps in blocks of 2")


def test_a_slowdown_by_a_known_factor_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    slow = synthetic.config() | {"seed": 1}
    synthetic.timed(store, synthetic.config())
    synthetic.timed(store, slow, slow=1.5)
    frames, _ = from_attempts(store.all_valid())
    keys = dict(zip(frames.runs["seed"], frames.runs["key"], strict=True))
    ratio = stats.slowdown(frames, [keys[1]], [keys[0]])
    assert ratio.low < 1.5 < ratio.high
    assert ratio.value == pytest.approx(1.5, rel=0.01)


def test_three_runs_make_the_run_the_unit_of_replication(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(3):
        synthetic.timed(store, synthetic.config() | {"seed": seed}, slow=1 + 0.1 * seed)
    frames, _ = from_attempts(store.all_valid())
    keys = list(frames.runs["key"])
    by_run, by_step = stats.throughput(frames, keys), stats.throughput(frames, keys[:1])
    assert (by_run.n, by_run.of) == (3, "runs")
    assert by_step.of.startswith("steps")
    assert by_run.high - by_run.low > by_step.high - by_step.low  # machines differ more than steps


def test_the_same_records_give_the_same_interval(frames: Frames) -> None:
    runs = [key(frames, "topk")]
    assert stats.throughput(frames, runs) == stats.throughput(frames, runs)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    noise, hits = np.random.default_rng(1), 0
    for _ in range(100):
        value = stats._estimate([stats._units([noise.normal(1.0, 0.1, 100)])], lambda mean: mean)
        hits += value.low <= 1.0 <= value.high
    assert 85 <= hits <= 100  # 95 % nominal; a percentile bootstrap of 20 blocks is a little narrow


def test_one_step_or_one_seed_has_no_interval() -> None:
    alone = stats._estimate([stats._units([np.array([2.0])])], lambda mean: mean)
    assert alone == Value(2.0, n=1, of="steps")
    assert stats.over_seeds([5.0]) == Value(5.0, n=1)
    assert stats.over_seeds([5.0, 6.0]) == Value(5.5, n=2)


def test_three_seeds_have_students_interval() -> None:
    value = stats.over_seeds([1.0, 2.0, 3.0])
    assert value.low == pytest.approx(2 - 4.302653 / np.sqrt(3), rel=1e-6)  # t(0.975, 2 degrees of freedom)
    assert value.n == 3


def test_finals_are_of_the_last_epoch_and_differences_pair_by_seed(frames: Frames) -> None:
    epochs = frames.epochs[frames.epochs["key"].isin(learned(frames, "topk"))]
    last = epochs[epochs["epoch"] == 10]["val_top1"]
    assert stats.final(frames, learned(frames, "topk"), "val_top1").value == pytest.approx(last.mean())
    shuffled = list(reversed(learned(frames, "dense")))
    # Synthetic seeds share their noise, so pairing by seed leaves none of it.
    gap = stats.final_difference(frames, shuffled, learned(frames, "topk"), "val_top1")
    assert gap.value == pytest.approx(12.0, abs=1e-9)
    assert gap.high - gap.low == pytest.approx(0.0, abs=1e-9)


def test_a_curve_says_how_many_runs_are_in_it(frames: Frames) -> None:
    curve = stats.curve(frames, learned(frames, "dense"), "val_loss")
    assert list(curve["epoch"]) == list(range(1, 11))
    assert set(curve["n"]) == {3}
    assert (curve["low"] < curve["mean"]).all()
    single = stats.curve(frames, learned(frames, "dense")[:1], "val_loss")
    assert single["low"].isna().all()


def test_ahead_for_good_is_after_the_last_time_behind(frames: Frames) -> None:
    dense, topk = learned(frames, "dense"), learned(frames, "topk")
    assert stats.ahead_for_good(frames, dense, topk, "val_top1").value == 390
    behind = frames.epochs["key"].isin(dense) & (frames.epochs["epoch"] == 6)
    epochs = frames.epochs.assign(val_top1=frames.epochs["val_top1"].mask(behind, 0.0))
    later = frames._replace(epochs=epochs)
    assert stats.ahead_for_good(later, dense, topk, "val_top1").value == 7 * 390
    assert stats.ahead_for_good(frames, topk, dense, "val_top1").value == np.inf
    assert stats.ahead_for_good(frames, [], dense, "val_top1") is None


def test_differences_widen_in_quadrature() -> None:
    difference = Value(10.0, 7.0, 13.0, 5).minus(Value(4.0, 0.0, 8.0, 9))
    assert difference == Value(6.0, 1.0, 11.0, 5)
