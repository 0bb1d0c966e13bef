# mypy: ignore-errors
# ruff: noqa: SIM108 (a branch on what is read at run time is a statement to Triton)
"""Triton's kernels that search many buckets at once; triton_group_search.py says in which order they run.

Each program works on a share: some blocks in a row of one bucket. Keys are counted by their upper, then
middle, then lower bits, as triton_search_device.py does after a wrong guess. So nothing is guessed, and
nothing can fail. Within one launch programs meet in atomics only, and none waits for another.

Addresses are int64 numbers in tables; all that they point to has a stride of 1. Offsets are int32.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from sparsify.kernels.triton_device_functions import (
    add_counts,
    block_offsets,
    emit_block,
    find_bin,
    kth_key,
    magnitude_keys,
)

# A row of `work` for each bucket, all 0 when a call begins: three histograms, and slots given away.
HIGH = constexpr(0)
MIDDLE = constexpr(2048)
LOW = constexpr(2048 + 1024)
NUM_EMITTED = constexpr(2048 + 2 * 1024)
WORK_ROW_NUMEL = constexpr(2048 + 2 * 1024 + 32)
HIGH_BINS = constexpr(2048)
LOW_BINS = constexpr(1024)
# A row of `shares` (programs, 4) int32.
BUCKET = constexpr(0)
FIRST_BLOCK = constexpr(1)
END_BLOCK = constexpr(2)  # the block behind the last
FIRST_PROGRAM = constexpr(3)  # the program that has the bucket's first share
# A row of `buckets` (buckets, 6) int64.
ACC = constexpr(0)  # address
GRAD = constexpr(1)  # address
SIZE = constexpr(2)
K = constexpr(3)
OUT = constexpr(4)  # where the bucket's part of the result begins
BASE = constexpr(5)  # where the bucket begins among all buckets
BUCKET_COLUMNS = constexpr(6)


@triton.jit
def load_share(shares, buckets, work):
    """Load this program's share: its bucket's rows in `buckets` and `work`, n and k; first and end block."""
    share = shares + tl.program_id(0) * 4
    number = tl.load(share + BUCKET)
    bucket = buckets + number * BUCKET_COLUMNS
    n = tl.load(bucket + SIZE).to(tl.int32)
    k = tl.load(bucket + K).to(tl.int32)
    return (
        bucket,
        work + number * WORK_ROW_NUMEL,
        n,
        k,
        tl.load(share + FIRST_BLOCK),
        tl.load(share + END_BLOCK),
    )


@triton.jit
def load_pointer(bucket, COLUMN: constexpr, DTYPE: constexpr, ALIGNED: constexpr):
    """Load the address of a tensor of this type from a column of the table of buckets."""
    pointer = tl.load(bucket + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # to 16 bytes, so that loads and stores are wide
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_block(places, offsets, n, is_full):
    """Load the elements of a block, 0 behind the last. A full block needs no mask, and its loads are wide."""
    if is_full:
        values = tl.load(places + offsets)
    else:
        values = tl.load(places + offsets, mask=offsets < n, other=0.0)
    return values


@triton.jit
def count_share(
    acc, n, first, last, prefix, PREFIX: constexpr, SHIFT: constexpr, BINS: constexpr, BLOCK: constexpr
):
    """Count keys of a share, whose bits from PREFIX on are `prefix`, by their bits from SHIFT on: (BINS,)."""
    counts = tl.zeros([BINS], tl.int32)
    for block in range(first, last):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        keys = magnitude_keys(load_block(acc, offsets, n, block * BLOCK + BLOCK <= n))
        is_hit = (offsets < n) & ((keys >> PREFIX) == prefix)
        counts += tl.histogram((keys >> SHIFT) & (BINS - 1), BINS, mask=is_hit)
    return counts


@triton.jit
def accumulate_and_count(shares, buckets, work, GRAD_DTYPE: constexpr, ALIGNED: constexpr, BLOCK: constexpr):
    """Add grad to acc, and count all keys by their upper bits; where GRAD_DTYPE is None nothing is added."""
    bucket, row, n, _k, first, last = load_share(shares, buckets, work)
    acc = load_pointer(bucket, ACC, tl.float32, ALIGNED)
    counts = tl.zeros([HIGH_BINS], tl.int32)
    for block in range(first, last):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        is_full = block * BLOCK + BLOCK <= n
        sums = load_block(acc, offsets, n, is_full)
        if GRAD_DTYPE is not None:
            grad = load_pointer(bucket, GRAD, GRAD_DTYPE, ALIGNED)
            sums = sums + load_block(grad, offsets, n, is_full).to(tl.float32)
            if is_full:
                tl.store(acc + offsets, sums)
            else:
                tl.store(acc + offsets, sums, mask=offsets < n)
        counts += tl.histogram(magnitude_keys(sums) >> 20, HIGH_BINS, mask=offsets < n)
    add_counts(row + HIGH, counts, HIGH_BINS)


@triton.jit
def count_group_middle_bits(shares, buckets, work, ALIGNED: constexpr, BLOCK: constexpr):
    """Count keys of the bin that the k-th falls into by their middle bits."""
    bucket, row, n, k, first, last = load_share(shares, buckets, work)
    acc = load_pointer(bucket, ACC, tl.float32, ALIGNED)
    high, _above, _inside = find_bin(row + HIGH, k, HIGH_BINS)
    add_counts(row + MIDDLE, count_share(acc, n, first, last, high, 20, 10, LOW_BINS, BLOCK), LOW_BINS)


@triton.jit
def count_group_low_bits(shares, buckets, work, rows, ALIGNED: constexpr, BLOCK: constexpr):
    """Count keys of the bin that the k-th falls into by their low bits.

    Each program's own count is stored as well, in rows (programs, LOW_BINS).
    """
    bucket, row, n, k, first, last = load_share(shares, buckets, work)
    acc = load_pointer(bucket, ACC, tl.float32, ALIGNED)
    high, above, _inside = find_bin(row + HIGH, k, HIGH_BINS)
    middle, _above, _inside = find_bin(row + MIDDLE, k - above, LOW_BINS)
    counts = count_share(acc, n, first, last, (high << 10) | middle, 10, 0, LOW_BINS, BLOCK)
    add_counts(row + LOW, counts, LOW_BINS)
    tl.store(rows + tl.program_id(0).to(tl.int64) * LOW_BINS + tl.arange(0, LOW_BINS), counts)


@triton.jit
def emit_group_largest(
    shares,
    buckets,
    work,
    rows,
    out_indices,
    out_values,
    ALIGNED: constexpr,
    WIDTH: constexpr,
    BLOCK: constexpr,
    SHARES: constexpr,
):
    """Emit all keys above the k-th, in no order, and of those equal to it the first by index.

    Indices are those among all buckets. SHARES: a power of 2, at least as many as any bucket has.
    """
    bucket, row, n, k, first, last = load_share(shares, buckets, work)
    acc = load_pointer(bucket, ACC, tl.float32, ALIGNED)
    out = tl.load(bucket + OUT)
    base = tl.load(bucket + BASE).to(tl.int32)
    kth, low, above = kth_key(row + HIGH, row + MIDDLE, row + LOW, k)
    # Shares of one bucket follow each other, so equal keys of smaller indices are the earlier programs'.
    earlier = tl.load(shares + tl.program_id(0) * 4 + FIRST_PROGRAM) + tl.arange(0, SHARES)
    ties = tl.load(rows + earlier.to(tl.int64) * LOW_BINS + low, mask=earlier < tl.program_id(0), other=0)
    tie_slot = out + above + tl.sum(ties, 0)
    block_lanes = block_offsets(BLOCK, WIDTH)
    for block in range(first, last):
        begin = block * BLOCK
        inside = (begin + block_lanes < n) & (k > 0)  # of k = 0 there is no k-th
        values = load_block(acc, begin + block_lanes, n, begin + BLOCK <= n)
        tie_slot = emit_block(
            out_indices,
            out_values,
            row + NUM_EMITTED,
            out,
            out + k,
            tie_slot,
            base + begin,
            None,
            inside,
            values,
            kth,
            BLOCK,
            WIDTH,
        )


@triton.jit(do_not_specialize=["k", "half", "alpha"])
def add_selection(
    indices,  # (k,) distinct, among all elements
    values,  # (k,)
    table,  # (2 x 2 half,) int64: where each memory begins among all elements, ascending; its address
    k,
    half,  # of the table's rows, a power of 2; behind the last memory's are rows that no index reaches
    alpha,
    ADD_BLOCK: constexpr,
):
    """Add alpha x value to each element, in the memory in which it lies."""
    slots = tl.program_id(0) * ADD_BLOCK + tl.arange(0, ADD_BLOCK)
    live = slots < k
    index = tl.load(indices + slots, mask=live, other=0).to(tl.int64)
    value = tl.load(values + slots, mask=live, other=0.0).to(tl.float32)
    # The last memory that begins no later: which is not empty.
    row = tl.zeros([ADD_BLOCK], tl.int32)
    step = half
    while step > 0:
        begin = tl.load(table + row + step)
        row = tl.where(begin <= index, row + step, row)
        step = step >> 1
    begin = tl.load(table + row)
    address = tl.load(table + 2 * half + row).to(tl.pointer_type(tl.float32))
    places = address + (index - begin)
    # Indices are distinct, so nobody else adds to this element.
    tl.store(places, tl.load(places, mask=live, other=0.0) + alpha * value, mask=live)
