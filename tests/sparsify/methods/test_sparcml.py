"""SparCML against Top-k, whose update it must give."""

from __future__ import annotations

import numpy as np
import pytest

from tests.sparsify.laws import gradient
from tests.sparsify.methods.replays import Array, N, against, run, top


@pytest.mark.parametrize(("size", "n"), [(1, N), (2, N), (3, N), (4, N), (7, N), (7, 5)])
@pytest.mark.parametrize("dense_at", [None, 0.01, 1.0])
def test_sparcml_gives_the_update_of_topk(size: int, n: int, dense_at: float | None) -> None:
    """Whether what comes of it travels as pairs or dense; with more workers than elements, too."""
    k = max(1, n // 20)
    lived = run("sparcml", size, 5, n=n, density=k / n, dense_at=dense_at)

    def step_of(accs: list[Array], t: int) -> tuple[Array, list[Array]]:
        total, residuals = np.zeros(n), [acc.copy() for acc in accs]
        for acc, residual in zip(accs, residuals, strict=True):
            chosen = top(acc, k)
            total[chosen] += acc[chosen]
            residual[chosen] = 0.0
        return total, residuals

    against(lived, step_of)


def test_sparcml_selects_of_every_bucket() -> None:
    lived = run("sparcml", 2, 1, gradient, 240, density=0.1, bucket=50)
    for rank, one in enumerate(lived):
        sent = (one.residual == 0) & (gradient(rank, 0, (240,)) != 0)
        assert [int(piece.sum()) for piece in sent.split(50)] == [5, 5, 5, 5, 4]
