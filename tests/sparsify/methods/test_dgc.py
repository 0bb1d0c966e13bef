"""DGC against a transcription of its algorithm, and the traps of its public code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sparsify
from sparsify import cost
from sparsify.comm import virtual
from sparsify.core import host_sync
from sparsify.method import num_selected
from sparsify.methods.dgc import DgcSample
from sparsify.types import DENSE_AT_DENSITY_1, NOTHING_IS_LOST, BucketContext
from tests.sparsify.laws import gradient, live, mass
from tests.sparsify.methods.replays import Array, equal_updates, gradients_of, tensors_of

DGC_SHAPES = [(40, 5), (5,), (7, 3), (1,)]


def dgc_by_the_paper(grads: Array, density: float, nesterov: bool, masking: bool, m: float) -> list[Array]:
    """Algorithm 4 with exact thresholds; vectors are averaged, with ordinary momentum."""
    steps, workers, n = grads.shape
    u, v, dense_u, updates = np.zeros((workers, n)), np.zeros((workers, n)), np.zeros(n), []
    for t in range(steps):
        update = np.zeros(n)
        for shape, at in tensors_of(DGC_SHAPES):
            if len(shape) == 1:
                mean = grads[t, :, at].mean(0)
                dense_u[at] = m * (dense_u[at] + mean) if nesterov else m * dense_u[at] + mean
                update[at] = dense_u[at] + mean if nesterov else dense_u[at]
                continue
            for worker in range(workers):
                g, uw, vw = grads[t, worker, at], u[worker, at], v[worker, at]
                uw[:] = m * (uw + g) if nesterov else m * uw + g
                vw += uw + g if nesterov else uw
                sent = np.argsort(-abs(vw))[: num_selected(len(g), density)]
                update[at][sent] += vw[sent] / workers
                vw[sent] = 0
                if masking:
                    uw[sent] = 0
        updates.append(update)
    return updates


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_is_the_papers_algorithm(nesterov: bool, masking: bool) -> None:
    method = sparsify.build("dgc", density=0.05, sample=1.0, nesterov=nesterov, masking=masking)
    lived = live(method, 3, steps=8, shapes=DGC_SHAPES)
    updates = dgc_by_the_paper(gradients_of(lived), 0.05, nesterov, masking, 0.9)
    equal_updates(lived, updates, atol=1e-13)


def choose(acc: torch.Tensor, k: int, selector: DgcSample | None = None, steps: int = 1) -> list[Any]:
    """(indices, host synchronisations) of each step, of one worker."""

    def body(comm: virtual.VirtualComm) -> list[Any]:
        part = selector or DgcSample()
        state, found = part.init(acc, BucketContext(0, 0, 0)), []
        for _ in range(steps):
            before = host_sync.num_syncs()
            found.append((part.select(acc, k, comm, state).indices, host_sync.num_syncs() - before))
        return found

    return virtual.run(1, body)[0]


@pytest.mark.parametrize("k", [100, 1000, 25_000])
@pytest.mark.parametrize("power", [1, 3])
def test_a_sampled_threshold_gives_the_largest_and_about_k_of_them(k: int, power: int) -> None:
    """Published: between k and 1.3 k the first k by position are sent, and not the largest."""
    acc = gradient(0, 0, (100_001,)).float() ** power
    for chosen, waits in choose(acc, k, steps=10):
        assert 0.8 * k <= len(chosen) <= k
        assert set(chosen.tolist()) == set(acc.abs().topk(len(chosen)).indices.tolist())
        assert 1 <= waits <= 11


def test_what_is_cut_is_cut_by_magnitude() -> None:
    """1100 candidates for k = 1000, the smallest of which come first."""
    acc = torch.full((100_000,), 1e-6)
    acc[:100] = 1.0
    acc[-1000:] = 2.0
    for chosen, _ in choose(acc, 1000, DgcSample(sample=0.5), steps=5):
        assert chosen.min() >= 99_000
        assert len(chosen) == 1000


def test_the_threshold_is_lowered_until_enough_reach_it() -> None:
    acc = gradient(0, 0, (20_000,))
    few = [len(chosen) for chosen, _ in choose(acc, 20, DgcSample(adaptations=0), steps=50)]
    enough = [len(chosen) for chosen, _ in choose(acc, 20, steps=50)]
    assert min(few) < 0.8 * 20 <= min(enough)
    # A gap that ten factors of 0.8 do not bridge ends the search, and what was found is sent.
    gap = torch.full((20_000,), 1e-9)
    gap[:3] = torch.tensor([1.0, 2.0, 3.0])
    assert all(waits <= 11 and len(chosen) <= 20 for chosen, waits in choose(gap, 20, steps=200))


def test_small_tensors_get_an_exact_top_k() -> None:
    """Those of 2 / density elements at most, of which the sample would be all."""
    acc = gradient(0, 0, (2000,))
    for chosen, waits in choose(acc, 1):
        assert chosen.tolist() == [int(acc.abs().argmax())]
        assert waits == 0


def test_zeros_are_no_candidates() -> None:
    acc = torch.zeros(100_000)
    assert [(len(chosen), waits) for chosen, waits in choose(acc, 100)] == [(0, 1)]
    acc[77_777] = -1e-12
    assert choose(acc, 100)[0][0].tolist() == [77_777]


def test_dgcs_defaults_are_the_published_ones() -> None:
    expected = {"density": 0.001, "scope": "layer", "momentum": 0.9, "sample": 0.01, "adaptations": 10}
    assert expected.items() <= sparsify.defaults("dgc").items()
    method = sparsify.build("dgc", density_warmup=[0.25, 0.0625, 0.015625, 0.004, 0.001])
    assert [method.density_at(epoch) for epoch in range(6)] == [0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001]
    assert method.momentum_inside
    assert not sparsify.build("dgc", momentum=0.0).momentum_inside


@pytest.mark.parametrize("dense_vectors", [True, False])
@pytest.mark.parametrize("masking", [True, False])
def test_without_momentum_nothing_is_lost(masking: bool, dense_vectors: bool) -> None:
    method = sparsify.build(
        "dgc", density=0.05, momentum=0.0, masking=masking, dense_vectors=dense_vectors, sample=0.5
    )
    assert NOTHING_IS_LOST not in method.broken_laws()
    seen, accounted = mass(live(method, 4, steps=12))
    torch.testing.assert_close(accounted, seen, rtol=1e-10, atol=1e-10)


def test_nesterovs_form_is_excused_from_a_dense_first_step_and_needs_it() -> None:
    method = sparsify.build("dgc", density=1.0, nesterov=True)
    assert DENSE_AT_DENSITY_1 in method.broken_laws()
    lived = live(method, 2, steps=1)
    mean = torch.stack([rank.gradients[0] for rank in lived]).mean(dim=0)
    torch.testing.assert_close(lived[0].updates[0], 1.9 * mean)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_vectors_are_averaged_whole_with_ordinary_momentum(dtype: torch.dtype) -> None:
    lived = live(sparsify.build("dgc", density=0.01), 2, steps=6, shapes=[(500,)], dtype=dtype)
    assert lived[0].selected == [500] * 6
    assert lived[0].counted_bytes == [cost.all_reduce(500 * dtype.itemsize, 2).sent_bytes] * 6
    u = torch.zeros(500, dtype=torch.float64)
    for step, update in enumerate(lived[0].updates):
        u = 0.9 * u + torch.stack([rank.gradients[step] for rank in lived]).double().mean(dim=0)
        # bfloat16: the mean is rounded once and the result once more, to 8 bits; the momentum is not.
        close = 1e-12 if dtype == torch.float64 else 2**-6
        torch.testing.assert_close(update.double(), u, rtol=close, atol=close)


def test_vectors_are_sparsified_like_the_rest_on_request() -> None:
    method = sparsify.build("dgc", density=0.01, dense_vectors=False)
    assert live(method, 2, shapes=[(500,)])[0].selected == [5] * 5


def test_clipping_is_local_and_by_the_square_root_of_the_workers() -> None:
    method = sparsify.build("dgc", clip_norm=1.0)

    def body(comm: virtual.VirtualComm) -> float:
        grad = gradient(comm.rank, 0, (100,))
        method.prepare([grad[:30], grad[30:]], comm)
        return float(grad.norm())

    assert virtual.run(4, body) == pytest.approx([0.5] * 4)
