"""Laws of the statistics: intervals cover the truth, runs pair by seed, and n is always given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis import stats
from analysis.frames import Frames, from_attempts
from analysis.records import Store
from analysis.stats import Value
from analysis.steps import breakdown, step_seconds
from tests import synthetic
from tests.synthetic import key


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    return from_attempts(synthetic.item_store(tmp_path_factory.mktemp("runs"), seeds=3).all_valid())[0]


def learned(frames: Frames, method: str) -> list[str]:
    runs = frames.runs[(frames.runs["workers"] == 8) & (frames.runs["method.name"] == method)]
    return list(runs["key"])


def found(value: Value | None) -> Value:
    """The value, which must be there."""
    assert value is not None
    return value


def interval(value: Value | None) -> tuple[float, float]:
    """Both ends, which must be there."""
    assert value is not None
    assert value.low is not None
    assert value.high is not None
    return value.low, value.high


def test_dense_has_no_selection_rather_than_a_selection_of_zero(frames: Frames) -> None:
    assert "select" not in breakdown(frames, [key(frames, "dense")])
    assert stats.of_phases(frames, [key(frames, "dense")], ["select"], lambda seconds: seconds) is None


def test_throughput_is_samples_of_all_workers_over_the_mean_step(frames: Frames) -> None:
    run = key(frames, "dense", "production")
    speed = found(stats.throughput(frames, [run]))
    assert speed.value == pytest.approx(2 * 32 / step_seconds(frames, run).mean())
    low, high = interval(speed)
    assert low < speed.value < high
    assert (speed.n, speed.of) == (16, "steps in blocks of 2")


def test_a_slowdown_by_a_known_factor_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    slow = synthetic.config() | {"seed": 1}
    synthetic.timed(store, synthetic.config())
    synthetic.timed(store, slow, slow=1.5)
    frames, _ = from_attempts(store.all_valid())
    keys = dict(zip(frames.runs["seed"], frames.runs["key"], strict=True))
    ratio = found(stats.slowdown(frames, [keys[1]], [keys[0]]))
    low, high = interval(ratio)
    assert low < 1.5 < high
    assert ratio.value == pytest.approx(1.5, rel=0.01)


def test_three_runs_make_the_run_the_unit_of_replication(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for seed in range(3):
        synthetic.timed(store, synthetic.config() | {"seed": seed}, slow=1 + 0.1 * seed)
    frames, _ = from_attempts(store.all_valid())
    keys = list(frames.runs["key"])
    by_run, by_step = found(stats.throughput(frames, keys)), found(stats.throughput(frames, keys[:1]))
    assert (by_run.n, by_run.of) == (3, "runs")
    assert by_step.of.startswith("steps")
    assert np.diff(interval(by_run)) > np.diff(interval(by_step))  # machines differ more than steps


def test_the_same_records_give_the_same_interval(frames: Frames) -> None:
    runs = [key(frames, "topk")]
    assert stats.throughput(frames, runs) == stats.throughput(frames, runs)


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    noise, hits = np.random.default_rng(1), 0
    for _ in range(100):
        units = stats._units([noise.normal(1.0, 0.1, 100)])
        low, high = interval(stats._estimate([units], lambda mean: mean))
        hits += low <= 1.0 <= high
    assert 85 <= hits <= 100  # 95 % nominal; a percentile bootstrap of 20 blocks is a little narrow


def test_one_step_or_one_seed_has_no_interval() -> None:
    alone = stats._estimate([stats._units([np.array([2.0])])], lambda mean: mean)
    assert alone == Value(2.0, n=1, of="steps")
    assert stats.over_seeds([5.0]) == Value(5.0, n=1)
    assert stats.over_seeds([5.0, 6.0]) == Value(5.5, n=2)


def test_three_seeds_have_students_interval() -> None:
    value = stats.over_seeds([1.0, 2.0, 3.0])
    t = 4.302653  # of 0.975, with 2 degrees of freedom
    assert interval(value)[0] == pytest.approx(2 - t / np.sqrt(3), rel=1e-6)
    assert value.n == 3


def test_finals_are_of_the_last_epoch_and_differences_pair_by_seed(frames: Frames) -> None:
    epochs = frames.epochs[frames.epochs["key"].isin(learned(frames, "topk"))]
    last = epochs[epochs["epoch"] == 10]["val_top1"]
    topk = found(stats.final(frames, learned(frames, "topk"), "val_top1"))
    assert topk.value == pytest.approx(last.mean())
    shuffled = list(reversed(learned(frames, "dense")))
    # Synthetic seeds share their noise, so pairing by seed leaves none of it.
    gap = found(stats.final_difference(frames, shuffled, learned(frames, "topk"), "val_top1"))
    assert gap.value == pytest.approx(12.0, abs=1e-9)
    assert np.diff(interval(gap)) == pytest.approx(0.0, abs=1e-9)


def test_a_curve_says_how_many_runs_are_in_it(frames: Frames) -> None:
    curve = stats.curve(frames, learned(frames, "dense"), "val_loss")
    assert list(curve["epoch"]) == list(range(1, 11))
    assert set(curve["n"]) == {3}
    assert (curve["low"] < curve["mean"]).all()
    single = stats.curve(frames, learned(frames, "dense")[:1], "val_loss")
    assert single["low"].isna().all()


def test_ahead_for_good_is_after_the_last_time_behind(frames: Frames) -> None:
    dense, topk = learned(frames, "dense"), learned(frames, "topk")
    assert found(stats.ahead_for_good(frames, dense, topk, "val_top1")).value == 390
    behind = frames.epochs["key"].isin(dense) & (frames.epochs["epoch"] == 6)
    epochs = frames.epochs.assign(val_top1=frames.epochs["val_top1"].mask(behind, 0.0))
    later = frames._replace(epochs=epochs)
    assert found(stats.ahead_for_good(later, dense, topk, "val_top1")).value == 7 * 390
    assert found(stats.ahead_for_good(frames, topk, dense, "val_top1")).value == np.inf
    assert stats.ahead_for_good(frames, [], dense, "val_top1") is None


def test_differences_widen_in_quadrature() -> None:
    difference = Value(10.0, 7.0, 13.0, 5).minus(Value(4.0, 0.0, 8.0, 9))
    assert difference == Value(6.0, 1.0, 11.0, 5)
