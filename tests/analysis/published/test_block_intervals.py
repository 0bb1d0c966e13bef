"""Intervals of means of samples that resemble their neighbours, and how often they hold the mean."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.published.block_intervals import (
    BLOCKS,
    autocorrelated_mean_interval,
    combine_independent_estimates,
    jackknife_estimate,
    leave_one_block_out_sums,
)
from analysis.stats import Estimate
from tests.analysis.values import correlated, interval


def test_intervals_hold_the_mean_of_blocks_that_correlate() -> None:
    for r in (0.0, 0.76, 0.88):  # none, and as in the logs
        draws = np.random.default_rng(0)
        intervals = [autocorrelated_mean_interval(correlated(r, BLOCKS, draws)) for _ in range(300)]
        assert 0.91 <= np.mean([low < 0 < high for low, high in intervals]) <= 0.98, r


def test_a_mean_is_that_of_its_blocks() -> None:
    samples = np.random.default_rng(1).normal(5, 1, BLOCKS)
    sums = leave_one_block_out_sums(samples[:, None])[:, 0]
    value = jackknife_estimate(sums / [BLOCKS, *[BLOCKS - 1] * BLOCKS])
    assert value.value == pytest.approx(samples.mean())
    assert interval(value) == pytest.approx(autocorrelated_mean_interval(samples))
    assert (value.n, value.sample_kind) == (BLOCKS, "logged blocks")


def test_what_never_differs_has_no_width_and_bounds_cut() -> None:
    assert interval(jackknife_estimate(np.full(1 + BLOCKS, 3.0))) == (3, 3)
    parts = 99.9 + np.random.default_rng(2).normal(0, 0.1, 1 + BLOCKS)
    assert interval(jackknife_estimate(parts, (0, 100)))[1] == 100


def test_errors_of_a_ratio_add_up_as_squares() -> None:
    above, below = Estimate(100, 97, 103, 40, "logged blocks"), Estimate(50, 48, 52, 138, "windows")
    ratio = combine_independent_estimates(lambda one, other: one / other, above, below)
    low, high = np.hypot(0.06, 2 - 100 / 52), np.hypot(0.06, 100 / 48 - 2)
    assert ratio[:4] == pytest.approx((2, 2 - low, 2 + high, 40))
    assert ratio.sample_kind == "logged blocks"
    with pytest.raises(ValueError, match="no interval"):
        combine_independent_estimates(lambda one: one, Estimate(1.0))
