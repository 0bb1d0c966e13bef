"""PowerSGD against the paper's algorithms in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsify
from sparsify.types import BucketContext
from tests.sparsify.laws import live, mass
from tests.sparsify.methods.replays import CPU, SEED, grads


def gram_schmidt(p: np.ndarray) -> np.ndarray:
    p = p.copy()
    for i in range(p.shape[1]):
        p[:, i] /= np.linalg.norm(p[:, i])
        for j in range(i + 1, p.shape[1]):
            p[:, j] -= (p[:, i] @ p[:, j]) * p[:, i]
    return p


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_powersgd_is_algorithms_1_and_2(rank: int) -> None:
    """Vogels et al. 2019, with their Gram-Schmidt: one matrix that is compressed, and a bias that is not."""
    m, n, size, steps = 30, 20, 3, 5
    lived = live(sparsify.build("powersgd", rank=rank), size, steps, shapes=[(m, n), (9,)])
    own = BucketContext(SEED, 0, 0).shared.generator(CPU)
    q = torch.randn(n * rank, generator=own, dtype=torch.float64).view(n, rank).numpy()
    e = [np.zeros((m, n)) for _ in range(size)]
    for step in range(steps):
        flat = grads(lived, step)  # the bias comes first: buckets run from the last parameter to the first
        delta = [g[9:].reshape(m, n) + e[w] for w, g in enumerate(flat)]
        p = sum(delta_w @ q for delta_w in delta) / size
        p = gram_schmidt(p)
        q = sum(delta_w.T @ p for delta_w in delta) / size
        decompressed = p @ q.T
        e = [delta_w - decompressed for delta_w in delta]
        update = lived[0].updates[step].numpy()
        # Householder QR and Gram-Schmidt give the same columns up to sign, which cancels in P Q^T
        np.testing.assert_allclose(update[9:].reshape(m, n), decompressed, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(update[:9], sum(g[:9] for g in flat) / size, rtol=1e-12)
    for w, one in enumerate(lived):
        np.testing.assert_allclose(one.residual[9:].view(m, n), e[w], rtol=1e-9, atol=1e-9)
        assert not one.residual[:9].any()


def test_powersgd_sends_two_allreduces_for_a_bucket() -> None:
    """Of all P with what is not compressed, and of all Q; by a ring on two workers each sends what it has."""
    lived = live(sparsify.build("powersgd", rank=2), 2, 1, shapes=[(30, 20), (4, 5, 2, 3), (9,), (2, 2)])
    first, second = 2 * 30 + (4 * 30) + 9 + 4, 2 * 20  # 2 (4 + 30) 2 >= 120: not compressed by more than 2
    assert lived[0].wire_bytes == lived[0].counted_bytes == [8 * (first + second)]
    eager = live(sparsify.build("powersgd", min_compression_rate=1.0), 2, 1, shapes=[(4, 5, 2, 3)])
    assert eager[0].wire_bytes == [8 * 2 * (4 + 30)]


def test_powersgd_gives_a_matrix_of_low_rank_back() -> None:
    left, right = (
        torch.randn(s, generator=torch.Generator().manual_seed(0)).double() for s in ((30, 2), (2, 20))
    )
    lived = live(sparsify.build("powersgd", rank=2), 3, 1, lambda *where: left @ right, [(30, 20)])
    torch.testing.assert_close(lived[0].updates[0].view(30, 20), left @ right, rtol=1e-10, atol=1e-10)


def test_warm_start_converges_to_the_best_approximation() -> None:
    own = torch.Generator().manual_seed(1)
    u, _, vt = torch.linalg.svd(
        torch.randn((30, 20), generator=own, dtype=torch.float64), full_matrices=False
    )
    s = 0.5 ** torch.arange(20).double()
    matrix = (u * s) @ vt
    method = sparsify.build("powersgd", rank=2, feedback="none")
    lived = live(method, 2, 30, lambda *where: matrix, [(30, 20)])
    best = (u[:, :2] * s[:2]) @ vt[:2]
    errors = [float((update.view(30, 20) - best).norm()) for update in lived[0].updates]
    assert errors[0] > 0.1  # a random Q is not enough
    assert errors[-1] < 1e-9


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_powersgd_recovers_from_zeros(scope: str) -> None:
    """Gram-Schmidt would divide 0 by 0, or with an epsilon leave Q at 0 for ever."""
    method = sparsify.build("powersgd", scope=scope)

    def make(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        own = torch.Generator().manual_seed(rank)
        return torch.randn(shape, generator=own, dtype=torch.float64) * (step > 2)

    lived = live(method, 3, 30, make, [(30, 20), (9,)])
    assert all(torch.isfinite(update).all() for update in lived[0].updates)
    assert not torch.stack(lived[0].updates[:3]).any()
    seen, accounted = mass(lived)
    torch.testing.assert_close(accounted, seen, rtol=1e-10, atol=1e-10)
    applied = 3 * torch.stack(lived[0].updates).sum(dim=0)
    assert (applied - seen).norm() < 0.5 * seen.norm()  # most of 27 steps has arrived


def test_powersgd_starts_alike_on_all_workers_and_differs_between_buckets() -> None:
    method = sparsify.build("powersgd")
    like = torch.zeros(600)
    places = [BucketContext(SEED, rank, bucket, ((30, 20),)) for rank, bucket in ((0, 0), (1, 0), (0, 1))]
    first, same, other = (method.init(like, place).second for place in places)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_powersgd_multiplies_narrow_gradients_in_single_precision() -> None:
    lived = live(sparsify.build("powersgd"), 3, 3, shapes=[(30, 20)], dtype=torch.bfloat16)
    assert lived[0].residual.dtype == torch.float32
    # P and Q of rank 2 in 4 bytes, by rings of three workers: 2 (P - 1) / P of them
    assert lived[0].wire_bytes == [sum(2 * (4 * 2 * rows) * 2 // 3 for rows in (30, 20))] * 3
