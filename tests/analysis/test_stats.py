"""Laws of the statistics: intervals cover the truth, runs pair by seed, and n is always given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis import stats
from analysis.pictures import captions
from analysis.records.attempts import from_attempts
from analysis.records.frames import Frames, stack
from analysis.records.steps import breakdown, phase_summary, step_seconds
from analysis.records.store import Store
from analysis.stats import ANY, POSITIVE, SHARE, Mixed, Value, over_units
from tests.analysis import synthetic
from tests.analysis.synthetic import key
from tests.analysis.values import interval
from tests.conftest import there


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    return from_attempts(synthetic.item_store(tmp_path_factory.mktemp("runs"), seeds=3).all_valid())[0]


def learned(frames: Frames, method: str) -> list[str]:
    runs = frames.runs[(frames.runs["workers"] == 8) & (frames.runs["method.name"] == method)]
    return list(runs["key"])


def test_dense_has_no_selection_rather_than_a_selection_of_zero(frames: Frames) -> None:
    assert "select" not in breakdown(frames, [key(frames, "dense")])
    assert (
        stats.of_phases(frames, [key(frames, "dense")], ["select"], lambda seconds: seconds, POSITIVE) is None
    )


def test_throughput_is_samples_of_all_workers_over_the_mean_step(frames: Frames) -> None:
    run = key(frames, "dense", "production")
    speed = there(stats.throughput(frames, [run]))
    assert speed.value == pytest.approx(2 * 32 / step_seconds(frames, run).mean())
    assert (speed.low, speed.n, speed.of) == (None, 1, "launches")


def timed(root: Path, slow: dict[int, float], method: str = "dense") -> tuple[Frames, list[str]]:
    """Runs of these seeds, so many times slower; their keys by seed."""
    store = Store(root)
    made = [synthetic.timed(store, synthetic.config(method, seed=seed), at) for seed, at in slow.items()]
    return from_attempts(made)[0], [attempt.key for attempt in made]


def test_a_slowdown_by_a_known_factor_is_found(tmp_path: Path) -> None:
    machine = {0: 1.0, 1: 1.3, 2: 0.8}  # drifts from repetition to repetition
    fast, base = timed(tmp_path / "a", machine)
    slow, keys = timed(tmp_path / "b", {seed: 1.5 * factor for seed, factor in machine.items()}, "topk")
    frames = stack([fast, slow])
    ratio, plain = (there(stats.slowdown(frames, side, base)) for side in (keys, base))
    own = step_seconds(frames, keys[0]).mean() / step_seconds(frames, base[0]).mean()
    assert ratio.value == pytest.approx(own, rel=0.02)
    assert ratio.half_width < 0.05  # the drift of both cancels
    assert plain.value == pytest.approx(1.0)
    assert plain.n == 3


def test_runs_pair_by_seed_whatever_their_order(tmp_path: Path) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 2.0, 2: 4.0})
    ratio = there(stats.slowdown(frames, keys, list(reversed(keys))))
    assert ratio.value == pytest.approx(1.0)
    assert ratio.half_width == pytest.approx(0.0)


def test_runs_without_a_partner_do_not_count(tmp_path: Path) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 2.0, 2: 4.0})
    assert there(stats.slowdown(frames, keys, keys[:1])) == Value(1.0, n=1, of="launches")
    assert stats.slowdown(frames, keys[1:], keys[:1]) is None
    assert stats.slowdown(frames, [], keys) is None


def test_the_same_number_stands_in_the_bar_and_in_the_table(tmp_path: Path) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 1.4, 2: 2.5}, "topk")
    short = frames.steps["key"].eq(keys[0]) & frames.steps["step"].ge(12)  # one run has fewer steps
    frames = frames._replace(steps=frames.steps[~short])
    value = there(stats.of_phases(frames, keys, ["step"], lambda seconds: seconds, POSITIVE)).value
    assert value == pytest.approx(breakdown(frames, keys)["step"], rel=1e-12)
    assert value == pytest.approx(phase_summary(frames, keys)["mean"]["step"], rel=1e-12)
    parts = breakdown(frames, keys)
    assert parts.drop("step").sum() == pytest.approx(parts["step"])


def in_blocks(frames: Frames, length: int, group: str = "a") -> Frames:
    """The same steps, as if all runs had taken turns in one group of processes."""
    steps = frames.steps.assign(block=(frames.steps["step"] // length).astype(float))
    return frames._replace(steps=steps, runs=frames.runs.assign(group=group))


def test_blocks_of_one_group_are_units_and_pair_by_their_number(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for method in ("dense", "topk"):
        config = synthetic.config(method)
        synthetic.timed(store, config | {"train": config["train"] | {"steps": 200}})
    frames = in_blocks(from_attempts(store.all_valid())[0], 5)
    ratio = there(stats.slowdown(frames, [key(frames, "topk")], [key(frames, "dense")]))
    assert ratio.of == "blocks"
    assert 30 <= ratio.n <= 40
    assert not ratio.decides
    low, high = interval(ratio)
    assert low < ratio.value < high
    select = there(stats.of_phases(frames, [key(frames, "topk")], ["select"], lambda s: 1e3 * s, POSITIVE))
    assert select.of == "blocks"
    assert select.value == pytest.approx(1e3 * breakdown(frames, [key(frames, "topk")])["select"])


def test_variants_that_took_turns_are_compared_block_by_block(tmp_path: Path) -> None:
    store = Store(tmp_path)
    synthetic.alternated(store, ["dense", "topk"], blocks=30)
    frames, _ = from_attempts(store.all_valid())
    keys = dict(zip(frames.runs["variant"], frames.runs["key"], strict=True))
    ratio = there(stats.slowdown(frames, [keys["topk"]], [keys["dense"]]))
    assert (ratio.n, ratio.of, ratio.decides) == (30, "blocks", False)  # block 0 is warm-up
    assert 1.1 < interval(ratio)[0] < ratio.value < interval(ratio)[1] < 1.5


def test_three_groups_of_blocks_count_as_three_launches(tmp_path: Path) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 1.1, 2: 1.2})
    two = in_blocks(frames, 2)
    three = two._replace(runs=two.runs.assign(group=["a", "b", "c"]))
    assert there(stats.throughput(two, keys)).of == "blocks"
    assert there(stats.throughput(three, keys))[3:5] == (3, "launches")


def test_records_without_blocks_among_those_with_some_fall_back_to_launches(tmp_path: Path) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 1.1, 2: 1.2})
    blocks = in_blocks(frames, 2)
    some = blocks.steps["block"].mask(blocks.steps["key"] == keys[0])
    mixed = blocks._replace(steps=blocks.steps.assign(block=some))
    assert there(stats.throughput(mixed, keys)).of == "launches"


def test_neighbouring_blocks_that_resemble_each_other_widen_the_interval() -> None:
    noise = np.random.default_rng(0).normal(size=400)
    drifting = np.zeros(400)
    for i in range(1, 400):
        drifting[i] = 0.8 * drifting[i - 1] + 0.6 * noise[i]  # variance 1, as the noise
    alone, alike = (over_units(series, of="blocks") for series in (noise, drifting))
    widths = [np.diff(interval(value))[0] for value in (alone, alike)]
    assert widths[1] / widths[0] == pytest.approx(3.0, rel=0.3)  # sqrt(1.8 / 0.2)
    assert np.diff(interval(over_units(drifting)))[0] == pytest.approx(widths[0], rel=0.3)  # runs are apart


def test_intervals_of_correlated_blocks_cover_the_truth_about_as_often_as_they_say() -> None:
    noise, hits = np.random.default_rng(1), 0
    for _ in range(200):
        series = np.empty(60)
        series[0] = noise.normal()
        for i in range(1, 60):
            series[i] = 0.5 * series[i - 1] + np.sqrt(0.75) * noise.normal()
        low, high = interval(over_units(series, of="blocks"))
        hits += low <= 0.0 <= high
    assert 175 <= hits <= 200  # 95 % nominal


@pytest.mark.parametrize(
    ("samples", "bounds"),
    [([1.0, 30.0, 2000.0], POSITIVE), ([40.0, 80.0, 99.0], SHARE), ([-99.0, 10.0, 99.0], (-100.0, 100.0))],
)
def test_intervals_stay_within_what_is_possible(samples: list[float], bounds: tuple[float, float]) -> None:
    low, high = interval(over_units(samples, bounds))
    assert bounds[0] < low < high < bounds[1]
    plain = interval(over_units(samples, ANY))
    assert plain[0] < bounds[0] or plain[1] > bounds[1]


def test_a_sample_on_a_bound_cuts_the_interval_there() -> None:
    low, high = interval(over_units([0.0, 1.0, 5.0], POSITIVE))
    assert low == 0.0
    assert 5.0 < high < np.inf


def test_a_ratio_and_its_inverse_say_the_same() -> None:
    ratios = np.array([1.1, 1.7, 2.9])
    there, back = over_units(ratios, POSITIVE), over_units(1 / ratios, POSITIVE)
    assert there.value == pytest.approx(1 / back.value)
    np.testing.assert_allclose(interval(there), [1 / edge for edge in reversed(interval(back))])


@pytest.mark.parametrize("bounds", [ANY, POSITIVE, SHARE])
@pytest.mark.parametrize("of", ["runs", "blocks"])
def test_one_or_two_have_no_interval(bounds: tuple[float, float], of: str) -> None:
    assert over_units([5.0], bounds, of) == Value(pytest.approx(5.0), n=1, of=of)  # type: ignore[arg-type]  # approx
    two = over_units([5.0, 6.0], bounds, of)
    assert (two.low, two.high, two.n, two.decides) == (None, None, 2, False)


def test_three_seeds_have_students_interval() -> None:
    value = over_units([1.0, 2.0, 3.0])
    t = 4.302653  # of 0.975, with 2 degrees of freedom
    assert interval(value)[0] == pytest.approx(2 - t / np.sqrt(3), rel=1e-6)
    assert value.n == 3


def test_a_diverged_run_is_not_left_out_of_its_mean(frames: Frames) -> None:
    keys = learned(frames, "topk")
    last = frames.epochs["key"].eq(keys[0]) & frames.epochs["epoch"].eq(10)
    diverged = frames._replace(epochs=frames.epochs.assign(val_loss=frames.epochs["val_loss"].mask(last)))
    value = there(stats.final(diverged, keys, "val_loss"))
    assert np.isnan(value.value)
    assert not value.decides


@pytest.mark.parametrize("epoch", [1, 5])
def test_of_a_training_that_diverged_nothing_is_taken_for_its_end(frames: Frames, epoch: int) -> None:
    keys, others = learned(frames, "topk"), learned(frames, "dense")
    mine, when = frames.epochs["key"].eq(keys[0]), frames.epochs["epoch"]
    metrics = ["val_loss", "val_top1", "val_top5"]
    epochs = frames.epochs.assign(**frames.epochs[metrics].mask(mine & when.eq(epoch)))[
        ~(mine & when.gt(epoch))
    ]
    runs = frames.runs.assign(diverged=frames.runs["key"].map({keys[0]: 1900.0}))
    diverged = frames._replace(runs=runs, epochs=epochs)
    for column in ("val_loss", "val_top1"):
        assert np.isnan(there(stats.final(diverged, keys, column)).value)
        assert np.isnan(there(stats.final_difference(diverged, keys, others, column)).value)
    curve = stats.curve(diverged, keys, "val_top1")
    assert list(curve["epoch"]) == list(range(1, epoch))
    assert set(curve["n"]) <= {3}
    assert there(stats.ahead_for_good(diverged, others, keys, "val_top1")).value == np.inf
    assert "1 of" in captions.diverged(diverged)
    assert captions.diverged(frames) == ""


@pytest.mark.parametrize(
    ("column", "value"),
    [("timing.mode", "production"), ("provenance.precision", "tf32"), ("provenance.data.digest", "f" * 16),
     ("task.batch_size", 64)],
)  # fmt: skip
def test_runs_that_differ_in_protocol_arithmetic_or_data_are_not_compared(
    tmp_path: Path, column: str, value: object
) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 1.1})
    frames = frames._replace(runs=frames.runs.assign(**{"provenance.precision": "fp32"}))
    assert stats.slowdown(frames, keys[:1], keys[:1])
    other = frames.runs[column].astype(object).mask(frames.runs["key"] == keys[1], value)
    mixed = frames._replace(runs=frames.runs.assign(**{column: other}))
    said = column.replace("provenance.precision", "precision")
    with pytest.raises(Mixed, match=said):
        stats.throughput(mixed, keys)
    with pytest.raises(Mixed, match=said):
        stats.slowdown(mixed, keys[1:], keys[:1])


def test_what_was_multiplied_in_counts_and_not_what_was_asked_for(tmp_path: Path) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 1.1})
    runs = frames.runs.assign(**{"precision": ["fp32", "tf32"], "provenance.precision": "fp32"})
    assert stats.throughput(frames._replace(runs=runs), keys)


def test_trainings_of_different_length_are_not_compared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for method, epochs in (("dense", 10), ("topk", 5)):
        synthetic.learned(store, synthetic.learning_config(method, epochs=epochs))
    frames, _ = from_attempts(store.all_valid())
    with pytest.raises(Mixed, match="steps_total"):
        stats.final_difference(frames, learned(frames, "dense"), learned(frames, "topk"), "val_top1")


def test_sides_may_differ_in_what_is_compared_but_no_side_within_itself(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for workers in (2, 4):
        synthetic.learned(store, synthetic.learning_config(workers=workers))
    runs = from_attempts(store.all_valid())[0]
    few, many = (list(runs.runs["key"][runs.runs["workers"] == workers]) for workers in (2, 4))
    with pytest.raises(Mixed, match="workers"):
        stats.final_difference(runs, few, many, "val_top1")
    assert there(stats.final_difference(runs, few, many, "val_top1", by="workers")).value == 0
    for sides in (([*few, *many], many), (few, [*few, *many])):
        with pytest.raises(Mixed, match="workers"):
            stats.final_difference(runs, *sides, "val_top1", by="workers")


def test_finals_are_of_the_last_epoch_and_differences_pair_by_seed(frames: Frames) -> None:
    epochs = frames.epochs[frames.epochs["key"].isin(learned(frames, "topk"))]
    last = epochs[epochs["epoch"] == 10]["val_top1"]
    topk = there(stats.final(frames, learned(frames, "topk"), "val_top1"))
    assert topk.value == pytest.approx(last.mean())
    shuffled = list(reversed(learned(frames, "dense")))
    # Synthetic seeds share their noise, so pairing by seed leaves none of it.
    gap = there(stats.final_difference(frames, shuffled, learned(frames, "topk"), "val_top1"))
    assert gap.value == pytest.approx(12.0, abs=1e-9)
    assert np.diff(interval(gap)) == pytest.approx(0.0, abs=1e-9)


def test_what_differs_by_powers_of_ten_has_a_geometric_mean_and_ratios_pair_by_seed(frames: Frames) -> None:
    losses = {0: 2.0, 1: 20.0, 2: 2e6}
    seeds = frames.runs.set_index("key")["seed"]
    both = [learned(frames, "dense"), learned(frames, "topk")]
    last = frames.epochs["epoch"].eq(frames.epochs["epoch"].max())
    epochs = frames.epochs.astype({"train_loss": float})
    for keys, factor in zip(both, (3.0, 1.0), strict=True):
        for run in keys:
            epochs.loc[last & epochs["key"].eq(run), "train_loss"] = factor * losses[seeds[run]]
    diverged = frames._replace(epochs=epochs)
    mean = there(stats.final(diverged, both[1], "train_loss", geometric=True))
    assert mean.value == pytest.approx((2.0 * 20.0 * 2e6) ** (1 / 3))
    ratio = there(stats.final_ratio(diverged, list(reversed(both[0])), both[1], "train_loss"))
    assert (ratio.value, *interval(ratio)) == pytest.approx((3.0, 3.0, 3.0))


def test_a_curve_says_how_many_runs_are_in_it(frames: Frames) -> None:
    curve = stats.curve(frames, learned(frames, "dense"), "val_loss")
    assert list(curve["epoch"]) == list(range(1, 11))
    assert set(curve["n"]) == {3}
    assert (curve["low"] < curve["mean"]).all()
    single = stats.curve(frames, learned(frames, "dense")[:1], "val_loss")
    assert single["low"].isna().all()


def test_ahead_for_good_is_after_the_last_time_behind(frames: Frames) -> None:
    dense, topk = learned(frames, "dense"), learned(frames, "topk")
    assert there(stats.ahead_for_good(frames, dense, topk, "val_top1")).value == pytest.approx(390)
    behind = frames.epochs["key"].isin(dense) & (frames.epochs["epoch"] == 6)
    epochs = frames.epochs.assign(val_top1=frames.epochs["val_top1"].mask(behind, 0.0))
    later = frames._replace(epochs=epochs)
    assert there(stats.ahead_for_good(later, dense, topk, "val_top1")).value == pytest.approx(7 * 390)
    assert there(stats.ahead_for_good(frames, topk, dense, "val_top1")).value == np.inf
    assert stats.ahead_for_good(frames, [], dense, "val_top1") is None


def test_a_p_value_says_what_the_interval_says() -> None:
    value = over_units([1.0, 2.0, 3.0])
    low, high = interval(value)
    assert [value.p_value(edge) for edge in (low, high)] == [pytest.approx(0.05)] * 2
    assert value.p_value(2.0) == pytest.approx(1.0)
    ratio = over_units([1.0, 2.0, 4.0], POSITIVE)
    assert [ratio.p_value(edge) for edge in interval(ratio)] == [pytest.approx(0.05)] * 2
    assert ratio.times(3).p_value(3 * 1.5) == pytest.approx(ratio.p_value(1.5))
    assert ratio.more_in_percent().p_value(50.0) == pytest.approx(ratio.p_value(1.5))
    assert Value(1.0).p_value(0.0) == 1.0
    assert Value(np.inf, 3.0, np.inf, 5).p_value(1.0) == 0.0
    assert Value(np.inf, 0.5, np.inf, 5).p_value(1.0) == 1.0
