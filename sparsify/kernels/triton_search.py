"""One pass over a GPU's memory, in Triton; exact, whatever the data.

A sample guesses a bound that somewhat more than k elements reach. One pass adds the gradient and marks what
reaches the bound. The marked, in order, are the candidates, among which the k largest are found by counting
keys in three rounds, however many are equal. That the bound was right is verified by counting as well, on the
device: if it was not, the same kernels find the same k among all elements, at 16 bytes per element more. The
host never waits. acc is only added to: no failure can lose any of it.

Guess, verify, refine: NVIDIA's GVR top-k for decoders (arXiv:2604.22312; with a sample as here: TensorRT-LLM,
blog 29), with the accumulation inside, and for hundreds of millions of elements.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from sparsify.core import host_sync
from sparsify.core.checks import check_k
from sparsify.kernels import triton_device_functions
from sparsify.kernels import triton_search_device as device_code
from sparsify.kernels.triton_launcher import ALIGNMENT, KernelLauncher, LaunchPlan, LaunchSpec
from sparsify.types import SearchStats, SelectionKernel, SparseVector, accumulation_dtype

TILE = 2048  # elements that a program takes at a time: 8 for each of 256 threads
SAMPLE = 2**14  # elements that the bound is guessed from: 16 registers of each of 1024 threads
WORDS = 1024  # of marks that a program takes at a time: four for each of 256 threads
CHUNK = 1024  # candidates that a program takes at a time, likewise
PROGRAMS = 4 * 132  # of kernels that loop: four for each multiprocessor of an H200, so that loads overlap
WIDE = 4  # elements that a thread loads and stores at once: 16 bytes
LONGEST = 2**31 - 2**22  # elements whose offsets, and one tile more, are int32
CAPABILITY = (8, 0)  # the least that Triton names as supported
UNREACHABLE_KEY = 0x7F800000  # a bound that finite elements do not reach: the key of Inf
GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
# Under TRITON_INTERPRET=1, Triton runs kernels in Python on the CPU.
INTERPRETED = not isinstance(device_code.stream, triton.runtime.JITFunction)


def unsupported_reason(like: Tensor) -> str | None:
    """Reason why `TritonKernel` can't serve buckets like this one; None where it can."""
    if accumulation_dtype(like.dtype) != torch.float32:
        return f"Triton's kernels take float32, bfloat16 or float16, and this is {like.dtype}"
    if like.numel() > LONGEST:
        return (
            f"Triton's kernels take at most {LONGEST:,} elements, whose offsets have 32 bits, and these are "
            f"{like.numel():,}: take a smaller scope"
        )
    if INTERPRETED and like.device.type == "cpu":
        return None
    if not like.is_cuda or torch.version.hip is not None:
        return f"Triton's kernels are written for NVIDIA GPUs, and this is {like.device}"
    if (found := torch.cuda.get_device_capability(like.device)) < CAPABILITY:
        least, this = (f"{major}.{minor}" for major, minor in (CAPABILITY, found))
        return f"Triton's kernels need compute capability {least}, and {like.device} has {this}"
    return None


class TritonKernel(SelectionKernel):
    """`topk` is six launches: 12.25 bytes of memory traffic per element, 10.25 where gradients have 16 bits,
    and 60 per candidate, of which there are 1.5 k at a density of 1 %, 3.0 k at 0.1 %. `above_threshold` is four
    launches, two of them torch's, and 12.25 bytes. Buffers take less than 0.1 n float32 at densities up to
    1 %, for large n, and grow with k.

    Args:
        like: (n,) float32, or bfloat16 or float16 whose sums are float32; others are a ValueError, see
            `unsupported_reason`.
        tile, sample: see TILE, SAMPLE; smaller in tests.
        bound, capacity: for trials: the key to take for the bound, and the room for what reaches it.
    """

    name = "triton"

    def __init__(
        self,
        like: Tensor,
        tile: int = TILE,
        sample: int = SAMPLE,
        bound: int | None = None,
        capacity: int | None = None,
    ) -> None:
        if trouble := unsupported_reason(like):
            raise ValueError(f"{trouble}; or take select=torch")
        super().__init__()
        self.n, self.tile, self.sample = like.numel(), tile, sample
        self.forced_bound, self.capacity = -1 if bound is None else bound, capacity
        self.programs = max(1, min(PROGRAMS, triton.cdiv(self.n, 4 * tile)))
        new = like.new_empty
        self.work = new(triton_device_functions.WORK.value, dtype=torch.int32)
        self.rows = new((self.programs, triton_device_functions.FEW.value), dtype=torch.int32)
        self.candidates = SparseVector(new(0, dtype=torch.int32), new(0, dtype=torch.float32))
        self.totals = torch.zeros(4, dtype=torch.int64, device=like.device)
        self.threshold = new(1, dtype=torch.float32)
        self.launch = KernelLauncher()
        self.launch.set_buffers(
            work=self.work, rows=self.rows, totals=self.totals, threshold=self.threshold,
            marks=new(triton.cdiv(self.n, tile) * tile // triton_device_functions.WORD.value, dtype=torch.int32),
            indices=self.candidates.indices, values=self.candidates.values,
        )  # fmt: skip

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> SparseVector:
        """The k largest, in no order. After a first call with this k a CUDA graph can capture it."""
        n = self._check(acc, grad)
        check_k(k, n)
        out = SparseVector(acc.new_empty(k, dtype=torch.int32), acc.new_empty(k))
        if k == 0:
            if grad is not None:
                acc.add_(grad)
            self.totals[triton_device_functions.STEPS.value] += 1
            return out
        rank = upper_count_bound(k / n * self.sample)
        sampled = self.sample < n and rank <= self.sample
        guessed = sampled or self.forced_bound >= 0
        capacity = candidate_capacity(n, rank, self.sample) if sampled else n
        if self.capacity is not None:
            capacity = self.capacity
        if guessed:
            self._make_room(capacity)
        tensors = added(acc, grad)
        with torch.cuda.device_of(acc):
            self.launch(
                self._search,
                (grad is not None, sampled, guessed, WIDE if has_wide_loads(acc) else 1),
                {**tensors, "out_indices": out.indices, "out_values": out.values},
                {
                    **self._sizes(n),
                    "k": k,
                    "rank": rank,
                    # Where there is room for all elements, zeros are candidates as well.
                    "least": 0 if capacity == n else 1,
                    "forced": self.forced_bound,
                    "capacity": capacity,
                },
            )
        return out

    def above_threshold(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> SparseVector:
        """All above a threshold, compared in float32: NaN is above nothing, and nothing is above NaN."""
        n = self._check(acc, grad)
        if n == 0:
            return SparseVector(acc.new_empty(0, dtype=torch.int32), acc.new_empty(0))
        if isinstance(threshold, Tensor) and threshold.device == acc.device:
            self.threshold.copy_(threshold)
        else:
            rounded = torch.tensor(float(threshold), dtype=torch.float32, device="cpu")
            self.threshold.fill_(rounded.item())
        self._make_ends()
        tensors, sizes = added(acc, grad), self._sizes(n)
        with torch.cuda.device_of(acc):
            choices = (grad is not None, strict)
            self.launch(self._mark_and_count, choices, tensors, sizes)
            counted, ends = (self.launch.buffers[name][: sizes["tiles"]] for name in ("counted", "ends"))
            torch.cumsum(counted, 0, out=ends)
            count = host_sync.to_host(ends[-1])
            out = SparseVector(acc.new_empty(count, dtype=torch.int32), acc.new_empty(count))
            if count:
                tensors |= {"out_indices": out.indices, "out_values": out.values}
                self.launch(self._gather_in_order, (), tensors, sizes)
        return out

    def stats(self) -> SearchStats:
        return SearchStats(*host_sync.to_host(self.totals))

    def _search(self, add: bool, sampled: bool, guessed: bool, width: int) -> LaunchPlan:
        # Tiles of kernels that count all of acc are twice as long: their histograms are read half as often.
        sizes = {"TILE": 2 * self.tile, "CHUNK": CHUNK}
        marks = {"MARKED": self.tile, "WORDS": WORDS, **sizes}
        tiles = {"WIDTH": width, "TILE": self.tile, "LONG": 2 * self.tile}
        emit = {"GUESSED": guessed, **tiles, "CHUNK_WIDTH": WIDE, "CHUNK": CHUNK}
        return (
            LaunchSpec(device_code.guess, "one", 32, {"SAMPLED": sampled, "ADD": add, "SAMPLE": self.sample}),
            LaunchSpec(device_code.stream, "tiles", 8, {"GUESSED": guessed, "ADD": add, "TILE": self.tile}),
            LaunchSpec(device_code.gather, "programs", 8, marks),
            LaunchSpec(device_code.count_next, "programs", 8, sizes),
            LaunchSpec(device_code.count_last, "programs", 8, sizes),
            LaunchSpec(device_code.emit, "programs", 8, emit),
        )

    def _mark_and_count(self, add: bool, strict: bool) -> LaunchPlan:
        return (
            LaunchSpec(device_code.stream_above, "tiles", 8, {"ADD": add, "STRICT": strict, "TILE": self.tile}),
        )

    def _gather_in_order(self) -> LaunchPlan:
        return (LaunchSpec(device_code.gather_in_order, "tiles", 2, {"TILE": self.tile}),)

    def _sizes(self, n: int) -> dict[str, int]:
        return {"n": n, "one": 1, "tiles": triton.cdiv(n, self.tile), "programs": self.programs}

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
            self.candidates = SparseVector(
                self.work.new_empty(capacity), self.work.new_empty(capacity, dtype=torch.float32)
            )
            self.launch.set_buffers(indices=self.candidates.indices, values=self.candidates.values)

    def _make_ends(self) -> None:
        if "ends" not in self.launch.buffers:
            new, tiles = self.work.new_empty, triton.cdiv(self.n, self.tile)
            self.launch.set_buffers(counted=new(tiles), ends=new(tiles, dtype=torch.int64))


def added(acc: Tensor, grad: Tensor | None) -> dict[str, Tensor]:
    """A kernel that adds nothing is given acc in the gradient's place."""
    return {"acc": acc, "grad": acc if grad is None else grad}


def has_wide_loads(vector: Tensor) -> bool:
    """True if its loads are of several elements at once."""
    return vector.stride(0) == 1 and vector.data_ptr() % ALIGNMENT == 0


def upper_count_bound(expected: float) -> int:
    """A number that a sample's count almost upper_count_bound does not exceed: four standard deviations above
    the expected count, at twice the variance of independent elements, for a sample's are runs of neighbours,
    which are alike.
    """
    return math.ceil(expected + 6 * math.sqrt(expected) + 8)


def candidate_capacity(n: int, rank: int, sample: int) -> int:
    """Room for candidates: elements that reach what `rank` of a sample reach."""
    return min(n, upper_count_bound(rank) * n // sample + 2**14)
