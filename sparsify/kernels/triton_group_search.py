"""The search of many buckets at once on a GPU, in Triton: five launches, however many buckets there are.

`TritonKernel` takes six launches for one bucket, which for a small one take longer than the search itself.
Here tables say which program works on which part of which bucket. Keys are counted in three rounds: no bound
is guessed, which would have to be verified for each bucket. That is 24 bytes of memory traffic per element
instead of 12, for which large buckets are better searched alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsify.core import host_sync
from sparsify.core.bucket import describe_tensors
from sparsify.core.checks import check_k
from sparsify.kernels import triton_device_functions, triton_search
from sparsify.kernels import triton_group_search_device as device_code
from sparsify.kernels.group_kernel import (
    GroupKernel,
    add_end_to_end,
    divide_into_stretches,
    return_single_or_add,
)
from sparsify.kernels.triton_launcher import ALIGNMENT, KernelLauncher, LaunchPlan, LaunchSpec
from sparsify.types import SearchStats, SelectionKernel, SparseVector

BLOCK = 4096  # elements that a program takes at a time
WIDTH = 4  # elements in a row that a thread holds when elements are emitted
MIN_BLOCKS = 4  # of a share, so that a program has something to do
MAX_SHARES = 256  # of one bucket
ADD_BLOCK = 256  # elements that a program adds: two for each thread
MAX_KEPT_TABLES = 8  # of memories that are added to
UNREACHABLE_INDEX = 2**62  # where no element is
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def unsupported_reason(likes: Sequence[Tensor]) -> str | None:
    """Return the reason why `TritonGroupKernel` can't serve such buckets; None where it can."""
    for like in likes:
        reason = triton_search.unsupported_reason(like)
        if reason:
            return reason
    numel = sum(like.numel() for like in likes)
    if numel > triton_search.MAX_NUMEL:
        return (
            f"Triton's kernels take at most {triton_search.MAX_NUMEL:,} elements together, whose indices "
            f"have 32 bits, and these are {numel:,}"
        )
    return None


class TritonGroupKernel(GroupKernel):
    """A search of small buckets together by Triton's kernels, which also add to any element of all buckets.

    Each large bucket is searched by itself, which takes less memory traffic.

    Args:
        likes: (n,) of each bucket, as `TritonKernel` takes them.
        kernels: the search of each bucket; none where all are searched together.
        max_small_numel: elements of a small bucket, at most.
        block_numel, min_blocks_per_program: see BLOCK, MIN_BLOCKS; smaller in tests.

    Raises:
        ValueError: `unsupported_reason` has a reason why such buckets can't be searched.
    """

    name = "triton, buckets together"

    def __init__(
        self,
        likes: Sequence[Tensor],
        kernels: Sequence[SelectionKernel] = (),
        max_small_numel: float = math.inf,
        block_numel: int = BLOCK,
        min_blocks_per_program: int = MIN_BLOCKS,
    ) -> None:
        reason = unsupported_reason(likes)
        if reason:
            raise ValueError(f"{reason}; or take select=torch")
        super().__init__([like.numel() for like in likes], kernels)
        small_buckets = [bucket for bucket, n in enumerate(self.sizes) if n <= max_small_numel]
        self.small_buckets = small_buckets if len(small_buckets) > 1 else []
        self.block = block_numel
        shares = self._divide_among_programs(min_blocks_per_program)
        self.num_programs = len(shares)
        new = likes[0].new_empty
        self.work = new((len(self.small_buckets), device_code.WORK_ROW_NUMEL.value), dtype=torch.int32)
        self.bucket_rows: list[tuple[int, ...]] = []  # rows of the table of small buckets on the device
        self.is_aligned = False
        self.memory_tables: dict[tuple[tuple[int, int], ...], Tensor] = {}  # of `add`, the oldest first
        self.launch = KernelLauncher()
        self.launch.set_buffers(
            shares=torch.tensor(shares, dtype=torch.int32, device=likes[0].device),
            work=self.work,
            rows=new((self.num_programs, triton_device_functions.LOW_BINS.value), dtype=torch.int32),
        )

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> SparseVector:
        """Search as `GroupKernel.topk`: each bucket's acc in one tensor; within a bucket in no order."""
        if not self.small_buckets:
            return super().topk(accs, grads, ks)
        self._check(accs, grads, ks)
        pieces_by_bucket = divide_into_stretches(grads, self.sizes)
        small_selection = self._search_small_buckets(accs, pieces_by_bucket, ks)
        if len(self.small_buckets) == len(ks):
            return small_selection
        small_ks = [ks[bucket] for bucket in self.small_buckets]
        small_parts = map(
            SparseVector, small_selection.indices.split(small_ks), small_selection.values.split(small_ks)
        )
        part_by_bucket = dict(zip(self.small_buckets, small_parts, strict=True))
        for bucket, (acc, pieces, k) in enumerate(zip(accs, pieces_by_bucket, ks, strict=True)):
            if bucket not in part_by_bucket:
                indices, values = self.kernels[bucket].topk(acc, return_single_or_add(acc, pieces), k)
                part_by_bucket[bucket] = SparseVector(indices.int() + self.bases[bucket], values)
        parts = [part_by_bucket[bucket] for bucket in range(len(ks))]
        return SparseVector(
            torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])
        )

    def _search_small_buckets(
        self, accs: Sequence[Tensor], pieces_by_bucket: Sequence[Sequence[Tensor]], ks: Sequence[int]
    ) -> SparseVector:
        """Add the gradients of small buckets and search these, given all buckets."""
        small_accs = [accs[bucket] for bucket in self.small_buckets]
        grads = return_whole_or_add(small_accs, [pieces_by_bucket[bucket] for bucket in self.small_buckets])
        *starts, total = accumulate([ks[bucket] for bucket in self.small_buckets], initial=0)
        rows = list[tuple[int, ...]]()
        for bucket, acc, grad, start in zip(self.small_buckets, small_accs, grads, starts, strict=True):
            address = 0 if grad is None else grad.data_ptr()
            rows.append((acc.data_ptr(), address, ks[bucket], start, self.bases[bucket]))
        if rows != self.bucket_rows:
            self.bucket_rows = rows
            self.is_aligned = all(address % ALIGNMENT == 0 for row in rows for address in row[:2])
            self.launch.set_buffers(buckets=host_sync.to_device(rows, self.work))
        selection = SparseVector(accs[0].new_empty(total, dtype=torch.int32), accs[0].new_empty(total))
        self.work.zero_()
        with torch.cuda.device_of(selection.values):
            self.launch(
                self._plan_topk,
                (None if grads[0] is None else TRITON_DTYPES[grads[0].dtype], self.is_aligned),
                {"out_indices": selection.indices, "out_values": selection.values},
                {"programs": self.num_programs},
            )
        self.search_stats += SearchStats(len(rows), selected=total)
        return selection

    def add(
        self, into: Sequence[Tensor], parts: Sequence[SparseVector], alpha: float = 1.0, clears: bool = False
    ) -> None:
        """Add as `GroupKernel.add`, with one launch for each part.

        Products are rounded before they are added, as those of torch's index_add_; memories that are not of
        float32 are left to torch.
        """
        if any(map(self._is_unsupported_memory, into)):
            return super().add(into, parts, alpha, clears)
        table = self._memory_table(into)
        if clears:
            torch._foreach_zero_(list(into))
        for part in parts:
            k = part.indices.numel()
            if not k:
                continue
            tensors = {
                "indices": part.indices.contiguous(),
                "values": part.values.contiguous(),
                "table": table,
            }
            numbers = {
                "k": k,
                "half": table.numel() // 4,
                "alpha": float(alpha),
                "blocks": triton.cdiv(k, ADD_BLOCK),
            }
            with torch.cuda.device_of(table):
                self.launch(self._plan_add, (), tensors, numbers)

    def _plan_topk(self, grad_dtype: tl.dtype | None, aligned: bool) -> LaunchPlan:
        common = {"ALIGNED": aligned, "BLOCK": self.block}
        emitting = {**common, "WIDTH": WIDTH, "SHARES": MAX_SHARES}
        return (
            LaunchSpec(device_code.accumulate_and_count, "programs", 8, {"GRAD_DTYPE": grad_dtype, **common}),
            LaunchSpec(device_code.count_group_middle_bits, "programs", 8, common),
            LaunchSpec(device_code.count_group_low_bits, "programs", 8, common),
            LaunchSpec(device_code.emit_group_largest, "programs", 8, emitting),
        )

    def _plan_add(self) -> LaunchPlan:
        return (LaunchSpec(device_code.add_selection, "blocks", 4, {"ADD_BLOCK": ADD_BLOCK}),)

    def _divide_among_programs(self, min_blocks: int) -> list[tuple[int, int, int, int]]:
        """Return the rows of `shares`: small bucket, first and end element, the bucket's first program."""
        shares = list[tuple[int, int, int, int]]()
        for row, bucket in enumerate(self.small_buckets):
            n = self.sizes[bucket]
            first_program = len(shares)
            length = max(min_blocks, triton.cdiv(n, MAX_SHARES * self.block)) * self.block
            for start in range(0, n, length):
                shares.append((row, start, min(start + length, n), first_program))
        return shares

    def _memory_table(self, memories: Sequence[Tensor]) -> Tensor:
        """Return (2 x rows,) int64: where each memory begins in the space, then the addresses.

        Tables of the last few memories are kept: results and residuals take turns.
        """
        key = tuple((memory.data_ptr(), memory.numel()) for memory in memories)
        table = self.memory_tables.get(key)
        if table is not None:
            return table
        if sum(size for _, size in key) != self.num_elements:
            raise ValueError(
                f"parts are added to memories of {self.num_elements} elements together; these are "
                f"{describe_tensors(*memories)}"
            )
        num_rows = max(2, triton.next_power_of_2(len(memories)))  # a power of 2, which the search halves
        num_unused = num_rows - len(memories)
        *begins, _ = accumulate((size for _, size in key), initial=0)
        begins += [UNREACHABLE_INDEX] * num_unused
        addresses = [address for address, _ in key] + [0] * num_unused
        if len(self.memory_tables) >= MAX_KEPT_TABLES:
            del self.memory_tables[next(iter(self.memory_tables))]
        table = host_sync.to_device(begins + addresses, memories[0])
        self.memory_tables[key] = table
        return table

    def _check(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> None:
        """Refuse other tensors than this kernel was made for."""
        if [acc.numel() for acc in accs] != self.sizes or any(map(self._is_unsupported_memory, accs)):
            raise ValueError(
                f"this kernel was made for buckets of {self.sizes} elements on {self.work.device}, acc in "
                f"float32 and without gaps; these are {describe_tensors(*accs)}"
            )
        for acc, k in zip(accs, ks, strict=True):
            check_k(k, acc.numel())
        is_strange = any(piece.dim() != 1 or piece.device != self.work.device for piece in grads)
        if grads and (is_strange or sum(piece.numel() for piece in grads) != self.num_elements):
            raise ValueError(
                f"gradients of {self.num_elements} elements on {self.work.device} are to be added, in pieces "
                f"without shape; these are {describe_tensors(*grads)}"
            )

    def _is_unsupported_memory(self, memory: Tensor) -> bool:
        return (
            memory.dtype != torch.float32
            or memory.dim() != 1
            or memory.device != self.work.device
            or not memory.is_contiguous()
        )


def return_whole_or_add(
    accs: Sequence[Tensor], pieces_by_bucket: Sequence[Sequence[Tensor]]
) -> Sequence[Tensor | None]:
    """Return the gradient of each bucket, for the search to add: all of one type and in one piece each.

    Others are added to accs here, and None is returned for each bucket.
    """
    whole = [pieces[0] for pieces in pieces_by_bucket if len(pieces) == 1 and pieces[0].is_contiguous()]
    dtypes = {grad.dtype for grad in whole}
    if len(whole) == len(accs) and len(dtypes) == 1 and dtypes <= TRITON_DTYPES.keys():
        return whole
    add_end_to_end(accs, [piece for pieces in pieces_by_bucket for piece in pieces])
    return [None for _ in accs]
