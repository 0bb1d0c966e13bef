# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The top-k of torch 1.8.1 on CUDA, as Yoon and Oh 2022 ran it: one thread block does all the work.

ATen/native/cuda/TensorTopK.cu of 1.8.1 gives each slice one block of 1,024 threads, and a gradient is one
slice, so one multiprocessor of many is at work. The block finds the k-th value by radix selection, two bits a
pass, and reads all n elements in each of the 16 passes; two more collect what lies above it, then what equals
it. This is the same in Triton, in one program: an emulation, whose counting is a little cheaper than theirs,
as each lane counts for itself until the end of a pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

THREADS = 1024
PASSES = 18  # over all n: 16 x 2 bits, and two that collect


@triton.jit
def one_block(magnitudes, indices, n, k, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    known = 0  # the leading bits of the k-th value, and where they are
    mask = 0
    rank = k  # of the k-th value among those that share its leading bits
    for digit in range(16):
        shift = 30 - 2 * digit
        threes = tl.zeros((BLOCK,), tl.int32)
        twos = tl.zeros((BLOCK,), tl.int32)
        ones = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, n, BLOCK):
            at = start + lanes
            key = tl.load(magnitudes + at, mask=at < n, other=0)
            shares = (at < n) & ((key & mask) == known)
            own = (key >> shift) & 3
            threes += (shares & (own == 3)).to(tl.int32)
            twos += (shares & (own == 2)).to(tl.int32)
            ones += (shares & (own == 1)).to(tl.int32)
        above_two = tl.sum(threes)
        above_one = above_two + tl.sum(twos)
        above_zero = above_one + tl.sum(ones)
        chosen = (rank <= above_zero).to(tl.int32) + (rank <= above_one).to(tl.int32)
        chosen += (rank <= above_two).to(tl.int32)
        rank -= tl.where(
            chosen == 3, 0, tl.where(chosen == 2, above_two, tl.where(chosen == 1, above_one, above_zero))
        )
        known = known | (chosen << shift)
        mask = mask | (3 << shift)
    found = 0
    for start in range(0, n, BLOCK):
        at = start + lanes
        wins = (at < n) & (tl.load(magnitudes + at, mask=at < n, other=0) > known)
        count = wins.to(tl.int32)
        tl.store(indices + found + tl.cumsum(count, 0) - count, at.to(tl.int64), mask=wins)
        found += tl.sum(count)
    for start in range(0, n, BLOCK):
        at = start + lanes
        ties = (at < n) & (tl.load(magnitudes + at, mask=at < n, other=0) == known)
        count = ties.to(tl.int32)
        place = found + tl.cumsum(count, 0) - count
        tl.store(indices + place, at.to(tl.int64), mask=ties & (place < k))
        found += tl.sum(count)


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """(n,) float32, not negative -> (k,) int64: where the k largest are."""
    indices = torch.empty(k, dtype=torch.int64, device=magnitudes.device)
    keys = magnitudes.view(torch.int32)  # floats that are not negative are ordered as their bits are
    one_block[(1,)](keys, indices, keys.numel(), k, BLOCK=THREADS, num_warps=THREADS // 32)
    return indices
