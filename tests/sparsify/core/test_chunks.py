"""Chunks of tensors, and the largest elements of each."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsify.core.chunks import ChunkLayout, make_chunk_grids, num_chosen_of_chunk
from sparsify.core.packing import (
    pack_codes,
    pack_places,
    packed_nbytes,
    packed_places_nbytes,
    unpack_codes,
    unpack_places,
)
from sparsify.types import SparseVector, num_selected

CPU = torch.device("cpu")
Shapes = list[tuple[int, ...]]
# Empty, prime, with divisors, beyond a chunk; and tensors of models.
SHAPES: list[Shapes] = [
    [()], [(0,)], [(0, 5), (3,)],
    [(67,)], [(1009,)], [(64,)], [(65,)], [(768,)],
    [(128, 192)], [(1, 300)], [(300, 1)], [(1, 4099)], [(67, 64)], [(67, 71)],
    [(10, 64), (10,), (32, 3, 5, 5), (32,), (6, 1, 5, 5), (120, 400)],
    [(1009, 8), (7,), (70, 66), (0,), (64, 3, 7, 7), (2, 3, 4, 5)],
]  # fmt: skip
shapes = st.lists(st.lists(st.integers(0, 90), max_size=3).map(tuple), min_size=1, max_size=4)


def numel(of: Shapes) -> int:
    return sum(map(prod, of))


def random(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check_equal(found: Tensor, expected: Tensor) -> None:
    """Check equality to the bit, with any NaN equal to any other."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def check_chosen(tiles: ChunkLayout, k: int | list[int], acc: Tensor, found: SparseVector) -> None:
    """Check that chunks cover every element once and that the largest of each chunk are chosen.

    They are chosen in the order of their places, and places and indices follow from each other.
    """
    indices = found.indices.long()
    check_equal(found.values, acc[indices])
    places = tiles.indices_to_places(indices, k)
    assert torch.equal(tiles.places_to_indices(places, k), indices)
    every = torch.arange(len(acc))
    covered = [every[:0]]
    first = 0
    for grid, share in zip(tiles.grids, tiles.quota(k).k_by_grid, strict=True):
        chunks = grid.view_chunks(every).reshape(-1, grid.chunk_numel)
        assert len(chunks) == grid.num_chunks
        assert grid.chunk_numel <= tiles.side**2
        assert torch.equal(grid.first_indices(CPU), chunks[:, 0])
        last = first + len(chunks) * share
        chosen = indices[first:last].view(-1, share)
        inside = places[first:last].view(-1, share).long()
        assert torch.equal(chunks.gather(1, inside), chosen)
        assert (inside.diff(dim=1) > 0).all()
        largest = acc[chunks].abs().topk(share, dim=1).values
        check_equal(acc[chosen].abs().sort(dim=1, descending=True).values, largest)
        covered.append(chunks.view(-1))
        first = last
    assert first == len(indices) == sum(tiles.quota(k).counts)
    assert torch.equal(torch.cat(covered).sort().values, every)


def search(tiles: ChunkLayout, density: float, acc: Tensor) -> None:
    before = acc.clone()
    k = num_selected(tiles.n, density)
    check_chosen(tiles, k, acc, tiles.select_largest(acc, k))
    check_equal(acc, before)


@pytest.mark.parametrize("of", SHAPES, ids=str)
def test_the_largest_of_each_chunk_are_chosen_whatever_the_shapes(of: Shapes) -> None:
    """And whatever the density was a step ago; NaN counts as largest."""
    n = numel(of)
    tiles = ChunkLayout(of)
    for density in (1 / 64, 0.7, 1.0, 1e-3, 0.1):
        search(tiles, density, random(n))
    for side in (1, 5):
        search(ChunkLayout(of, side), 0.1, random(n, dtype=torch.float64))
    strange = random(n)
    strange[n // 2 :: 1000] = torch.nan
    strange[n // 3 :: 700] = -torch.inf
    strange[n // 5 :: 1100] = -torch.nan
    for acc in (torch.zeros(n), random(n).round(), strange):
        search(tiles, 1 / 64, acc)


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 64), st.floats(1e-3, 1.0))
def test_the_largest_of_each_chunk_of_any_shapes_are_chosen(of: Shapes, side: int, density: float) -> None:
    search(ChunkLayout(of, side), density, random(numel(of)))


def test_a_matrix_is_cut_into_tiles_and_a_vector_into_runs() -> None:
    """By the largest divisors of up to 64, as published; where a side is prime, into runs."""
    sizes = {
        (1000, 1024): [(50, 64)], (30522, 768): [(6, 64)], (64, 3, 7, 7): [(64, 49)], (768,): [(1, 64)],
        (67,): [(1, 64), (1, 3)], (1009, 8): [(1, 4096), (1, 3976)], (67, 64): [(1, 4096), (1, 192)],
        (61,): [(1, 61)], (1, 64): [(1, 64)],  # no more than 64: as it is
        (32 * 67,): [(1, 32)], (31 * 67,): [(1, 64), (1, 29)],
    }  # fmt: skip
    assert {shape: [grid[-2:] for grid in make_chunk_grids((shape,))] for shape in sizes} == sizes
    (grid,) = make_chunk_grids(((4, 6),), 3)
    assert grid.view_chunks(torch.arange(24)).reshape(-1, 6).tolist() == [
        [0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11], [12, 13, 14, 18, 19, 20], [15, 16, 17, 21, 22, 23],
    ]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10**8), st.integers(1, 4096), st.floats(1e-6, 1.0))
def test_the_share_of_a_chunk_is_the_whole_part_of_the_density(n: int, size: int, density: float) -> None:
    """Up to one more: k of n says the density up to 1 / n, so that of the chunk up to size / n."""
    size = min(size, n)
    k = num_selected(n, density)
    share = num_chosen_of_chunk(size, k, n)
    assert 1 <= share <= size
    exact = (k + 1) * size / n  # of the largest density that gives this k
    assert share in {1, int(density * size), int(exact), int(exact) - 1}
    assert num_chosen_of_chunk(size, n, n) == size
    assert num_chosen_of_chunk(4096, num_selected(4096 + n, 1 / 64), 4096 + n) == 64


def test_slabs_are_small_and_do_not_change_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    of = [(128, 640), (640,), (64, 64), (128, 64)]
    acc = random(numel(of))
    k = numel(of) // 64
    whole = ChunkLayout(of).select_largest(acc, k)
    for most in (1, 3 * 4096, 25 * 4096):
        monkeypatch.setattr("sparsify.core.chunks.BATCH_NUMEL", most)
        tiles = ChunkLayout(of)
        assert torch.equal(tiles.select_largest(acc, k).indices, whole.indices)
        assert all(batch.numel <= max(most, batch.chunk_numel) for batch in tiles.quota(k).batches)


def test_counts_of_tensors_and_of_buckets() -> None:
    """Each of several buckets has its own k: a tensor of 7 alone gives one of its own."""
    of = ((1009, 8), (7,), (0,), (64, 64))
    assert ChunkLayout(of).quota(num_selected(numel([*of]), 1 / 64)).counts == (64 + 62, 1, 0, 64)
    several = ChunkLayout(of, tensors_per_bucket=[1, 2, 1])
    ks = [num_selected(n, 0.3) for n in several.bucket_numels]
    assert several.bucket_numels == [8072, 7, 4096]
    assert several.quota(ks).counts == (1228 + 1193, 2, 0, 1228)
    assert several.counts_by_bucket(ks) == [1228 + 1193, 2, 1228]
    with pytest.raises(ValueError, match=r"side=65 is out of range: it must be a whole number from 1 to 64"):
        ChunkLayout([(3,)], 65)


def test_what_is_packed_is_unpacked() -> None:
    """Codes of few bits; places, which take three bytes for two."""
    for k in (0, 1, 2, 3, 7, 1000):
        for bits in (1, 2, 4, 8):
            codes = torch.randint(0, 1 << bits, (k,), generator=torch.Generator().manual_seed(k))
            message = pack_codes(codes.to(torch.uint8), bits)
            assert len(message) == packed_nbytes(k, bits) == -(-k * bits // 8)
            assert torch.equal(unpack_codes(message, bits, k), codes.to(torch.uint8))
        places = torch.arange(k) * 4095 // max(1, k - 1)
        message = pack_places(places)
        assert len(message) == packed_places_nbytes(k) == -(-3 * k // 2)
        assert torch.equal(unpack_places(message, k), places)
