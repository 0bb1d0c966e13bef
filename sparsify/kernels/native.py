"""The C++ pass of native.cpp, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from sparsify.core import host_sync
from sparsify.core.checks import check_k
from sparsify.kernels import native_library
from sparsify.kernels.native_library import Unavailable as Unavailable
from sparsify.types import Kernel, SearchStats, Sparse, without_nan

LEVELS = ("scalar", "avx2", "avx512")
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum Kind
NOTHING = 0xFFFFFFFF  # a bound that nothing reaches


class Native(Kernel):
    """One pass over memory, 12 bytes per element in float32, in as many threads as torch has; or
    `Unavailable`. Indices ascend.

    Args:
        like: (n,) float32, or bfloat16 or float16 whose sums are float32.
        level: the vector instructions to use at most; None: the best that this processor has.
        bound: for tests: the key to take for the bound, instead of a sampled one.
    """

    def __init__(self, like: Tensor, level: str | None = None, bound: int | None = None) -> None:
        super().__init__()
        self.library = library()
        best = int(self.library.sparsify_level())
        self.level = best if level is None else min(best, LEVELS.index(level))
        self.name = f"native {LEVELS[self.level]}"
        self.forced = -1 if bound is None else bound
        # Candidates of all parts, one part behind the other. Grown when k or the number of threads grows.
        self.indices = torch.empty(0, dtype=torch.int32)
        self.values = torch.empty(0, dtype=torch.float32)
        self.report = np.zeros(3, dtype=np.int64)  # struct Report

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        check_k(k, acc.numel())
        if not acc.is_contiguous():
            return self._through_a_copy(acc, grad, lambda copy: self.topk(copy, None, k))
        n, threads, parts = self._shape(acc, grad)
        capacity = int(self.library.sparsify_capacity(n, k, threads))
        self._make_room(parts * (max(capacity, k) if self.forced >= 0 else capacity))
        indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k, dtype=torch.float32)
        grad, kind = added(grad)
        forced, fallbacks = self.forced, 0
        while True:
            needed = self.library.sparsify_topk(
                acc.data_ptr(), pointer(grad), kind, n, k, self.level, threads, self.indices.data_ptr(),
                self.values.data_ptr(), self.indices.numel() // parts, forced, indices.data_ptr(),
                values.data_ptr(), self.report.ctypes.data,
            )  # fmt: skip
            was_wrong, candidates, bound = self.report.tolist()
            fallbacks |= was_wrong
            if not needed:
                break
            grad, kind, forced = None, 0, bound  # it has been added by now
            self._make_room(parts * (needed + needed // 4))
        self.done += SearchStats(1, fallbacks, candidates, k if candidates else 0)
        return Sparse(indices, values)

    def above(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> Sparse:
        if not acc.is_contiguous():
            return self._through_a_copy(acc, grad, lambda copy: self.above(copy, None, threshold, strict))
        host_sync.count_sync()  # for how many there are
        n, threads, parts = self._shape(acc, grad)
        bound, counts = bound_key(float(threshold), strict), np.zeros(parts, dtype=np.int64)
        grad, kind = added(grad)
        self._make_room(parts)
        while True:
            capacity = self.indices.numel() // parts
            self.library.sparsify_above(
                acc.data_ptr(), pointer(grad), kind, n, bound, self.level, threads,
                self.indices.data_ptr(), self.values.data_ptr(), capacity, counts.ctypes.data,
            )  # fmt: skip
            if (most := int(counts.max())) <= capacity:
                break
            grad, kind = None, 0  # it has been added by now
            self._make_room(parts * (most + most // 4))
        starts = range(0, parts * capacity, capacity)
        pieces = [slice(at, at + int(count)) for at, count in zip(starts, counts, strict=True)]
        indices, values = (torch.cat([buffer[at] for at in pieces]) for buffer in (self.indices, self.values))
        return without_nan(Sparse(indices, values))

    def _shape(self, acc: Tensor, grad: Tensor | None) -> tuple[int, int, int]:
        """Elements, threads, and how many parts these work in. What the library would misread is refused."""
        fits = supports(acc) and acc.dtype == torch.float32 and acc.dim() == 1
        if grad is not None:
            fits &= supports(grad) and grad.shape == acc.shape
        if not fits:
            seen = [f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (acc, grad) if x is not None]
            raise ValueError(
                "this kernel takes acc in float32 and as many gradients in float32, bfloat16 or float16, on "
                f"the CPU; this is {' and '.join(seen)}"
            )
        n, threads = acc.numel(), torch.get_num_threads()
        return n, threads, int(self.library.sparsify_parts(n, threads))

    def _make_room(self, size: int) -> None:
        if self.indices.numel() < size:
            self.indices = torch.empty(size, dtype=torch.int32)
            self.values = torch.empty(size, dtype=torch.float32)

    def _through_a_copy(self, acc: Tensor, grad: Tensor | None, work: Callable[[Tensor], Sparse]) -> Sparse:
        """Search a view with gaps, which buckets never are."""
        if grad is not None:
            acc.add_(grad)
        return work(acc.contiguous())


def supports(like: Tensor) -> bool:
    """True where a bucket like this one can be searched."""
    return like.device.type == "cpu" and like.dtype in KINDS and like.numel() < 2**31


def added(grad: Tensor | None) -> tuple[Tensor | None, int]:
    """The gradient without gaps, and its kind."""
    return (None, 0) if grad is None else (grad.contiguous(), KINDS[grad.dtype])


def pointer(grad: Tensor | None) -> int | None:
    """Address of a tensor's first element; None: there is no tensor."""
    return None if grad is None else grad.data_ptr()


def bound_key(threshold: float, strict: bool) -> int:
    """The least key that a magnitude has which reaches the threshold (exceeds it, if strict)."""
    if np.isnan(threshold):
        return NOTHING
    if threshold < 0:
        return 0
    with np.errstate(over="ignore"):
        key = int(np.abs(np.float32(threshold)).view(np.uint32))
    return key + strict


def best_level() -> str:
    """The widest vector instructions of this processor that there is code for."""
    return LEVELS[library().sparsify_level()]


@cache
def library() -> ctypes.CDLL:
    """Raises Unavailable: see `Native`."""
    return native_library.ready()
