"""Selections that are made up have the density, the overlap and the skew that they are asked for."""

from __future__ import annotations

import pytest
import torch

from sparsify.core.synthetic_selections import (
    NUM_SLICES,
    SelectionStatistics,
    SyntheticSelections,
    skewed_shares,
)

N = 1_000_000


def test_they_are_as_asked() -> None:
    for overlap, skew in ((0.0, 1.0), (0.05, 6.0), (0.3, 1.0), (1.0, 1.0), (1.0, 6.0)):
        shares = skewed_shares(skew) if skew > 1 else (1.0,)
        parts = list(SyntheticSelections(SelectionStatistics(0.01, overlap, shares), N, 6))
        for indices, values in parts:
            assert len(indices) == len(values) == 10_000
            assert (indices.diff() > 0).all()  # distinct, ascending, within n
            assert 0 <= indices[0] < indices[-1] < N
        expected = max(overlap, 0.01 * skew if overlap < 0.05 else 0)
        num_workers_by_element = torch.cat([part.indices for part in parts]).bincount(minlength=N)
        num_pairs = (num_workers_by_element * (num_workers_by_element - 1)).sum()
        assert num_pairs / (6 * 5 * 10_000) == pytest.approx(expected, abs=0.03), (overlap, skew)
        counts = torch.stack([part.sum() for part in num_workers_by_element.tensor_split(NUM_SLICES)])
        measured_skew = counts.max() / counts.double().mean()
        assert measured_skew == pytest.approx(skew, abs=0.15 * skew + 0.15), (overlap, skew)


def test_a_worker_selects_the_same_whenever_it_is_asked() -> None:
    statistics = SelectionStatistics(0.01, 0.3)
    first, second, again, other = (
        SyntheticSelections(statistics, N, 4, seed=seed)[rank]
        for rank, seed in ((2, 5), (1, 5), (2, 5), (2, 6))
    )
    assert all(map(torch.equal, first, again))
    assert not first.indices.equal(second.indices)
    assert not first.indices.equal(other.indices)


def test_values_of_an_element_have_one_sign_and_exceed_the_threshold() -> None:
    parts = list(SyntheticSelections(SelectionStatistics(0.01, 0.9), N, 3))
    indices = torch.cat([part.indices for part in parts])
    values = torch.cat([part.values for part in parts])
    signs = torch.zeros(N).index_add_(0, indices, values.sign())
    assert signs.abs().equal(indices.bincount(minlength=N).float())
    assert signs.sum().abs() < 0.1 * len(indices)
    assert values.abs().min() >= 4.6  # ln(1 / 0.01)


def test_shares_fall_to_the_skew_that_was_asked_for() -> None:
    shares = skewed_shares(5.0, 32)
    assert shares[0] * 32 == pytest.approx(5)
    assert sum(shares) == pytest.approx(1)
    assert list(shares) == sorted(shares, reverse=True)
    with pytest.raises(ValueError, match="skew=65"):
        skewed_shares(65.0)


def test_shares_out_of_range_are_refused() -> None:
    for density, overlap in ((0.0, 0.5), (1.5, 0.5), (0.1, -0.1), (0.1, 1.1)):
        with pytest.raises(ValueError, match="out of range"):
            SyntheticSelections(SelectionStatistics(density, overlap), 1000, 2)
