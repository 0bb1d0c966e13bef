"""Selectors, part by part."""

from __future__ import annotations

import pytest
import torch

import sparsify
from sparsify.select import BlockRandomK, Drawing, FirstK, RandomK, Selector, TopK, Union
from sparsify.types import BucketContext
from tests.sparsify.laws import ALONE, live

CONTEXT = BucketContext(seed=0, rank=0, bucket=0)


SELECTORS = [
    TopK(), RandomK(), RandomK(shared=True), RandomK(sampling="permutation"), BlockRandomK(),
    BlockRandomK(aligned=True), FirstK(), Union(TopK()),
]  # fmt: skip


def choose(selector: Selector, acc: torch.Tensor, k: int, state: object) -> torch.Tensor:
    return selector.select(acc, k, ALONE, state).indices


@pytest.mark.parametrize("k", [1, 7, 100])
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_indices_are_distinct_and_in_range(selector: Selector, k: int) -> None:
    acc = torch.randn(100, generator=torch.Generator().manual_seed(0))
    state = selector.init(acc, CONTEXT)
    for _ in range(3):
        chosen = choose(selector, acc, k, state)
        assert chosen.shape == (k,)
        assert len(chosen.unique()) == k
        assert chosen.min() >= 0
        assert chosen.max() < 100


@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_more_than_there_is_is_refused(selector: Selector) -> None:
    acc = torch.ones(10)
    with pytest.raises(ValueError, match="k=11 elements can't be chosen of 10"):
        choose(selector, acc, 11, selector.init(acc, CONTEXT))


def test_topk_takes_the_largest_magnitudes() -> None:
    acc = torch.tensor([0.1, -5.0, 3.0, -0.2, 4.0])
    assert set(choose(TopK(), acc, 3, TopK().init(acc, CONTEXT)).tolist()) == {1, 2, 4}


@pytest.mark.parametrize("sampling", ["hash", "permutation"])
def test_randomk_is_uniform_and_differs_between_ranks_and_buckets(sampling: Drawing) -> None:
    acc, draws, selector = torch.zeros(20), torch.zeros(20), RandomK(sampling=sampling)
    state = selector.init(acc, CONTEXT)
    for _ in range(2000):
        draws[choose(selector, acc, 5, state)] += 1
    # 2000 draws of 5 from 20: 500 each, standard deviation 19; six of them is one in 10^8
    assert (draws - 500).abs().max() < 6 * 19.4
    places = [BucketContext(0, 0, 0), BucketContext(0, 1, 0), BucketContext(0, 0, 1), BucketContext(1, 0, 0)]
    states = [selector.init(acc, place) for place in places]
    orders = {tuple(choose(selector, acc, 20, state).tolist()) for state in states}
    assert len(orders) == 4


@pytest.mark.parametrize("selector", [RandomK(shared=True), BlockRandomK(shared=True)], ids=repr)
def test_a_shared_seed_draws_alike_on_all_ranks_and_anew_in_every_step(selector: Selector) -> None:
    acc = torch.zeros(1000)
    states = [selector.init(acc, BucketContext(0, rank, 0)) for rank in range(2)]
    drawn = [[choose(selector, acc, 10, state).tolist() for _ in range(3)] for state in states]
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1] != drawn[0][2]


def test_blocks_wrap_around_the_end_or_keep_to_their_grid() -> None:
    acc = torch.zeros(10)
    wrapping, aligned = BlockRandomK(), BlockRandomK(aligned=True)
    starts: dict[bool, set[int]] = {False: set(), True: set()}
    for selector in (wrapping, aligned):
        state = selector.init(acc, CONTEXT)
        for _ in range(200):
            chosen = choose(selector, acc, 4, state).tolist()
            assert chosen == [(chosen[0] + i) % 10 for i in range(4)]
            starts[selector.aligned].add(chosen[0])
    assert starts == {False: set(range(10)), True: {0, 4}}  # aligned: 8 and 9 are never chosen


def test_unbiased_random_k_has_the_gradient_as_its_mean() -> None:
    method = sparsify.build("randomk", density=0.25, unbiased=True)
    lived = live(method, 2, steps=400, make=lambda *where: torch.arange(8.0).double(), shapes=[(8,)])
    mean = torch.stack(lived[0].updates).mean(dim=0)
    # Each of 800 draws gives 4 g with probability 1/4: standard error of the mean sqrt(3 / 800) g
    torch.testing.assert_close(mean, torch.arange(8.0).double(), rtol=6 * (3 / 800) ** 0.5, atol=0)
