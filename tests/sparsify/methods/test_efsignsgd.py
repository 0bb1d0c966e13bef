"""EF-signSGD against the paper's algorithm in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsify
from tests.sparsify.laws import SHAPES, live, mass
from tests.sparsify.methods.replays import grads

ENDS = np.cumsum([np.prod(shape) for shape in reversed(SHAPES)])[:-1]  # of tensors, the last ones first


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("feedback", ["learning_rate", "gradient"])
def test_efsignsgd_is_algorithm_1(feedback: str, scope: str) -> None:
    """Karimireddy et al. 2019, algorithm 1, on three workers whose messages are averaged; of each tensor by
    itself, as in the authors' code.
    """
    lr, steps = 0.1, 5
    lived = live(sparsify.build("efsignsgd", scope=scope, feedback=feedback), 3, steps, lr=lr)
    e = [np.zeros(227) for _ in range(3)]
    for step in range(steps):
        deltas = []
        for rank, g in enumerate(grads(lived, step)):
            p = lr * g + e[rank]
            parts = np.split(p, ENDS)
            deltas.append(np.concatenate([np.abs(d).sum() / d.size * np.sign(d) for d in parts]))
            e[rank] = p - deltas[rank]
        # Scales travel as fp32
        np.testing.assert_allclose(lr * lived[0].updates[step], sum(deltas) / 3, rtol=1e-5, atol=1e-8)
    for rank, one in enumerate(lived):
        np.testing.assert_allclose(lr * one.residual, e[rank], rtol=1e-4, atol=1e-7)


def test_efsignsgd_loses_nothing_to_the_rounding_of_its_scale() -> None:
    """The residual is what the others did not get, to the last bit of float64, though scales are fp32."""
    seen, accounted = mass(live(sparsify.build("efsignsgd"), 3, 20))
    torch.testing.assert_close(accounted, seen, rtol=0, atol=1e-12)
