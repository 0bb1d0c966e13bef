"""Intervals of means of samples that resemble their neighbours, and how often they hold the mean."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.published.dependent import BLOCKS, combined, estimate, interval_of_mean, without_each
from analysis.stats import Value
from tests.analysis.values import correlated, interval


def test_intervals_hold_the_mean_of_blocks_that_correlate() -> None:
    for r in (0.0, 0.76, 0.88):  # none, and as in the logs
        draws = np.random.default_rng(0)
        intervals = [interval_of_mean(correlated(r, BLOCKS, draws)) for _ in range(300)]
        assert 0.91 <= np.mean([low < 0 < high for low, high in intervals]) <= 0.98, r


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
    low, high = np.hypot(0.06, 2 - 100 / 52), np.hypot(0.06, 100 / 48 - 2)
    assert ratio[:4] == pytest.approx((2, 2 - low, 2 + high, 40))
    assert ratio.of == "logged blocks"
    with pytest.raises(ValueError, match="no interval"):
        combined(lambda one: one, Value(1.0))
