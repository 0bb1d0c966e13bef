"""Chunks: how the tensors of a bucket are cut, and the largest elements of each chunk.

Facts of the published cutting (SparseLoCo, arXiv:2508.15706, section 3; DeMo, arXiv:2411.19870): a matrix in
tiles, whose sides are the largest divisors of the matrix's sides that are at most 64; a vector in runs of its
largest such divisor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify import ranges
from sparsify.core import host_sync
from sparsify.core.packing import MOST_PLACES
from sparsify.ranges import ChunkSide
from sparsify.types import Sparse, index_dtype

SIDE = 64  # of a chunk, as published
SLAB = 2**20  # elements that are copied and searched at once: what that takes fits a cache
FOLD = 8  # elements of a chunk of which only the largest is looked at first


class Grid(NamedTuple):
    """Chunks of equal size, as they lie in a matrix (rows, columns) inside the bucket."""

    tensor: int  # of the bucket's, to which the matrix belongs
    start: int  # of the matrix, in elements of the bucket
    rows: int
    columns: int
    height: int  # of a chunk; divides rows
    width: int  # of a chunk; divides columns

    @property
    def size(self) -> int:
        """Elements of a chunk."""
        return self.height * self.width

    @property
    def down(self) -> int:
        """Number of chunks, one below the other."""
        return self.rows // self.height

    @property
    def across(self) -> int:
        """Number of chunks, side by side."""
        return self.columns // self.width

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return self.down * self.across

    def of(self, acc: Tensor) -> Tensor:
        """(n,) of the bucket -> a view (down, across, height, width): chunks in their order."""
        matrix = acc[self.start : self.start + self.rows * self.columns]
        return matrix.view(self.down, self.height, self.across, self.width).transpose(1, 2)

    def starts(self, device: torch.device) -> Tensor:
        """(chunks,) int64: index of the first element of each chunk."""
        down = torch.arange(self.down, device=device) * (self.height * self.columns)
        across = torch.arange(self.across, device=device) * self.width
        return (self.start + down[:, None] + across).view(-1)


@cache
def cut(shapes: tuple[tuple[int, ...], ...], side: int = SIDE) -> tuple[Grid, ...]:
    """Chunks of tensors that follow each other, in the order of their numbers.

    Deviation: a side without a divisor that is large enough (a prime one has none but 1) would give chunks of
    1, or of 1 x 64, of which a density of 1/64 leaves 1 or less; the published code, by reading, fails on
    chunks of 1. So a vector whose runs would have fewer than half of `side` elements is cut into runs of
    `side`; a matrix whose tiles would have `side` elements or fewer, though it has more, is cut into runs of
    `side` x `side` elements in the order in which they lie. The last run may be shorter.
    """
    grids, start = list[Grid](), 0
    for at, shape in enumerate(shapes):
        n = torch.Size(shape).numel()
        grids += _cut_one(at, start, n, shape, side)
        start += n
    return tuple(grids)


def _cut_one(at: int, start: int, n: int, shape: tuple[int, ...], side: int) -> Iterator[Grid]:
    if not n:
        return
    if len(shape) >= 2:
        rows, columns = shape[0], n // shape[0]
        height, width = largest_divisor(rows, side), largest_divisor(columns, side)
        if height * width > side or height * width == n:
            yield Grid(at, start, rows, columns, height, width)
            return
        run = side * side
    else:
        run = largest_divisor(n, side)
        if run < side / 2 and run < n:
            run = side
    whole = n // run
    if whole:
        yield Grid(at, start, whole, run, 1, run)
    if rest := n - whole * run:
        yield Grid(at, start + whole * run, 1, rest, 1, rest)


def largest_divisor(n: int, most: int) -> int:
    """The largest divisor of n that is at most `most`."""
    return next(divisor for divisor in range(min(n, most), 0, -1) if n % divisor == 0)


def share_of(size: int, k: int, n: int) -> int:
    """Elements to choose of a chunk, where k of all n are asked for: the whole part of its share, at least 1.

    k is itself the whole part of density x n, so k / n is a little below the density. The share is taken of
    the largest density that gives this k: 64 of 4096 at 1/64, whatever n is.
    """
    return min(size, max(1, ((k + 1) * size - 1) // n))


class TileBlock(NamedTuple):
    """Some of a grid's chunks, which follow each other."""

    grid: int
    down: slice
    across: slice  # all of them, unless it is a part of one row
    first: int  # chunk of the grid
    num_chunks: int


class Slab(NamedTuple):
    """Chunks of equal size, of which equally many elements are chosen: searched at once."""

    each: int  # to choose of a chunk
    size: int  # elements of a chunk
    blocks: list[TileBlock]

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return sum(block.num_chunks for block in self.blocks)

    @property
    def numel(self) -> int:
        """Elements of all chunks."""
        return self.num_chunks * self.size


def slabs_of(grids: Sequence[Grid], each: Sequence[int], most: int) -> list[Slab]:
    """All chunks, in slabs of at most so many elements, or of one chunk."""
    found = dict[tuple[int, int], list[Slab]]()
    for at, (grid, few) in enumerate(zip(grids, each, strict=True)):
        slabs, room = found.setdefault((grid.size, few), []), max(1, most // grid.size)
        for block in _blocks(at, grid, room):
            if not slabs or slabs[-1].num_chunks + block.num_chunks > room:
                slabs.append(Slab(few, grid.size, []))
            slabs[-1].blocks.append(block)
    return [slab for slabs in found.values() for slab in slabs]


def _blocks(at: int, grid: Grid, room: int) -> Iterator[TileBlock]:
    """A grid in blocks of at most `room` chunks: of whole rows, where a row has no more."""
    down, across = max(1, room // grid.across), min(room, grid.across)
    for row in range(0, grid.down, down):
        rows = min(down, grid.down - row)
        for column in range(0, grid.across, across):
            columns = min(across, grid.across - column)
            where = slice(row, row + rows), slice(column, column + columns)
            yield TileBlock(at, *where, row * grid.across + column, rows * columns)


class Quota(NamedTuple):
    """How many elements are chosen, K of all chunks together."""

    ks: tuple[int, ...]  # that were asked for, of each bucket
    counts: tuple[int, ...]  # of each tensor
    each: tuple[int, ...]  # of a chunk, by grid
    firsts: tuple[int, ...]  # which of the K is the first of each grid; and K
    starts: Tensor  # (K,) of the chunk that each of the K lies in: its first element,
    columns: Tensor  # (K,) those of its matrix,
    widths: Tensor  # (K,) and its own
    slabs: list[Slab]

    @property
    def total(self) -> int:
        """K."""
        return self.firsts[-1]


class Tiles:
    """The chunks of a bucket, or of several that follow each other. K elements are chosen of them, chunk by
    chunk, and by ascending place within a chunk; a place counts a chunk's elements row by row, from 0.
    Nothing of n elements is kept.

    Where k is asked for, one number is that of the only bucket, and several are those of each.

    Args:
        shapes: of the tensors, which follow each other.
        side: the most that a side of a chunk may have.
        buckets: how many tensors each bucket has; by default one has all.

    Raises:
        ValueError: `side` below 1, or above 64, where places would need more than 12 bits.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        side: int = SIDE,
        device: torch.device | None = None,
        buckets: Sequence[int] = (),
    ) -> None:
        ranges.check_value("side", side, ChunkSide)
        assert side * side <= MOST_PLACES
        self.shapes, self.side = tuple(map(tuple, shapes)), side
        self.grids = cut(self.shapes, side)
        self.buckets = tuple(buckets) or (len(self.shapes),)
        sizes = [torch.Size(shape).numel() for shape in self.shapes]
        ends = [*accumulate(self.buckets, initial=0)]
        self.ns = [sum(sizes[begin:end]) for begin, end in pairwise(ends)]  # of each bucket
        self.n = sum(self.ns)
        self.device = torch.device("cpu") if device is None else device
        self.narrow = index_dtype(self.n)
        self._quota: Quota | None = None

    def counts(self, k: int | Sequence[int]) -> tuple[int, ...]:
        """Elements that are chosen of each tensor, where k of all n are asked for."""
        return self.quota(k).counts

    def chosen(self, k: int | Sequence[int]) -> list[int]:
        """Elements that are chosen of each bucket."""
        counts = iter(self.counts(k))
        return [sum(islice(counts, tensors)) for tensors in self.buckets]

    def quota(self, k: int | Sequence[int]) -> Quota:
        """What is chosen where k of all n are asked for; kept until another k is."""
        ks = (k,) if isinstance(k, int) else tuple(k)
        if self._quota is None or self._quota.ks != ks:
            asked = [
                (few, n)
                for few, n, tensors in zip(ks, self.ns, self.buckets, strict=True)
                for _ in range(tensors)
            ]
            each = tuple(share_of(grid.size, *asked[grid.tensor]) for grid in self.grids)
            totals = [few * grid.num_chunks for few, grid in zip(each, self.grids, strict=True)]
            counts = [0] * len(self.shapes)
            for grid, chosen in zip(self.grids, totals, strict=True):
                counts[grid.tensor] += chosen
            starts = [torch.empty(0, dtype=torch.int64, device=self.device)]
            for grid, few in zip(self.grids, each, strict=True):
                starts.append(grid.starts(self.device)[:, None].expand(-1, few).reshape(-1))
            firsts, slabs = tuple(accumulate(totals, initial=0)), slabs_of(self.grids, each, SLAB)
            columns, widths = (
                host_sync.to_device(numbers, starts[0], self.narrow).repeat_interleave(
                    host_sync.to_device(totals, starts[0]), output_size=firsts[-1]
                )
                for numbers in ([grid.columns for grid in self.grids], [grid.width for grid in self.grids])
            )
            first_of_each = torch.cat(starts).to(self.narrow)
            self._quota = Quota(ks, tuple(counts), each, firsts, first_of_each, columns, widths, slabs)
        return self._quota

    def places(self, indices: Tensor, k: int | Sequence[int]) -> Tensor:
        """(K,) indices of chosen elements -> (K,): their places, from 0 to 4095."""
        quota = self.quota(k)
        inside = indices.to(self.narrow) - quota.starts
        down = inside // quota.columns
        return inside.sub_(down * quota.columns).add_(down.mul_(quota.widths))

    def indices(self, places: Tensor, k: int | Sequence[int]) -> Tensor:
        """The inverse of `places`: (K,) -> (K,) int64."""
        quota = self.quota(k)
        across = places.to(self.narrow, copy=True)
        down = across // quota.widths
        return across.sub_(down * quota.widths).add_(down.mul_(quota.columns)).add_(quota.starts).long()

    def largest(self, acc: Tensor, k: int) -> Sparse:
        """The largest magnitudes of each chunk, (K,) with indices of int64. NaN counts as larger than Inf; of
        equal ones any. No host synchronisation.
        """
        quota = self.quota(k)
        places = torch.empty(quota.total, dtype=self.narrow, device=self.device)
        work = acc.new_empty(max((slab.numel for slab in quota.slabs), default=0))
        for slab in quota.slabs:
            chosen = largest_of_rows(self._keys_of(acc, slab, work), slab.each).sort(dim=1).values
            rows = chosen.split([block.num_chunks for block in slab.blocks])
            for block, own in zip(slab.blocks, rows, strict=True):
                begin = quota.firsts[block.grid] + block.first * slab.each
                places[begin : begin + own.numel()].copy_(own.view(-1))
        indices = self.indices(places, k)
        return Sparse(indices, acc.index_select(0, indices))  # far faster than acc[indices] on CPUs

    def _keys_of(self, acc: Tensor, slab: Slab, work: Tensor) -> Tensor:
        """(chunks, size) whole numbers in the order of the magnitudes, in the memory of `work`."""
        work = work[: slab.numel].view(-1, slab.size)
        rows = work.split([block.num_chunks for block in slab.blocks])
        for block, own in zip(slab.blocks, rows, strict=True):
            chunks = self.grids[block.grid].of(acc)[block.down, block.across]
            torch.abs(chunks, out=own.view(chunks.shape))
        return work.view(KEYS[acc.dtype])


KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}


def largest_of_rows(keys: Tensor, k: int) -> Tensor:
    """(m, size) whole numbers -> (m, k): where the largest of each row lie, in no order. Magnitudes are
    compared by their bits, which is right of floating-point numbers without a sign, puts NaN above infinity,
    and is faster.
    """
    rows, size = keys.shape
    if k == 1:
        return keys.argmax(dim=1, keepdim=True)
    if size % FOLD or 2 * FOLD * k > size:
        return keys.topk(k, dim=1, sorted=False).indices
    # The k folds with the largest of their own hold the k largest: what any other holds is beaten k times.
    folds = keys.view(rows, FOLD, size // FOLD)
    best = folds.amax(1).topk(k, dim=1, sorted=False).indices
    rivals = folds.gather(2, best[:, None, :].expand(-1, FOLD, -1)).view(rows, FOLD * k)
    chosen = rivals.topk(k, dim=1, sorted=False).indices
    return chosen // k * (size // FOLD) + best.gather(1, chosen % k)
