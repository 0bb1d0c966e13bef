"""Laws of the statistics: intervals cover the truth, runs pair by seed, and n is always given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis import stats
from analysis.pictures import captions
from analysis.records.attempts import load_attempt
from analysis.records.frames import Frames
from analysis.records.steps import mean_phase_seconds, summarize_phase_seconds, warm_step_seconds_slowest_rank
from analysis.records.store import Store
from analysis.stats import PERCENT, POSITIVE, UNBOUNDED, Estimate, IncomparableRunsError, estimate_mean
from tests.analysis import synthetic
from tests.analysis.synthetic import key
from tests.analysis.values import correlated, interval
from tests.conftest import there


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    return synthetic.frames_of(synthetic.item_store(tmp_path_factory.mktemp("runs"), seeds=3))


def learned(frames: Frames, method: str) -> list[str]:
    runs = frames.runs[(frames.runs["workers"] == 8) & (frames.runs["method.name"] == method)]
    return list(runs["key"])


def test_throughput_is_samples_of_all_workers_over_the_mean_step(frames: Frames) -> None:
    run = key(frames, "dense", "production")
    speed = there(stats.samples_per_second(frames, [run]))
    assert speed.value == pytest.approx(2 * 32 / warm_step_seconds_slowest_rank(frames, run).mean())
    assert (speed.low, speed.n, speed.sample_kind) == (None, 1, "launches")
    assert stats.phase_time(frames, [run], "select") is None, "no selection, rather than one of zero"


def timed(root: Path, slow: dict[int, float], method: str = "dense") -> tuple[Frames, list[str]]:
    """Add runs of these seeds, so many times slower; return all runs and the keys of these by seed."""
    store = Store(root)
    keys = [synthetic.timed(store, synthetic.config(method, seed=seed), slow[seed]).key for seed in slow]
    return synthetic.frames_of(store), keys


def test_a_slowdown_by_a_known_factor_is_found_as_runs_pair_by_seed(tmp_path: Path) -> None:
    machine = {0: 1.0, 1: 1.3, 2: 0.8}  # drifts from repetition to repetition
    _, base = timed(tmp_path, machine)
    frames, keys = timed(tmp_path, {seed: 1.5 * factor for seed, factor in machine.items()}, "topk")
    ratio = there(stats.step_time_ratio(frames, keys, base))
    of_first_seed = (
        warm_step_seconds_slowest_rank(frames, keys[0]).mean()
        / warm_step_seconds_slowest_rank(frames, base[0]).mean()
    )
    assert ratio.value == pytest.approx(of_first_seed, rel=0.02)
    assert ratio.half_width_on_log_scale < 0.05  # the drift of both cancels
    itself = there(stats.step_time_ratio(frames, base, list(reversed(base))))
    assert (itself.value, itself.half_width_on_log_scale, itself.n) == pytest.approx((1.0, 0.0, 3))


def test_runs_without_a_partner_do_not_count(tmp_path: Path) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 2.0})
    assert stats.step_time_ratio(frames, keys, keys[:1]) == Estimate(1.0, n=1, sample_kind="launches")
    assert stats.step_time_ratio(frames, keys[1:], keys[:1]) is None
    assert stats.step_time_ratio(frames, [], keys) is None


def test_the_same_number_stands_in_the_bar_and_in_the_table(tmp_path: Path) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 1.4, 2: 2.5}, "topk")
    short = frames.steps["key"].eq(keys[0]) & frames.steps["step"].ge(12)  # one run has fewer steps
    frames = frames._replace(steps=frames.steps[~short])
    parts, mean = mean_phase_seconds(frames, keys), summarize_phase_seconds(frames, keys)["mean"]
    for phase in ("step", "select"):
        value = there(stats.phase_time(frames, keys, phase, units_per_second=1e3)).value
        assert (1e3 * parts[phase], 1e3 * mean[phase]) == pytest.approx((value, value), rel=1e-12)


def test_blocks_count_as_launches_where_there_are_three_and_where_some_records_have_none(
    tmp_path: Path,
) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 1.1, 2: 1.2})
    blocks = frames.steps["step"] // 2
    for of_steps, groups, n, of in (
        (blocks, "aaa", 9, "blocks"),
        (blocks, "abc", 3, "launches"),
        (blocks.mask(frames.steps["key"] == keys[0]), "aaa", 3, "launches"),
    ):
        runs = frames.runs.assign(group=[*groups])
        found = there(
            stats.samples_per_second(Frames(runs, frames.steps.assign(block=of_steps), *frames[2:]), keys)
        )
        assert (found.n, found.sample_kind) == (n, of)


def test_variants_that_took_turns_are_compared_block_by_block(tmp_path: Path) -> None:
    frames = load_attempt(synthetic.alternated(Store(tmp_path), ["dense", "topk"]))[0]
    dense, topk = sorted(frames.runs["key"])
    ratio = there(stats.step_time_ratio(frames, [topk], [dense]))
    assert (ratio.n, ratio.sample_kind, ratio.can_support_verdict) == (
        30,
        "blocks",
        False,
    )  # block 0 is warm-up
    low, high = interval(ratio)
    assert 1.1 < low < ratio.value < high < 1.5
    select = there(stats.phase_time(frames, [topk], "select"))
    assert select.value == pytest.approx(mean_phase_seconds(frames, [topk])["select"])
    assert select.sample_kind == "blocks"


def test_intervals_of_correlated_blocks_cover_the_truth_about_as_often_as_they_say() -> None:
    draws = np.random.default_rng(1)
    intervals = [
        interval(estimate_mean(correlated(0.5, 60, draws), sample_kind="blocks")) for _ in range(200)
    ]
    assert 175 <= sum(low <= 0.0 <= high for low, high in intervals) < 200  # 95 % nominal
    rising = range(20)
    assert (
        estimate_mean(rising, sample_kind="blocks").degrees_of_freedom,
        estimate_mean(rising).degrees_of_freedom,
    ) == (
        1,
        19,
    )  # two count at least


def test_intervals_stay_within_what_is_possible() -> None:
    for bounds, samples in {
        POSITIVE: [1.0, 30.0, 2000.0],
        PERCENT: [40.0, 80.0, 99.0],
        (1.0, np.inf): [1.01, 2.0, 30.0],
        (-100.0, 100.0): [-99.0, 10.0, 99.0],
    }.items():
        low, high = interval(estimate_mean(samples, bounds))
        assert bounds[0] < low < high < bounds[1]
        plain = interval(estimate_mean(samples))
        assert (np.clip(plain, *bounds) != plain).any()
    low, high = interval(estimate_mean([0.0, 1.0, 5.0], POSITIVE))
    assert low == 0.0, "a sample on a bound cuts the interval there"
    assert 5.0 < high < np.inf


def test_a_ratio_and_its_inverse_say_the_same() -> None:
    ratios = np.array([1.1, 1.7, 2.9])
    ratio = estimate_mean(ratios, POSITIVE)
    inverse = estimate_mean(1 / ratios, POSITIVE)
    assert ratio.value == pytest.approx(1 / inverse.value)
    assert interval(ratio) == pytest.approx([1 / edge for edge in reversed(interval(inverse))])


@pytest.mark.parametrize("of", ["runs", "blocks"])
def test_one_or_two_have_no_interval_and_three_have_students(of: str) -> None:
    for bounds in (UNBOUNDED, POSITIVE, PERCENT):
        for samples in ([5.0], [5.0, 6.0]):
            value = estimate_mean(samples, bounds, of)
            assert value[1:5] == (None, None, len(samples), of)
            assert not value.can_support_verdict
            assert value.value == pytest.approx(np.mean(samples), rel=0.01)
    three = estimate_mean([2.0, 1.0, 3.0], sample_kind=of)
    t = 4.302653  # of 0.975, with 2 degrees of freedom
    assert interval(three) == pytest.approx((2 - t / np.sqrt(3), 2 + t / np.sqrt(3)), rel=1e-6)
    assert (three.n, three.degrees_of_freedom) == (3, 2)


@pytest.mark.parametrize("epoch", [1, 5])
def test_of_a_training_that_diverged_nothing_is_taken_for_its_end(frames: Frames, epoch: int) -> None:
    keys, others = learned(frames, "topk"), learned(frames, "dense")
    epochs = frames.epochs.set_index(["key", "epoch"])
    epochs.loc[(keys[0], epoch), ["val_loss", "val_top1"]] = np.nan
    epochs = epochs.drop([(keys[0], later) for later in range(epoch + 1, 11)]).reset_index()
    runs = frames.runs.assign(diverged=frames.runs["key"].map({keys[0]: 1900.0}))
    diverged = frames._replace(runs=runs, epochs=epochs)
    for column in ("val_loss", "val_top1"):
        end = there(stats.final_mean(diverged, keys, column))
        assert np.isnan(end.value)
        assert not end.can_support_verdict
        assert np.isnan(there(stats.final_difference(diverged, keys, others, column)).value)
    curve = stats.mean_curve(diverged, keys, "val_top1")
    assert list(curve["epoch"]) == list(range(1, epoch))
    assert set(curve["n"]) <= {3}
    assert there(stats.lasting_lead_step(diverged, others, keys, "val_top1")).value == np.inf
    assert "1 of" in captions.divergence_remark(diverged)
    assert captions.divergence_remark(frames) == ""


@pytest.mark.parametrize(
    ("column", "value"),
    [("timing.mode", "production"), ("provenance.precision", "tf32"), ("provenance.data.digest", "f" * 16),
     ("task.batch_size", 64)],
)  # fmt: skip
def test_runs_that_differ_in_protocol_arithmetic_or_data_are_not_compared(
    tmp_path: Path, column: str, value: object
) -> None:
    frames, keys = timed(tmp_path, {0: 1.0, 1: 1.1})
    frames.runs["provenance.precision"] = "fp32"
    asked = frames.runs.assign(precision=["fp32", "tf32"])  # what was multiplied in counts
    assert stats.samples_per_second(frames._replace(runs=asked), keys)
    other = frames.runs[column].astype(object).mask(frames.runs["key"] == keys[1], value)
    mixed = frames._replace(runs=frames.runs.assign(**{column: other}))
    assert stats.step_time_ratio(mixed, keys[:1], keys[:1])
    reason = column.replace("provenance.precision", "precision")
    with pytest.raises(IncomparableRunsError, match=reason):
        stats.samples_per_second(mixed, keys)
    with pytest.raises(IncomparableRunsError, match=reason):
        stats.step_time_ratio(mixed, keys[1:], keys[:1])


def test_trainings_of_different_length_are_not_compared(tmp_path: Path) -> None:
    configs = synthetic.learning_config(epochs=10), synthetic.learning_config("topk", epochs=5)
    frames = synthetic.frames_with(tmp_path, *configs)
    one, other = ([key] for key in frames.runs["key"])
    for compared in (stats.final_difference, stats.final_ratio):
        with pytest.raises(IncomparableRunsError, match="steps_total"):
            compared(frames, one, other, "val_top1")


def test_sides_may_differ_in_what_is_compared_but_no_side_within_itself(tmp_path: Path) -> None:
    configs = (synthetic.learning_config(workers=workers) for workers in (2, 4))
    frames = synthetic.frames_with(tmp_path, *configs)
    few, many = frames.runs["key"]
    with pytest.raises(IncomparableRunsError, match="workers"):
        stats.final_difference(frames, [few], [many], "val_top1")
    assert (
        there(stats.final_difference(frames, [few], [many], "val_top1", may_differ_in="workers")).value == 0
    )
    for sides in (([few, many], [many]), ([few], [few, many])):
        with pytest.raises(IncomparableRunsError, match="workers"):
            stats.final_difference(frames, *sides, "val_top1", may_differ_in="workers")


def test_finals_are_of_the_last_epoch_and_differences_pair_by_seed(frames: Frames) -> None:
    dense, topk = learned(frames, "dense"), learned(frames, "topk")
    epochs = frames.epochs[frames.epochs["key"].isin(topk)]
    last = epochs[epochs["epoch"] == 10]["val_top1"]
    assert there(stats.final_mean(frames, topk, "val_top1")).value == pytest.approx(last.mean())
    # Synthetic seeds share their noise, so pairing by seed leaves none of it.
    gap = there(stats.final_difference(frames, list(reversed(dense)), topk, "val_top1"))
    assert (gap.value, *interval(gap)) == pytest.approx((12.0, 12.0, 12.0), abs=1e-9)
    never_validated = frames._replace(epochs=frames.epochs.assign(val_top1=np.nan))
    assert stats.final_mean(never_validated, topk, "val_top1") is None


def test_what_differs_by_powers_of_ten_has_a_geometric_mean_and_ratios_pair_by_seed(frames: Frames) -> None:
    dense, topk = learned(frames, "dense"), learned(frames, "topk")
    runs = frames.runs.set_index("key").loc[frames.epochs["key"]].set_index(frames.epochs.index)
    losses = runs["seed"].map({0: 2.0, 1: 20.0, 2: 2e6}) * runs["method.name"].map(
        {"dense": 3.0, "topk": 1.0}
    )
    diverged = frames._replace(epochs=frames.epochs.assign(train_loss=losses))
    mean = there(stats.final_mean(diverged, topk, "train_loss", is_geometric=True))
    assert mean.value == pytest.approx((2.0 * 20.0 * 2e6) ** (1 / 3))
    ratio = there(stats.final_ratio(diverged, list(reversed(dense)), topk, "train_loss"))
    assert (ratio.value, *interval(ratio)) == pytest.approx((3.0, 3.0, 3.0))


def test_a_curve_says_how_many_runs_are_in_it(frames: Frames) -> None:
    dense = learned(frames, "dense")
    curve = stats.mean_curve(frames, dense, "val_loss")
    assert list(curve["epoch"]) == list(range(1, 11))
    assert set(curve["n"]) == {3}
    assert (curve["low"] < curve["mean"]).all()
    assert stats.mean_curve(frames, dense[:1], "val_loss")["low"].isna().all()


def test_ahead_for_good_is_after_the_last_time_behind(frames: Frames) -> None:
    dense, topk = learned(frames, "dense"), learned(frames, "topk")
    behind = frames.epochs["key"].isin(dense) & (frames.epochs["epoch"] == 6)
    epochs = frames.epochs.assign(val_top1=frames.epochs["val_top1"].mask(behind, 0.0))
    for found, sides, step in (
        (frames, (dense, topk), 390),
        (frames._replace(epochs=epochs), (dense, topk), 7 * 390),
        (frames, (topk, dense), np.inf),
        (frames, (dense, dense), np.inf),
    ):
        assert there(stats.lasting_lead_step(found, *sides, "val_top1")).value == pytest.approx(step)
    assert stats.lasting_lead_step(frames, [], dense, "val_top1") is None


def test_a_p_value_says_what_the_interval_says() -> None:
    value = estimate_mean([1.0, 2.0, 3.0])
    ratio = estimate_mean([1.0, 2.0, 4.0], POSITIVE)
    for own in (value, ratio):
        for edge in interval(own):
            assert own.two_sided_p_value(edge) == pytest.approx(0.05)
    assert value.two_sided_p_value(2.0) == pytest.approx(1.0)
    assert ratio.scale_by(3).two_sided_p_value(3 * 1.5) == pytest.approx(ratio.two_sided_p_value(1.5))
    assert ratio.percent_above_one().two_sided_p_value(50.0) == pytest.approx(ratio.two_sided_p_value(1.5))
    assert Estimate(1.0).two_sided_p_value(0.0) == Estimate(1.0, 1.0, 1.0, 3).two_sided_p_value(1.0) == 1.0
    assert Estimate(np.inf, 3.0, np.inf, 5).two_sided_p_value(1.0) == 0.0
    assert Estimate(np.inf, 0.5, np.inf, 5).two_sided_p_value(1.0) == 1.0
