"""Stable Top-K against its slides' scheme in numpy."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch

import sparsify
from sparsify import cost
from sparsify.methods import stable_topk
from sparsify.methods.stable_topk import Score, StableBlocks
from tests.sparsify.laws import live
from tests.sparsify.methods.replays import (
    CONTEXT,
    SIZE,
    STEPS,
    Array,
    Chooser,
    N,
    choose,
    count,
    follows,
    run,
)


def stable_reference(block: int, every: int, density: float) -> Chooser:
    """The slides' scheme with an l1 score: choose buckets every N steps, else apply the same mask."""
    k, mask = int(density * N), list[Array]()
    block = min(block, k)

    def choose(acc: list[Array], step: int) -> list[Array]:
        if step % every == 0:
            scores = [sum(np.abs(a[i : i + block]).sum() for a in acc) for i in range(0, N, block)]
            best = np.argsort(-np.array(scores), kind="stable")[: k // block]
            mask[:] = [np.concatenate([np.arange(N)[b * block : (b + 1) * block] for b in sorted(best)])]
        return mask * SIZE

    return choose


@pytest.mark.parametrize(("block", "every"), [(4, 5), (10, 1), (1, 3), (10_000, 100)])
def test_stable_top_k_chooses_buckets_every_n_steps(block: int, every: int) -> None:
    lived = run("stable_topk", density=0.2, block=block, every=every)
    follows(lived, stable_reference(block, every, 0.2))


@pytest.mark.parametrize("score", get_args(stable_topk.Score))
def test_between_choices_indices_stay_and_only_values_travel(score: Score) -> None:
    block, every, k = 4, 5, int(0.2 * N)
    lived = run("stable_topk", density=0.2, block=block, every=every, score=score)
    supports = [tuple(update.nonzero().flatten().tolist()) for update in lived[0].updates]
    for start in range(0, STEPS, every):
        assert len(set(supports[start : start + every])) == 1
    assert len(set(supports)) == 3
    scores = cost.all_reduce(8 * -(-N // block), SIZE).sent_bytes
    for step, (sent, selected) in enumerate(zip(lived[0].wire_bytes, lived[0].selected, strict=True)):
        values = 8 * selected * 2 * (SIZE - 1) // SIZE  # float64
        assert sent == values + (0 if step % every else scores)
        assert selected <= k
        assert lived[0].host_syncs[step] == (0 if step % every else 1)


def test_choosing_takes_no_host_synchronisation_where_buckets_divide_n() -> None:
    method = sparsify.build("stable_topk", density=0.25, block=4, every=2)
    assert live(method, 3, 4, shapes=[(8, 8)])[0].host_syncs == [0] * 4


@pytest.mark.parametrize(
    ("score", "expected"), [("l1", [0, 1]), ("l2", [4, 5]), ("max", [4, 5]), ("count", [0, 1])]
)
def test_scores_rank_buckets_differently(score: Score, expected: list[int]) -> None:
    acc = torch.tensor([3.0, -3.0, 0.1, 0.1, 5.0, 0.0])
    selector = StableBlocks(block=2, score=score)
    chosen = choose(selector, acc, 3)
    assert chosen.tolist() == expected


def test_equal_scores_are_resolved_alike_first_bucket_first() -> None:
    selector = StableBlocks(block=2)
    acc = torch.ones(7)
    chosen = choose(selector, acc, 4)
    assert chosen.tolist() == [0, 1, 2, 3]


def test_another_k_asks_for_another_choice() -> None:
    selector = StableBlocks(block=2, every=100)
    acc = torch.arange(8.0)
    state = selector.init(acc, CONTEXT)
    assert count(selector, acc, 2, state) == 2
    assert count(selector, acc, 4, state) == 4


def test_a_bucket_that_is_not_chosen_accumulates_and_is_flushed_by_the_next_choice() -> None:
    """Gradients of 1 there, of 2 in the chosen one: after five steps it owes 5, and wins."""

    def make(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([2.0, 2.0, 1.0, 1.0]).double()

    method = sparsify.build("stable_topk", density=0.5, block=2, every=5)
    lived = live(method, SIZE, 6, make, [(4,)])
    updates = torch.stack(lived[0].updates)
    assert (updates[:5] == torch.tensor([2.0, 2, 0, 0]).double()).all()
    assert updates[5].tolist() == [0, 0, 6, 6]
    assert lived[0].residual.tolist() == [2, 2, 0, 0]
