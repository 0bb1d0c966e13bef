"""Chunks searched in C++: they choose what torch's operators choose."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor

from sparsify.comm import Comm, virtual
from sparsify.core.chunks import Tiles
from sparsify.kernels import trouble_with_native
from sparsify.kernels.native import KINDS, LEVELS, best_level
from sparsify.kernels.native_chunks import NativeChunks
from sparsify.method import num_selected
from sparsify.methods._chunked import ChunkTopK
from sparsify.types import BucketContext, Sparse
from tests.conftest import there

pytestmark = pytest.mark.skipif(bool(trouble_with_native()), reason=str(trouble_with_native()))
Shapes = list[tuple[int, ...]]
SHAPES: list[Shapes] = [
    [(1,)], [(0, 3), (5,)], [(67,)], [(64, 64)], [(128, 64 * 35)], [(1009, 8)], [(50, 1280)], [(513, 2)],
    [(10, 64), (10,), (32, 3, 5, 5), (6, 1, 5, 5), (120, 400), (0,), (64, 3, 7, 7)],
]  # fmt: skip


def levels() -> list[str]:
    return [] if trouble_with_native() else [*LEVELS[: LEVELS.index(best_level()) + 1]]


def random(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def check(
    of: Shapes, density: float, acc: Tensor, grad: Tensor | None = None, level: str | None = None
) -> None:
    tiles, k = Tiles(of), num_selected(acc.numel(), density)
    summed = acc.clone() if grad is None else acc + grad
    theirs = tiles.largest(summed, k)
    found = there(NativeChunks(tiles, level).largest([acc], [] if grad is None else [grad], [k]))
    indices, values = found.indices.long(), found.values
    torch.testing.assert_close(acc, summed, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, acc[indices], rtol=0, atol=0, equal_nan=True)
    places, at = tiles.places(indices, k), 0
    assert torch.equal(tiles.indices(places, k), indices)
    for grid, few in zip(tiles.grids, tiles.quota(k).each, strict=True):
        stop = at + grid.num_chunks * few
        assert (places[at:stop].view(-1, few).diff(dim=1) > 0).all()
        chosen = (part[at:stop].view(-1, few).abs().sort(dim=1).values for part in (values, theirs.values))
        torch.testing.assert_close(*chosen, rtol=0, atol=0, equal_nan=True)
        at = stop


@pytest.mark.parametrize("density", [1e-3, 1 / 64, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("of", SHAPES, ids=str)
def test_they_choose_the_largest_of_each_chunk(of: Shapes, level: str, density: float) -> None:
    n = sum(map(prod, of))
    check(of, density, random(n), None, level)
    check(of, density, random(n), random(n, 1), level)


@pytest.mark.parametrize("level", levels())
def test_chunks_of_very_different_magnitudes_are_searched_exactly(level: str) -> None:
    """Where what one chunk lets expect of the next is wrong: too few, too many, or all are beyond it."""
    of: Shapes = [(640, 640)]
    scales = 10.0 ** torch.randint(-30, 30, (100, 1), generator=torch.Generator().manual_seed(3))
    check(of, 1 / 64, (random(409600).view(100, -1) * scales).view(-1), None, level)
    zeros = random(409600)
    zeros.view(-1, 640)[64:200] = 0
    zeros.view(-1, 640)[300:500:7] = 1e-42
    check(of, 1 / 64, zeros, None, level)
    check(of, 1 / 64, torch.ones(409600), None, level)
    check(of, 1 / 64, random(409600).mul_(3).round_(), None, level)


@pytest.mark.parametrize("level", levels())
def test_nan_and_infinity_are_the_largest(level: str) -> None:
    acc = random(4096 * 4)
    acc[5], acc[4096 * 2 + 1], acc[7], acc[9000:9100] = torch.nan, -torch.nan, torch.inf, torch.nan
    check([(128, 128)], 1 / 64, acc, None, level)
    check([(128, 128)], 1 / 64, torch.full((4096 * 4,), torch.nan), None, level)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_gradients_are_added_on_the_way(dtype: torch.dtype) -> None:
    for of in SHAPES:
        n = sum(map(prod, of))
        check(of, 1 / 64, random(n), random(n, 1).to(dtype))


def test_threads_choose_alike() -> None:
    of: Shapes = [(2048, 1024), (1000,), (640, 640)]
    n, threads = sum(map(prod, of)), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            chunks = NativeChunks(Tiles(of))
            found.append(there(chunks.largest([random(n)], [random(n, 1)], [n // 64])))
    finally:
        torch.set_num_threads(threads)
    for one in found[1:]:
        assert torch.equal(one.indices, found[0].indices)
        assert torch.equal(one.values, found[0].values)


def test_the_selector_takes_them_where_they_work() -> None:
    """Not for float64, nor where the user wants torch's operators; all find the same."""
    of, chosen = ((64, 128), (67,)), []

    def body(comm: Comm) -> None:
        for select, dtype in (("auto", torch.float32), ("torch", torch.float32), ("auto", torch.float64)):
            acc = random(8259).to(dtype)
            state = ChunkTopK().init(acc, BucketContext(0, 0, 0, of, select))
            assert (state.native is None) == (select == "torch")
            part = ChunkTopK().accumulate_and_select(acc, random(8259, 1).to(dtype), 129, comm, state)
            chosen.append(part.indices)

    virtual.run(1, body)
    assert torch.equal(chosen[0], chosen[1])
    assert torch.equal(chosen[0], chosen[2])


@pytest.mark.parametrize("level", levels())
def test_drift_is_added_to_what_is_left_of_the_residual_and_parameters_go_back_to_the_anchor(
    level: str,
) -> None:
    """Of several buckets, whose tensors lie in memories of their own: to the bit what one operator after the
    other gives, each bucket by itself.
    """
    of: Shapes = [(128, 192), (1000,), (0,), (67, 65), (3,)]
    sizes = [*map(prod, of)]
    tiles = Tiles(of, buckets=[1, 3, 1])
    ks = [num_selected(n, 1 / 64) for n in tiles.ns]
    accs, own, anchors = ([random(n, seed + n) for n in sizes] for seed in (1, 2, 3))
    accs = [accs[0], torch.cat(accs[1:4]), accs[4]]  # of each bucket
    residual, drift = torch.cat(accs), torch.cat(anchors) - torch.cat(own)
    before, chunks = [anchor.clone() for anchor in anchors], NativeChunks(tiles, level)
    for _ in range(2):  # the second time with kept tables
        summed = residual * 0.95 + drift
        found = there(chunks.largest(accs, own, ks, 0.95, anchors))
        residual, drift = torch.cat(accs), torch.zeros(len(drift))
        assert torch.equal(residual, summed)
        assert all(map(torch.equal, own, before))
        assert all(map(torch.equal, anchors, before))
        first, base = 0, 0
        for n, k, count, shapes in zip(
            tiles.ns, ks, tiles.chosen(ks), (of[:1], of[1:4], of[4:]), strict=True
        ):
            theirs = Tiles(shapes).largest(summed[base : base + n], k)
            ours = Sparse(*(part[first : first + count] for part in found))
            assert torch.equal(ours.indices.long() - base, theirs.indices)
            assert torch.equal(ours.values, theirs.values)
            first, base = first + count, base + n


def test_what_it_cannot_read_is_left_as_it_is() -> None:
    """Other types, gaps, a chunk in two memories."""
    chunks, n = NativeChunks(Tiles([(64, 64)])), 4096
    acc, grad = random(n), random(n, 1)
    for accs, grads, anchors in (
        ([acc.double()], [grad], []),
        ([acc], [grad.double()], []),
        ([acc], [grad.bfloat16()], [grad]),
        ([acc.repeat(2)[::2]], [grad], []),
        ([acc], [*grad.split(1000)], []),
        ([acc], [grad[1:]], []),
    ):
        before = accs[0].clone()
        assert chunks.largest(accs, grads, [64], 0.5, anchors) is None
        assert torch.equal(accs[0], before)
