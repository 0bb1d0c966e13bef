"""The search of one bucket on a GPU, in Triton: one pass over memory; exact, whatever the data.

A sample guesses a bound that somewhat more than k elements reach. One pass adds the gradient and marks the
elements that reach the bound. These, in order, are the candidates, among which the k largest are found by
counting keys in three rounds, however many are equal. That the bound was right is verified by counting as
well, on the device: if it was not, the same kernels find the same k among all elements, at 16 bytes per
element more. The host never waits. acc is only added to: no failure can lose any of it.

Guess, verify, refine: NVIDIA's GVR top-k for decoders (arXiv:2604.22312; with a sample as here: TensorRT-LLM,
blog 29), with the accumulation inside, and for hundreds of millions of elements.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from sparsify.core import host_sync
from sparsify.core.bucket import describe_tensors
from sparsify.core.checks import check_k
from sparsify.kernels import triton_device_functions
from sparsify.kernels import triton_search_device as device_code
from sparsify.kernels.triton_launcher import ALIGNMENT, KernelLauncher, LaunchPlan, LaunchSpec
from sparsify.types import SearchStats, SelectionKernel, SparseVector, accumulation_dtype

BLOCK = 2048  # elements that a program takes at a time: 8 for each of 256 threads
SAMPLE_NUMEL = 2**14  # elements that the bound is guessed from: 16 registers of each of 1024 threads
WORD_BLOCK = 1024  # words of marks that a program takes at a time: four for each of 256 threads
CANDIDATE_BLOCK = 1024  # candidates that a program takes at a time, likewise
# Of kernels that loop: four for each multiprocessor of an H200, so that loads overlap.
MAX_LOOPING_PROGRAMS = 4 * 132
WIDE_NUMEL = 4  # elements that a thread loads and stores at once: 16 bytes
MAX_NUMEL = 2**31 - 2**22  # elements whose offsets, and those of one block more, are int32
MIN_CAPABILITY = (8, 0)  # the least that Triton names as supported
UNREACHABLE_KEY = 0x7F800000  # a bound that finite elements do not reach: the key of Inf
# Under TRITON_INTERPRET=1, Triton runs kernels in Python on the CPU.
INTERPRETED = not isinstance(device_code.accumulate_and_mark, triton.runtime.JITFunction)


def unsupported_reason(like: Tensor) -> str | None:
    """Return the reason why `TritonKernel` can't serve buckets like this tensor; None where it can."""
    if accumulation_dtype(like.dtype) != torch.float32:
        return f"Triton's kernels take float32, bfloat16 or float16, and this is {like.dtype}"
    if like.numel() > MAX_NUMEL:
        return (
            f"Triton's kernels take at most {MAX_NUMEL:,} elements, whose offsets have 32 bits, and these "
            f"are {like.numel():,}: take a smaller scope"
        )
    if INTERPRETED and like.device.type == "cpu":
        return None
    if not like.is_cuda or torch.version.hip is not None:
        return f"Triton's kernels are written for NVIDIA GPUs, and this is {like.device}"
    capability = torch.cuda.get_device_capability(like.device)
    if capability < MIN_CAPABILITY:
        needed, actual = (f"{major}.{minor}" for major, minor in (MIN_CAPABILITY, capability))
        return f"Triton's kernels need compute capability {needed}, and {like.device} has {actual}"
    return None


class TritonKernel(SelectionKernel):
    """A search of one bucket by Triton's kernels.

    `topk` is six launches: 12.25 bytes of memory traffic per element, 10.25 where gradients have 16 bits, and
    60 per candidate, of which there are 1.5 k at a density of 1 %, 3.0 k at 0.1 %. `above_threshold` is four
    launches, two of them torch's, and 12.25 bytes. Buffers take less than 0.1 n float32 at densities up to 1
    %, for large n, and grow with k.

    Args:
        like: (n,) float32, or bfloat16 or float16 whose sums are float32.
        block_numel, sample_numel: see BLOCK, SAMPLE_NUMEL; smaller in tests.
        forced_bound, forced_capacity: for trials: the key to take for the bound, and the room for candidates.

    Raises:
        ValueError: `unsupported_reason` has a reason why such buckets can't be searched.
    """

    name = "triton"

    def __init__(
        self,
        like: Tensor,
        block_numel: int = BLOCK,
        sample_numel: int = SAMPLE_NUMEL,
        forced_bound: int | None = None,
        forced_capacity: int | None = None,
    ) -> None:
        reason = unsupported_reason(like)
        if reason:
            raise ValueError(f"{reason}; or take select=torch")
        super().__init__()
        self.n = like.numel()
        self.block = block_numel
        self.sample = sample_numel
        self.forced_bound = -1 if forced_bound is None else forced_bound
        self.forced_capacity = forced_capacity
        self.num_programs = max(1, min(MAX_LOOPING_PROGRAMS, triton.cdiv(self.n, 4 * block_numel)))
        num_blocks = triton.cdiv(self.n, block_numel)
        new = like.new_empty
        self.work = new(triton_device_functions.WORK_NUMEL.value, dtype=torch.int32)
        self.totals = torch.zeros(4, dtype=torch.int64, device=like.device)
        self.threshold = new(1, dtype=torch.float32)
        self.launch = KernelLauncher()
        self.launch.set_buffers(
            work=self.work,
            rows=new((self.num_programs, triton_device_functions.LOW_BINS.value), dtype=torch.int32),
            totals=self.totals,
            threshold=self.threshold,
            marks=new(
                num_blocks * block_numel // triton_device_functions.MARKS_PER_WORD.value, dtype=torch.int32
            ),
            counted=new(num_blocks, dtype=torch.int32),
            ends=new(num_blocks, dtype=torch.int64),
            indices=new(0, dtype=torch.int32),  # of candidates
            values=new(0, dtype=torch.float32),
        )

    def topk(self, acc: Tensor, grad: Tensor | None, k: int) -> SparseVector:
        """Add the gradient and find the k largest, in no order.

        After a first call with this k a CUDA graph can capture it.
        """
        n = self._check(acc, grad)
        check_k(k, n)
        selection = SparseVector(acc.new_empty(k, dtype=torch.int32), acc.new_empty(k))
        if k == 0:
            if grad is not None:
                acc.add_(grad)
            self.totals[triton_device_functions.STEPS.value] += 1
            return selection
        rank = upper_count_bound(k / n * self.sample)
        is_sampled = self.sample < n and rank <= self.sample
        has_bound = is_sampled or self.forced_bound >= 0
        capacity = candidate_capacity(n, rank, self.sample) if is_sampled else n
        if self.forced_capacity is not None:
            capacity = self.forced_capacity
        if has_bound:
            self._ensure_candidate_capacity(capacity)
        tensors = acc_and_grad_by_name(acc, grad)
        tensors |= {"out_indices": selection.indices, "out_values": selection.values}
        numbers = self._sizes(n) | {
            "k": k,
            "rank": rank,
            "least": 0 if capacity == n else 1,  # where there is room for all elements, zeros are candidates
            "forced": self.forced_bound,
            "capacity": capacity,
        }
        choices = (grad is not None, is_sampled, has_bound, WIDE_NUMEL if can_load_wide(acc) else 1)
        with torch.cuda.device_of(acc):
            self.launch(self._plan_topk, choices, tensors, numbers)
        return selection

    def above_threshold(
        self, acc: Tensor, grad: Tensor | None, threshold: Tensor | float, strict: bool = False
    ) -> SparseVector:
        """Add the gradient and find all elements above a threshold, compared in float32.

        NaN is above nothing, and nothing is above NaN.
        """
        n = self._check(acc, grad)
        if n == 0:
            return SparseVector(acc.new_empty(0, dtype=torch.int32), acc.new_empty(0))
        if isinstance(threshold, Tensor) and threshold.device == acc.device:
            self.threshold.copy_(threshold)
        else:
            rounded = torch.tensor(float(threshold), dtype=torch.float32, device="cpu")
            self.threshold.fill_(rounded.item())
        tensors = acc_and_grad_by_name(acc, grad)
        sizes = self._sizes(n)
        with torch.cuda.device_of(acc):
            self.launch(self._plan_marking, (grad is not None, strict), tensors, sizes)
            counted = self.launch.buffers["counted"][: sizes["blocks"]]
            ends = self.launch.buffers["ends"][: sizes["blocks"]]
            torch.cumsum(counted, 0, out=ends)
            count = host_sync.to_host(ends[-1])
            selection = SparseVector(acc.new_empty(count, dtype=torch.int32), acc.new_empty(count))
            if count:
                tensors |= {"out_indices": selection.indices, "out_values": selection.values}
                self.launch(self._plan_gathering, (), tensors, sizes)
        return selection

    def stats(self) -> SearchStats:
        return SearchStats(*host_sync.to_host(self.totals))

    def _plan_topk(self, add: bool, is_sampled: bool, has_bound: bool, width: int) -> LaunchPlan:
        # Blocks of kernels that count all of acc are twice as long: their histograms are read half as often.
        counting = {"BLOCK": 2 * self.block, "CANDIDATE_BLOCK": CANDIDATE_BLOCK}
        guessing = {"SAMPLED": is_sampled, "ADD": add, "SAMPLE_NUMEL": self.sample}
        marking = {"GUESSED": has_bound, "ADD": add, "BLOCK": self.block}
        gathering = {"MARK_BLOCK": self.block, "WORD_BLOCK": WORD_BLOCK, **counting}
        emitting = {
            "GUESSED": has_bound,
            "WIDTH": width,
            "BLOCK": self.block,
            "COUNT_BLOCK": 2 * self.block,
            "CANDIDATE_WIDTH": WIDE_NUMEL,
            "CANDIDATE_BLOCK": CANDIDATE_BLOCK,
        }
        return (
            LaunchSpec(device_code.guess_bound, "one", 32, guessing),
            LaunchSpec(device_code.accumulate_and_mark, "blocks", 8, marking),
            LaunchSpec(device_code.gather_candidates, "programs", 8, gathering),
            LaunchSpec(device_code.count_middle_bits, "programs", 8, counting),
            LaunchSpec(device_code.count_low_bits, "programs", 8, counting),
            LaunchSpec(device_code.emit_largest, "programs", 8, emitting),
        )

    def _plan_marking(self, add: bool, strict: bool) -> LaunchPlan:
        constants = {"ADD": add, "STRICT": strict, "BLOCK": self.block}
        return (LaunchSpec(device_code.accumulate_and_mark_above, "blocks", 8, constants),)

    def _plan_gathering(self) -> LaunchPlan:
        return (LaunchSpec(device_code.gather_marked, "blocks", 2, {"BLOCK": self.block}),)

    def _sizes(self, n: int) -> dict[str, int]:
        return {"n": n, "one": 1, "blocks": triton.cdiv(n, self.block), "programs": self.num_programs}

    def _check(self, acc: Tensor, grad: Tensor | None) -> int:
        """Refuse other tensors than this kernel was made for; return the number of elements."""
        is_wrong = (
            acc.dim() != 1
            or acc.numel() > self.n
            or acc.dtype != torch.float32
            or acc.device != self.work.device
        )
        if grad is not None:
            is_wrong |= (
                grad.shape != acc.shape
                or accumulation_dtype(grad.dtype) != torch.float32
                or grad.device != acc.device
            )
        if is_wrong:
            raise ValueError(
                f"this kernel was made for up to {self.n} elements on {self.work.device}, acc in float32, "
                f"gradients in float32, bfloat16 or float16; this is {describe_tensors(acc, grad)}"
            )
        return acc.numel()

    def _ensure_candidate_capacity(self, capacity: int) -> None:
        if self.launch.buffers["indices"].numel() < capacity:
            values = self.work.new_empty(capacity, dtype=torch.float32)
            self.launch.set_buffers(indices=self.work.new_empty(capacity), values=values)


def acc_and_grad_by_name(acc: Tensor, grad: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors that kernels read; one that adds nothing is given acc in the gradient's place."""
    return {"acc": acc, "grad": acc if grad is None else grad}


def can_load_wide(vector: Tensor) -> bool:
    """Tell whether a thread can load several elements of a vector at once."""
    return vector.stride(0) == 1 and vector.data_ptr() % ALIGNMENT == 0


def upper_count_bound(expected: float) -> int:
    """Return a number that the count of a sample's elements almost surely does not exceed.

    It is four standard deviations above the expected count, at twice the variance of independent elements,
    for a sample's are runs of neighbours, which are alike.
    """
    return math.ceil(expected + 6 * math.sqrt(expected) + 8)


def candidate_capacity(n: int, rank: int, sample: int) -> int:
    """Return the room for candidates: elements that reach what `rank` of a sample reach."""
    return min(n, upper_count_bound(rank) * n // sample + 2**14)
