"""DGC against a transcription of its algorithm, and the traps of its public code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import sparsify
from sparsify.comm import virtual
from sparsify.core import host_sync
from sparsify.methods.dgc import SampledThreshold
from sparsify.types import num_selected
from tests.sparsify.laws import SHAPES, check_laws, gradient, live
from tests.sparsify.methods.replays import (
    CONTEXT,
    Array,
    check_updates,
    indices_of_largest,
    select_alone,
    split_tensors,
)


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [False, True])
def test_dgc_is_the_papers_algorithm(nesterov: bool, masking: bool) -> None:
    """Algorithm 4 with exact thresholds; vectors are averaged, with ordinary momentum."""
    method = sparsify.build("dgc", density=0.05, sample=1.0, nesterov=nesterov, masking=masking)
    momenta, sums = ([np.zeros(227) for _ in range(3)] for _ in range(2))

    def accelerate(momentum: Array, grad: Array) -> Array:
        momentum[:] = 0.9 * (momentum + grad) if nesterov else 0.9 * momentum + grad
        return momentum + grad if nesterov else momentum

    def update_of(grads: list[Array]) -> Array:
        update = np.zeros(227)
        mean = sum(grads[1:], grads[0]) / 3
        for worker, grad in enumerate(grads):
            flats = (update, mean, grad, momenta[worker], sums[worker])
            parts = (split_tensors(SHAPES, flat) for flat in flats)
            for (shape, into), (_, average), (_, g), (_, u), (_, v) in zip(*parts, strict=True):
                if len(shape) == 1:
                    into[:] = accelerate(u, average)
                    continue
                v += accelerate(u, g)
                sent = indices_of_largest(v, num_selected(len(g), 0.05))
                into[sent] += v[sent] / 3
                v[sent] = 0
                if masking:
                    u[sent] = 0
        return update

    check_updates(live(method, 3, steps=8), update_of, 1e-12)


def choose(acc: torch.Tensor, k: int, selector: SampledThreshold | None = None, steps: int = 1) -> list[Any]:
    """Return (indices, host synchronisations) of each step, of one worker."""
    selector = selector or SampledThreshold()
    state = selector.init(acc, CONTEXT)
    found = []
    for _ in range(steps):
        before = host_sync.num_syncs()
        found.append((select_alone(selector, acc, k, state), host_sync.num_syncs() - before))
    return found


@pytest.mark.parametrize("k", [100, 1000, 25_000])
@pytest.mark.parametrize("power", [1, 3])
def test_a_sampled_threshold_gives_the_largest_and_about_k_of_them(k: int, power: int) -> None:
    """Published: between k and 1.3 k the first k by position are sent, and not the largest."""
    acc = gradient(0, 0, (100_001,)).float() ** power
    ranked = acc.abs().argsort(descending=True)
    for chosen, waits in choose(acc, k, steps=10):
        assert 0.8 * k <= len(chosen) <= k
        assert set(chosen.tolist()) == set(ranked[: len(chosen)].tolist())
        assert 1 <= waits <= 11


def test_the_threshold_is_lowered_until_enough_reach_it() -> None:
    acc = gradient(0, 0, (20_000,))
    few = [len(chosen) for chosen, _ in choose(acc, 20, SampledThreshold(adaptations=0), steps=50)]
    enough = [len(chosen) for chosen, _ in choose(acc, 20, steps=50)]
    assert min(few) < 0.8 * 20 <= min(enough)
    # A gap that ten factors of 0.8 do not bridge ends the search, and what was found is sent.
    gap = torch.full((20_000,), 1e-9)
    gap[:3] = torch.tensor([1.0, 2.0, 3.0])
    assert all(waits <= 11 and len(chosen) <= 20 for chosen, waits in choose(gap, 20, steps=100))


def test_small_tensors_get_an_exact_top_k() -> None:
    """Small tensors have at most 2 / density elements, of which the sample would be all."""
    acc = gradient(0, 0, (2000,))
    chosen, waits = choose(acc, 1)[0]
    assert chosen.tolist() == [int(acc.abs().argmax())]
    assert waits == 0


def test_zeros_are_no_candidates() -> None:
    acc = torch.zeros(100_000)
    assert [(len(chosen), waits) for chosen, waits in choose(acc, 100)] == [(0, 1)]
    acc[77_777] = -1e-12
    assert choose(acc, 100)[0][0].tolist() == [77_777]


@pytest.mark.parametrize("dense_vectors", [True, False])
@pytest.mark.parametrize("masking", [True, False])
def test_without_momentum_nothing_is_lost(masking: bool, dense_vectors: bool) -> None:
    choices = {"masking": masking, "dense_vectors": dense_vectors}
    method = sparsify.build("dgc", density=0.05, momentum=0.0, sample=0.5, **choices)
    assert not method.broken_laws()
    check_laws(method, live(method, 4, steps=12))


def test_the_momentum_of_averaged_vectors_is_wide() -> None:
    lived = live(sparsify.build("dgc", density=0.01), 2, steps=6, shapes=[(500,)], dtype=torch.bfloat16)
    momentum = torch.zeros(500, dtype=torch.float64)
    for step, update in enumerate(lived[0].updates):
        momentum = (
            0.9 * momentum + (lived[0].gradients[step].double() + lived[1].gradients[step].double()) / 2
        )
        # The mean is rounded once and the result once more, to 8 bits; the momentum is not.
        torch.testing.assert_close(update.double(), momentum, rtol=2**-6, atol=2**-6)


def test_clipping_is_local_and_by_the_square_root_of_the_workers() -> None:
    method = sparsify.build("dgc", clip_norm=1.0)

    def body(comm: virtual.VirtualComm) -> float:
        grad = gradient(comm.rank, 0, (100,))
        method.prepare_gradients_in_place([grad[:30], grad[30:]], comm)
        return float(grad.norm())

    assert virtual.run(4, body) == pytest.approx([0.5] * 4)
