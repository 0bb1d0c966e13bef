# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The top-k of torch 1.8.1 on CUDA, as Yoon and Oh 2022 ran it: one thread block does all the work.

ATen/native/cuda/TensorTopK.cu of 1.8.1 gives each slice one block of 1,024 threads, and a gradient is one
slice, so one multiprocessor of many is at work. The block finds the k-th value by radix selection, two bits a
pass, and reads all n elements in each of the 16 passes; two more collect what lies above it, then what equals
it. The kernel here does so in Triton, in one program: an emulation, whose counting is a little cheaper than
theirs, as each lane counts for itself until the end of a pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

THREADS = 1024


@triton.jit
def write_largest_indices_in_one_block(magnitudes, indices, n, k, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    prefix = 0  # the leading bits of the k-th value that are known
    prefix_mask = 0
    rank = k  # of the k-th value among those that share its prefix
    for digit_index in range(16):
        shift = 30 - 2 * digit_index
        threes = tl.zeros((BLOCK,), tl.int32)
        twos = tl.zeros((BLOCK,), tl.int32)
        ones = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, n, BLOCK):
            offsets = start + lanes
            key = tl.load(magnitudes + offsets, mask=offsets < n, other=0)
            has_prefix = (offsets < n) & ((key & prefix_mask) == prefix)
            digit = (key >> shift) & 3
            threes += (has_prefix & (digit == 3)).to(tl.int32)
            twos += (has_prefix & (digit == 2)).to(tl.int32)
            ones += (has_prefix & (digit == 1)).to(tl.int32)
        above_two = tl.sum(threes)
        above_one = above_two + tl.sum(twos)
        above_zero = above_one + tl.sum(ones)
        kth_digit = (rank <= above_zero).to(tl.int32) + (rank <= above_one).to(tl.int32)
        kth_digit += (rank <= above_two).to(tl.int32)
        rank -= tl.where(
            kth_digit == 3,
            0,
            tl.where(kth_digit == 2, above_two, tl.where(kth_digit == 1, above_one, above_zero)),
        )
        prefix = prefix | (kth_digit << shift)
        prefix_mask = prefix_mask | (3 << shift)
    num_found = 0
    for start in range(0, n, BLOCK):
        offsets = start + lanes
        wins = (offsets < n) & (tl.load(magnitudes + offsets, mask=offsets < n, other=0) > prefix)
        count = wins.to(tl.int32)
        tl.store(indices + num_found + tl.cumsum(count, 0) - count, offsets.to(tl.int64), mask=wins)
        num_found += tl.sum(count)
    for start in range(0, n, BLOCK):
        offsets = start + lanes
        ties = (offsets < n) & (tl.load(magnitudes + offsets, mask=offsets < n, other=0) == prefix)
        count = ties.to(tl.int32)
        place = num_found + tl.cumsum(count, 0) - count
        tl.store(indices + place, offsets.to(tl.int64), mask=ties & (place < k))
        num_found += tl.sum(count)


def find_largest_indices(magnitudes: Tensor, k: int) -> Tensor:
    """Return the indices (k,) int64 of the k largest of these magnitudes (n,) float32, none negative."""
    indices = torch.empty(k, dtype=torch.int64, device=magnitudes.device)
    keys = magnitudes.view(torch.int32)  # floats that are not negative are ordered as their bits are
    write_largest_indices_in_one_block[(1,)](
        keys, indices, keys.numel(), k, BLOCK=THREADS, num_warps=THREADS // 32
    )
    return indices
