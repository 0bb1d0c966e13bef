"""The largest elements of many buckets in one search: five launches on a GPU, however many there are.

What `Gpu` does for one bucket takes six launches, which for small ones take longer than the search itself.
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
from sparsify.core.checks import check_k
from sparsify.kernels import gpu
from sparsify.kernels import segments_triton as on_device
from sparsify.kernels.launches import Launch, Launcher, Launches
from sparsify.types import SearchStats, Sparse

TILE = 4096  # elements that a program looks at in one go
WIDTH = 4  # elements in a row that a thread holds when it looks what to emit
FEWEST = 4  # tiles of a share, so that a program has something to do
MOST_SHARES = 256  # of one bucket
ALIGNMENT = 16  # bytes of the widest load
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class GpuSegments:
    """`topk` of several buckets together; a ValueError for those that `gpu.obstacle` refuses.

    Args:
        likes: (n,) of each, as `Gpu` takes them.
        tile, fewest: see TILE, FEWEST; smaller in tests.
    """

    name = "triton, buckets together"

    def __init__(self, likes: Sequence[Tensor], tile: int = TILE, fewest: int = FEWEST) -> None:
        if any(map(gpu.obstacle, likes)):
            raise ValueError("no Triton kernel for such buckets; take select=torch")
        self.tile, self.sizes = tile, [like.numel() for like in likes]
        shares = list(self._shares(fewest))
        new = likes[0].new_empty
        self.shares = torch.tensor(shares, dtype=torch.int32, device=likes[0].device)
        self.work = new((len(likes), on_device.ROW.value), dtype=torch.int32)
        self.rows = new((len(shares), on_device.FEW.value), dtype=torch.int32)
        self.table: list[tuple[int, int, int, int, int]] = []  # what `buckets` holds
        self.buckets, self.is_aligned = new(0, dtype=torch.int64), False
        self.launch = Launcher()
        self.launch.hold(shares=self.shares, work=self.work, rows=self.rows)
        self.steps = self.selected = 0

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor | None], ks: Sequence[int]) -> list[Sparse]:
        """The k largest of each bucket, as `Kernel.topk`; in no order. No host synchronisation."""
        grads = self._check(accs, grads, ks)
        starts = [0, *accumulate(ks)]
        out = Sparse(accs[0].new_empty(starts[-1], dtype=torch.int32), accs[0].new_empty(starts[-1]))
        kind = None if grads[0] is None else KINDS[grads[0].dtype]
        self._describe(accs, grads, ks, starts)
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
        parts = (part.split_with_sizes(list(ks)) for part in out)
        return [Sparse(*part) for part in zip(*parts, strict=True)]

    def stats(self) -> SearchStats:
        """Counts so far, see `Kernel.stats`; without a host synchronisation."""
        return SearchStats(self.steps, selected=self.selected)

    def _search(self, kind: tl.dtype | None, aligned: bool) -> Launches:
        shape = {"ALIGNED": aligned, "TILE": self.tile}
        return (
            Launch(on_device.add_and_count, "programs", 8, {"KIND": kind, **shape}),
            Launch(on_device.count_middle, "programs", 8, shape),
            Launch(on_device.count_low, "programs", 8, shape),
            Launch(on_device.emit_all, "programs", 8, {**shape, "WIDTH": WIDTH, "SHARES": MOST_SHARES}),
        )

    def _shares(self, fewest: int) -> list[tuple[int, int, int, int]]:
        """Bucket, first tile, the one behind the last, the first program of this bucket: for each program."""
        found: list[tuple[int, int, int, int]] = []
        for bucket, size in enumerate(self.sizes):
            tiles, before = triton.cdiv(size, self.tile), len(found)
            length = max(fewest, triton.cdiv(tiles, MOST_SHARES))
            found += [(bucket, at, min(at + length, tiles), before) for at in range(0, tiles, length)]
        return found

    def _describe(
        self, accs: Sequence[Tensor], grads: Sequence[Tensor | None], ks: Sequence[int], starts: Sequence[int]
    ) -> None:
        """Bring the table of buckets up to date, where something has changed: a k, an address."""
        table = [
            (acc.data_ptr(), 0 if grad is None else grad.data_ptr(), acc.numel(), k, start)
            for acc, grad, k, start in zip(accs, grads, ks, starts, strict=False)
        ]
        if table != self.table:
            self.table, self.buckets = table, host_sync.to_device(table, accs[0])
            self.is_aligned = all(address % ALIGNMENT == 0 for row in table for address in row[:2])
            self.launch.hold(buckets=self.buckets)

    def _check(
        self, accs: Sequence[Tensor], grads: Sequence[Tensor | None], ks: Sequence[int]
    ) -> Sequence[Tensor | None]:
        """The gradients that are yet to be added, all of one type, or none at all."""
        if [acc.numel() for acc in accs] != self.sizes or any(
            acc.dtype != torch.float32 or acc.device != self.work.device or not acc.is_contiguous()
            for acc in accs
        ):
            seen = ", ".join(f"{tuple(acc.shape)} {acc.dtype} on {acc.device}" for acc in accs)
            raise ValueError(
                f"this kernel was made for buckets of {self.sizes} elements on {self.work.device}, acc in "
                f"float32 and without gaps; these are {seen}"
            )
        for acc, k in zip(accs, ks, strict=True):
            check_k(k, acc.numel())
        kinds = {None if grad is None or not grad.is_contiguous() else grad.dtype for grad in grads}
        if len(kinds) == 1 and kinds < {None, *KINDS}:
            return grads
        for acc, grad in zip(accs, grads, strict=True):
            if grad is not None:
                acc.add_(grad)
        return [None] * len(accs)
