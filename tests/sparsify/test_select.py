"""Selectors, part by part; and samples without replacement, `select.sample`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsify
from sparsify.select import BlockRandomK, FirstK, RandomK, Selector, TopK, sample_indices
from sparsify.types import BucketContext
from tests.sparsify.laws import ALONE, live

CPU = torch.device("cpu")
CONTEXT = BucketContext(seed=0, rank=0, bucket=0)
SELECTORS = [
    TopK(), RandomK(), RandomK(shared=True), RandomK(sampling="permutation"), BlockRandomK(),
    BlockRandomK(aligned=True), FirstK(),
]  # fmt: skip


def choose(selector: Selector, acc: Tensor, k: int, state: object) -> Tensor:
    return selector.select(acc, k, ALONE, state).indices


def check_distinct(chosen: Tensor, n: int, k: int) -> None:
    assert chosen.shape == (k,)
    assert len(chosen.unique()) == k
    assert 0 <= chosen.min() <= chosen.max() < n


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_indices_are_distinct_and_in_range(selector: Selector) -> None:
    acc = torch.randn(100, generator=torch.Generator().manual_seed(0))
    for k in (1, 7, 100):
        state = selector.init(acc, CONTEXT)
        for _ in range(3):
            check_distinct(choose(selector, acc, k, state), 100, k)
    with pytest.raises(ValueError, match="k=101 elements can't be chosen of 100"):
        choose(selector, acc, 101, selector.init(acc, CONTEXT))


@pytest.mark.parametrize("selector", [RandomK(), RandomK(sampling="permutation")], ids=repr)
def test_randomk_differs_between_ranks_and_buckets(selector: Selector) -> None:
    acc = torch.zeros(20)
    places = [BucketContext(*place) for place in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0))]
    orders = {tuple(choose(selector, acc, 20, selector.init(acc, place)).tolist()) for place in places}
    assert len(orders) == 4


@pytest.mark.parametrize(
    ("selector", "starts"),
    [(BlockRandomK(), set(range(10))), (BlockRandomK(aligned=True), {0, 4})],  # 8 and 9 are never chosen
)
def test_blocks_wrap_around_the_end_or_keep_to_their_grid(selector: Selector, starts: set[int]) -> None:
    acc = torch.zeros(10)
    state = selector.init(acc, CONTEXT)
    drawn = [choose(selector, acc, 4, state).tolist() for _ in range(200)]
    assert all(chosen == [(chosen[0] + i) % 10 for i in range(4)] for chosen in drawn)
    assert {chosen[0] for chosen in drawn} == starts


def test_unbiased_random_k_has_the_gradient_as_its_mean() -> None:
    method = sparsify.build("randomk", density=0.25, unbiased=True)
    gradient = torch.arange(8.0).double()
    lived = live(method, 2, steps=400, make=lambda *where: gradient, shapes=[(8,)])
    mean = torch.stack(lived[0].updates).mean(dim=0)
    # Each of 800 draws gives 4 g with probability 1/4: standard error of the mean sqrt(3 / 800) g
    torch.testing.assert_close(mean, gradient, rtol=6 * (3 / 800) ** 0.5, atol=0)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 97, 100, 1009, 65_536, 1_000_003])
def test_samples_are_distinct_and_in_range(n: int) -> None:
    """So of everything they are permutations."""
    for k in {1, min(n, 10), min(n, 5000), n if n < 2000 else 1}:
        for key in (0, 1, CONTEXT.random_key_for_rank(), 2**63 - 1):
            drawn = sample_indices(n, k, key, CPU)
            assert drawn.dtype == torch.int64
            check_distinct(drawn, n, k)


def test_samples_are_uniform_differ_between_keys_and_repeat_with_them() -> None:
    n, k, draws = 53, 5, 1500
    place = BucketContext(seed=1, rank=0, bucket=0)
    drawn = torch.stack([sample_indices(n, k, place.random_key_for_rank(step), CPU) for step in range(draws)])
    assert torch.equal(drawn[7], sample_indices(n, k, place.random_key_for_rank(7), CPU))
    assert len(drawn.unique(dim=0)) > 0.99 * draws
    distances = (drawn[:, 1] - drawn[:, 0]) % n
    for values, least in ((drawn.flatten(), 0), (distances, 1)):
        observed = values.bincount(minlength=n)[least:]
        expected = len(values) / len(observed)
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        # As many degrees of freedom: that is the mean, and half the variance; six standard deviations.
        # Without replacement the counts vary a little less.
        freedom = len(observed) - 1
        assert abs(chi_square - freedom) < 6 * (2 * freedom) ** 0.5


def test_a_sample_takes_memory_for_k_and_the_root_of_n() -> None:
    n = 10**13 + 7
    check_distinct(sample_indices(n, 1000, 3, CPU), n, 1000)
