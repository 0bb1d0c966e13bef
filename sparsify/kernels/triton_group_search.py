"""The largest elements of many buckets in one search: five launches on a GPU, however many there are.

What `TritonKernel` does for one bucket takes six launches, which for small ones take longer than the search
itself. Here tables say which program works on which part of which bucket. Keys are counted in three rounds:
no bound is guessed, which would have to be verified for each bucket. That is 24 bytes of memory traffic per
element instead of 12, for which large buckets are better searched alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsify.core import host_sync
from sparsify.core.checks import check_k
from sparsify.kernels import triton_group_search_device as device_code
from sparsify.kernels import triton_search
from sparsify.kernels.joint import JointKernel, divide, matched, split_like
from sparsify.kernels.triton_launcher import KernelLauncher, LaunchPlan, LaunchSpec
from sparsify.types import SearchStats, SelectionKernel, SparseVector

TILE = 4096  # elements that a program looks at in one go
WIDTH = 4  # elements in a row that a thread holds when it looks what to emit
FEWEST = 4  # tiles of a share, so that a program has something to do
MOST_SHARES = 256  # of one bucket
ALIGNMENT = 16  # bytes of the widest load
CHUNK = 256  # elements that a program adds: two for each thread
MOST_TABLES = 8  # of memories that are added to
UNREACHED = 2**62  # where no element is
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def unsupported_reason(likes: Sequence[Tensor]) -> str | None:
    """Reason why `TritonGroupSearch` can't serve such buckets; None where it can."""
    if trouble := next(filter(None, map(triton_search.unsupported_reason, likes)), None):
        return trouble
    if (together := sum(like.numel() for like in likes)) > triton_search.LONGEST:
        return (
            f"Triton's kernels take at most {triton_search.LONGEST:,} elements together, whose indices have 32 bits, "
            f"and these are {together:,}"
        )
    return None


class TritonGroupSearch(JointKernel):
    """`topk` of several buckets together, and additions to any of their elements; a ValueError for those that
    `unsupported_reason` refuses.

    Args:
        likes: (n,) of each, as `TritonKernel` takes them.
        tile, fewest: see TILE, FEWEST; smaller in tests.
        bases: where these buckets begin, if they are part of a larger space.
    """

    name = "triton, buckets together"

    def __init__(
        self,
        likes: Sequence[Tensor],
        tile: int = TILE,
        fewest: int = FEWEST,
        bases: Sequence[int] | None = None,
    ) -> None:
        if trouble := unsupported_reason(likes):
            raise ValueError(f"{trouble}; or take select=torch")
        super().__init__([like.numel() for like in likes])
        self.tile, self.bases = tile, self.bases if bases is None else list(bases)
        shares = list(self._shares(fewest))
        new = likes[0].new_empty
        self.shares = torch.tensor(shares, dtype=torch.int32, device=likes[0].device)
        self.work = new((len(likes), device_code.ROW.value), dtype=torch.int32)
        self.rows = new((len(shares), device_code.FEW.value), dtype=torch.int32)
        self.table: list[tuple[int, ...]] = []  # what `buckets` holds
        self.buckets, self.is_aligned = new(0, dtype=torch.int64), False
        self.memories: dict[tuple[tuple[int, int], ...], Tensor] = {}  # tables of `add`, the oldest first
        self.launch = KernelLauncher()
        self.launch.set_buffers(shares=self.shares, work=self.work, rows=self.rows)
        self.steps = self.selected = 0

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> SparseVector:
        """See `JointKernel.topk`: each bucket's acc in one tensor; within a bucket in no order."""
        self._check(accs, grads, ks)
        added = self._added(accs, grads)
        starts = [0, *accumulate(ks)]
        out = SparseVector(accs[0].new_empty(starts[-1], dtype=torch.int32), accs[0].new_empty(starts[-1]))
        kind = None if added is None else KINDS[added[0].dtype]
        self._describe(accs, added, ks, starts)
        self.work.zero_()
        with torch.cuda.device_of(out.values):
            self.launch(
                self._search,
                (kind, self.is_aligned),
                {"out_indices": out.indices, "out_values": out.values},
                {"programs": len(self.shares)},
            )
        self.steps += len(ks)
        self.selected += starts[-1]
        return out

    def add(
        self, into: Sequence[Tensor], parts: Sequence[SparseVector], alpha: float = 1.0, clears: bool = False
    ) -> None:
        """See `JointKernel.add`: one launch for each part. Products are rounded before they are added, as
        those of torch's index_add_; what is not float32 is left to torch.
        """
        if any(map(self._misfits, into)):
            return super().add(into, parts, alpha, clears)
        table = self._memories(into)
        if clears:
            torch._foreach_zero_(list(into))
        for part in parts:
            if k := part.indices.numel():
                with torch.cuda.device_of(table):
                    self.launch(
                        self._add,
                        (),
                        {
                            "indices": part.indices.contiguous(),
                            "values": part.values.contiguous(),
                            "table": table,
                        },
                        {
                            "k": k,
                            "half": table.numel() // 4,
                            "alpha": float(alpha),
                            "chunks": triton.cdiv(k, CHUNK),
                        },
                    )

    def stats(self) -> SearchStats:
        """Counts so far, see `SelectionKernel.stats`; without a host synchronisation."""
        return SearchStats(self.steps, selected=self.selected)

    def _search(self, kind: tl.dtype | None, aligned: bool) -> LaunchPlan:
        shape = {"ALIGNED": aligned, "TILE": self.tile}
        return (
            LaunchSpec(device_code.add_and_count, "programs", 8, {"KIND": kind, **shape}),
            LaunchSpec(device_code.count_middle, "programs", 8, shape),
            LaunchSpec(device_code.count_low, "programs", 8, shape),
            LaunchSpec(device_code.emit_all, "programs", 8, {**shape, "WIDTH": WIDTH, "SHARES": MOST_SHARES}),
        )

    def _add(self) -> LaunchPlan:
        return (LaunchSpec(device_code.add_part, "chunks", 4, {"CHUNK": CHUNK}),)

    def _shares(self, fewest: int) -> list[tuple[int, int, int, int]]:
        """Bucket, first tile, the one behind the last, the first program of this bucket: for each program."""
        found: list[tuple[int, int, int, int]] = []
        for bucket, size in enumerate(self.sizes):
            tiles, before = triton.cdiv(size, self.tile), len(found)
            length = max(fewest, triton.cdiv(tiles, MOST_SHARES))
            found += [(bucket, at, min(at + length, tiles), before) for at in range(0, tiles, length)]
        return found

    def _describe(
        self,
        accs: Sequence[Tensor],
        grads: Sequence[Tensor] | None,
        ks: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        """Bring the table of buckets up to date, where something has changed: a k, an address."""
        added = [0] * len(accs) if grads is None else [grad.data_ptr() for grad in grads]
        table: list[tuple[int, ...]] = [
            (acc.data_ptr(), grad, acc.numel(), k, start, base)
            for acc, grad, k, start, base in zip(accs, added, ks, starts, self.bases, strict=False)
        ]
        if table != self.table:
            self.table, self.buckets = table, host_sync.to_device(table, accs[0])
            self.is_aligned = all(address % ALIGNMENT == 0 for row in table for address in row[:2])
            self.launch.set_buffers(buckets=self.buckets)

    def _memories(self, into: Sequence[Tensor]) -> Tensor:
        """(2 x rows,) int64: where each memory begins in the space, and its address. Tables of the last few
        memories are kept: results and residuals take turns.
        """
        key = tuple((memory.data_ptr(), memory.numel()) for memory in into)
        if (table := self.memories.get(key)) is not None:
            return table
        if sum(size for _, size in key) != self.num_elements:
            raise ValueError(
                f"parts are added to memories of {self.num_elements} elements together; these are "
                f"{described(into)}"
            )
        # A power of 2, which the search halves.
        rows = max(2, triton.next_power_of_2(len(into)))
        bases = [0, *accumulate(size for _, size in key)][:-1]
        begins = bases + [UNREACHED] * (rows - len(into))
        addresses = [address for address, _ in key] + [0] * (rows - len(into))
        if len(self.memories) >= MOST_TABLES:
            del self.memories[next(iter(self.memories))]
        self.memories[key] = table = host_sync.to_device(begins + addresses, into[0])
        return table

    def _check(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> None:
        if [acc.numel() for acc in accs] != self.sizes or any(map(self._misfits, accs)):
            raise ValueError(
                f"this kernel was made for buckets of {self.sizes} elements on {self.work.device}, acc in "
                f"float32 and without gaps; these are {described(accs)}"
            )
        for acc, k in zip(accs, ks, strict=True):
            check_k(k, acc.numel())
        is_strange = any(piece.dim() != 1 or piece.device != self.work.device for piece in grads)
        if grads and (is_strange or sum(piece.numel() for piece in grads) != self.num_elements):
            raise ValueError(
                f"gradients of {self.num_elements} elements on {self.work.device} are to be added, in pieces "
                f"without shape; these are {described(grads)}"
            )

    def _misfits(self, memory: Tensor) -> bool:
        return (
            memory.dtype != torch.float32
            or memory.dim() != 1
            or memory.device != self.work.device
            or not memory.is_contiguous()
        )

    def _added(self, accs: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor] | None:
        """The gradients that the search itself is to add: all of one type and in one piece each. Others are
        added here.
        """
        if not grads:
            return None
        pieces = divide(grads, self.sizes)
        if all(len(own) == 1 for own in pieces):
            whole = [own[0] for own in pieces]
            kinds = {grad.dtype if grad.is_contiguous() else None for grad in whole}
            if len(kinds) == 1 and kinds <= set(KINDS):
                return whole
        pairs = list(matched(accs, grads))
        torch._foreach_add_([acc for acc, _ in pairs], [piece for _, piece in pairs])
        return None


class TritonGroupKernel(JointKernel):
    """Small buckets searched at once, and each large one by itself, which takes less traffic.

    Args:
        likes, kernels: of each bucket.
        most: elements of a small bucket.
    """

    name = TritonGroupSearch.name

    def __init__(self, likes: Sequence[Tensor], kernels: Sequence[SelectionKernel], most: int) -> None:
        super().__init__([like.numel() for like in likes], kernels)
        self.space = TritonGroupSearch(likes)  # written to
        self.small = [at for at, n in enumerate(self.sizes) if n <= most]
        bases = [self.bases[at] for at in self.small]
        self.segments = (
            TritonGroupSearch([likes[at] for at in self.small], bases=bases) if len(bases) > 1 else None
        )

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> SparseVector:
        if self.segments is None or [acc.numel() for acc in accs] != self.sizes:
            return super().topk(accs, grads, ks)
        added = divide(grads, self.sizes) if grads else [list[Tensor]() for _ in accs]
        few = [ks[at] for at in self.small]
        of_small = [grad for at in self.small for grad in added[at]]
        found = self.segments.topk([accs[at] for at in self.small], of_small, few)
        if len(few) == len(ks):
            return found
        parts = dict(
            zip(self.small, map(SparseVector, found.indices.split(few), found.values.split(few)), strict=True)
        )
        for at, base in enumerate(self.bases):
            if at not in parts:
                own = added[at]
                if len(own) > 1:
                    torch._foreach_add_(split_like(accs[at], own), own)
                indices, values = self.kernels[at].topk(accs[at], own[0] if len(own) == 1 else None, ks[at])
                parts[at] = SparseVector(indices.int() + base, values)
        ordered = [parts[at] for at in range(len(ks))]
        return SparseVector(
            torch.cat([one.indices for one in ordered]), torch.cat([one.values for one in ordered])
        )

    def add(
        self, into: Sequence[Tensor], parts: Sequence[SparseVector], alpha: float = 1.0, clears: bool = False
    ) -> None:
        self.space.add(into, parts, alpha, clears)

    def stats(self) -> SearchStats:
        return SearchStats() if self.segments is None else self.segments.stats()


def described(tensors: Sequence[Tensor]) -> str:
    """Shapes, types and devices, for a message."""
    return ", ".join(f"{tuple(one.shape)} {one.dtype} on {one.device}" for one in tensors)
