"""Selections that are made up have the density, the overlap and the skew that they are asked for."""

from __future__ import annotations

import pytest
import torch

from sparsify.core.selections import Generated, Statistics, measured, skewed
from sparsify.types import Sparse

N = 1_000_000


@pytest.mark.parametrize("overlap", [0.0, 0.05, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("skew", [1.0, 6.0])
def test_they_are_as_asked(overlap: float, skew: float) -> None:
    wanted = Statistics(0.01, overlap, skewed(skew) if skew > 1 else (1.0,))
    parts = list(Generated(wanted, N, 6))
    found = measured(parts, N)
    assert {len(part.indices) for part in parts} == {10_000}
    assert all(bool((part.indices.diff() > 0).all()) for part in parts)  # distinct, ascending, within n
    assert all(int(part.indices.min()) >= 0 and int(part.indices.max()) < N for part in parts)
    assert found.overlap == pytest.approx(max(overlap, 0.01 * skew if overlap < 0.05 else 0), abs=0.03)
    assert found.skew == pytest.approx(skew, abs=0.15 * skew + 0.15)


def test_the_union_grows_as_the_beta_binomial_has_it() -> None:
    """Of 16 workers at overlap 0.3: n E[1 - (1-p)^16] for Beta-distributed popularities."""
    density, overlap, size = 0.01, 0.3, 16
    together = (1 - overlap) / (overlap - density)
    a, b = density * together, (1 - density) * together
    missed = 1.0
    for worker in range(size):
        missed *= (b + worker) / (a + b + worker)
    parts = list(Generated(Statistics(density, overlap), N, size))
    union = torch.cat([part.indices for part in parts]).unique().numel()
    assert union == pytest.approx(N * (1 - missed), rel=0.03)


def test_a_worker_selects_the_same_whenever_it_is_asked() -> None:
    parts = Generated(Statistics(0.01, 0.3), N, 4, seed=5)
    first, again = parts[2], Generated(Statistics(0.01, 0.3), N, 4, seed=5)[2]
    assert first.indices.equal(again.indices)
    assert first.values.equal(again.values)
    assert not first.indices.equal(parts[1].indices)
    assert not first.indices.equal(Generated(Statistics(0.01, 0.3), N, 4, seed=6)[2].indices)


def test_values_of_an_element_have_one_sign_and_exceed_the_threshold() -> None:
    parts = list(Generated(Statistics(0.01, 0.9), N, 3))
    signs = torch.zeros(N)
    for part in parts:
        signs.index_add_(0, part.indices, part.values.sign())
        assert float(part.values.abs().min()) >= 4.6  # ln(1 / 0.01)
    counts = torch.zeros(N)
    for part in parts:
        counts.index_add_(0, part.indices, torch.ones(len(part.indices)))
    assert signs.abs().equal(counts)


def test_overlap_and_skew_of_known_selections() -> None:
    parts = [Sparse(torch.tensor(chosen), torch.ones(4)) for chosen in ([0, 1, 2, 3], [2, 3, 4, 63])]
    found = measured(parts, 64)
    assert found.density == 4 / 64
    assert found.overlap == 0.5
    assert found.skew == pytest.approx(64 * 2 / 8)


def test_shares_fall_to_the_skew_that_was_asked_for() -> None:
    shares = skewed(5.0, 32)
    assert shares[0] * 32 == pytest.approx(5)
    assert sum(shares) == pytest.approx(1)
    assert list(shares) == sorted(shares, reverse=True)


@pytest.mark.parametrize("statistics", [(0.0, 0.5), (1.5, 0.5), (0.1, -0.1), (0.1, 1.1)])
def test_shares_out_of_range_are_refused(statistics: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        Generated(Statistics(*statistics), 1000, 2)


def test_a_skew_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="skew=65"):
        skewed(65.0)
    with pytest.raises(ValueError, match="two workers"):
        measured([Sparse(torch.tensor([1]), torch.ones(1))], 10)
