"""Ok-Topk against a transcription of its algorithms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsify
from sparsify.comm import virtual
from sparsify.exchange import even_borders
from sparsify.methods.oktopk import balanced_borders, overlaps
from tests.sparsify.laws import gradient
from tests.sparsify.methods.replays import Array, N, against, run, top


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("balance", [True, False])
def test_oktopk_is_algorithms_1_and_2_of_li_and_hoefler(size: int, balance: bool) -> None:
    k, steps, every = int(0.05 * N), 9, 4
    lived = run("oktopk", size, steps, density=0.05, threshold_every=every, balance=balance)
    local, reached = [0.0] * size, [0.0]

    def step_of(accs: list[Array], t: int) -> tuple[Array, list[Array]]:
        chosen = []
        for rank, acc in enumerate(accs):
            if t % every == 0:
                picked = top(acc, k)
                local[rank] = np.abs(acc[picked]).min()
            else:
                picked = np.flatnonzero(np.abs(acc) >= local[rank])
                count = len(picked)
                local[rank] *= 1.012 if count > 5 * k / 4 else 1 / 1.012 if count < 2 * k / 3 else 1.0
                if count > 4 * k / 3:
                    picked = top(acc, k)
                    local[rank] = np.abs(acc[picked]).min()
            chosen.append(picked)
        reduced = np.zeros(N)
        for acc, picked in zip(accs, chosen, strict=True):
            reduced[picked] += acc[picked]
        if t % every == 0:
            kept = top(reduced, k)
            reached[0] = np.abs(reduced[kept]).min()
        else:
            kept = np.flatnonzero(np.abs(reduced) >= reached[0])
            if len(kept) > 4 * k / 3:
                kept = top(reduced, k)
                reached[0] = np.abs(reduced[kept]).min()
            else:
                reached[0] *= 1.008 if len(kept) > 5 * k / 4 else 1 / 1.008 if len(kept) < 2 * k / 3 else 1.0
        total, residuals = np.zeros(N), [acc.copy() for acc in accs]
        total[kept] = reduced[kept]
        for residual, picked in zip(residuals, chosen, strict=True):
            residual[np.intersect1d(picked, kept)] = 0.0
        return total, residuals

    against(lived, step_of)


def test_oktopks_constants_are_those_of_its_code_for_vgg() -> None:
    known = sparsify.defaults("oktopk")
    assert (known["threshold_every"], known["regions_every"]) == (32, 64)
    assert (known["local_drift"], known["global_drift"]) == (1.012, 1.008)


def test_means_of_borders_do_not_overflow() -> None:
    """In the public code for VGG and the LSTM, n x P beyond 2^31 does."""
    n, chosen = 2**40, torch.arange(2**40 - 80, 2**40, 10)
    found = virtual.run(4, lambda comm: balanced_borders(chosen - comm.rank, n, comm))
    assert found[0] == [0, n - 62, n - 42, n - 22, n]
    assert all(theirs == found[0] for theirs in found)


def test_a_threshold_that_selects_too_many_is_taken_anew() -> None:
    lived = run("oktopk", 2, 8, make=lambda r, s, shape: gradient(r, s, shape) * 3.0**s, density=0.05)
    assert max(lived[0].selected) <= 14  # 4k/3


def test_overlaps_count_positions_between_borders() -> None:
    assert overlaps(3, 9, [0, 4, 8, 12]) == [1, 4, 1]
    assert overlaps(5, 5, [0, 4, 8]) == [0, 0]
    assert even_borders(7, 3) == [0, 2, 4, 7]
    assert even_borders(2, 4) == [0, 0, 1, 1, 2]
