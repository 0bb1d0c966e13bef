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
from sparsify.kernels.launches import Launch, Launcher, Launches
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
        words = triton.cdiv(self.n, on_device.WORD.value * WORDS)
        self.counted, self.ends = new(words, dtype=torch.int32), new(words, dtype=torch.int64)
        self.launch = Launcher()
        self.launch.hold(
            work=self.work, rows=self.rows, totals=self.totals, threshold=self.threshold, marks=self.marks,
            counted=self.counted, ends=self.ends,
            edge_indices=self.edge.indices, edge_values=self.edge.values,
        )  # fmt: skip

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
        with torch.cuda.device_of(acc):
            self.launch(
                self._search,
                (grad is not None, sampled),
                {**added(acc, grad), "out_indices": out.indices, "out_values": out.values},
                {
                    **self._sizes(n),
                    "k": k,
                    "rank": rank,
                    # Where there is room for all elements, zeros are candidates as well.
                    "least": 0 if capacity == n else 1,
                    "forced": self.forced,
                    "capacity": capacity,
                    "room": self.ties,
                },
            )
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
        tensors, sizes = added(acc, grad), self._sizes(n)
        with torch.cuda.device_of(acc):
            choices = (grad is not None, strict)
            self.launch(self._mark_and_count, choices, tensors, sizes)
            words = sizes["words"]
            ends = torch.cumsum(self.counted[:words], 0, out=self.ends[:words])
            count = host_sync.to_host(ends[-1])
            out = Sparse(acc.new_empty(count, dtype=torch.int32), acc.new_empty(count))
            if count:
                tensors |= {"out_indices": out.indices, "out_values": out.values}
                self.launch(self._gather_in_order, (), tensors, sizes)
        return out

    def stats(self) -> SearchStats:
        """See `Kernel.stats`."""
        return SearchStats(*host_sync.to_host(self.totals))

    def _search(self, add: bool, sampled: bool) -> Launches:
        tile = {"TILE": self.tile}
        return (
            Launch(on_device.guess, "one", 32, {"SAMPLED": sampled, "ADD": add, "SAMPLE": self.sample}),
            Launch(on_device.stream, "tiles", 8, {"ADD": add, **tile}),
            Launch(on_device.gather, "words", 4, {"WORDS": WORDS}),
            Launch(on_device.refine, "programs", 16, tile),
            Launch(on_device.split, "programs", 16, tile),
            Launch(on_device.settle, "programs", 16, {**tile, "CHUNK": CHUNK}),
            Launch(on_device.count_last, "programs", 16, tile),
            Launch(
                on_device.emit, "programs", 16,
                {"SAMPLED": sampled, **tile, "PROGRAMS": triton.next_power_of_2(PROGRAMS)},
            ),
        )  # fmt: skip

    def _mark_and_count(self, add: bool, strict: bool) -> Launches:
        return (
            Launch(on_device.stream_above, "tiles", 8, {"ADD": add, "STRICT": strict, "TILE": self.tile}),
            Launch(on_device.count_marks, "words", 4, {"WORDS": WORDS}),
        )

    def _gather_in_order(self) -> Launches:
        return (Launch(on_device.gather_in_order, "words", 4, {"WORDS": WORDS}),)

    def _sizes(self, n: int) -> dict[str, int]:
        return {
            "n": n,
            "one": 1,
            "tiles": triton.cdiv(n, self.tile),
            "words": triton.cdiv(n, on_device.WORD.value * WORDS),
            "programs": self.programs,
        }

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
            self.launch.hold(indices=self.candidates.indices, values=self.candidates.values)


def added(acc: Tensor, grad: Tensor | None) -> dict[str, Tensor]:
    """A kernel that adds nothing is given acc in the gradient's place."""
    return {"acc": acc, "grad": acc if grad is None else grad}


def surely(expected: float) -> int:
    """A number that a sample's count almost surely does not exceed, given the expected count.

    It would be give or take sqrt(expected), if the sample's elements were independent. They are runs of
    neighbours, which are alike: twice the variance is allowed for, at four standard deviations.
    """
    return math.ceil(expected + 6 * math.sqrt(expected) + 8)


def room(n: int, rank: int, sample: int) -> int:
    """For candidates: elements that reach what `rank` of a sample reach."""
    return min(n, surely(rank) * n // sample + 2**14)
