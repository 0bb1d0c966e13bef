# mypy: ignore-errors
# ruff: noqa: SIM108 (a branch on what is read at run time is a statement to Triton)
"""What runs on the GPU to search many buckets at once, in Triton; triton_group_search.py says in which order.

Each program works on a share: some tiles in a row of one bucket. Keys are counted by their upper, then
middle, then lower bits, as triton_kernels.py does after a failure; so nothing is guessed, nothing can fail.
Within one launch programs meet in atomics only, and none waits for another.

Addresses are int64 numbers in tables; all that they point to has a stride of 1. Offsets are int32.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from sparsify.kernels.triton_device_functions import (
    add_counts,
    find_bin,
    emit_block,
    kth_key,
    magnitude,
    block_offsets,
)

# A row of `work` for each bucket, all 0 when a call begins: three histograms, and slots given away.
HIGH = constexpr(0)
MIDDLE = constexpr(2048)
LOW = constexpr(2048 + 1024)
NUM_EMITTED = constexpr(2048 + 2 * 1024)
ROW = constexpr(2048 + 2 * 1024 + 32)
HIGH_BINS = constexpr(2048)  # bins
LOW_BINS = constexpr(1024)
# A row of `shares` (programs, 4) int32.
BUCKET = constexpr(0)
FIRST = constexpr(1)  # tile
LAST = constexpr(2)  # one tile behind the last
BEFORE = constexpr(3)  # the program that has the bucket's first share
# A row of `buckets` (buckets, 6) int64.
ACC = constexpr(0)  # address
GRAD = constexpr(1)  # address
SIZE = constexpr(2)
K = constexpr(3)
OUT = constexpr(4)  # where its share of the result begins
BASE = constexpr(5)  # where it begins among all buckets
COLUMNS = constexpr(6)


@triton.jit
def share_of(shares, buckets, work):
    """This program's bucket: its row in `buckets` and in `work`, its size, k; and the share's first tile, and
    the one behind its last.
    """
    row = shares + tl.program_id(0) * 4
    bucket = tl.load(row + BUCKET)
    about = buckets + bucket * COLUMNS
    n = tl.load(about + SIZE).to(tl.int32)
    k = tl.load(about + K).to(tl.int32)
    return about, work + bucket * ROW, n, k, tl.load(row + FIRST), tl.load(row + LAST)


@triton.jit
def vector(about, which: constexpr, kind: constexpr, ALIGNED: constexpr):
    """The tensor whose address stands in the table."""
    found = tl.load(about + which).to(tl.pointer_type(kind))
    if ALIGNED:  # to 16 bytes, so that loads and stores are wide
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def load(places, offsets, n, full):
    """Elements of a tile, 0 behind the last. A full tile needs no mask, and its loads are wide."""
    if full:
        values = tl.load(places + offsets)
    else:
        values = tl.load(places + offsets, mask=offsets < n, other=0.0)
    return values


@triton.jit
def counted(
    acc, n, first, last, prefix, PREFIX: constexpr, SHIFT: constexpr, BINS: constexpr, BLOCK: constexpr
):
    """(BINS,): counts by SHIFT of those keys of a share whose bits from PREFIX on are `prefix`."""
    counts = tl.zeros([BINS], tl.int32)
    for tile in range(first, last):
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        keys = magnitude_keys(load(acc, offsets, n, tile * BLOCK + BLOCK <= n))
        here = (offsets < n) & ((keys >> PREFIX) == prefix)
        counts += tl.histogram((keys >> SHIFT) & (BINS - 1), BINS, mask=here)
    return counts


@triton.jit
def accumulate_and_count(shares, buckets, work, KIND: constexpr, ALIGNED: constexpr, BLOCK: constexpr):
    """acc += grad; KIND: of the gradients, None: there are none. All keys are counted by their upper bits."""
    about, row, n, _k, first, last = share_of(shares, buckets, work)
    acc = vector(about, ACC, tl.float32, ALIGNED)
    counts = tl.zeros([HIGH_BINS], tl.int32)
    for tile in range(first, last):
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        full = tile * BLOCK + BLOCK <= n
        sums = load(acc, offsets, n, full)
        if KIND is not None:
            grad = vector(about, GRAD, KIND, ALIGNED)
            sums = sums + load(grad, offsets, n, full).to(tl.float32)
            if full:
                tl.store(acc + offsets, sums)
            else:
                tl.store(acc + offsets, sums, mask=offsets < n)
        counts += tl.histogram(magnitude_keys(sums) >> 20, HIGH_BINS, mask=offsets < n)
    add_counts(row + HIGH, counts, HIGH_BINS)


@triton.jit
def count_group_middle_bits(shares, buckets, work, ALIGNED: constexpr, BLOCK: constexpr):
    """Keys of the bin that the k-th falls into are counted by their next bits."""
    about, row, n, k, first, last = share_of(shares, buckets, work)
    acc = vector(about, ACC, tl.float32, ALIGNED)
    high, _above, _inside = find_bin(row + HIGH, k, HIGH_BINS)
    add_counts(row + MIDDLE, counted(acc, n, first, last, high, 20, 10, LOW_BINS, BLOCK), LOW_BINS)


@triton.jit
def count_group_low_bits(shares, buckets, work, rows, ALIGNED: constexpr, BLOCK: constexpr):
    """And by their last; each program's own count as well, into rows (programs, LOW_BINS)."""
    about, row, n, k, first, last = share_of(shares, buckets, work)
    acc = vector(about, ACC, tl.float32, ALIGNED)
    high, above, _inside = find_bin(row + HIGH, k, HIGH_BINS)
    middle, _above, _inside = find_bin(row + MIDDLE, k - above, LOW_BINS)
    counts = counted(acc, n, first, last, (high << 10) | middle, 10, 0, LOW_BINS, BLOCK)
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
    """All keys above the k-th, in no order; of those equal to it the first by index. Indices are those among
    all buckets. SHARES: a power of 2, at least as many as any bucket has.
    """
    about, row, n, k, first, last = share_of(shares, buckets, work)
    acc = vector(about, ACC, tl.float32, ALIGNED)
    out = tl.load(about + OUT)
    base = tl.load(about + BASE).to(tl.int32)
    kth, low, above = kth_key(row + HIGH, row + MIDDLE, row + LOW, k)
    # Shares of one bucket follow each other, so equal keys of smaller indices are the earlier programs'.
    earlier = tl.load(shares + tl.program_id(0) * 4 + BEFORE) + tl.arange(0, SHARES)
    ties = tl.load(rows + earlier.to(tl.int64) * LOW_BINS + low, mask=earlier < tl.program_id(0), other=0)
    taken = out + above + tl.sum(ties, 0)
    lanes = block_offsets(BLOCK, WIDTH)
    for tile in range(first, last):
        begin = tile * BLOCK
        inside = (begin + lanes < n) & (k > 0)  # of k = 0 there is no k-th
        values = load(acc, begin + lanes, n, begin + BLOCK <= n)
        taken = emit_block(
            out_indices,
            out_values,
            row + NUM_EMITTED,
            out,
            out + k,
            taken,
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
    """memory[index] += alpha x value, each in the memory that the element lies in."""
    slots = tl.program_id(0) * ADD_BLOCK + tl.arange(0, ADD_BLOCK)
    live = slots < k
    index = tl.load(indices + slots, mask=live, other=0).to(tl.int64)
    value = tl.load(values + slots, mask=live, other=0.0).to(tl.float32)
    row = tl.zeros([ADD_BLOCK], tl.int32)  # the last one that begins no later: of none that is empty
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
