"""Error feedback around a choice: Gaussian-k, hard threshold, ScaleCom, EF21 and Stable Top-K."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch

from sparsify.core import host_sync
from sparsify.methods import hardthreshold
from sparsify.methods.gaussiank import GaussianThreshold, GaussianTopK
from sparsify.methods.stable_topk import BlockScore, StableBlocks
from sparsify.types import SparseVector
from tests.sparsify.methods.replays import (
    CONTEXT,
    EXACT,
    SIZE,
    STEPS,
    Array,
    Chooser,
    N,
    check_choices,
    check_updates,
    count_selected,
    indices_of_largest,
    run,
    select_alone,
)

K = int(0.05 * N)


def choose_alone(choose: Callable[[Array], Array]) -> Chooser:
    """Return the choice of workers who each choose by themselves."""
    return lambda accs, step: [choose(acc) for acc in accs]


def choose_gaussian(acc: Array) -> Array:
    """hclhkbu/GaussianK-SGD, compression.py, in our words."""
    threshold = acc.mean() - NormalDist().inv_cdf(K / len(acc) / 2) * acc.std(ddof=1)
    for _ in range(3):
        chosen = np.flatnonzero(np.abs(acc) > threshold)
        if len(chosen) < 2 * K / 3:
            threshold *= 0.5
        elif len(chosen) > 4 * K / 3:
            threshold *= 1.5
        else:
            break
    return chosen


def choose_above(threshold: float) -> Chooser:
    return choose_alone(lambda acc: np.flatnonzero(np.abs(acc) >= threshold))


def choose_as_leader(accs: list[Array], step: int) -> list[Array]:
    return [indices_of_largest(accs[step % SIZE], K)] * SIZE


CASES: list[tuple[str, dict[str, Any], Chooser]] = [
    ("gaussiank", {"rule": "published"}, choose_alone(choose_gaussian)),
    ("gaussiank", {}, choose_alone(lambda acc: indices_of_largest(acc, K))),
    ("hardthreshold", {}, choose_above(1 / (2 * math.sqrt(K)))),
    ("hardthreshold", {"threshold": 0.75, "send": "strom"}, choose_above(0.75)),
    ("scalecom", {}, choose_as_leader),
    ("scalecom", {"beta": 0.1}, choose_as_leader),
]


@pytest.mark.parametrize(("name", "choices", "choose"), CASES)
def test_updates_are_error_feedback_around_the_rule(
    name: str, choices: dict[str, Any], choose: Chooser
) -> None:
    def send(values: Array) -> Array:
        """Strom's words send tau, and keep the rest."""
        return 0.75 * np.sign(values) if choices.get("send") else values

    check_choices(run(name, density=0.05, **choices), choose, choices.get("beta", 1.0), send)


@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_ef21_is_algorithm_2(eta: float) -> None:
    """g_r <- g_r + C(h_r - g_r), and the update is the mean of all g_r."""
    tracked = np.zeros((SIZE, N))
    estimates = np.zeros((SIZE, N))

    def update_of(grads: list[Array]) -> Array:
        tracked[:] = (1 - eta) * tracked + eta * np.array(grads)
        for change, estimate in zip(tracked - estimates, estimates, strict=True):
            best = indices_of_largest(change, K)
            estimate[best] += change[best]
        mean: Array = estimates.mean(0)
        return mean

    check_updates(run("ef21", density=0.05, scope="global", eta=eta), update_of, EXACT)


def make_normal(n: int = 200_000) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("change", "low", "high"),
    [
        (lambda x: x, 0.9, 1.2),
        (lambda x: x.clamp(-1, 1), 550, 560),
        (lambda x: torch.erf(x / 2**0.5), 0, 0),  # uniform between -1 and 1
        (lambda x: x * torch.where(torch.arange(x.numel()) % 10_000 == 0, 1000.0, 1.0), 0.05, 0.15),
    ],
    ids=["normal", "clamped to one sigma", "uniform", "a few outliers"],
)
def test_the_published_gaussian_rule_misses_k_where_the_bounded_one_does_not(
    change: Callable[[torch.Tensor], torch.Tensor], low: float, high: float
) -> None:
    k = 200
    acc = change(make_normal())
    assert low <= count_selected(GaussianThreshold(), acc, k) / k <= high
    assert len(set(select_alone(GaussianTopK(), acc, k).tolist())) == k


def test_a_normal_bucket_takes_the_bounded_rule_three_host_synchronisations() -> None:
    acc = make_normal()
    before = host_sync.num_syncs()
    count_selected(GaussianTopK(), acc, 200)
    assert host_sync.num_syncs() - before == 3


def test_lambda_for_resnet_18_is_the_published_one() -> None:
    """4.73e-3 in kljp's run.sh, at density 0.001 of 11,173,962 parameters."""
    assert hardthreshold.resolve_threshold(None, int(0.001 * 11_173_962)) == pytest.approx(4.73e-3, abs=5e-6)


def test_words_hold_31_bits_of_index_and_a_sign() -> None:
    part = SparseVector(torch.tensor([0, 5, 2**31 - 1, 0]), torch.tensor([1.0, -2.0, -3.0, -4.0]))
    written = hardthreshold.pack_indices_and_signs(part, 2**31)
    assert written.dtype == torch.int32
    read = hardthreshold.decode_words(written, 0.5, torch.float64)
    assert read.indices.tolist() == part.indices.tolist()
    assert read.values.tolist() == [0.5, -0.5, -0.5, -0.5]
    with pytest.raises(ValueError, match="needs wider indices than Strom's 31 bits"):
        hardthreshold.pack_indices_and_signs(part, 2**31 + 1)


@pytest.mark.parametrize(("block", "every"), [(4, 5), (10, 1), (1, 3), (10_000, 100)])
def test_stable_top_k_chooses_blocks_every_n_steps(block: int, every: int) -> None:
    """The slides' scheme with an l1 score: choose blocks every N steps, else apply the same mask."""
    k = int(0.2 * N)
    size = min(block, k)
    blocks = np.split(np.arange(N), range(size, N, size))
    mask = [np.arange(0)]

    def choose(accs: list[Array], step: int) -> list[Array]:
        if step % every == 0:
            scores = [-sum(np.abs(acc[places]).sum() for acc in accs) for places in blocks]
            best = np.argsort(scores, kind="stable")[: k // size]
            mask[0] = np.concatenate([blocks[i] for i in best])
        return mask * SIZE

    lived = run("stable_topk", density=0.2, block=block, every=every)
    check_choices(lived, choose)
    waits = 1 if N % size else 0  # a shorter last block: how many are sent depends on whether it is chosen
    assert lived[0].host_syncs == [0 if step % every else waits for step in range(STEPS)]


def test_scores_rank_blocks_differently() -> None:
    """Among equal scores the first block is chosen."""
    expected: dict[BlockScore, list[int]] = {"l1": [0, 1], "l2": [4, 5], "max": [4, 5], "count": [0, 1]}
    acc = torch.tensor([3.0, -3.0, 0.1, 0.1, 5.0, 0.0])
    for score, chosen in expected.items():
        assert select_alone(StableBlocks(block=2, score=score), acc, 3).tolist() == chosen
    assert select_alone(StableBlocks(block=2, score="l1"), torch.ones(6), 3).tolist() == [0, 1]


def test_another_k_asks_for_another_choice() -> None:
    selector = StableBlocks(block=2, every=100)
    acc = torch.arange(8.0)
    state = selector.init(acc, CONTEXT)
    assert [count_selected(selector, acc, k, state) for k in (2, 4)] == [2, 4]
