"""Chunks: how the tensors of a bucket are cut, and the largest elements of each chunk.

Facts of the published cutting (SparseLoCo, arXiv:2508.15706, section 3; DeMo, arXiv:2411.19870): the chunks
of a matrix are rectangles, whose sides are the largest divisors of the matrix's sides that are at most 64;
the chunks of a vector are runs of its largest such divisor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from sparsify import ranges
from sparsify.core import host_sync
from sparsify.core.packing import MAX_PLACES
from sparsify.ranges import ChunkSide
from sparsify.types import SparseVector, index_dtype, tensor_sizes

SIDE = 64  # of a chunk, as published
BATCH_NUMEL = 2**20  # elements that are copied and searched at once: what that takes fits a cache
FOLD = 8  # elements of a chunk of which only the largest is looked at first
KEY_DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64}


class ChunkGrid(NamedTuple):
    """Chunks of equal size, as they lie in a matrix (rows, columns) inside the bucket."""

    tensor: int  # of the bucket's, to which the matrix belongs
    start: int  # of the matrix, in elements of the bucket
    rows: int
    columns: int
    height: int  # of a chunk; divides rows
    width: int  # of a chunk; divides columns

    @property
    def chunk_numel(self) -> int:
        """Number of elements of a chunk."""
        return self.height * self.width

    @property
    def chunks_down(self) -> int:
        """Number of chunks, one below the other."""
        return self.rows // self.height

    @property
    def chunks_across(self) -> int:
        """Number of chunks, side by side."""
        return self.columns // self.width

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return self.chunks_down * self.chunks_across

    def view_chunks(self, acc: Tensor) -> Tensor:
        """View the chunks of a bucket (n,), in their order, as (down, across, height, width)."""
        matrix = acc[self.start : self.start + self.rows * self.columns]
        return matrix.view(self.chunks_down, self.height, self.chunks_across, self.width).transpose(1, 2)

    def first_indices(self, device: torch.device) -> Tensor:
        """Return (chunks,) int64: the index in the bucket of the first element of each chunk."""
        down = torch.arange(self.chunks_down, device=device) * (self.height * self.columns)
        across = torch.arange(self.chunks_across, device=device) * self.width
        return (self.start + down[:, None] + across).view(-1)


@cache
def make_chunk_grids(shapes: tuple[tuple[int, ...], ...], side: int = SIDE) -> tuple[ChunkGrid, ...]:
    """Cut tensors that follow each other into chunks, in the order of their numbers.

    Deviation: a side without a divisor that is large enough (a prime one has none but 1) would give chunks of
    1, or of 1 x 64, of which a density of 1/64 leaves 1 or less; the published code, by reading, fails on
    chunks of 1. So a vector whose runs would have fewer than half of `side` elements is cut into runs of
    `side`; a matrix whose chunks would have `side` elements or fewer, though it has more, is cut into runs of
    `side` x `side` elements in the order in which they lie. The last run may be shorter.
    """
    grids = list[ChunkGrid]()
    start = 0
    for tensor, (shape, n) in enumerate(zip(shapes, tensor_sizes(shapes), strict=True)):
        grids += _cut_tensor(tensor, start, n, shape, side)
        start += n
    return tuple(grids)


def _cut_tensor(tensor: int, start: int, n: int, shape: tuple[int, ...], side: int) -> Iterator[ChunkGrid]:
    """Yield the grids of one tensor of n elements."""
    if not n:
        return
    if len(shape) >= 2:
        rows = shape[0]
        columns = n // rows
        height = _largest_divisor(rows, side)
        width = _largest_divisor(columns, side)
        if height * width > side or height * width == n:
            yield ChunkGrid(tensor, start, rows, columns, height, width)
            return
        run = side * side
    else:
        run = _largest_divisor(n, side)
        if run < side / 2 and run < n:
            run = side
    num_runs = n // run
    rest = n % run
    if num_runs:
        yield ChunkGrid(tensor, start, num_runs, run, 1, run)
    if rest:
        yield ChunkGrid(tensor, start + num_runs * run, 1, rest, 1, rest)


def _largest_divisor(n: int, limit: int) -> int:
    """Return the largest divisor of n that is at most `limit`."""
    return next(divisor for divisor in range(min(n, limit), 0, -1) if n % divisor == 0)


def num_chosen_of_chunk(chunk_numel: int, k: int, n: int) -> int:
    """Return how many elements to choose of a chunk, at least 1, where k of all n are asked for.

    k is itself the whole part of density x n, so k / n is a little below the density. The number is the whole
    part of the chunk's share at the largest density that gives this k: 64 of 4096 at 1/64, whatever n is.
    """
    return min(chunk_numel, max(1, ((k + 1) * chunk_numel - 1) // n))


class ChunkRange(NamedTuple):
    """Consecutive chunks of a grid."""

    grid: int
    down: slice
    across: slice  # all of them, unless the range is a part of one row
    first: int  # chunk of the grid
    num_chunks: int


class ChunkBatch(NamedTuple):
    """Chunks of equal size that are searched at once, and of which equally many elements are chosen."""

    k: int  # elements to choose of a chunk
    chunk_numel: int
    ranges: list[ChunkRange]

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""
        return sum(chunks.num_chunks for chunks in self.ranges)

    @property
    def numel(self) -> int:
        """Number of elements of all chunks."""
        return self.num_chunks * self.chunk_numel


def _make_batches(grids: Sequence[ChunkGrid], k_by_grid: Sequence[int], max_numel: int) -> list[ChunkBatch]:
    """Divide all chunks into batches of at most so many elements, or of one chunk."""
    batches_by_kind = dict[tuple[int, int], list[ChunkBatch]]()
    for index, (grid, k) in enumerate(zip(grids, k_by_grid, strict=True)):
        batches = batches_by_kind.setdefault((grid.chunk_numel, k), [])
        max_chunks = max(1, max_numel // grid.chunk_numel)
        for chunks in _chunk_ranges(index, grid, max_chunks):
            if not batches or batches[-1].num_chunks + chunks.num_chunks > max_chunks:
                batches.append(ChunkBatch(k, grid.chunk_numel, []))
            batches[-1].ranges.append(chunks)
    return [batch for batches in batches_by_kind.values() for batch in batches]


def _chunk_ranges(index: int, grid: ChunkGrid, max_chunks: int) -> Iterator[ChunkRange]:
    """Divide a grid into ranges of at most so many chunks: of whole rows, where a row has no more."""
    down = max(1, max_chunks // grid.chunks_across)
    across = min(max_chunks, grid.chunks_across)
    for row in range(0, grid.chunks_down, down):
        rows = slice(row, min(row + down, grid.chunks_down))
        for column in range(0, grid.chunks_across, across):
            columns = slice(column, min(column + across, grid.chunks_across))
            num_chunks = (rows.stop - row) * (columns.stop - column)
            yield ChunkRange(index, rows, columns, row * grid.chunks_across + column, num_chunks)


class ChunkQuota(NamedTuple):
    """Numbers of elements to choose: of each tensor and chunk, and K of all chunks together."""

    ks: tuple[int, ...]  # that were asked for, of each bucket
    counts: tuple[int, ...]  # of each tensor
    k_by_grid: tuple[int, ...]  # of a chunk
    offsets: tuple[int, ...]  # which of the K is the first of each grid; and K
    starts: Tensor  # (K,) of the chunk in which each of the K lies: index of its first element,
    columns: Tensor  # (K,) columns of its matrix,
    widths: Tensor  # (K,) and its width
    batches: list[ChunkBatch]

    @property
    def total(self) -> int:
        """K, the number of elements to choose."""
        return self.offsets[-1]


class ChunkLayout:
    """The chunks of a bucket, or of several that follow each other, and the order of elements chosen of them.

    K elements are chosen, chunk by chunk, and by ascending place within a chunk; a place counts a chunk's
    elements row by row, from 0. Nothing of n elements is kept. Where k is asked for, one number is that of
    the only bucket, and several are those of each.

    Args:
        shapes: of the tensors, which follow each other.
        side: the most that a side of a chunk may have.
        tensors_per_bucket: how many tensors each bucket has; by default one has all.

    Raises:
        ValueError: `side` below 1, or above 64, where places would need more than 12 bits.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        side: int = SIDE,
        device: torch.device | None = None,
        tensors_per_bucket: Sequence[int] = (),
    ) -> None:
        ranges.check_value("side", side, ChunkSide)
        assert side * side <= MAX_PLACES
        self.shapes = tuple(map(tuple, shapes))
        self.side = side
        self.grids = make_chunk_grids(self.shapes, side)
        self.tensors_per_bucket = tuple(tensors_per_bucket) or (len(self.shapes),)
        numels = iter(tensor_sizes(self.shapes))
        self.bucket_numels = [sum(islice(numels, tensors)) for tensors in self.tensors_per_bucket]
        self.n = sum(self.bucket_numels)
        self.device = torch.device("cpu") if device is None else device
        self.index_dtype = index_dtype(self.n)
        self._quota: ChunkQuota | None = None

    def counts_by_bucket(self, k: int | Sequence[int]) -> list[int]:
        """Return how many elements are chosen of each bucket, where k of all n are asked for."""
        counts = iter(self.quota(k).counts)
        return [sum(islice(counts, tensors)) for tensors in self.tensors_per_bucket]

    def quota(self, k: int | Sequence[int]) -> ChunkQuota:
        """Return how many elements are chosen where k of all n are asked for; kept until another k is."""
        ks = (k,) if isinstance(k, int) else tuple(k)
        if self._quota is None or self._quota.ks != ks:
            self._quota = self._make_quota(ks)
        return self._quota

    def _make_quota(self, ks: tuple[int, ...]) -> ChunkQuota:
        asked = list[tuple[int, int]]()  # k and n of each tensor's bucket
        for k, n, tensors in zip(ks, self.bucket_numels, self.tensors_per_bucket, strict=True):
            asked += [(k, n)] * tensors
        k_by_grid = tuple(num_chosen_of_chunk(grid.chunk_numel, *asked[grid.tensor]) for grid in self.grids)
        counts = [0] * len(self.shapes)
        totals = list[int]()
        starts = [torch.empty(0, dtype=torch.int64, device=self.device)]
        for grid, k in zip(self.grids, k_by_grid, strict=True):
            totals.append(k * grid.num_chunks)
            counts[grid.tensor] += totals[-1]
            starts.append(grid.first_indices(self.device).repeat_interleave(k))
        offsets = tuple(accumulate(totals, initial=0))

        repeats = host_sync.to_device(totals, starts[0])

        def repeat(numbers: list[int]) -> Tensor:
            """(grids,) -> (K,) numbers of the grid of each of the K."""
            numbers_on_device = host_sync.to_device(numbers, starts[0], self.index_dtype)
            return numbers_on_device.repeat_interleave(repeats, output_size=offsets[-1])

        return ChunkQuota(
            ks,
            tuple(counts),
            k_by_grid,
            offsets,
            torch.cat(starts).to(self.index_dtype),
            repeat([grid.columns for grid in self.grids]),
            repeat([grid.width for grid in self.grids]),
            _make_batches(self.grids, k_by_grid, BATCH_NUMEL),
        )

    def indices_to_places(self, indices: Tensor, k: int | Sequence[int]) -> Tensor:
        """Return the places (K,) in their chunks, from 0 to 4095, of chosen elements (K,)."""
        quota = self.quota(k)
        inside = indices.to(self.index_dtype) - quota.starts
        down = inside // quota.columns
        return inside.sub_(down * quota.columns).add_(down.mul_(quota.widths))

    def places_to_indices(self, places: Tensor, k: int | Sequence[int]) -> Tensor:
        """Return the indices (K,) int64 of chosen elements at these places."""
        quota = self.quota(k)
        across = places.to(self.index_dtype, copy=True)
        down = across // quota.widths
        return across.sub_(down * quota.widths).add_(down.mul_(quota.columns)).add_(quota.starts).long()

    def select_largest(self, acc: Tensor, k: int) -> SparseVector:
        """Select the largest magnitudes of each chunk, (K,) with indices of int64, without a host sync.

        NaN counts as larger than Inf; of equal magnitudes any are taken.
        """
        quota = self.quota(k)
        places = torch.empty(quota.total, dtype=self.index_dtype, device=self.device)
        work = acc.new_empty(max((batch.numel for batch in quota.batches), default=0))
        for batch in quota.batches:
            keys = self._keys(acc, batch, work)
            rows = _topk_of_rows(keys, batch.k).sort(dim=1).values
            row = 0
            for chunks in batch.ranges:
                chosen = rows[row : row + chunks.num_chunks]
                begin = quota.offsets[chunks.grid] + chunks.first * batch.k
                places[begin : begin + chosen.numel()].copy_(chosen.view(-1))
                row += chunks.num_chunks
        indices = self.places_to_indices(places, k)
        return SparseVector(indices, acc.index_select(0, indices))  # far faster than acc[indices] on CPUs

    def _keys(self, acc: Tensor, batch: ChunkBatch, work: Tensor) -> Tensor:
        """Return (chunks, size) whole numbers in the order of the magnitudes, in the memory of `work`."""
        work = work[: batch.numel].view(-1, batch.chunk_numel)
        row = 0
        for chunks in batch.ranges:
            source = self.grids[chunks.grid].view_chunks(acc)[chunks.down, chunks.across]
            torch.abs(source, out=work[row : row + chunks.num_chunks].view(source.shape))
            row += chunks.num_chunks
        return work.view(KEY_DTYPES[acc.dtype])


def _topk_of_rows(keys: Tensor, k: int) -> Tensor:
    """Return (m, k): where the k largest of each row of keys (m, size) lie, in no order.

    Keys are whole numbers: the bits of magnitudes. Comparing these is right of floating-point numbers without
        a
    sign, puts NaN above infinity, and is faster.
    """
    num_rows, size = keys.shape
    if k == 1:
        return keys.argmax(dim=1, keepdim=True)
    if size % FOLD or 2 * FOLD * k > size:
        return keys.topk(k, dim=1, sorted=False).indices
    # The k folds whose largest elements are largest hold the k largest: in any other, k elements beat all.
    folds = keys.view(num_rows, FOLD, size // FOLD)
    best = folds.amax(1).topk(k, dim=1, sorted=False).indices
    rivals = folds.gather(2, best[:, None, :].expand(-1, FOLD, -1)).view(num_rows, FOLD * k)
    chosen = rivals.topk(k, dim=1, sorted=False).indices
    return chosen // k * (size // FOLD) + best.gather(1, chosen % k)
