"""Intervals of means of samples that resemble their neighbours, and how often they hold the mean."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.published.dependent import BLOCKS, combined, estimate, interval_of_mean, without_each
from analysis.stats import Value
from tests.analysis.values import correlated, interval


def test_intervals_hold_the_mean_of_blocks_that_correlate() -> None:
    for r, least, most in (
        (0.0, 0.94, 1.0),
        (0.76, 0.92, 0.98),
        (0.88, 0.91, 0.98),
    ):  # as in the logs, and none
        draws = np.random.default_rng(0)
        intervals = [interval_of_mean(correlated(r, BLOCKS, draws)) for _ in range(300)]
        assert least <= np.mean([low < 0 < high for low, high in intervals]) <= most, r


def test_the_first_row_is_of_the_table_and_the_others_lack_a_block_each() -> None:
    columns = np.arange(12.0).reshape(6, 2)
    assert without_each(columns, blocks=3).tolist() == [[30, 36], [28, 32], [20, 24], [12, 16]]
    with pytest.raises(ValueError, match="6 iterations can't be cut into 7 blocks"):
        without_each(columns, blocks=7)


def test_a_mean_is_that_of_its_blocks() -> None:
    samples = np.random.default_rng(1).normal(5, 1, BLOCKS)
    sums = without_each(samples[:, None])[:, 0]
    value = estimate(sums / [BLOCKS, *[BLOCKS - 1] * BLOCKS])
    assert value.value == pytest.approx(samples.mean())
    assert interval(value) == pytest.approx(interval_of_mean(samples))
    assert (value.n, value.of) == (BLOCKS, "logged blocks")


def test_what_never_differs_has_no_width_and_bounds_cut() -> None:
    assert interval(estimate(np.full(1 + BLOCKS, 3.0))) == (3, 3)
    parts = 99.9 + np.random.default_rng(2).normal(0, 0.1, 1 + BLOCKS)
    assert interval(estimate(parts, (0, 100)))[1] == 100


def test_errors_of_a_ratio_add_up_as_squares() -> None:
    above, below = Value(100, 97, 103, 40, "logged blocks"), Value(50, 48, 52, 138, "windows")
    ratio = combined(lambda one, other: one / other, above, below)
    assert (ratio.value, ratio.n, ratio.of) == (2, 40, "logged blocks")
    expected = 2 - np.hypot(0.06, 2 - 100 / 52), 2 + np.hypot(0.06, 100 / 48 - 2)
    assert interval(ratio) == pytest.approx(expected)
    with pytest.raises(ValueError, match="no interval"):
        combined(lambda one: one, Value(1.0))
