"""QSGD against the paper's quantisation in numpy."""

from __future__ import annotations

import numpy as np
import pytest

import sparsify
from tests.sparsify.laws import live
from tests.sparsify.methods.replays import grads, stochastic_level, uniform


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize(("bits", "levels"), [(2, 1), (4, 7), (8, 127)])
def test_qsgd_is_the_papers_quantisation(bits: int, levels: int, norm: str) -> None:
    """Alistarh et al. 2017, section 3: Q_s(v_i) = |v| sgn(v_i) xi_i, for every bucket of its own."""
    block, steps = 64, 4  # 227 elements: three blocks and a rest
    lived = live(sparsify.build("qsgd", bits=bits, block=block, norm=norm), 3, steps)
    draws = [uniform(rank, 227, steps) for rank in range(3)]
    for step in range(steps):
        total = np.zeros(227)
        for rank, g in enumerate(grads(lived, step)):
            for start in range(0, 227, block):
                v, u = g[start : start + block], draws[rank][step][start : start + block]
                size = np.float32(np.abs(v).max() if norm == "max" else np.sqrt((v**2).sum()))
                total[start : start + block] += size * stochastic_level(levels * v / size, u) / levels
        # The same operations in another order, in float64
        np.testing.assert_allclose(lived[0].updates[step], total / 3, rtol=1e-12, atol=1e-12)


def test_qsgd_has_the_published_defaults() -> None:
    assert sparsify.defaults("qsgd") == {
        "scope": "global", "bits": 4, "block": 512, "norm": "l2", "feedback": "none",
    }  # fmt: skip
    lived = live(sparsify.build("qsgd"), 2, 1, shapes=[(2000,)])
    assert lived[0].wire_bytes == [2000 // 2 + 4 * 4]  # four blocks


def test_qsgd_with_feedback_is_stable_only_for_enough_levels() -> None:
    """Its error is at most min(n / s^2, sqrt(n) / s) of what it rounds: with s = 7 and 512 elements, 3.2."""

    def owed(**hyperparameters: object) -> float:
        method = sparsify.build("qsgd", feedback="gradient", **hyperparameters)
        lived = live(method, 1, 40, shapes=[(64, 64)])[0]
        return float(lived.residual.norm() / lived.gradients[0].norm())

    assert owed() > 50
    assert owed(block=48) < 1
    assert owed(norm="max") < 1
    assert owed(bits=8) < 1
