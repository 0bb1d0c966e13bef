"""DeMo against scipy's transform, and without its sign nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.fft import dctn, idctn
from torch import Tensor

from sparsify.core.chunks import Tiles
from sparsify.methods.demo import cosines, transform
from tests.sparsify.laws import build, live

SIDE, SHAPE, SIZE, STEPS = 4, (8, 12), 3, 5


def made(rank: int, step: int, shape: tuple[int, ...]) -> Tensor:
    draws = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(shape, generator=draws, dtype=torch.float64)


def chunks(matrix: Any) -> Any:
    rows, columns = SHAPE
    return matrix.reshape(rows // SIDE, SIDE, columns // SIDE, SIDE).swapaxes(1, 2)


def whole(parts: Any) -> Any:
    return parts.swapaxes(1, 2).reshape(SHAPE)


@pytest.mark.parametrize("sign", [True, False])
def test_each_step_is_the_published_one(sign: bool) -> None:
    k, decay = 3, 0.9
    method = build("demo", density=k / SIDE**2, decay=decay, side=SIDE, sign=sign)
    updates = live(method, SIZE, STEPS, make=made, shapes=[SHAPE])[0].updates
    momenta = [np.zeros(SHAPE) for _ in range(SIZE)]
    for step in range(STEPS):
        sent = []
        for rank in range(SIZE):
            momenta[rank] = decay * momenta[rank] + made(rank, step, SHAPE).numpy()
            coefficients = dctn(chunks(momenta[rank]), axes=(2, 3), norm="ortho")
            rows = coefficients.reshape(-1, SIDE * SIDE)
            kept = np.zeros_like(rows)
            best = np.argsort(-np.abs(rows), axis=1)[:, :k]
            np.put_along_axis(kept, best, np.take_along_axis(rows, best, 1), 1)
            sent.append(kept.reshape(coefficients.shape))
            momenta[rank] = momenta[rank] - whole(idctn(sent[-1], axes=(2, 3), norm="ortho"))
        count = sum((part != 0).astype(float) for part in sent).clip(1)
        mean = whole(idctn(sum(sent) / count, axes=(2, 3), norm="ortho"))
        expected = np.sign(mean) if sign else mean
        np.testing.assert_allclose(updates[step].view(SHAPE).numpy(), expected, atol=1e-12)


def test_without_sign_and_decay_nothing_is_lost() -> None:
    method = build("demo", density=0.1, decay=1.0, sign=False, average="workers")
    assert not method.broken_laws()
    lives = live(method, SIZE, STEPS)
    seen = sum(sum(lived.gradients) for lived in lives)
    kept = sum(lived.residual for lived in lives)
    torch.testing.assert_close(SIZE * sum(lives[0].updates) + kept, seen, rtol=1e-10, atol=1e-10)


def test_the_transform_is_orthonormal_and_has_an_inverse() -> None:
    shapes = [(70, 130), (97,), (3, 5, 7), (1,)]
    tiles = Tiles(shapes)
    values = torch.randn(tiles.n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    there = transform(values, torch.empty_like(values), tiles)
    torch.testing.assert_close(there.norm(), values.norm())
    torch.testing.assert_close(transform(there, torch.empty_like(values), tiles, back=True), values)
    matrix = cosines(7, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(7, dtype=torch.float64))
