"""gTop-k, Ok-Topk and SparCML, whose workers add up parts of a bucket, against transcriptions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sparsify.comm import virtual
from sparsify.methods.gtopk import merge_topk
from sparsify.methods.oktopk import SplitReduceBalance, gather_balanced_borders
from sparsify.methods.sparcml import SplitAllGather
from sparsify.types import BucketContext, SparseVector
from tests.sparsify.laws import gradient
from tests.sparsify.methods.replays import (
    Array,
    N,
    check_choices,
    check_steps,
    indices_of_largest,
    run,
)

K = int(0.05 * N)


@pytest.mark.parametrize("leak", ["returned", "published"])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 8])
def test_gtopk_is_algorithm_2_of_shi_et_al(size: int, leak: str) -> None:
    def step_of(accs: list[Array], step: int) -> tuple[Array, list[Array]]:
        held = [keep_largest(acc) for acc in accs]
        chosen = [part != 0 for part in held]
        dropped = [np.zeros(N) for _ in accs]
        stride = 1
        while stride < size:
            for to in range(0, size - stride, 2 * stride):
                merged = held[to] + held[to + stride]
                held[to] = keep_largest(merged)
                dropped[to] += merged - held[to]
            stride *= 2
        residuals = []
        for acc, own, lost in zip(accs, chosen, dropped, strict=True):
            survives = held[0] != 0
            residual = np.where(own & survives, 0, acc)
            residuals.append(residual + lost * survives if leak == "returned" else residual)
        return held[0], residuals

    check_steps(run("gtopk", size, 6, density=0.05, leak=leak), step_of)


def keep_largest(values: Array) -> Array:
    """Return the K largest magnitudes at their places, and 0 elsewhere."""
    kept = np.zeros_like(values)
    places = indices_of_largest(values, K)
    kept[places] = values[places]
    return kept


def test_an_infinity_leaves_the_elements_beside_it_alone() -> None:
    one = SparseVector(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    other = SparseVector(torch.tensor([2, 3]), torch.tensor([math.inf, 0.0]))
    best, lost = merge_topk(one, other, 2)
    assert dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)) == {1: 2.0, 2: math.inf}
    assert lost.values.sum() == 1.0


class ReusedThresholdSelector:
    """A threshold that is taken from an exact Top-k, then drifts."""

    def __init__(self, drift: float) -> None:
        self.drift = drift
        self.value = 0.0

    def choose(self, acc: Array, is_exact: bool) -> Array:
        if not is_exact:
            chosen = np.flatnonzero(np.abs(acc) >= self.value)
            if len(chosen) <= 4 * K / 3:
                if len(chosen) > 5 * K / 4:
                    self.value *= self.drift
                elif len(chosen) < 2 * K / 3:
                    self.value /= self.drift
                return chosen
        chosen = indices_of_largest(acc, K)
        self.value = np.abs(acc[chosen]).min()
        return chosen


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("balance", [True, False])
def test_oktopk_is_algorithms_1_and_2_of_li_and_hoefler(size: int, balance: bool) -> None:
    own_thresholds = [ReusedThresholdSelector(1.012) for _ in range(size)]
    common_threshold = ReusedThresholdSelector(1.008)

    def step_of(accs: list[Array], step: int) -> tuple[Array, list[Array]]:
        is_exact = step % 4 == 0
        reduced = np.zeros(N)
        chosen = []
        for acc, threshold in zip(accs, own_thresholds, strict=True):
            chosen.append(threshold.choose(acc, is_exact))
            reduced[chosen[-1]] += acc[chosen[-1]]
        kept = common_threshold.choose(reduced, is_exact)
        total = np.zeros(N)
        total[kept] = reduced[kept]
        residuals = [acc.copy() for acc in accs]
        for residual, picked in zip(residuals, chosen, strict=True):
            residual[np.intersect1d(picked, kept)] = 0.0
        return total, residuals

    check_steps(run("oktopk", size, 9, density=0.05, threshold_every=4, balance=balance), step_of)


def test_means_of_borders_do_not_overflow() -> None:
    """In the public code for VGG and the LSTM, n x P beyond 2^31 does."""
    n = 2**40
    chosen = torch.arange(n - 80, n, 10)
    found = virtual.run(4, lambda comm: gather_balanced_borders(chosen - comm.rank, n, comm))
    assert found == [[0, n - 62, n - 42, n - 22, n]] * 4


@pytest.mark.parametrize("dense_at", [None, 0.01, 1.0])
@pytest.mark.parametrize(("size", "n"), [(1, N), (2, N), (3, N), (7, N), (7, 5)])
def test_sparcml_gives_the_update_of_topk(size: int, n: int, dense_at: float | None) -> None:
    """The result may travel as pairs or dense; with more workers than elements, too."""
    k = max(1, n // 20)
    lived = run("sparcml", size, 5, n=n, density=k / n, dense_at=dense_at)
    check_choices(lived, lambda accs, step: [indices_of_largest(acc, k) for acc in accs])


def test_sparcml_selects_of_every_bucket() -> None:
    for one in run("sparcml", 2, 1, gradient, 240, density=0.1, bucket=50):
        assert [int((piece == 0).sum()) for piece in one.residual.split(50)] == [5, 5, 5, 5, 4]


@pytest.mark.parametrize("exchange", [SplitReduceBalance(), SplitAllGather()], ids=["oktopk", "sparcml"])
def test_workers_that_selected_nothing_take_part(exchange: Any) -> None:
    """First nobody selects anything, then worker 1 only."""

    def body(comm: virtual.VirtualComm) -> list[list[float]]:
        state = exchange.init(torch.zeros(50), BucketContext(0, comm.rank, 0))
        totals = []
        for chosen in (0, 5 * (comm.rank == 1)):
            part = SparseVector(torch.arange(chosen) * 10, torch.ones(chosen))
            total = torch.zeros(50)
            for piece in exchange.exchange(part, 50, 5, comm, state).sum_parts:
                piece.add_to(total)
            totals.append(total.nonzero().flatten().tolist())
        return totals

    assert virtual.run(4, body) == [[[], [0, 10, 20, 30, 40]]] * 4
