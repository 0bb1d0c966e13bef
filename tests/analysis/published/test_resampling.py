"""Blocks: every iteration is drawn as often, neighbours stay together, and the interval covers the truth."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.published.resampling import block_sums


def test_the_first_row_is_of_the_table_itself() -> None:
    columns = np.arange(12.0).reshape(6, 2)
    assert block_sums(columns, stream=0, block=2, draws=3)[0].tolist() == columns.sum(axis=0).tolist()


def test_blocks_go_round_the_end() -> None:
    """Of five iterations in one block all are drawn, wherever it begins."""
    columns = np.arange(5.0)[:, None]
    assert (block_sums(columns, stream=0, block=5, draws=50) == 10).all()


def test_neighbours_stay_together() -> None:
    """Pairs of +1 and -1 cancel in every block of two that begins at a pair, and nearly in all others."""
    columns = np.tile([1.0, -1.0], 50)[:, None]
    assert np.abs(block_sums(columns, stream=0, block=2, draws=200)).max() == 0


def test_columns_are_drawn_together() -> None:
    values = np.random.default_rng(0).normal(size=200)
    sums = block_sums(np.stack([values, 2 * values], axis=1), stream=0, block=10, draws=100)
    np.testing.assert_allclose(sums[:, 1], 2 * sums[:, 0])


def test_the_same_stream_gives_the_same_draws_and_others_others() -> None:
    columns = np.random.default_rng(0).normal(size=(100, 1))
    once, again, other = (block_sums(columns, stream, block=10, draws=20) for stream in (1, 1, 2))
    assert np.array_equal(once, again)
    assert not np.array_equal(once[1:], other[1:])


def test_the_spread_of_a_mean_is_that_of_correlated_samples() -> None:
    """AR(1) with r = 0.8: the mean of n has the standard error sigma / (1 - r) / sqrt(n), three times that of
    independent samples. Blocks must be long against 1 / (1 - r) = 5.
    """
    n, r = 20_000, 0.8
    noise, series = np.random.default_rng(3).normal(size=n), np.zeros(n)
    for i in range(1, n):
        series[i] = r * series[i - 1] + noise[i]
    means = block_sums(series[:, None], stream=0, block=200, draws=500)[1:] / n
    assert means.std() == pytest.approx(1 / (1 - r) / np.sqrt(n), rel=0.15)


def test_a_block_longer_than_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="a block of 11 iterations is longer than the 10"):
        block_sums(np.zeros((10, 1)), stream=0, block=11)
