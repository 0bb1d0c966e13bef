"""Intervals of means of samples that resemble their neighbours, and how often they hold the mean."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.published import rederived
from analysis.published.dependent import BLOCKS, combined, estimate, interval_of_mean, without_each
from analysis.published.rederived import JOB
from analysis.stats import Value
from tests.analysis.values import interval


def series(r: float, n: int, draws: np.random.Generator) -> np.ndarray:
    """AR(1) with mean 0 and variance 1."""
    noise, found = draws.normal(size=n), np.empty(n)
    found[0] = noise[0]
    for i in range(1, n):
        found[i] = r * found[i - 1] + np.sqrt(1 - r**2) * noise[i]
    return found


# Correlations as of blocks of the logs, and none; 600 series give the coverage to a point or so.
@pytest.mark.parametrize(("r", "least", "most"), [(0.0, 0.95, 0.99), (0.76, 0.93, 0.97), (0.88, 0.92, 0.97)])
def test_intervals_hold_the_mean_of_blocks_that_correlate(r: float, least: float, most: float) -> None:
    draws = np.random.default_rng(0)
    bounds = np.array([interval_of_mean(series(r, BLOCKS, draws)) for _ in range(600)])
    held = ((bounds[:, 0] < 0) & (bounds[:, 1] > 0)).mean()
    assert least - 0.01 <= held <= most + 0.01


@pytest.mark.parametrize(("gpu", "r"), [("A100", 0.76), ("V100", 0.88)])
def test_blocks_of_compression_correlate_so(gpu: str, r: float) -> None:
    rests = rederived.compression_ms(JOB[gpu, "topk"])[1:]
    apart = rests.mean() - rests
    assert (apart[1:] * apart[:-1]).sum() / (apart**2).sum() == pytest.approx(r, abs=0.07)


def test_an_interval_of_blocks_is_wider_than_one_of_independent_ones() -> None:
    for gpu, times in (("A100", 3), ("V100", 3)):
        parts = rederived.compression_ms(JOB[gpu, "topk"])
        low, high = interval(estimate(parts))
        blocks = (BLOCKS - 1) * (parts[1:].mean() - parts[1:])
        independent = 2 * 1.96 * blocks.std(ddof=1) / np.sqrt(BLOCKS)
        assert high - low > times * independent


def test_the_first_row_is_of_the_table_and_the_others_lack_a_block_each() -> None:
    columns = np.arange(12.0).reshape(6, 2)
    sums = without_each(columns, blocks=3)
    assert sums.tolist() == [[30, 36], [28, 32], [20, 24], [12, 16]]


def test_more_blocks_than_iterations_are_refused() -> None:
    with pytest.raises(ValueError, match="10 iterations can't be cut into 11 blocks"):
        without_each(np.zeros((10, 1)), blocks=11)


def test_a_mean_is_that_of_its_blocks() -> None:
    samples = np.random.default_rng(1).normal(5, 1, BLOCKS)
    sums = without_each(np.stack([samples, np.ones(BLOCKS)], axis=1))
    value = estimate(sums[:, 0] / sums[:, 1])
    low, high = interval(value)
    expected = interval_of_mean(samples)
    assert value.value == pytest.approx(samples.mean())
    assert (low, high) == pytest.approx(expected)
    assert (value.n, value.of) == (BLOCKS, "logged blocks")


def test_what_never_differs_has_no_width_and_bounds_cut() -> None:
    assert interval(estimate(np.full(1 + BLOCKS, 3.0))) == (3, 3)
    parts = 99.9 + np.random.default_rng(2).normal(0, 0.1, 1 + BLOCKS)
    assert interval(estimate(parts, (0, 100)))[1] == 100


def test_errors_of_a_ratio_add_up_as_squares() -> None:
    above, below = Value(100, 97, 103, 40, "logged blocks"), Value(50, 48, 52, 138, "windows")
    ratio = combined(lambda one, other: one / other, above, below)
    low, high = interval(ratio)
    assert ratio.value == 2
    assert (ratio.n, ratio.of) == (40, "logged blocks")
    assert low == pytest.approx(2 - np.hypot(0.06, 2 - 100 / 52))
    assert high == pytest.approx(2 + np.hypot(0.06, 100 / 48 - 2))


def test_a_value_without_an_interval_can_not_be_combined() -> None:
    with pytest.raises(ValueError, match="no interval"):
        combined(lambda one: one, Value(1.0))
