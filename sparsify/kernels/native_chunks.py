"""The largest elements of each chunk, by native.cpp: one pass over memory, 12 bytes per float32 element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsify.core.chunks import Tiles
from sparsify.kernels.native import (
    KIND_BY_DTYPE,
    VECTOR_LEVELS,
    Array,
    are_contiguous_on_cpu,
    empty_selection,
    library,
)
from sparsify.types import Sparse

DRIFT = 4  # enum Kind


class GridLocations(NamedTuple):
    """Where each grid lies among tensors that follow each other."""

    sizes: list[int]  # of these
    at: Array  # which one
    offset: Array  # elements of it before the grid


class NativeChunkSearch:
    """Searches the chunks of a bucket, or of several, in as many threads as torch has; raises
    `KernelUnavailableError` where there is no native library. Of equal magnitudes the smallest places are
    taken.

    Args:
        tiles: the chunks.
        level: the vector instructions to use at most; None: the best that this processor has.
    """

    def __init__(self, tiles: Tiles, level: str | None = None) -> None:
        self.library, self.tiles = library(), tiles
        best = int(self.library.sparsify_level())
        self.level = best if level is None else min(best, VECTOR_LEVELS.index(level))
        self.ks = tuple[int, ...]()
        self.table: Array = np.zeros((len(tiles.grids), 11), dtype=np.int64)  # struct Grid of each
        self.lying = [GridLocations([], self.table[:0, 0], self.table[:0, 0])] * 3

    def largest(
        self,
        accs: Sequence[Tensor],
        grads: Sequence[Tensor],
        ks: Sequence[int],
        weight: float = 1.0,
        anchors: Sequence[Tensor] = (),
    ) -> Sparse | None:
        """acc <- weight x acc + grad, each product and sum rounded; then as `Tiles.largest`, with indices of
        int32. None where these can't be read, and nothing has changed.

        Args:
            accs: tensors (m,) float32 that follow each other, as the chunks do.
            grads: such tensors, too, of any type that `KIND_BY_DTYPE` has; none where nothing is added.
            weight: where nothing is added it has to be 1.
            anchors: tensors as `grads` of float32. Then anchor - grad is added instead, and what was `grads`
                becomes a copy of the anchors.
        """
        quota, table = self.tiles.quota(ks), self.table
        kinds = {grad.dtype for grad in grads}
        fits = (
            are_contiguous_on_cpu(accs)
            and len(kinds) < 2
            and kinds <= {*KIND_BY_DTYPE}
            and are_contiguous_on_cpu(grads, *kinds)
        )
        if not fits or (anchors and not (are_contiguous_on_cpu(anchors) and kinds == {torch.float32})):
            return None
        for column, tensors in enumerate((accs, grads, anchors)):
            if tensors and not self._find(column, tensors):
                return None
        if tuple(ks) != self.ks:
            rows = zip(self.tiles.grids, quota.each, quota.firsts, strict=False)
            table[:, 3:] = [
                (grid.start, grid.columns, grid.height, grid.width, grid.down, grid.across, few, first)
                for grid, few, first in rows
            ] or table[:, 3:]
            self.ks = tuple(ks)
        found = empty_selection(quota.total)
        kind = DRIFT if anchors else KIND_BY_DTYPE[kinds.pop()] if kinds else 0
        self.library.sparsify_chunks(
            table.ctypes.data, len(table), weight, kind, self.tiles.n, self.level,
            torch.get_num_threads(), found.indices.data_ptr(), found.values.data_ptr(),
        )  # fmt: skip
        return found

    def _find(self, column: int, tensors: Sequence[Tensor]) -> bool:
        """Write the addresses of the grids' first elements; False where a grid does not lie in one tensor."""
        lying, sizes = self.lying[column], [tensor.numel() for tensor in tensors]
        if lying.sizes != sizes:
            ends = np.cumsum([0, *sizes])
            starts = np.array([grid.start for grid in self.tiles.grids], dtype=np.int64)
            stops = starts + [grid.rows * grid.columns for grid in self.tiles.grids]
            at = np.searchsorted(ends, starts, side="right") - 1
            if ends[-1] != self.tiles.n or (stops > ends[at + 1]).any():
                return False
            lying = self.lying[column] = GridLocations(sizes, at, starts - ends[at])
        addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        width = tensors[0].element_size()
        self.table[:, column] = addresses[lying.at] + width * lying.offset
        return True
