"""One pass over a GPU's memory, in Triton; exact, whatever the data.

A sample guesses a bound that somewhat more than k elements reach. One pass adds the gradient and marks what
reaches the bound, a bit for each element. The k largest are then found among the marked. That the bound was
right is verified by counting, on the device: if it was not, or too many elements tie, the last four kernels
find the same k from acc itself, at 16 bytes per element more. All are always launched, and return at once if
there is nothing to do, so the host never waits. acc is only added to: no failure can lose any of it.

Guess, verify, refine: NVIDIA's GVR top-k for decoders (arXiv:2604.22312; with a sample as here: TensorRT-LLM,
blog 29), with the accumulation inside, and for hundreds of millions of elements.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from sparsify import host_sync
from sparsify.checks import check_k
from sparsify.kernels import triton_kernels as on_device
from sparsify.kernels.search_stats import SearchStats
from sparsify.types import Sparse, work_dtype

TILE = 4096  # elements that a program adds
SAMPLE = 2**15  # elements that the bound is guessed from: 32 registers of each of 1024 threads
TIES = 4096  # elements that may share the k-th's narrow bin; ranking them takes the square of their number
CHUNK = 64  # of these, how many a program ranks
WORDS = 512  # of marks, of 32 elements each, that a program gathers
PROGRAMS = 132  # of kernels that loop: one for each multiprocessor of an H200
LONGEST = 2**31 - 2**22  # elements whose offsets, and one tile more, are int32
CAPABILITY = (8, 0)  # the least that Triton names as supported
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
# Under TRITON_INTERPRET=1, Triton runs kernels in Python on the CPU.
INTERPRETED = not isinstance(on_device.stream, triton.runtime.JITFunction)


def supports(like: Tensor) -> bool:
    """Can `Gpu` serve buckets like this one? NVIDIA, sums in float32, fewer than about 2^31 elements."""
    if work_dtype(like.dtype) != torch.float32 or like.numel() > LONGEST:
        return False
    if not like.is_cuda:
        return INTERPRETED and like.device.type == "cpu"
    return torch.version.hip is None and torch.cuda.get_device_capability(like.device) >= CAPABILITY


class Gpu:
    """`topk` is eight launches: 12.25 bytes of memory traffic per element, 10.25 where gradients have 16
    bits, and about 60 per candidate; candidates are 1.4 k at a density of 1 %, 2.3 k at 0.1 %. `above` is
    five launches and as many bytes.

    Buffers: a bit per element; 8 bytes for each of 1.8 k candidates (1 %) or 4.2 k (0.1 %), and for 2^14
    more; 0.6 MB. Together below 0.08 n float32 at densities up to 1 %, for large n. They grow when k grows.

    Args:
        like: (n,) float32, or bfloat16 or float16 whose sums are float32.
        tile, sample, ties: see TILE, SAMPLE, TIES; smaller in tests.
        bound, capacity: for tests: the key to take for the bound, and the room for what reaches it.

    Raises:
        ValueError: not for such buckets; see `supports`.
    """

    name = "triton"

    def __init__(
        self,
        like: Tensor,
        tile: int = TILE,
        sample: int = SAMPLE,
        ties: int = TIES,
        bound: int | None = None,
        capacity: int | None = None,
    ) -> None:
        if not supports(like):
            raise ValueError(
                f"no Triton kernel for {like.numel()} x {like.dtype} on {like.device}: it takes float32, "
                "bfloat16 or float16 on an NVIDIA GPU of compute capability 8.0 or above; take select=torch"
            )
        self.n, self.tile, self.sample, self.ties = like.numel(), tile, sample, ties
        self.forced, self.capacity = -1 if bound is None else bound, capacity
        self.programs = max(1, min(PROGRAMS, triton.cdiv(self.n, 4 * tile)))
        new = like.new_empty
        self.work = new(on_device.WORK.value, dtype=torch.int32)
        self.rows = new((self.programs, on_device.FEW.value), dtype=torch.int32)
        self.edge = Sparse(new(ties, dtype=torch.int32), new(ties, dtype=torch.float32))
        self.candidates = Sparse(new(0, dtype=torch.int32), new(0, dtype=torch.float32))
        self.totals = torch.zeros(4, dtype=torch.int64, device=like.device)
        self.threshold = new(1, dtype=torch.float32)
        self.marks = new(triton.cdiv(self.n, tile) * tile // on_device.WORD.value, dtype=torch.int32)

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> Sparse:
        """See `Kernel.topk`; in no order. Can be captured in a CUDA graph after a first call with this k."""
        n = self._check(acc, grad)
        check_k(k, n)
        out = Sparse(acc.new_empty(k, dtype=torch.int32), acc.new_empty(k))
        if k == 0:
            if grad is not None:
                acc.add_(grad)
            self.totals[on_device.STEPS.value] += 1
            return out
        rank = surely(k / n * self.sample)
        sampled = self.sample < n and rank <= self.sample
        capacity = room(n, rank, self.sample) if sampled else n
        if self.capacity is not None:
            capacity = self.capacity
        self._make_room(capacity)
        found, edge, work = self.candidates, self.edge, self.work
        source, strides = (
            acc if grad is None else grad,
            (acc.stride(0), (acc if grad is None else grad).stride(0)),
        )
        add, tile, programs = grad is not None, self.tile, (self.programs,)
        tiles, words = self._grids(n)
        with torch.cuda.device_of(acc):
            # Where there is room for all elements, zeros are candidates as well.
            least = 0 if capacity == n else 1
            on_device.guess[(1,)](
                acc, source, work, self.totals, n, *strides, rank, least, self.forced,
                SAMPLED=sampled, ADD=add, SAMPLE=self.sample, num_warps=32,
            )  # fmt: skip
            on_device.stream[tiles](
                acc, source, work, self.marks, n, *strides, ADD=add, TILE=tile, num_warps=8
            )
            on_device.gather[words](
                acc, work, self.marks, *found, n, strides[0], capacity, WORDS=WORDS, num_warps=4
            )
            on_device.refine[programs](work, found.values, k, capacity, TILE=tile, num_warps=16)
            on_device.split[programs](
                acc, work, *found, *edge, *out, n, strides[0], k, capacity, self.ties, TILE=tile, num_warps=16
            )
            on_device.settle[programs](
                acc, work, *edge, *out, n, strides[0], k, TILE=tile, CHUNK=CHUNK, num_warps=16
            )
            on_device.count_last[programs](acc, work, self.rows, n, strides[0], k, TILE=tile, num_warps=16)
            on_device.emit[programs](
                acc, work, self.rows, self.totals, *out, n, strides[0], k,
                SAMPLED=sampled, TILE=tile, PROGRAMS=triton.next_power_of_2(PROGRAMS), num_warps=16,
            )  # fmt: skip
        return out

    def above(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> Sparse:
        """See `Kernel.above`. Comparisons are those of float32: NaN is above nothing, and nothing is above
        NaN.
        """
        n = self._check(acc, grad)
        if n == 0:
            return Sparse(acc.new_empty(0, dtype=torch.int32), acc.new_empty(0))
        if isinstance(threshold, Tensor) and threshold.device == acc.device:
            self.threshold.copy_(threshold)
        else:
            self.threshold.fill_(torch.tensor(float(threshold), dtype=torch.float32).item())
        source, strides = (
            acc if grad is None else grad,
            (acc.stride(0), (acc if grad is None else grad).stride(0)),
        )
        tiles, words = self._grids(n)
        counted = self.work.new_empty(words)
        with torch.cuda.device_of(acc):
            on_device.stream_above[tiles](
                acc, source, self.threshold, self.marks, n, *strides,
                ADD=grad is not None, STRICT=strict, TILE=self.tile, num_warps=8,
            )  # fmt: skip
            on_device.count_marks[words](self.marks, counted, n, WORDS=WORDS, num_warps=4)
            ends = counted.cumsum(0)
            count = host_sync.to_host(ends[-1])
            out = Sparse(acc.new_empty(count, dtype=torch.int32), acc.new_empty(count))
            if count:
                on_device.gather_in_order[words](
                    acc, self.marks, ends, *out, n, strides[0], WORDS=WORDS, num_warps=4
                )
        return out

    def stats(self) -> SearchStats:
        """See `Kernel.stats`."""
        return SearchStats(*host_sync.to_host(self.totals))

    def _grids(self, n: int) -> tuple[tuple[int], tuple[int]]:
        """Of tiles of elements, and of words of marks."""
        return (triton.cdiv(n, self.tile),), (triton.cdiv(n, on_device.WORD.value * WORDS),)

    def _check(self, acc: Tensor, grad: Tensor | None) -> int:
        wrong = (
            acc.dim() != 1
            or acc.numel() > self.n
            or acc.dtype != torch.float32
            or acc.device != self.work.device
        )
        if grad is not None:
            wrong |= grad.shape != acc.shape or grad.dtype not in GRADIENTS or grad.device != acc.device
        if wrong:
            seen = [f"{tuple(x.shape)} {x.dtype} on {x.device}" for x in (acc, grad) if x is not None]
            raise ValueError(
                f"this kernel was made for up to {self.n} elements on {self.work.device}, acc in float32, "
                f"gradients in float32, bfloat16 or float16; this is {', '.join(seen)}"
            )
        return acc.numel()

    def _make_room(self, capacity: int) -> None:
        if self.candidates.indices.numel() < capacity:
            self.candidates = Sparse(
                self.work.new_empty(capacity), self.work.new_empty(capacity, dtype=torch.float32)
            )


def surely(expected: float) -> int:
    """A number that a sample's count almost surely does not exceed, given the expected count.

    It would be give or take sqrt(expected), if the sample's elements were independent. They are runs of
    neighbours, which are alike: twice the variance is allowed for, at four standard deviations.
    """
    return math.ceil(expected + 6 * math.sqrt(expected) + 8)


def room(n: int, rank: int, sample: int) -> int:
    """For candidates: elements that reach what `rank` of a sample reach."""
    return min(n, surely(rank) * n // sample + 2**14)
