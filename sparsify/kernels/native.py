"""Searches and additions by native.cpp, which is called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsify.core import host_sync
from sparsify.core.bucket import describe_tensors
from sparsify.core.checks import check_k
from sparsify.kernels import native_library
from sparsify.kernels.group_kernel import GroupKernel
from sparsify.kernels.native_library import KernelUnavailableError as KernelUnavailableError
from sparsify.types import SearchStats, SelectionKernel, SparseVector, drop_nans

VECTOR_LEVELS = ("scalar", "avx2", "avx512")  # enum Level
KIND_BY_DTYPE = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum Kind
UNREACHABLE_KEY = 0xFFFFFFFF  # a bound that no magnitude reaches

Array = npt.NDArray[Any]


class NativeKernel(SelectionKernel):
    """A search in C++: one pass over memory, 12 bytes per float32 element, in as many threads as torch has.

    Indices ascend.

    Args:
        like: (n,) float32, or bfloat16 or float16 whose sums are float32.
        max_level: the vector instructions to use at most; None: the best that this processor has.
        forced_bound: for tests: the key to take for the bound, instead of a sampled one.

    Raises:
        KernelUnavailableError: the library can't be built or loaded here.
    """

    def __init__(self, like: Tensor, max_level: str | None = None, forced_bound: int | None = None) -> None:
        super().__init__()
        self.library = get_library()
        self.level = best_level_at_most(max_level)
        self.name = f"native {VECTOR_LEVELS[self.level]}"
        self.forced_bound = -1 if forced_bound is None else forced_bound
        self.block_capacity = 0  # elements that `above_threshold` allocates for each block
        self.requests = np.zeros((1, 5), dtype=np.int64)  # struct SearchRequest

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> SparseVector:
        check_k(k, acc.numel())
        self._check(acc, grad)
        grads = [] if grad is None else [grad.contiguous()]
        self.requests[0, :2] = acc.numel(), k
        result = search_buckets(self.requests, address_table([acc]), grads, k, self.level, self.forced_bound)
        assert result is not None
        self.search_stats += result.stats
        return result.selection

    def above_threshold(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> SparseVector:
        host_sync.record_syncs()  # for the number of elements
        self._check(acc, grad)
        grad = None if grad is None else grad.contiguous()
        address, kind = (None, 0) if grad is None else (grad.data_ptr(), KIND_BY_DTYPE[grad.dtype])
        n = acc.numel()
        num_threads = torch.get_num_threads()
        num_blocks = int(self.library.sparsify_num_blocks(n, num_threads))
        bound = min_magnitude_key(float(threshold), strict)
        counts = np.zeros(num_blocks, dtype=np.int64)
        while True:
            capacity = self.block_capacity
            blocks = empty_selection(num_blocks, capacity)
            self.library.sparsify_above(
                acc.data_ptr(),
                address,
                kind,
                n,
                bound,
                self.level,
                num_threads,
                blocks.indices.data_ptr(),
                blocks.values.data_ptr(),
                capacity,
                counts.ctypes.data,
            )
            most = int(counts.max())
            # The next call finds about as many.
            self.block_capacity = max(most + most // 4, capacity - capacity // 8)
            if most <= capacity:
                break
            address, kind = None, 0  # the gradient has been added by now
        lengths = counts.tolist()
        indices = [block[:length] for block, length in zip(blocks.indices, lengths, strict=True)]
        values = [block[:length] for block, length in zip(blocks.values, lengths, strict=True)]
        return drop_nans(SparseVector(torch.cat(indices), torch.cat(values)))

    def _check(self, acc: Tensor, grad: Tensor | None) -> None:
        """Refuse tensors that the library would misread."""
        fits = can_search(acc) and are_contiguous_on_cpu([acc]) and acc.dim() == 1
        if grad is not None:
            fits &= can_search(grad) and grad.shape == acc.shape
        if not fits:
            raise ValueError(
                "this kernel takes acc in float32 without gaps and as many gradients in float32, bfloat16 or "
                f"float16, on the CPU; this is {describe_tensors(acc, grad, separator=' and ')}"
            )


class NativeGroupKernel(GroupKernel):
    """Buckets as one space that C++ searches in one call, and writes to in another.

    They are of float32, or bfloat16 or float16 whose sums are float32. Where memories or selections are of
    any other type, torch's operators write.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self.library = get_library()
        self.level = best_level_at_most(None)
        self.name = f"native {VECTOR_LEVELS[self.level]}"
        self.requests = np.zeros((len(self.sizes), 5), dtype=np.int64)  # struct SearchRequest of each bucket
        self.requests[:, 0] = self.sizes
        self.requests[:, 2] = self.bases
        self.ks = list[int]()
        self.known_tensors = list[Tensor]()
        self.known_table = address_table([])

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> SparseVector:
        if ks != self.ks:
            for n, k in zip(self.sizes, ks, strict=True):
                check_k(k, n)
            *starts, _ = accumulate(ks, initial=0)
            self.requests[:, 1] = ks
            self.requests[:, 3] = starts
            self.ks = [*ks]
        acc_table = self._address_table(accs, keeps=True)
        result = None
        if acc_table is not None:
            result = search_buckets(self.requests, acc_table, grads, sum(ks), self.level)
        if result is None:
            raise ValueError(
                f"this kernel was made for buckets of {self.sizes} elements, acc in float32 and without "
                f"gaps, on the CPU; these are {describe_tensors(*accs, *grads)}"
            )
        self.search_stats += result.stats
        return result.selection

    def add(
        self, into: Sequence[Tensor], parts: Sequence[SparseVector], alpha: float = 1, clears: bool = False
    ) -> None:
        if not self._try_write("add", [into], parts, alpha, clears):
            super().add(into, parts, alpha, clears)

    def clear_at(self, into: Sequence[Tensor], part: SparseVector) -> None:
        if not self._try_write("clear_at", [into], [part]):
            super().clear_at(into, part)

    def add_sum_to_anchors_and_copies(
        self,
        anchors: Sequence[Tensor],
        copies: Sequence[Tensor],
        parts: Sequence[SparseVector],
        alpha: float,
        rate: float,
    ) -> None:
        parts = [SparseVector(indices.int(), values) for indices, values in parts]
        if not self._try_write("move", [anchors, copies], parts, alpha, rate):
            super().add_sum_to_anchors_and_copies(anchors, copies, parts, alpha, rate)

    def _try_write(
        self,
        function: str,
        spaces: Sequence[Sequence[Tensor]],
        parts: Sequence[SparseVector],
        *numbers: float,
    ) -> bool:
        """Let a function of the library write; return False, with nothing written, where it can't.

        Args:
            spaces: the tensors of each space.
        """
        memories = [table for table in map(self._memory_table, spaces) if table is not None]
        has_native_indices = are_contiguous_on_cpu([part.indices for part in parts], torch.int32)
        has_native_values = are_contiguous_on_cpu([part.values for part in parts])
        if not (has_native_indices and has_native_values and len(memories) == len(spaces)):
            return False
        rows = [(indices.data_ptr(), values.data_ptr(), len(indices)) for indices, values in parts]
        selections = np.array(rows, dtype=np.int64)  # struct Selection of each
        is_refused = getattr(self.library, f"sparsify_{function}")(
            *[table.ctypes.data for table in memories],
            len(memories[0]),
            selections.ctypes.data,
            len(parts),
            *numbers,
        )
        return not is_refused

    def _memory_table(self, tensors: Sequence[Tensor]) -> Array | None:
        """Return struct Memory of each tensor; None where the library can't write to them."""
        table = self._address_table(tensors)
        if table is None:
            return None
        ends = table[:, 1].cumsum()
        assert ends[-1] == self.num_elements
        return np.stack([table[:, 0], ends - table[:, 1], ends], axis=1)

    def _address_table(self, tensors: Sequence[Tensor], keeps: bool = False) -> Array | None:
        """Return struct TensorSpan of each tensor; None where one is no float32 without gaps.

        Args:
            keeps: keep the table for when these tensors come again: residuals stay where they are.
        """
        if len(tensors) == len(self.known_tensors) and all(map(is_, tensors, self.known_tensors)):
            return self.known_table
        if not are_contiguous_on_cpu(tensors):
            return None
        table = address_table(tensors)
        if keeps:
            self.known_tensors = [*tensors]
            self.known_table = table
        return table


class SearchResult(NamedTuple):
    """The selection of a search, and the counts of this search alone."""

    selection: SparseVector
    stats: SearchStats


def search_buckets(
    requests: Array,
    acc_table: Array,
    grads: Sequence[Tensor],
    num_selected: int,
    level: int,
    forced_bound: int = -1,
) -> SearchResult | None:
    """Add gradients and search buckets for their largest elements, in one call of the library.

    Args:
        requests: struct SearchRequest of each bucket; the library keeps in it for how many candidates there
            is room.
        acc_table: struct TensorSpan of tensors that follow each other.
        grads: tensors that follow each other; none where nothing is added.
        num_selected: elements of all buckets together.
        forced_bound: the key to take for the bound, instead of a sampled one; negative: none.

    Returns:
        The selection, (num_selected,), bucket after bucket; None, with nothing done, where the library can't
        read the gradients, or the tensors have not as many elements as the buckets.
    """
    kind = common_kind(grads)
    if kind is None:
        return None
    grad_table = address_table(grads)
    selection = empty_selection(num_selected)
    counts = np.zeros(3, dtype=np.int64)  # struct SearchCounts
    is_refused = get_library().sparsify_topk(
        requests.ctypes.data,
        len(requests),
        acc_table.ctypes.data,
        len(acc_table),
        grad_table.ctypes.data,
        len(grad_table),
        kind,
        level,
        torch.get_num_threads(),
        forced_bound,
        selection.indices.data_ptr(),
        selection.values.data_ptr(),
        counts.ctypes.data,
    )
    return None if is_refused else SearchResult(selection, SearchStats(len(requests), *counts.tolist()))


def norms_of_stretches(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
    """Return the Euclidean norm of each stretch of tensors (m,) that follow each other, which are read once.

    A norm may overflow though all elements are finite.

    Args:
        sizes: elements of each stretch.

    Returns:
        (number of sizes,) float32; None where the library can't read these tensors.
    """
    kind = common_kind(tensors)
    if not kind:
        return None
    table = address_table(tensors)
    stretches = np.array(sizes, dtype=np.int64)
    assert table[:, 1].sum() == stretches.sum()
    stretch_norms = torch.empty(len(sizes), dtype=torch.float32, device="cpu")
    get_library().sparsify_norms(
        table.ctypes.data,
        stretches.ctypes.data,
        len(sizes),
        kind,
        best_level_at_most(None),
        torch.get_num_threads(),
        stretch_norms.data_ptr(),
    )
    return stretch_norms


def common_kind(tensors: Sequence[Tensor]) -> int | None:
    """Return enum Kind of tensors that the library can read, 0 of no tensors; None of any others."""
    if not tensors:
        return 0
    dtype = tensors[0].dtype
    return KIND_BY_DTYPE.get(dtype) if are_contiguous_on_cpu(tensors, dtype) else None


def are_contiguous_on_cpu(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> bool:
    """Tell whether all tensors are on the CPU, of this type, and without gaps."""
    return all(tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)


def empty_selection(*shape: int) -> SparseVector:
    """Allocate so many indices and values, in the types that the library writes."""
    indices = torch.empty(shape, dtype=torch.int32, device="cpu")
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    return SparseVector(indices, values)


def address_table(tensors: Sequence[Tensor]) -> Array:
    """Return struct TensorSpan of each tensor: its address and length."""
    table = np.empty((len(tensors), 2), dtype=np.int64)
    table[:, 0] = [tensor.data_ptr() for tensor in tensors]
    table[:, 1] = [tensor.numel() for tensor in tensors]
    return table


def can_search(like: Tensor) -> bool:
    """Tell whether buckets like this tensor can be searched."""
    return like.device.type == "cpu" and like.dtype in KIND_BY_DTYPE and like.numel() < 2**31


def min_magnitude_key(threshold: float, strict: bool) -> int:
    """Return the least key of a magnitude that reaches the threshold (exceeds it, if strict)."""
    if np.isnan(threshold):
        return UNREACHABLE_KEY
    if threshold < 0:
        return 0
    with np.errstate(over="ignore"):
        key = int(np.abs(np.float32(threshold)).view(np.uint32))
    return key + strict


def best_level_at_most(level: str | None) -> int:
    """Return the number of the widest vector instructions that this processor has, and `level` at most."""
    best = int(get_library().sparsify_level())
    return best if level is None else min(best, VECTOR_LEVELS.index(level))


def best_vector_level() -> str:
    """Return the name of the widest vector instructions that this processor has and there is code for."""
    return VECTOR_LEVELS[best_level_at_most(None)]


@cache
def get_library() -> ctypes.CDLL:
    """Return the library; KernelUnavailableError where it can't be built or loaded."""
    return native_library.load_or_build()
