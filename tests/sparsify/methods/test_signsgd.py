"""signSGD against the paper's vote in numpy."""

from __future__ import annotations

import numpy as np

import sparsify
from tests.sparsify.laws import live
from tests.sparsify.methods.replays import given, grads


def test_signsgd_is_the_majority_vote() -> None:
    """Bernstein et al. 2018, algorithm 3: sign of the sum over workers of sign(g)."""
    for size in (1, 3, 4):
        lived = live(sparsify.build("signsgd"), size, 3)
        for step in range(3):
            votes = sum(np.sign(g) for g in grads(lived, step))
            assert np.array_equal(lived[0].updates[step].numpy(), np.sign(votes))


def test_the_sign_of_zero_is_one_and_a_tie_moves_nothing() -> None:
    lived = live(
        sparsify.build("signsgd"), 2, 1, given([0.0, -0.0, -2.0, 5.0], [0.0, 0.0, 1.0, 1e-30]), [(4,)]
    )
    assert lived[0].updates[0].tolist() == [1.0, 1.0, 0.0, 1.0]
