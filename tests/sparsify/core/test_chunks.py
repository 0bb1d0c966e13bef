"""Chunks of tensors, and the largest elements of each."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsify.core.chunks import (
    Tiles,
    cut,
    largest_divisor,
    largest_of_rows,
    share_of,
    slabs_of,
)
from sparsify.core.packing import pack_places, packed, packed_nbytes, places_nbytes, unpack_places, unpacked
from sparsify.method import num_selected

Shapes = list[tuple[int, ...]]
SHAPES: list[Shapes] = [
    [(1,)], [()], [(0,)], [(0, 5), (3,)], [(5, 0)],
    [(67,)], [(1009,)], [(64,)], [(65,)], [(768,)], [(1000,)], [(100,)],
    [(64, 64)], [(128, 192)], [(1, 300)], [(300, 1)], [(1, 4099)], [(67, 64)], [(67, 71)], [(3, 1009)],
    [(10, 64), (10,), (32, 3, 5, 5), (32,), (6, 1, 5, 5), (120, 400)],
    [(1009, 8), (7,), (70, 66), (0,), (64, 3, 7, 7), (2, 3, 4, 5)],
]  # fmt: skip
shapes = st.lists(st.lists(st.integers(0, 90), max_size=3).map(tuple), min_size=1, max_size=4)


def numel(of: Shapes) -> int:
    return sum(map(prod, of))


def tiles(of: Shapes, side: int = 64) -> Tiles:
    return Tiles(of, side)


def chunks_of(of: Shapes, side: int = 64) -> list[list[int]]:
    """Indices of each chunk's elements, by number and place."""
    every = torch.arange(numel(of))
    grids = cut(tuple(of), side)
    return [chunk.tolist() for grid in grids for chunk in grid.of(every).reshape(-1, grid.size)]


def random(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def check_cut(of: Shapes, side: int) -> None:
    found = chunks_of(of, side)
    assert sorted(index for chunk in found for index in chunk) == list(range(numel(of)))
    assert all(0 < len(chunk) <= side * side for chunk in found)
    assert len(found) == sum(grid.num_chunks for grid in tiles(of, side).grids)
    starts = [start for grid in cut(tuple(of), side) for start in grid.starts(torch.device("cpu")).tolist()]
    assert starts == [chunk[0] for chunk in found]


@pytest.mark.parametrize("side", [1, 5, 64])
@pytest.mark.parametrize("of", SHAPES, ids=str)
def test_chunks_cover_every_element_once(of: Shapes, side: int) -> None:
    check_cut(of, side)


@settings(max_examples=40, deadline=None)
@given(shapes, st.integers(1, 64))
def test_chunks_of_any_shapes_cover_every_element_once(of: Shapes, side: int) -> None:
    check_cut(of, side)


def test_a_matrix_is_cut_into_tiles_and_a_vector_into_runs() -> None:
    """By the largest divisors of up to 64, as published."""
    sizes = {shape: cut((shape,))[0][-2:] for shape in [(1000, 1024), (30522, 768), (64, 3, 7, 7), (768,)]}
    assert sizes == {(1000, 1024): (50, 64), (30522, 768): (6, 64), (64, 3, 7, 7): (64, 49), (768,): (1, 64)}
    assert chunks_of([(4, 6)], 3) == [
        [0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11], [12, 13, 14, 18, 19, 20], [15, 16, 17, 21, 22, 23],
    ]  # fmt: skip


def test_where_a_side_is_prime_chunks_are_runs_of_useful_length() -> None:
    lengths = {shape: [len(chunk) for chunk in chunks_of([shape])] for shape in [(67,), (1009, 8), (67, 64)]}
    assert lengths == {(67,): [64, 3], (1009, 8): [4096, 3976], (67, 64): [4096, 192]}
    assert [len(chunk) for chunk in chunks_of([(61,)])] == [61]  # no more than 64: as it is
    assert [len(chunk) for chunk in chunks_of([(1, 64)])] == [64]


def test_the_largest_divisor() -> None:
    for n in range(1, 300):
        assert largest_divisor(n, 64) == max(d for d in range(1, 65) if n % d == 0)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 10**8), st.integers(1, 4096), st.floats(1e-6, 1.0))
def test_the_share_of_a_chunk_is_the_whole_part_of_the_density(n: int, size: int, density: float) -> None:
    """Up to one more: k of n says the density up to 1 / n, so that of the chunk up to size / n."""
    size, k = min(size, n), num_selected(n, density)
    share = share_of(size, k, n)
    assert 1 <= share <= size
    exact = (k + 1) * size / n  # of the largest density that gives this k
    assert share in {1, int(density * size), int(exact), int(exact) - 1}
    assert share_of(size, n, n) == size


@pytest.mark.parametrize("n", [4096, 2 * 4096, 10_240_000, 12_345 * 4096 + 1009])
def test_64_of_4096_are_chosen_at_one_in_64(n: int) -> None:
    assert share_of(4096, num_selected(n, 1 / 64), n) == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("density", [1e-3, 1 / 64, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("of", SHAPES, ids=str)
def test_the_largest_of_each_chunk_are_chosen(of: Shapes, density: float, dtype: torch.dtype) -> None:
    check_chosen(of, density, random(numel(of), dtype=dtype))


@settings(max_examples=40, deadline=None)
@given(shapes.filter(numel), st.integers(1, 64), st.floats(1e-3, 1.0))
def test_the_largest_of_each_chunk_of_any_shapes_are_chosen(of: Shapes, side: int, density: float) -> None:
    check_chosen(of, density, random(numel(of)), side)


def test_the_largest_of_each_chunk_are_chosen_among_equals() -> None:
    of = SHAPES[-1]
    check_chosen(of, 1 / 64, torch.zeros(numel(of)))
    check_chosen(of, 1 / 64, random(numel(of)).round())


def check_chosen(of: Shapes, density: float, acc: Tensor, side: int = 64) -> None:
    n = numel(of)
    k, cut_up, at = num_selected(n, density), tiles(of, side), 0
    before = acc.clone()
    indices, values = cut_up.largest(acc, k)
    assert torch.equal(acc, before)
    assert torch.equal(values, acc[indices])
    places = cut_up.places(indices, k)
    assert torch.equal(cut_up.indices(places, k), indices)
    counts = cut_up.counts(k)
    assert sum(counts) == len(indices) == cut_up.quota(k).total if n else True
    for grid in cut(tuple(of), side):
        share, chunks = share_of(grid.size, k, n), grid.of(torch.arange(n)).reshape(-1, grid.size)
        stop = at + grid.num_chunks * share
        own, inside = indices[at:stop].view(-1, share), places[at:stop].view(-1, share)
        assert torch.equal(chunks.gather(1, inside.long()), own)
        assert (inside.diff(dim=1) > 0).all()
        best = acc[chunks].abs().topk(share, dim=1).values
        assert torch.equal(acc[own].abs().sort(dim=1, descending=True).values, best)
        at = stop
    assert at == len(indices)


def test_nan_counts_as_largest() -> None:
    acc = random(4096 * 2)
    acc[5], acc[4096 * 2 - 1], acc[7] = torch.nan, -torch.nan, torch.inf
    indices, _ = tiles([(64, 64), (64, 64)]).largest(acc, 4)
    assert indices.tolist()[:2] == [5, 7]
    assert 4096 * 2 - 1 in indices.tolist()[2:]


def test_the_density_may_change_from_step_to_step() -> None:
    of, cut_up = SHAPES[-2], tiles(SHAPES[-2])
    acc = random(numel(of))
    for density in (0.01, 0.5, 1.0, 0.01):
        k = num_selected(numel(of), density)
        once = tiles(of).largest(acc, k)
        assert torch.equal(cut_up.largest(acc, k).indices, once.indices)


def test_slabs_hold_every_chunk_once_and_are_small() -> None:
    grids = cut(((1000, 64), (64, 6400), (640,), (640, 640)))
    each = [share_of(grid.size, 1, 64) for grid in grids]
    for most in (1, 4096, 5 * 4096, 2**20):
        seen = list[tuple[int, int]]()
        for slab in slabs_of(grids, each, most):
            assert slab.numel <= max(most, slab.size)
            for block in slab.blocks:
                assert (grids[block.grid].size, each[block.grid]) == (slab.size, slab.each)
                seen += [(block.grid, block.first + at) for at in range(block.num_chunks)]
        assert sorted(seen) == [(at, c) for at, grid in enumerate(grids) for c in range(grid.num_chunks)]


def test_slabs_do_not_change_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    of = [(128, 640), (640,), (64, 64), (128, 64)]
    acc, k = random(numel(of)), numel(of) // 64
    whole = tiles(of).largest(acc, k)
    for most in (1, 3 * 4096, 25 * 4096):
        monkeypatch.setattr("sparsify.core.chunks.SLAB", most)
        assert torch.equal(tiles(of).largest(acc, k).indices, whole.indices)


@pytest.mark.parametrize("size", [1, 8, 64, 3200, 4096])
@pytest.mark.parametrize("k", [1, 2, 64, 200])
def test_looking_at_folds_first_finds_the_same(size: int, k: int) -> None:
    keys = torch.randint(0, 3 * size, (7, size), generator=torch.Generator().manual_seed(k))
    k = min(k, size)
    found = keys.gather(1, largest_of_rows(keys, k)).sort(dim=1).values
    assert torch.equal(found, keys.topk(k).values.sort(dim=1).values)
    assert all(len(set(row)) == k for row in largest_of_rows(keys, k).tolist())


def test_counts_of_tensors_and_of_buckets() -> None:
    """Of several buckets each has its own k: a tensor of 7 alone gives one of its own."""
    of = ((1009, 8), (7,), (0,), (64, 64))
    assert tiles([*of]).counts(num_selected(numel([*of]), 1 / 64)) == (64 + 62, 1, 0, 64)
    several = Tiles(of, buckets=[1, 2, 1])
    ks = [num_selected(n, 0.3) for n in several.ns]
    assert several.ns == [8072, 7, 4096]
    assert several.counts(ks) == (1228 + 1193, 2, 0, 1228)
    assert several.chosen(ks) == [1228 + 1193, 2, 1228]
    alone = [Tiles(shapes).counts(k) for shapes, k in zip([of[:1], of[1:3], of[3:]], ks, strict=True)]
    assert sum(alone, ()) == several.counts(ks)


def test_sides_beyond_12_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"side=65 is out of range: it must be a whole number from 1 to 64"):
        Tiles([(3,)], 65)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("k", [0, 1, 3, 4, 7, 1000])
def test_packed_codes_are_unpacked(bits: int, k: int) -> None:
    codes = torch.randint(0, 1 << bits, (k,), generator=torch.Generator().manual_seed(k)).to(torch.uint8)
    message = packed(codes, bits)
    assert len(message) == packed_nbytes(k, bits) == -(-k * bits // 8)
    assert torch.equal(unpacked(message, bits, k), codes)


@pytest.mark.parametrize("k", [0, 1, 2, 5, 4096])
def test_places_take_3_bytes_for_two(k: int) -> None:
    places = torch.arange(k) * 4095 // max(1, k - 1)
    message = pack_places(places)
    assert len(message) == places_nbytes(k) == -(-3 * k // 2)
    assert unpack_places(message, k).tolist() == places.tolist()
