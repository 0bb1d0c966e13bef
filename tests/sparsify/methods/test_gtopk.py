"""gTop-k against a transcription of its tree."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sparsify.methods.gtopk import merge
from sparsify.types import Sparse
from tests.sparsify.laws import gradient, mass
from tests.sparsify.methods.replays import Array, N, against, run, top


@pytest.mark.parametrize("leak", ["returned", "published"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8])
def test_gtopk_is_algorithm_2_of_shi_et_al(size: int, leak: str) -> None:
    k = int(0.05 * N)

    def step_of(accs: list[Array], t: int) -> tuple[Array, list[Array]]:
        held = [{int(i): float(acc[i]) for i in top(acc, k)} for acc in accs]
        mine = [set(pairs_of_rank) for pairs_of_rank in held]
        residuals, dropped = [acc.copy() for acc in accs], [dict[int, float]() for _ in accs]
        stride = 1
        while stride < size:
            for to in range(0, size - stride, 2 * stride):
                merged = {
                    i: held[to].get(i, 0.0) + held[to + stride].get(i, 0.0)
                    for i in held[to].keys() | held[to + stride].keys()
                }
                kept = sorted(merged, key=lambda i: -abs(merged[i]))[:k]
                held[to] = {i: merged.pop(i) for i in kept}
                for i, value in merged.items():
                    dropped[to][i] = dropped[to].get(i, 0.0) + value
            stride *= 2
        total = np.zeros(N)
        for i, value in held[0].items():
            total[i] = value
        for rank, residual in enumerate(residuals):
            residual[list(mine[rank] & held[0].keys())] = 0.0
            if leak == "returned":
                for i in dropped[rank].keys() & held[0].keys():
                    residual[i] += dropped[rank][i]
        return total, residuals

    against(run("gtopk", size, 6, density=0.05, leak=leak), step_of)


def test_gtopk_as_published_loses_what_a_merge_dropped_of_a_survivor() -> None:
    """Worker 2 has 3.0 at index 0; its partner's larger values push it out, and index 0 survives by way of
    worker 0. Published: worker 2 takes its 3.0 for sent.
    """
    values = torch.zeros(4, N, dtype=torch.float64)
    values[0, 0], values[1, 1], values[2, 0], values[3, 2] = 100.0, 1.0, 3.0, 50.0
    for leak, deficit in (("published", 3.0), ("returned", 0.0)):
        lived = run("gtopk", 4, 1, make=lambda r, s, shape: values[r], density=1 / N, leak=leak)
        seen, accounted = mass(lived)
        assert (seen - accounted).tolist()[0] == deficit
        assert lived[0].updates[0][0] == 25.0  # 100 of worker 0 only, a quarter of it
    assert torch.equal(seen, accounted)


def test_an_infinity_leaves_the_elements_beside_it_alone() -> None:
    one = Sparse(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    other = Sparse(torch.tensor([2, 3]), torch.tensor([math.inf, 0.0]))
    best, lost = merge(one, other, 2)
    assert dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)) == {1: 2.0, 2: math.inf}
    assert lost.values.sum() == 1.0


def test_gtopk_loses_a_known_share_on_random_gradients() -> None:
    """P = 8, k = 50: some of the final 50 are incomplete as published."""
    lived = run("gtopk", 8, 1, gradient, density=0.005, leak="published", n=10_000)
    seen, accounted = mass(lived)
    incomplete = int((~torch.isclose(seen, accounted, atol=1e-9)).sum())
    assert 1 <= incomplete <= 25
