"""The C++ pass of native.cpp, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from operator import is_
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
        self.wanted = np.zeros(5, dtype=np.int64)  # struct Wanted
        self.report = np.zeros(3, dtype=np.int64)  # struct Report

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        check_k(k, acc.numel())
        if not acc.is_contiguous():
            return self._through_a_copy(acc, grad, lambda copy: self.topk(copy, None, k))
        n, threads, _ = self._shape(acc, grad)
        indices, values = empty_message(k)
        grad, kind = added(grad)
        self.wanted[:2] = n, k
        owed, gradient = (np.array([at or 0, n]) for at in (acc.data_ptr(), pointer(grad)))
        self.library.sparsify_topk(
            self.wanted.ctypes.data, 1, owed.ctypes.data, 1, gradient.ctypes.data, grad is not None, kind,
            self.level, threads, self.forced, indices.data_ptr(), values.data_ptr(), self.report.ctypes.data,
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
            found = empty_message(parts, self.room)
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

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes)
        self.library = library()
        self.level = int(self.library.sparsify_level())
        self.name = f"native {LEVELS[self.level]}"
        self.wanted = np.zeros((len(self.sizes), 5), dtype=np.int64)  # struct Wanted of each
        self.wanted[:, 0], self.wanted[:, 2] = self.sizes, self.bases
        self.report = np.zeros(3, dtype=np.int64)  # struct Report
        self.done, self.ks = SearchStats(), list[int]()
        self.kept, self.kept_table = list[Tensor](), table_of([])

    def topk(self, accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> Sparse:
        if ks != self.ks:
            for n, k in zip(self.sizes, ks, strict=True):
                check_k(k, n)
            *starts, _ = accumulate(ks, initial=0)
            self.wanted[:, 1], self.wanted[:, 3], self.ks = ks, starts, [*ks]
        kinds = {grad.dtype for grad in grads}
        fits = len(kinds) < 2 and kinds <= {*KINDS} and are_plain(grads, *kinds)
        owed, gradient, total = self._table(accs, keeps=True), table_of(grads), sum(ks)
        found = empty_message(total)
        fits = fits and owed is not None and not self.library.sparsify_topk(
            self.wanted.ctypes.data, len(self.sizes), owed.ctypes.data, len(accs), gradient.ctypes.data,
            len(grads), KINDS[kinds.pop()] if kinds else 0, self.level,
            torch.get_num_threads(), -1, found.indices.data_ptr(), found.values.data_ptr(),
            self.report.ctypes.data,
        )  # fmt: skip
        if not fits:
            seen = [f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (*accs, *grads)]
            raise ValueError(
                f"this kernel was made for buckets of {self.sizes} elements, acc in float32 and without "
                f"gaps, on the CPU; these are {', '.join(seen)}"
            )
        self.done += SearchStats(len(self.sizes), *self.report.tolist())
        return found

    def add(
        self, into: Sequence[Tensor], parts: Sequence[Sparse], alpha: float = 1, clears: bool = False
    ) -> None:
        memories = self._memories(into)
        if memories is None or not are_messages(parts):
            return super().add(into, parts, alpha, clears)
        table = self._parts(parts)
        self.library.sparsify_add(
            memories.ctypes.data, len(memories), table.ctypes.data, len(parts), alpha, clears
        )

    def clear_at(self, into: Sequence[Tensor], part: Sparse) -> None:
        memories = self._memories(into)
        if memories is None or not are_messages([part]):
            return super().clear_at(into, part)
        table = self._parts([part])
        self.library.sparsify_clear_at(memories.ctypes.data, len(memories), table.ctypes.data)

    def move(
        self,
        anchors: Sequence[Tensor],
        owns: Sequence[Tensor],
        parts: Sequence[Sparse],
        alpha: float,
        rate: float,
    ) -> None:
        memories, copies = self._memories(anchors), self._memories(owns)
        parts = [Sparse(indices.int(), values) for indices, values in parts]
        if memories is None or copies is None or not are_messages(parts):
            return super().move(anchors, owns, parts, alpha, rate)
        table = self._parts(parts)
        self.library.sparsify_move(
            memories.ctypes.data, copies.ctypes.data, len(memories), table.ctypes.data, len(parts), alpha,
            rate,
        )  # fmt: skip

    def stats(self) -> SearchStats:
        return self.done

    def _memories(self, into: Sequence[Tensor]) -> Numbers | None:
        """struct Memory of each; None where the library can't write to them."""
        if (numbers := self._table(into)) is None:
            return None
        ends = numbers[:, 1].cumsum()
        assert ends[-1] == self.num_elements
        return np.stack([numbers[:, 0], ends - numbers[:, 1], ends], axis=1)

    @staticmethod
    def _parts(parts: Sequence[Sparse]) -> Numbers:
        """struct Part of each."""
        return np.array([(*map(Tensor.data_ptr, part), len(part.indices)) for part in parts], dtype=np.int64)

    def _table(self, tensors: Sequence[Tensor], keeps: bool = False) -> Numbers | None:
        """struct Numbers of each; None of what is no float32 without gaps. `keeps` it for when these come
        again: residuals stay where they are.
        """
        if len(tensors) == len(self.kept) and all(map(is_, tensors, self.kept)):
            return self.kept_table
        if not are_plain(tensors):
            return None
        table = table_of(tensors)
        if keeps:
            self.kept, self.kept_table = [*tensors], table
        return table


def norms(tensors: Sequence[Tensor], sizes: Sequence[int]) -> Tensor | None:
    """(number of sizes,) float32: Euclidean norms of stretches of tensors (m,) that follow each other, read
    once; None where it can't be had here. A norm may overflow though all elements are finite.
    """
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) != 1 or not kinds <= {*KINDS} or not are_plain(tensors, *kinds):
        return None
    table, stretches = table_of(tensors), np.array(sizes, dtype=np.int64)
    assert table[:, 1].sum() == stretches.sum()
    found = torch.empty(len(sizes), dtype=torch.float32, device="cpu")
    ours = library()
    ours.sparsify_norms(
        table.ctypes.data, stretches.ctypes.data, len(sizes), KINDS[kinds.pop()], ours.sparsify_level(),
        torch.get_num_threads(), found.data_ptr(),
    )  # fmt: skip
    return found


def are_plain(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> bool:
    """True if all are on the CPU, of this type, and without gaps."""
    of_type = {tensor.dtype for tensor in tensors} <= {dtype}
    return of_type and all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)


def are_messages(parts: Sequence[Sparse]) -> bool:
    """True if the library can read these."""
    indices, values = zip(*parts, strict=True) if parts else ((), ())
    return are_plain(indices, torch.int32) and are_plain(values)


def empty_message(*shape: int) -> Sparse:
    """Return memory for so many indices and values, in the types that the library writes."""
    indices = torch.empty(shape, dtype=torch.int32, device="cpu")
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    return Sparse(indices, values)


def table_of(tensors: Sequence[Tensor]) -> Numbers:
    """struct Numbers of each."""
    table = np.empty((len(tensors), 2), dtype=np.int64)
    table[:, 0] = [tensor.data_ptr() for tensor in tensors]
    table[:, 1] = [tensor.numel() for tensor in tensors]
    return table


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
