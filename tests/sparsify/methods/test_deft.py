"""DEFT against a transcription of its algorithm."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import sparsify
from sparsify.methods.deft import Deft, fragments, packed, shares
from tests.sparsify.laws import SHAPES, live
from tests.sparsify.methods.replays import Array, equal_updates, gradients_of, select


def deft_by_the_paper(grads: Array, sizes: list[int], density: float) -> list[Array]:
    steps, workers, n = grads.shape
    cuts: list[tuple[int, int]] = []
    for size in sizes:
        pieces = workers if size > n / workers else 1
        for i in range(pieces):
            start = cuts[-1][1] if cuts else 0
            cuts.append((start, start + size // pieces + (i < size % pieces)))
    e, updates = np.zeros((workers, n)), list[Array]()
    for t in range(steps):
        acc = e + grads[t]
        leader = t % workers
        norms = np.array([np.linalg.norm(acc[leader, a:b]) for a, b in cuts])
        k_rem, norm_rem, ks = int(density * n), norms.sum(), np.zeros(len(cuts), int)
        for i in np.argsort(-norms, kind="stable"):
            length = cuts[i][1] - cuts[i][0]
            ks[i] = np.clip(int(k_rem * norms[i] / norm_rem + 1e-12), 1, length)
            k_rem, norm_rem = k_rem - ks[i], norm_rem - norms[i]
        for i in np.argsort(-norms, kind="stable"):
            more = min(max(k_rem, 0), cuts[i][1] - cuts[i][0] - ks[i])
            ks[i], k_rem = ks[i] + more, k_rem - more
        # Who selects a fragment: the packing decides.
        weights = [(b - a) * (np.log2(k) if k > 1 else 1) for (a, b), k in zip(cuts, ks, strict=True)]
        bins, loads = np.zeros(len(cuts), int), np.zeros(workers)
        for i in np.argsort(-np.array(weights), kind="stable"):
            bins[i] = loads.argmin()
            loads[bins[i]] += weights[i]
        union: list[int] = []
        for worker in range(workers):
            for i, (a, b) in enumerate(cuts):
                if bins[i] == (t + worker) % workers:
                    union += list(a + np.argsort(-abs(acc[worker, a:b]))[: ks[i]])
        update = np.zeros(n)
        update[union] = acc[:, union].sum(0) / workers
        acc[:, union] = 0
        e, updates = acc, [*updates, update]
    return updates


@pytest.mark.parametrize("density", [0.05, 0.3])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_deft_is_the_papers_algorithm(size: int, density: float) -> None:
    lived = live(sparsify.build("deft", density=density), size, steps=6)
    sizes = [torch.Size(shape).numel() for shape in SHAPES[::-1]]
    expected = deft_by_the_paper(gradients_of(lived), sizes, density)
    equal_updates(lived, expected, rtol=1e-14, atol=0)


def test_deft_cuts_tensors_of_more_than_their_share_and_leaves_out_empty_pieces() -> None:
    assert fragments([10, 3, 90], 4) == [10, 3, 23, 23, 22, 22]
    assert fragments([2, 0], 4) == [1, 1]
    assert fragments([10, 3, 90], 1) == [10, 3, 90]


def test_deft_shares_k_by_the_norms() -> None:
    assert shares([6.0, 3.0, 1.0], [100, 100, 100], 20) == [12, 6, 2]
    assert shares([6.0, 3.0, 1.0], [5, 100, 100], 20) == [
        5,
        11,
        4,
    ]  # a full fragment leaves its share to others
    assert shares([0.0, 0.0], [10, 10], 4) == [3, 1]
    assert shares([1e4, 1e-13, 3.0], [7, 7, 7], 21) == [7, 7, 7]
    assert sum(shares([float("nan"), float("inf"), 1.0], [7, 7, 7], 9)) >= 9


def test_deft_sends_one_element_of_each_fragment_at_least_which_raises_the_density() -> None:
    lived = live(sparsify.build("deft", density=0.02), 2, shapes=[(3,)] * 40)
    assert int(0.02 * 120) == 2
    assert lived[0].selected == [40] * 5


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_one_worker_alone_sends_whole_fragments_too(density: float) -> None:
    """Published DEFT left out the fragments that are sent whole where P = 1."""
    n = sum(torch.Size(shape).numel() for shape in SHAPES)
    lived = live(sparsify.build("deft", density=density), 1, steps=3)
    assert all(selected >= int(density * n) for selected in lived[0].selected)
    if density == 1:
        assert all(torch.equal(*pair) for pair in zip(lived[0].updates, lived[0].gradients, strict=True))


def test_deft_packs_the_heaviest_first_into_the_lightest_bin() -> None:
    assert packed([3.0, 9.0, 4.0, 5.0], 2) == [0, 0, 1, 1]
    assert packed([1.0], 3) == [0]


def test_the_leaders_norms_decide_for_all() -> None:
    """Worker 0 has everything in the first tensor, worker 1 in the second; they take turns to lead."""
    quiet, loud = torch.full((50,), 1e-6).double(), torch.arange(1, 51).double()
    accs = [torch.cat([loud, quiet]), torch.cat([quiet, loud])]
    chosen, _ = select(Deft(), 2, accs, 20, steps=2, shapes=((50,), (50,)))
    first = [sum(index < 50 for index in step) for step in chosen[0]]
    assert first == [19, 1]
