"""Gaussian-k against its public code, and exactly k."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from sparsify.core import host_sync
from sparsify.methods import gaussiank
from sparsify.methods.gaussiank import GaussianGuess, GaussianThreshold
from tests.sparsify.methods.replays import CONTEXT, Array, N, choose, count, follows, run, top


def gaussian_published(acc: Array, k: int) -> Array:
    """hclhkbu/GaussianK-SGD, compression.py, in our words."""
    threshold = acc.mean() - NormalDist().inv_cdf(k / len(acc) / 2) * acc.std(ddof=1)
    for _ in range(3):
        chosen = np.flatnonzero(np.abs(acc) > threshold)
        if len(chosen) < 2 * k / 3:
            threshold *= 0.5
        elif len(chosen) > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return chosen


def test_gaussian_k_as_published_follows_its_code() -> None:
    k = int(0.05 * N)
    follows(
        run("gaussiank", density=0.05, rule="published"),
        lambda acc, step: [gaussian_published(a, k) for a in acc],
    )


def test_bounded_gaussian_k_selects_the_k_largest() -> None:
    k = int(0.05 * N)
    follows(run("gaussiank", density=0.05), lambda acc, step: [top(a, k) for a in acc])


def normal(n: int = 200_000) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


BUCKETS: dict[str, tuple[torch.Tensor, float, float]] = {
    "normal": (normal(), 0.9, 1.2),
    "normal, clamped to one sigma": (normal().clamp(-1, 1), 550, 560),
    "uniform": (torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 2 - 1, 0, 0),
    "a few outliers": (normal() * torch.where(torch.arange(200_000) % 10_000 == 0, 1000.0, 1.0), 0.05, 0.15),
}


@pytest.mark.parametrize(("acc", "low", "high"), BUCKETS.values(), ids=BUCKETS)
def test_the_published_gaussian_rule_misses_k_where_the_bounded_one_does_not(
    acc: torch.Tensor, low: float, high: float
) -> None:
    k = 200
    assert low <= count(GaussianThreshold(), acc, k) / k <= high
    assert count(GaussianGuess(), acc, k) == k


def test_in_a_merged_bucket_with_residuals_the_published_rule_sends_a_small_part_of_k() -> None:
    """20 layers with scales from 0.01 to 1: a tenth of what was asked for, at most."""
    n, k = 30_000, 30  # below the size at which torch starts threads, which would wait for busy cores
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-2, 0, 20).repeat_interleave(n // 20)
    counts: dict[str, list[int]] = {}
    for selector in (GaussianThreshold(), GaussianGuess()):
        residual = torch.zeros(n)
        state = selector.init(residual, CONTEXT)
        counts[type(selector).__name__] = one = []
        for _ in range(100):
            residual.add_(torch.randn(n, generator=generator) * scales)
            chosen = choose(selector, residual, k, state)
            residual[chosen] = 0
            one.append(len(chosen))
    assert np.median(counts["GaussianThreshold"]) < 0.1 * k
    assert set(counts["GaussianGuess"]) == {k}


def test_a_clipped_signal_costs_the_bounded_rule_an_exact_top_k_instead_of_a_flood() -> None:
    acc, k = normal().clamp(-1, 1), 200
    selector = GaussianGuess()
    assert selector.candidates(acc, k, selector.init(acc, CONTEXT)) is None
    assert len(set(choose(selector, acc, k).tolist())) == k


def test_a_normal_bucket_takes_the_bounded_rule_three_host_synchronisations() -> None:
    acc, before = normal(), host_sync.num_syncs()
    count(GaussianGuess(), acc, 200)
    assert host_sync.num_syncs() - before == 3


def test_published_constants_of_gaussian_k() -> None:
    assert gaussiank.PUBLISHED_PASSES == 3
    assert (gaussiank.FEWEST, gaussiank.MOST, gaussiank.DOWN, gaussiank.UP) == (2 / 3, 4 / 3, 0.5, 1.5)
    standard = torch.tensor([-1.0, 1.0], dtype=torch.float64)  # sigma sqrt 2, divided by n - 1
    found = gaussiank.gaussian_threshold(standard, 0.001).item()
    assert found == pytest.approx(3.2905 * math.sqrt(2), rel=1e-4)
