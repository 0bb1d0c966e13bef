"""EF21 and ARC-Top-K against their formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sparsify
from sparsify.methods.arctopk import ArcRows
from tests.sparsify.laws import build, gradient, live

SIZE, STEPS = 3, 6
SHAPES = [(12, 10), (5,)]


def made(rank: int, step: int) -> Any:
    parts = [gradient(rank, step, shape).flatten() for shape in reversed(SHAPES)]  # in the order of buckets
    return torch.cat(parts).numpy()


@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_ef21_is_algorithm_2(eta: float) -> None:
    """g_r <- g_r + C(h_r - g_r), and the update is the mean of all g_r."""
    k = 8
    method = build("ef21", density=k / 125, scope="global", eta=eta)
    updates = live(method, SIZE, STEPS, shapes=SHAPES)[0].updates
    tracked, estimates = np.zeros((SIZE, 125)), np.zeros((SIZE, 125))
    for step in range(STEPS):
        for rank in range(SIZE):
            tracked[rank] = (1 - eta) * tracked[rank] + eta * made(rank, step)
            change = tracked[rank] - estimates[rank]
            best = np.argsort(-np.abs(change))[:k]
            estimates[rank][best] += change[best]
        np.testing.assert_allclose(updates[step].numpy(), estimates.mean(0), atol=1e-12)


def test_rows_are_those_that_the_sketch_of_the_mean_finds_and_vectors_go_whole() -> None:
    method = sparsify.build("arctopk", density=0.25, scope="global", feedback="gradient", rank=2)
    first, *others = live(method, SIZE, 1, shapes=SHAPES)
    matrix = first.updates[0][5:].view(12, 10)  # the vector comes first
    is_sent = matrix.abs().sum(1) > 0
    assert int(is_sent.sum()) == 3
    mean = torch.stack([lived.gradients[0] for lived in (first, *others)]).mean(0)
    torch.testing.assert_close(matrix[is_sent], mean[5:].view(12, 10)[is_sent])
    torch.testing.assert_close(first.updates[0][:5], mean[:5])
    assert first.selected == [3 * 10 + 5]
    # An all-reduce of 12 x 2 numbers, and one of what was chosen.
    assert first.wire_bytes[0] == pytest.approx(2 * (SIZE - 1) / SIZE * 8 * (24 + 35), abs=8)


def test_a_sketch_of_many_columns_finds_the_largest_rows() -> None:
    """With as many columns as the matrix has, and more, it tells the norms well enough for rows far apart."""

    def far_apart(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        values = gradient(rank, step, shape)
        if len(shape) == 2:
            values[[2, 7]] *= 100
        return values

    method = sparsify.build("arctopk", density=2 / 12, scope="global", feedback="gradient", rank=9)
    updates = live(method, SIZE, 1, make=far_apart, shapes=SHAPES)[0].updates[0]
    assert updates[5:].view(12, 10).abs().sum(1).nonzero().flatten().tolist() == [2, 7]


def test_what_is_too_narrow_for_a_sketch_is_sent_whole() -> None:
    tables = ArcRows(4).tables(((10, 4), (10, 5), (1, 50), (7,), (0,), (3, 2, 5)))
    assert [table.is_sketched for table in tables] == [False, True, False, False, True]
    assert [table.sent(20, 100) for table in tables] == [10, 2, 1, 1, 1]
