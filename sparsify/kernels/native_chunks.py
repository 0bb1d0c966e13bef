"""The largest elements of each chunk, by native.cpp: one pass over memory, 12 bytes per float32 element."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsify.core.chunks import Tiles
from sparsify.kernels.native import LEVELS, Numbers, added, library, pointer, supports
from sparsify.types import Sparse


class NativeChunks:
    """Searches a bucket's chunks in as many threads as torch has; raises `Unavailable` where there is no
    native library. Of equal magnitudes the smallest places are taken.

    Args:
        tiles: the chunks.
        level: the vector instructions to use at most; None: the best that this processor has.
    """

    def __init__(self, tiles: Tiles, level: str | None = None) -> None:
        self.library, self.tiles = library(), tiles
        best = int(self.library.sparsify_level())
        self.level = best if level is None else min(best, LEVELS.index(level))
        self.k = -1
        self.table: Numbers = np.empty((0, 8), dtype=np.int64)  # struct Grid of each

    def serves(self, acc: Tensor, grad: Tensor | None) -> bool:
        """True if it can search the sum of these."""
        does = acc.dtype == torch.float32 and acc.is_contiguous() and supports(acc)
        return does and (grad is None or (supports(grad) and grad.shape == acc.shape))

    def largest(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        """acc (n,) += grad (n,), if there is one; then as `Tiles.largest`. Both as `serves` has it."""
        quota, tiles = self.tiles.quota(k), self.tiles
        assert acc.numel() == tiles.n
        if k != self.k:
            rows = zip(tiles.grids, quota.each, quota.firsts, strict=False)
            self.table = np.array(
                [
                    (grid.start, grid.columns, grid.height, grid.width, grid.down, grid.across, few, first)
                    for grid, few, first in rows
                ],
                dtype=np.int64,
            )
            self.k = k
        indices, values = torch.empty(quota.total, dtype=torch.int64), torch.empty(quota.total)
        grad, kind = added(grad)
        self.library.sparsify_chunks(
            self.table.ctypes.data, len(self.table), acc.data_ptr(), pointer(grad), kind, acc.numel(),
            self.level, torch.get_num_threads(), indices.data_ptr(), values.data_ptr(),
        )  # fmt: skip
        return Sparse(indices, values)
