"""PowerSGD, ARC-Top-K and DeMo, which see the rows and columns of tensors, against the papers' algorithms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.fft import dctn, idctn

import sparsify
from sparsify.methods._matrices import matrix_shapes
from sparsify.methods.arctopk import SketchedRowTopK
from sparsify.types import BucketContext
from tests.sparsify.laws import build, check_laws, gradient, live
from tests.sparsify.methods.replays import CPU, EXACT, SEED, SIZE, Array, check_updates, gradients_in_step

ARC_SHAPES: list[tuple[int, ...]] = [(12, 10), (5,)]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_algorithms_1_and_2(rank: int) -> None:
    """Vogels et al. 2019: one matrix that is compressed, and a bias that is not and comes first.

    Buckets run from the last parameter to the first.
    """
    lived = live(sparsify.build("powersgd", rank=rank), SIZE, 5, shapes=[(30, 20), (9,)])
    generator = BucketContext(SEED, 0, 0).without_rank.make_generator_for_rank(CPU)
    q = torch.randn(20 * rank, generator=generator, dtype=torch.float64).view(20, rank).numpy()
    residuals = np.zeros((SIZE, 30, 20))

    def update_of(grads: list[Array]) -> Array:
        flat = np.array(grads)
        deltas = residuals + flat[:, 9:].reshape(residuals.shape)
        # Columns differ from Gram-Schmidt's in their sign at most, which cancels in P Q^T
        p = np.linalg.qr((deltas @ q).mean(0))[0]
        q[:] = deltas.mean(0).T @ p
        residuals[:] = deltas - p @ q.T
        return np.concatenate([flat[:, :9].mean(0), (p @ q.T).ravel()])

    check_updates(lived, update_of, 1e-9)
    for one, residual in zip(lived, residuals, strict=True):
        np.testing.assert_allclose(one.residual[9:].view(30, 20), residual, rtol=1e-9, atol=1e-9)
        assert not one.residual[:9].any()


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_powersgd_recovers_from_zeros(scope: str) -> None:
    """Gram-Schmidt would divide 0 by 0, or with an epsilon leave Q at 0 for ever."""
    method = sparsify.build("powersgd", scope=scope)

    def make(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        return gradient(rank, 0, shape) * (step > 2)

    lived = live(method, SIZE, 30, make, [(30, 20), (9,)])
    check_laws(method, lived)
    assert not torch.stack(lived[0].updates[:3]).any()
    owed = torch.stack([rank.residual for rank in lived]).sum(0)
    seen = 27 * torch.stack([rank.gradients[-1] for rank in lived]).sum(0)
    assert owed.norm() < 0.5 * seen.norm()  # most has arrived


def test_the_largest_rows_of_the_mean_are_sent_and_vectors_go_whole() -> None:
    """A sketch of nearly as many columns as the matrix has tells the norms well enough for rows far apart."""

    def make(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        values = gradient(rank, step, shape)
        if len(shape) == 2:
            values[[2, 7]] *= 100
        return values

    method = sparsify.build("arctopk", density=2 / 12, scope="global", feedback="gradient", rank=9)
    lived = live(method, SIZE, 1, make, ARC_SHAPES)
    mean = torch.tensor(np.mean(gradients_in_step(lived, 0), axis=0))
    expected = torch.zeros(125).double()
    expected[:5] = mean[:5]  # the vector comes first
    for row in (2, 7):
        expected[5:].view(12, 10)[row] = mean[5:].view(12, 10)[row]
    torch.testing.assert_close(lived[0].updates[0], expected)
    assert lived[0].selected == [2 * 10 + 5]
    # An all-reduce of 12 x 9 numbers, and one of what was chosen.
    assert lived[0].wire_bytes[0] == pytest.approx(2 * (SIZE - 1) / SIZE * 8 * (108 + 25), abs=8)


def test_what_is_too_narrow_for_a_sketch_is_sent_whole() -> None:
    shapes = matrix_shapes(((10, 4), (10, 5), (1, 50), (7,), (0,), (3, 2, 5)))
    assert [SketchedRowTopK(4).is_sketched(*shape) for shape in shapes] == [False, True, False, False, True]


@pytest.mark.parametrize("sign", [True, False])
def test_each_step_of_demo_is_the_published_one(sign: bool) -> None:
    """Matrices of 8 x 12 in chunks of 4 x 4, of which three coefficients each are sent."""
    momenta = np.zeros((SIZE, 8, 12))

    def transform_chunks(matrices: Array) -> Array:
        chunks = matrices.reshape(SIZE, 2, 4, 3, 4).swapaxes(2, 3)
        coefficients: Array = dctn(chunks, axes=(3, 4), norm="ortho").reshape(SIZE, 6, 16)
        return coefficients

    def transform_back(coefficients: Array) -> Array:
        chunks = coefficients.reshape(-1, 2, 3, 4, 4)
        matrices: Any = idctn(chunks, axes=(3, 4), norm="ortho").swapaxes(2, 3)
        return np.asarray(matrices).reshape(-1, 8, 12)

    def update_of(grads: list[Array]) -> Array:
        momenta[:] = 0.9 * momenta + np.reshape(grads, momenta.shape)
        sent = transform_chunks(momenta)
        smallest = np.argsort(-np.abs(sent), axis=2)[:, :, 3:]
        np.put_along_axis(sent, smallest, 0, axis=2)
        momenta[:] -= transform_back(sent)
        senders = (sent != 0).sum(0).clip(1)
        mean = transform_back(sent.sum(0) / senders).ravel()
        update: Array = np.sign(mean) if sign else mean
        return update

    method = build("demo", density=3 / 16, decay=0.9, side=4, sign=sign)
    check_updates(live(method, SIZE, 5, shapes=[(8, 12)]), update_of, EXACT)


def test_without_sign_and_decay_demo_loses_nothing() -> None:
    method = build("demo", density=0.1, decay=1.0, sign=False, average="workers")
    assert not method.broken_laws()
    check_laws(method, live(method, SIZE))
