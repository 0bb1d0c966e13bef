"""Search of the largest elements of each chunk by native.cpp: one pass over memory, 12 bytes per element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsify.core.chunks import ChunkLayout
from sparsify.kernels.native import (
    KIND_BY_DTYPE,
    Array,
    are_contiguous_on_cpu,
    best_level_at_most,
    common_kind,
    empty_selection,
    get_library,
)
from sparsify.types import SparseVector

DRIFT = 4  # enum Kind


class GridLocations(NamedTuple):
    """Where each grid lies among tensors that follow each other."""

    numels: list[int]  # of the tensors
    tensors: Array  # number of the tensor in which each grid lies
    offsets: Array  # elements of that tensor before the grid


class NativeChunkSearch:
    """A search in C++ of the chunks of one or several buckets, in as many threads as torch has.

    Of equal magnitudes the smallest places are taken.

    Args:
        layout: the chunks.
        max_level: the vector instructions to use at most; None: the best that this processor has.

    Raises:
        KernelUnavailableError: there is no native library.
    """

    def __init__(self, layout: ChunkLayout, max_level: str | None = None) -> None:
        self.library = get_library()
        self.layout = layout
        self.level = best_level_at_most(max_level)
        self.ks = tuple[int, ...]()
        self.table: Array = np.zeros((len(layout.grids), 11), dtype=np.int64)  # struct ChunkGrid of each
        for row, grid in zip(self.table, layout.grids, strict=True):
            sides = (grid.height, grid.width, grid.chunks_down, grid.chunks_across)
            row[3:9] = (grid.start, grid.columns, *sides)
        self.locations = list[GridLocations | None]([None] * 3)  # among accs, grads and anchors

    def try_accumulate_and_select(
        self,
        accs: Sequence[Tensor],
        grads: Sequence[Tensor],
        ks: Sequence[int],
        weight: float = 1.0,
        reset_grads_to: Sequence[Tensor] = (),
    ) -> SparseVector | None:
        """Set acc to weight x acc + grad, and select the largest elements of each chunk.

        Each product and each sum is rounded. Then elements are selected as by `ChunkLayout.select_largest`.

        Args:
            accs: tensors (m,) float32 that follow each other, as the chunks do.
            grads: such tensors, too, of any type that `KIND_BY_DTYPE` has; none where nothing is added.
            weight: where nothing is added it has to be 1.
            reset_grads_to: anchors, which are tensors as `grads` of float32. If given, anchor - grad is added
                instead, and `grads` become copies of the anchors.

        Returns:
            (K,) with indices of int32; None where the library can't read these tensors: nothing has changed.
        """
        kind = common_kind(grads)
        if kind is None or not are_contiguous_on_cpu(accs):
            return None
        if reset_grads_to:
            if kind != KIND_BY_DTYPE[torch.float32] or not are_contiguous_on_cpu(reset_grads_to):
                return None
            kind = DRIFT
        for column, tensors in enumerate((accs, grads, reset_grads_to)):
            if tensors and not self._write_addresses(column, tensors):
                return None
        quota = self.layout.quota(ks)
        if tuple(ks) != self.ks:
            self.table[:, 9] = quota.k_by_grid
            self.table[:, 10] = quota.offsets[:-1]
            self.ks = tuple(ks)
        selection = empty_selection(quota.total)
        self.library.sparsify_chunks(
            self.table.ctypes.data,
            len(self.table),
            weight,
            kind,
            self.layout.n,
            self.level,
            torch.get_num_threads(),
            selection.indices.data_ptr(),
            selection.values.data_ptr(),
        )
        return selection

    def _write_addresses(self, column: int, tensors: Sequence[Tensor]) -> bool:
        """Write the addresses of the grids' first elements; False where a grid does not lie in one tensor."""
        numels = [tensor.numel() for tensor in tensors]
        locations = self.locations[column]
        if locations is None or locations.numels != numels:
            ends = np.cumsum([0, *numels])
            starts = self.table[:, 3]
            stops = starts + [grid.rows * grid.columns for grid in self.layout.grids]
            indices = np.searchsorted(ends, starts, side="right") - 1
            if ends[-1] != self.layout.n or (stops > ends[indices + 1]).any():
                return False
            locations = self.locations[column] = GridLocations(numels, indices, starts - ends[indices])
        addresses = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        itemsize = tensors[0].element_size()
        self.table[:, column] = addresses[locations.tensors] + itemsize * locations.offsets
        return True
