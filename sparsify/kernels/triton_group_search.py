"""The search of many buckets at once on a GPU, in Triton: five launches, however many buckets there are.

`TritonKernel` takes six launches for one bucket, which for a small one take longer than the search itself.
Here tables say which program works on which part of which bucket. Keys are counted in three rounds: no bound
is guessed, which would have to be verified for each bucket. That is 24 bytes of memory traffic per element
instead of 12, for which large buckets are better searched alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsify.core import host_sync
from sparsify.core.bucket import describe_tensors
from sparsify.core.checks import check_k
from sparsify.kernels import triton_group_search_device as device_code
from sparsify.kernels import triton_search
from sparsify.kernels.group_kernel import GroupKernel, divide, pair_up, split_like
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
    """Return the reason why `TritonGroupSearch` can't serve such buckets; None where it can."""
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


class TritonGroupSearch(GroupKernel):
    """A search of several buckets together by Triton's kernels, which also add to any of their elements.

    Args:
        likes: (n,) of each, as `TritonKernel` takes them.
        block, min_blocks: see BLOCK, MIN_BLOCKS; smaller in tests.
        bases: where these buckets begin, if they are part of a larger space.

    Raises:
        ValueError: `unsupported_reason` has a reason why such buckets can't be searched.
    """

    name = "triton, buckets together"

    def __init__(
        self,
        likes: Sequence[Tensor],
        block: int = BLOCK,
        min_blocks: int = MIN_BLOCKS,
        bases: Sequence[int] | None = None,
    ) -> None:
        reason = unsupported_reason(likes)
        if reason:
            raise ValueError(f"{reason}; or take select=torch")
        super().__init__([like.numel() for like in likes])
        self.block = block
        if bases is not None:
            self.bases = list(bases)
        shares = self._divide_among_programs(min_blocks)
        self.num_programs = len(shares)
        new = likes[0].new_empty
        self.work = new((len(likes), device_code.WORK_ROW_NUMEL.value), dtype=torch.int32)
        self.bucket_rows: list[tuple[int, ...]] = []  # rows of the table of buckets on the device
        self.is_aligned = False
        self.memory_tables: dict[tuple[tuple[int, int], ...], Tensor] = {}  # of `add`, the oldest first
        self.launch = KernelLauncher()
        self.launch.set_buffers(
            shares=torch.tensor(shares, dtype=torch.int32, device=likes[0].device),
            work=self.work,
            rows=new((self.num_programs, device_code.LOW_BINS.value), dtype=torch.int32),
        )
        self.steps = 0
        self.selected = 0

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> SparseVector:
        """Search as `GroupKernel.topk`: each bucket's acc in one tensor; within a bucket in no order."""
        self._check(accs, grads, ks)
        whole_grads = self._whole_gradients(accs, grads)
        starts = [0, *accumulate(ks)]
        total = starts[-1]
        selection = SparseVector(accs[0].new_empty(total, dtype=torch.int32), accs[0].new_empty(total))
        grad_dtype = None if whole_grads is None else TRITON_DTYPES[whole_grads[0].dtype]
        self._update_bucket_table(accs, whole_grads, ks, starts)
        self.work.zero_()
        with torch.cuda.device_of(selection.values):
            self.launch(
                self._plan_topk,
                (grad_dtype, self.is_aligned),
                {"out_indices": selection.indices, "out_values": selection.values},
                {"programs": self.num_programs},
            )
        self.steps += len(ks)
        self.selected += total
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

    def stats(self) -> SearchStats:
        """Return counts so far, see `SelectionKernel.stats`; without a host synchronisation."""
        return SearchStats(self.steps, selected=self.selected)

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
        """Return the rows of `shares`: bucket, first block, end block, and the bucket's first program."""
        shares: list[tuple[int, int, int, int]] = []
        for bucket, size in enumerate(self.sizes):
            num_blocks = triton.cdiv(size, self.block)
            first_program = len(shares)
            length = max(min_blocks, triton.cdiv(num_blocks, MAX_SHARES))
            for start in range(0, num_blocks, length):
                shares.append((bucket, start, min(start + length, num_blocks), first_program))
        return shares

    def _update_bucket_table(
        self,
        accs: Sequence[Tensor],
        grads: Sequence[Tensor] | None,
        ks: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        """Bring the table of buckets on the device up to date, where a k or an address has changed."""
        grad_addresses = [0] * len(accs) if grads is None else [grad.data_ptr() for grad in grads]
        rows: list[tuple[int, ...]] = [
            (acc.data_ptr(), grad_address, acc.numel(), k, start, base)
            for acc, grad_address, k, start, base in zip(
                accs, grad_addresses, ks, starts, self.bases, strict=False
            )
        ]
        if rows != self.bucket_rows:
            self.bucket_rows = rows
            self.is_aligned = all(address % ALIGNMENT == 0 for row in rows for address in row[:2])
            self.launch.set_buffers(buckets=host_sync.to_device(rows, accs[0]))

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

    def _whole_gradients(self, accs: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """Return the gradients that the search itself is to add: all of one type and in one piece each.

        Others are added here, and None is returned.
        """
        if not grads:
            return None
        pieces_by_bucket = divide(grads, self.sizes)
        if all(len(pieces) == 1 for pieces in pieces_by_bucket):
            whole = [pieces[0] for pieces in pieces_by_bucket]
            dtypes = {grad.dtype for grad in whole}
            is_plain = all(grad.is_contiguous() for grad in whole)
            if is_plain and len(dtypes) == 1 and dtypes <= set(TRITON_DTYPES):
                return whole
        pairs = list(pair_up(accs, grads))
        torch._foreach_add_([acc for acc, _ in pairs], [piece for _, piece in pairs])
        return None


class TritonGroupKernel(GroupKernel):
    """A search of small buckets at once, and of each large one by itself, which takes less memory traffic.

    Args:
        likes, kernels: of each bucket.
        max_small_numel: elements of a small bucket, at most.
    """

    name = TritonGroupSearch.name

    def __init__(
        self, likes: Sequence[Tensor], kernels: Sequence[SelectionKernel], max_small_numel: int
    ) -> None:
        super().__init__([like.numel() for like in likes], kernels)
        self.writer = TritonGroupSearch(likes)
        self.small_buckets = [bucket for bucket, n in enumerate(self.sizes) if n <= max_small_numel]
        self.small_search: TritonGroupSearch | None = None
        if len(self.small_buckets) > 1:
            small_likes = [likes[bucket] for bucket in self.small_buckets]
            bases = [self.bases[bucket] for bucket in self.small_buckets]
            self.small_search = TritonGroupSearch(small_likes, bases=bases)

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> SparseVector:
        if self.small_search is None or [acc.numel() for acc in accs] != self.sizes:
            return super().topk(accs, grads, ks)
        grad_pieces = divide(grads, self.sizes) if grads else [list[Tensor]() for _ in accs]
        small_accs = [accs[bucket] for bucket in self.small_buckets]
        small_grads = [grad for bucket in self.small_buckets for grad in grad_pieces[bucket]]
        small_ks = [ks[bucket] for bucket in self.small_buckets]
        small_selection = self.small_search.topk(small_accs, small_grads, small_ks)
        if len(small_ks) == len(ks):
            return small_selection
        small_indices = small_selection.indices.split(small_ks)
        small_values = small_selection.values.split(small_ks)
        indices_by_bucket = dict(zip(self.small_buckets, small_indices, strict=True))
        values_by_bucket = dict(zip(self.small_buckets, small_values, strict=True))
        for bucket, base in enumerate(self.bases):
            if bucket not in indices_by_bucket:
                pieces = grad_pieces[bucket]
                if len(pieces) > 1:
                    torch._foreach_add_(split_like(accs[bucket], pieces), pieces)
                grad = pieces[0] if len(pieces) == 1 else None
                indices, values = self.kernels[bucket].topk(accs[bucket], grad, ks[bucket])
                indices_by_bucket[bucket] = indices.int() + base
                values_by_bucket[bucket] = values
        buckets = range(len(ks))
        return SparseVector(
            torch.cat([indices_by_bucket[bucket] for bucket in buckets]),
            torch.cat([values_by_bucket[bucket] for bucket in buckets]),
        )

    def add(
        self, into: Sequence[Tensor], parts: Sequence[SparseVector], alpha: float = 1.0, clears: bool = False
    ) -> None:
        self.writer.add(into, parts, alpha, clears)

    def stats(self) -> SearchStats:
        return SearchStats() if self.small_search is None else self.small_search.stats()
