# mypy: ignore-errors
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
    HIGH_BINS,
    LOW_BINS,
    accumulate_block,
    add_and_store_counts,
    add_counts,
    count_keys,
    emit_range,
    find_kth_bin,
    find_kth_key,
    find_kth_upper_bits_and_num_above,
    magnitude_keys,
)

# A row of `work` for each bucket, all 0 when a call begins: three histograms, and slots given away.
HIGH = constexpr(0)
MIDDLE = constexpr(2048)
LOW = constexpr(2048 + 1024)
NUM_EMITTED = constexpr(2048 + 2 * 1024)
WORK_ROW_NUMEL = constexpr(2048 + 2 * 1024 + 32)
# A row of `shares` (programs, 4) int32.
BUCKET = constexpr(0)
FIRST = constexpr(1)  # of the bucket's elements, a multiple of the block
END = constexpr(2)  # the element behind the last
FIRST_PROGRAM = constexpr(3)  # the program that has the bucket's first share
# A row of `buckets` (buckets, 5) int64.
ACC = constexpr(0)  # address
GRAD = constexpr(1)  # address
K = constexpr(2)
OUT = constexpr(3)  # where the bucket's part of the result begins
BASE = constexpr(4)  # where the bucket begins among all buckets
BUCKET_COLUMNS = constexpr(5)


@triton.jit
def load_share(shares, buckets, work, BLOCK: constexpr):
    """Load this program's share: its bucket's rows in `buckets` and `work`, and k; first and end element."""
    share = shares + tl.program_id(0) * 4
    number = tl.load(share + BUCKET)
    bucket = buckets + number * BUCKET_COLUMNS
    k = tl.load(bucket + K).to(tl.int32)
    first = tl.multiple_of(tl.load(share + FIRST), BLOCK)  # so that loads and stores are wide
    return bucket, work + number * WORK_ROW_NUMEL, k, first, tl.load(share + END)


@triton.jit
def load_tensor_address(bucket, COLUMN: constexpr, DTYPE: constexpr, ALIGNED: constexpr):
    """Load the address of a tensor of this type from a column of the table of buckets."""
    pointer = tl.load(bucket + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:  # to 16 bytes, so that loads and stores are wide
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def accumulate_and_count(shares, buckets, work, GRAD_DTYPE: constexpr, ALIGNED: constexpr, BLOCK: constexpr):
    """Add grad to acc, and count all keys by their upper bits; where GRAD_DTYPE is None nothing is added."""
    bucket, row, _k, first, last = load_share(shares, buckets, work, BLOCK)
    acc = load_tensor_address(bucket, ACC, tl.float32, ALIGNED)
    ADD: constexpr = GRAD_DTYPE is not None
    grad = load_tensor_address(bucket, GRAD, GRAD_DTYPE if ADD else tl.float32, ALIGNED)
    counts = tl.zeros([HIGH_BINS], tl.int32)
    for begin in range(first, last, BLOCK):
        sums, inside = accumulate_block(acc, grad, last, 1, 1, begin, tl.arange(0, BLOCK), ADD, BLOCK)
        counts += tl.histogram(magnitude_keys(sums) >> 20, HIGH_BINS, mask=inside)
    add_counts(row + HIGH, counts, HIGH_BINS)


@triton.jit
def count_group_middle_bits(shares, buckets, work, ALIGNED: constexpr, BLOCK: constexpr):
    """Count keys of the bin that the k-th falls into by their middle bits."""
    bucket, row, k, first, last = load_share(shares, buckets, work, BLOCK)
    acc = load_tensor_address(bucket, ACC, tl.float32, ALIGNED)
    high, _above = find_kth_bin(row + HIGH, k, HIGH_BINS)
    add_counts(row + MIDDLE, count_keys(acc, 1, first, last, high, 20, 10, LOW_BINS, BLOCK), LOW_BINS)


@triton.jit
def count_group_low_bits(shares, buckets, work, rows, ALIGNED: constexpr, BLOCK: constexpr):
    """Count keys of the bin that the k-th falls into by their low bits.

    Each program's own count is stored as well, in rows (programs, LOW_BINS).
    """
    bucket, row, k, first, last = load_share(shares, buckets, work, BLOCK)
    acc = load_tensor_address(bucket, ACC, tl.float32, ALIGNED)
    upper_bits, _above = find_kth_upper_bits_and_num_above(row + HIGH, row + MIDDLE, k)
    counts = count_keys(acc, 1, first, last, upper_bits, 10, 0, LOW_BINS, BLOCK)
    add_and_store_counts(row + LOW, rows, counts)


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
    bucket, row, k, first, last = load_share(shares, buckets, work, BLOCK)
    acc = load_tensor_address(bucket, ACC, tl.float32, ALIGNED)
    out = tl.load(bucket + OUT)
    base = tl.load(bucket + BASE).to(tl.int32)
    kth, low, above = find_kth_key(row + HIGH, row + MIDDLE, row + LOW, k)
    # Shares of one bucket follow each other, so equal keys of smaller indices are the earlier programs'.
    earlier = tl.load(shares + tl.program_id(0) * 4 + FIRST_PROGRAM) + tl.arange(0, SHARES)
    ties = tl.load(rows + earlier.to(tl.int64) * LOW_BINS + low, mask=earlier < tl.program_id(0), other=0)
    emit_range(
        out_indices + out,
        out_values + out,
        row + NUM_EMITTED,
        k,
        above + tl.sum(ties, 0),
        acc,
        1,
        base,
        None,
        first,
        last,
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
