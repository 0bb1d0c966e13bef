"""Error feedback around an exchange, replayed in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import sparsify
from tests.sparsify.laws import Lived, gradient, live

N, SHAPE = 240, (240,)


Array = np.ndarray


def run(name: str, size: int, steps: int, make: Any = gradient, n: int = N, **choices: Any) -> list[Lived]:
    return live(sparsify.build(name, **choices), size, steps, make, [(n,)])


def top(acc: Array, k: int) -> Array:
    """The indices of the k largest magnitudes."""
    return np.argsort(-np.abs(acc), kind="stable")[:k]


def against(lived: list[Lived], step_of: Callable[[list[Array], int], tuple[Array, list[Array]]]) -> None:
    """`step_of` takes everybody's gradient plus residual and the step, gives the sum and the residuals."""
    residuals = [np.zeros(lived[0].gradients[0].numel()) for _ in lived]
    for t in range(len(lived[0].gradients)):
        accs = [e + one.gradients[t].numpy() for e, one in zip(residuals, lived, strict=True)]
        total, residuals = step_of(accs, t)
        np.testing.assert_allclose(lived[0].updates[t].numpy(), total / len(lived), rtol=1e-9, atol=1e-12)
    for one, residual in zip(lived, residuals, strict=True):
        np.testing.assert_allclose(one.residual.numpy(), residual, rtol=1e-9, atol=1e-12)


def pairs(acc: Array, indices: Array) -> dict[int, float]:
    return {int(i): float(acc[i]) for i in indices}
