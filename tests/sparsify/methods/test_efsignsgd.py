"""EF-signSGD against the paper's algorithm in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsify
from tests.sparsify.laws import live, mass
from tests.sparsify.methods.replays import grads


@pytest.mark.parametrize("feedback", ["learning_rate", "gradient"])
def test_efsignsgd_is_algorithm_1(feedback: str) -> None:
    """Karimireddy et al. 2019, algorithm 1, on three workers whose messages are averaged."""
    lr, steps = 0.1, 5
    lived = live(sparsify.build("efsignsgd", scope="global", feedback=feedback), 3, steps, lr=lr)
    e = [np.zeros(227) for _ in range(3)]
    for step in range(steps):
        deltas = []
        for rank, g in enumerate(grads(lived, step)):
            p = lr * g + e[rank]
            deltas.append(np.abs(p).sum() / p.size * np.sign(p))
            e[rank] = p - deltas[rank]
        # Scales travel as fp32
        np.testing.assert_allclose(lr * lived[0].updates[step], sum(deltas) / 3, rtol=1e-5, atol=1e-8)
    for rank, one in enumerate(lived):
        np.testing.assert_allclose(lr * one.residual, e[rank], rtol=1e-4, atol=1e-7)


def test_efsignsgd_loses_nothing_to_the_rounding_of_its_scale() -> None:
    """The residual is what the others did not get, to the last bit of float64, though scales are fp32."""
    seen, accounted = mass(live(sparsify.build("efsignsgd"), 3, 20))
    torch.testing.assert_close(accounted, seen, rtol=0, atol=1e-12)
