"""The C++ pass of native.cpp, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsify.core import host_sync
from sparsify.core.checks import check_k
from sparsify.kernels import native_library
from sparsify.kernels.joint import JointKernel
from sparsify.kernels.native_library import Unavailable as Unavailable
from sparsify.types import Kernel, SearchStats, Sparse, without_nan

LEVELS = ("scalar", "avx2", "avx512")
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # enum Kind
Numbers = npt.NDArray[Any]
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
        self.room = 0  # elements that `above` makes room for, in each part
        self.wanted = np.zeros(6, dtype=np.int64)  # struct Wanted
        self.report = np.zeros(3, dtype=np.int64)  # struct Report

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        check_k(k, acc.numel())
        if not acc.is_contiguous():
            return self._through_a_copy(acc, grad, lambda copy: self.topk(copy, None, k))
        n, threads, _ = self._shape(acc, grad)
        indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k, dtype=torch.float32)
        grad, kind = added(grad)
        self.wanted[:3] = n, k, 1
        piece = np.array([acc.data_ptr(), pointer(grad) or 0, 0, n], dtype=np.int64)
        self.library.sparsify_topk(
            self.wanted.ctypes.data, 1, piece.ctypes.data, kind, self.level, threads, self.forced,
            indices.data_ptr(), values.data_ptr(), self.report.ctypes.data,
        )  # fmt: skip
        self.done += SearchStats(1, *self.report.tolist())
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
        while True:
            found = torch.empty((parts, self.room), dtype=torch.int32), torch.empty((parts, self.room))
            self.library.sparsify_above(
                acc.data_ptr(), pointer(grad), kind, n, bound, self.level, threads,
                *(buffer.data_ptr() for buffer in found), self.room, counts.ctypes.data,
            )  # fmt: skip
            most, room = int(counts.max()), self.room
            self.room = max(most + most // 4, room - room // 8)  # of the next call, which finds about as many
            if most <= room:
                break
            grad, kind = None, 0  # it has been added by now
        indices, values = (
            torch.cat([piece[:count] for piece, count in zip(buffer, counts.tolist(), strict=True)])
            for buffer in found
        )
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

    def _through_a_copy(self, acc: Tensor, grad: Tensor | None, work: Callable[[Tensor], Sparse]) -> Sparse:
        """Search a view with gaps, which buckets never are."""
        if grad is not None:
            acc.add_(grad)
        return work(acc.contiguous())


class NativeJoint(JointKernel):
    """Buckets as one space, searched in one call, and written to in another; of float32, or bfloat16 or
    float16 whose sums are float32. Where memories or messages hold anything else, torch's operators write.
    """

    name = "native, buckets together"

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self.library = library()
        self.level = int(self.library.sparsify_level())
        self.name = f"native {LEVELS[self.level]}"
        self.wanted = np.zeros((len(self.sizes), 6), dtype=np.int64)  # struct Wanted of each
        self.wanted[:, 0], self.wanted[:, 3] = self.sizes, self.bases
        self.report = np.zeros(3, dtype=np.int64)  # struct Report
        self.done = SearchStats()

    def topk(
        self, accs: Sequence[Sequence[Tensor]], grads: Sequence[Sequence[Tensor]], ks: Sequence[int]
    ) -> Sparse:
        kept = [[piece.contiguous() for piece in own] for own in grads]
        kind = self._check(accs, kept, ks)
        first, *starts = accumulate(ks, initial=0)
        found = Sparse(torch.empty(starts[-1], dtype=torch.int32), torch.empty(starts[-1]))
        pieces = [list(pieces_of(*pair)) for pair in zip(accs, kept, strict=True)]
        table = np.array([piece for own in pieces for piece in own], dtype=np.int64)
        self.wanted[:, 1], self.wanted[:, 4] = ks, [first, *starts[:-1]]
        self.wanted[:, 2] = [*map(len, pieces)]
        self.library.sparsify_topk(
            self.wanted.ctypes.data, len(self.sizes), table.ctypes.data, kind, self.level,
            torch.get_num_threads(), -1, found.indices.data_ptr(), found.values.data_ptr(),
            self.report.ctypes.data,
        )  # fmt: skip
        self.done += SearchStats(len(self.sizes), *self.report.tolist())
        return found

    def add(
        self, into: Sequence[Tensor], parts: Sequence[Sparse], alpha: float = 1, clears: bool = False
    ) -> None:
        if not all(map(is_plain, into)) or not all(map(is_message, parts)):
            return super().add(into, parts, alpha, clears)
        memories = self._memories(into)
        table = np.array([(*map(Tensor.data_ptr, part), len(part.indices)) for part in parts], dtype=np.int64)
        self.library.sparsify_add(
            memories.ctypes.data, len(memories), table.ctypes.data, len(parts), alpha, clears
        )

    def clear_at(self, into: Sequence[Tensor], part: Sparse) -> None:
        if not all(map(is_plain, into)) or not is_message(part):
            return super().clear_at(into, part)
        memories = self._memories(into)
        table = np.array([*map(Tensor.data_ptr, part), len(part.indices)], dtype=np.int64)
        self.library.sparsify_clear_at(memories.ctypes.data, len(memories), table.ctypes.data)

    def stats(self) -> SearchStats:
        return self.done

    def _memories(self, into: Sequence[Tensor]) -> Numbers:
        """struct Memory of each."""
        ends = [*accumulate(map(Tensor.numel, into))]
        assert ends[-1] == self.num_elements
        table = np.empty((len(ends), 3), dtype=np.int64)
        table[:, 0], table[:, 2] = [memory.data_ptr() for memory in into], ends
        table[0, 1], table[1:, 1] = 0, ends[:-1]
        return table

    def _check(
        self, accs: Sequence[Sequence[Tensor]], grads: Sequence[Sequence[Tensor]], ks: Sequence[int]
    ) -> int:
        """Refuse what the library would misread. Returns the gradients' kind."""
        pieces, memories = [[piece for own in all_of for piece in own] for all_of in (grads, accs)]
        kinds = {piece.dtype for piece in pieces}
        fits = len(kinds) < 2 and all(map(supports, pieces)) and all(map(is_plain, memories))
        for parts, own, n in zip(accs, grads, self.sizes, strict=True):
            fits &= sum(map(Tensor.numel, parts)) == n and (not own or sum(map(Tensor.numel, own)) == n)
        if not fits:
            seen = [f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (*memories, *pieces)]
            raise ValueError(
                f"this kernel was made for buckets of {self.sizes} elements, acc in float32 and without "
                f"gaps, on the CPU; these are {', '.join(seen)}"
            )
        for n, k in zip(self.sizes, ks, strict=True):
            check_k(k, n)
        return KINDS[kinds.pop()] if kinds else 0


def pieces_of(accs: Sequence[Tensor], grads: Sequence[Tensor]) -> Iterator[tuple[int, int, int, int]]:
    """struct Piece of each stretch of a bucket that ends where one of these tensors ends."""
    if len(accs) > 1 and [*map(Tensor.numel, accs)] != [*map(Tensor.numel, grads or accs)]:
        raise ValueError(
            "a bucket's residual in several tensors needs its gradient in tensors of the same sizes"
        )
    start = 0
    for at, piece in enumerate(grads or accs):
        acc = accs[at].data_ptr() if len(accs) > 1 else accs[0].data_ptr() + start * accs[0].itemsize
        end = start + piece.numel()
        yield acc, piece.data_ptr() if grads else 0, start, end
        start = end


def norms(tensors: Sequence[Tensor]) -> Tensor | None:
    """(number of tensors,) float32: the Euclidean norm of each (m,), read once; None where it can't be had
    here. It may overflow though all elements are finite.
    """
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) != 1 or not all(supports(tensor) and tensor.is_contiguous() for tensor in tensors):
        return None
    table = np.array([(tensor.data_ptr(), tensor.numel()) for tensor in tensors], dtype=np.int64)
    found, ours = torch.empty(len(tensors)), library()
    ours.sparsify_norms(
        table.ctypes.data, len(tensors), KINDS[kinds.pop()], ours.sparsify_level(), torch.get_num_threads(),
        found.data_ptr(),
    )  # fmt: skip
    return found


def is_plain(tensor: Tensor) -> bool:
    """True for float32 on the CPU, without gaps."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


def is_message(part: Sparse) -> bool:
    """True if the library can read it."""
    indices, values = part
    return indices.dtype == torch.int32 and indices.is_contiguous() and is_plain(values)


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
