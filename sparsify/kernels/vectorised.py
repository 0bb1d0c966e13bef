"""The fused pass in numpy, for CPUs where nothing can be compiled, and for float64.

As native.cpp does it (guess a bound, add and compare once, refine what reached it, verify by counting), in
chunks that stay in the processor's cache: so memory sees 12 bytes per element.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsify.core import host_sync
from sparsify.core.checks import check_k
from sparsify.types import Kernel, SearchStats, Sparse, index_dtype, without_nan, work_dtype

CHUNK = 2**16  # elements: 256 KB of float32, of which three have room in today's level-2 caches
UNSAMPLED, SAMPLE, RUN = 2**14, 2**16, 8  # as in native.cpp
INTEGERS = {torch.float32: np.int32, torch.float64: np.int64}  # of the same width


Array = npt.NDArray[Any]
Candidates = tuple[Array, Array]  # indices, values


class Vectorised(Kernel):
    """Add, mask the sign away, compare, flatnonzero, chunk by chunk; then argpartition of the candidates.
    `like` (n,) may be bfloat16 or float16, whose sums are float32; `bound`, for tests, stands in for the
    sampled one. Indices ascend.
    """

    name = "numpy"

    def __init__(self, like: Tensor, bound: int | None = None) -> None:
        super().__init__()
        self.forced = bound
        chunk = min(CHUNK, like.numel())
        self.integer = INTEGERS[work_dtype(like.dtype)]
        self.magnitude = self.integer(np.iinfo(self.integer).max)  # all bits but the sign
        self.nothing = int(self.magnitude) + 1  # a bound that nothing reaches
        self.keys = np.empty(chunk, self.integer)
        self.mask = np.empty(chunk, np.bool_)

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        n = acc.numel()
        check_k(k, n)
        bound = self._bound(acc, grad, k) if self.forced is None else self.forced
        # Without a bound the sum itself is looked through: nothing is collected on the way.
        room = 0 if bound is None else 4 * k + SAMPLE
        found = self._reaching(acc, grad, self.nothing if bound is None else bound, room)
        guessed, right = bound is not None and k > 0, found is not None and len(found[0]) >= k
        if found is None or not right or not guessed:
            found = np.arange(n), acc.numpy()
        elif guessed:
            self.done += SearchStats(0, 0, len(found[0]), k)
        self.done += SearchStats(1, int(guessed and not right))
        places, values = found
        return self._part(n, *self._largest(places, values, k))

    def above(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> Sparse:
        host_sync.count_sync()  # for how many there are
        found = self._reaching(acc, grad, self._least_key(threshold, acc.dtype, strict), acc.numel())
        assert found is not None
        return without_nan(self._part(acc.numel(), *found))

    def _bound(self, acc: Tensor, grad: Tensor | None, k: int) -> int | None:
        """A key that somewhat more than k elements reach, probably; None: look at all of them."""
        n = acc.numel()
        if n < UNSAMPLED or not k:
            return None
        runs = min(SAMPLE, n // 16) // RUN
        expected = k / n * runs * RUN
        rank = int(expected + 6 * math.sqrt(expected) + 8)
        if rank > runs * RUN // 2:
            return None
        stride = n // runs
        mixed = np.arange(1, runs + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        starts = np.arange(runs) * stride + ((mixed >> np.uint64(33)) % np.uint64(stride - RUN + 1)).astype(
            np.int64
        )
        places = (starts[:, None] + np.arange(RUN)).ravel()
        sample = acc.numpy()[places]
        if grad is not None:
            sample = sample + grad[torch.from_numpy(places)].to(acc.dtype).numpy()
        keys = sample.view(self.integer) & self.magnitude
        return int(np.partition(keys, len(keys) - rank)[len(keys) - rank])

    def _reaching(self, acc: Tensor, grad: Tensor | None, bound: int, room: int) -> Candidates | None:
        """acc += grad; what has a key of at least `bound`, ascending; None where it is more than `room`."""
        values, places, found, total = acc.numpy(), list[Array](), list[Array](), 0
        same = grad.numpy() if grad is not None and grad.dtype == acc.dtype else None
        for start in range(0, len(values), CHUNK):
            part = values[start : start + CHUNK]
            if same is not None:
                np.add(part, same[start : start + CHUNK], out=part)
            elif grad is not None:
                acc[start : start + CHUNK].add_(grad[start : start + CHUNK])
            if total <= room and bound != self.nothing:
                keys, mask = self.keys[: len(part)], self.mask[: len(part)]
                np.bitwise_and(part.view(self.integer), self.magnitude, out=keys)
                here = np.flatnonzero(np.greater_equal(keys, bound, out=mask))
                places.append(here + start)
                found.append(part[here])  # while it is in the cache
                total += len(here)
        if total > room:
            return None
        return np.concatenate([np.empty(0, np.int64), *places]), np.concatenate([values[:0], *found])

    def _largest(self, places: Array, values: Array, k: int) -> Candidates:
        """The k of largest magnitude, of elements in the order of their indices; of equal ones the first."""
        keys = values.view(self.integer) & self.magnitude
        border = np.partition(keys, len(keys) - k)[len(keys) - k] if k else self.nothing
        chosen = keys > border
        ties = np.flatnonzero(keys == border)
        chosen[ties[: k - np.count_nonzero(chosen)]] = True
        return places[chosen], values[chosen]

    def _least_key(self, threshold: Tensor | float, dtype: torch.dtype, strict: bool) -> int:
        """The least key that a magnitude has which reaches the threshold (exceeds it, if strict)."""
        value = torch.as_tensor(threshold, dtype=dtype, device="cpu")
        if value.isnan():
            return self.nothing
        if value < 0:
            return 0
        return int(value.abs().numpy().view(self.integer)) + strict

    def _part(self, n: int, places: Array, values: Array) -> Sparse:
        # Not from_numpy alone, which gives empty tensors a stride of 0.
        indices = torch.empty(len(places), dtype=index_dtype(n), device="cpu")
        kept = torch.empty(len(values), dtype=torch.from_numpy(values).dtype, device="cpu")
        return Sparse(indices.copy_(torch.from_numpy(places)), kept.copy_(torch.from_numpy(values)))


def supports(like: Tensor) -> bool:
    """True where a bucket like this one can be searched."""
    return like.device.type == "cpu" and work_dtype(like.dtype) in INTEGERS
