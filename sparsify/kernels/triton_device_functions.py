# mypy: ignore-errors
# ruff: noqa: SIM108 (a branch on what is read at run time is a statement to Triton)
"""Functions that Triton's kernels share, and the layout of their work memory.

A key is the bits of |x| as an integer: its order is that of magnitudes, NaN above Inf. `work` (WORK_NUMEL,)
int32 holds numbers that kernels leave to later ones, how many candidates each program has, then three
histograms.

Offsets are int32 (triton_search.py refuses longer vectors); a stride can make them longer, so addresses are
int64.
"""

import triton
import triton.language as tl
from triton.language import constexpr

# Numbers in `work`. All are 0 when a call begins.
BOUND = constexpr(0)  # least key of a candidate
NUM_CANDIDATES = constexpr(1)  # elements that reached the bound
# 1: the k-th is looked for among all elements, for the bound was wrong, or there is none.
SEARCHES_ALL = constexpr(2)
NUM_EMITTED = constexpr(3)  # slots given away in the result
# Then how many candidates each program has that loops, and the histograms of keys: by upper, middle and lower
# bits.
CANDIDATES_BY_PROGRAM = constexpr(16)
MAX_PROGRAMS = constexpr(1024)
HIGH_BINS = constexpr(2048)
LOW_BINS = constexpr(1024)
HIGH = constexpr(16 + 1024)
MIDDLE = constexpr(16 + 1024 + 2048)
LOW = constexpr(16 + 1024 + 2048 + 1024)
WORK_NUMEL = constexpr(16 + 1024 + 2048 + 2 * 1024)
# In `totals` (4,) int64, counted over all calls: see `sparsify.types.SearchStats`.
STEPS = constexpr(0)
FALLBACKS = constexpr(1)
CANDIDATES = constexpr(2)
SELECTED = constexpr(3)

MARKS_PER_WORD = constexpr(32)  # elements that a word of marks speaks of
RUN_NUMEL = constexpr(32)  # elements of a sample that lie side by side: a memory line


@triton.jit
def magnitude_keys(values):
    """Return the keys, int32, of float32 values."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load_block_and_mask(acc, n, acc_stride, begin, offsets, BLOCK: constexpr):
    """Load elements `offsets` from `begin` on: values, 0 where there is none; and where there is one."""
    inside = offsets < n - begin
    places = acc + tl.cast(begin, tl.int64) * acc_stride + offsets.to(tl.int64) * acc_stride
    if begin + BLOCK <= n:  # loads without a mask are wide
        values = tl.load(places)
    else:
        values = tl.load(places, mask=inside, other=0.0)
    return values, inside


@triton.jit
def accumulate_block(acc, grad, n, acc_stride, grad_stride, begin, offsets, ADD: constexpr, BLOCK: constexpr):
    """Add grad to acc in the block from `begin` on; return the sums, and a mask of those that exist."""
    inside = offsets < n - begin
    # One base of 64 bits; offsets differ from it by few bits, and mostly by constants.
    places = acc + tl.cast(begin, tl.int64) * acc_stride + offsets.to(tl.int64) * acc_stride
    addends = grad + tl.cast(begin, tl.int64) * grad_stride + offsets.to(tl.int64) * grad_stride
    if begin + BLOCK <= n:  # loads and stores without a mask are wide
        sums = tl.load(places)
        if ADD:
            sums = sums + tl.load(addends).to(tl.float32)
            tl.store(places, sums)
    else:
        sums = tl.load(places, mask=inside, other=0.0)
        if ADD:
            sums = sums + tl.load(addends, mask=inside, other=0.0).to(tl.float32)
            tl.store(places, sums, mask=inside)
    return sums, inside


@triton.jit
def block_offsets(BLOCK: constexpr, WIDTH: constexpr):
    """Return 0 ... BLOCK - 1 as (BLOCK / WIDTH, WIDTH)."""
    return tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def select_column(rows, number: constexpr, WIDTH: constexpr):
    """Return a column (m,) of rows (m, WIDTH) int32: where a row lies in one thread, one of its registers."""
    return tl.sum(tl.where(tl.arange(0, WIDTH)[None, :] == number, rows, 0), 1)


@triton.jit
def store_kept(
    indices, values, slots, end, begin, index_table, keep, bits, BLOCK: constexpr, WIDTH: constexpr
):
    """Store the kept elements (BLOCK / WIDTH, WIDTH) of a block that starts at `begin`.

    Those of a row go to its slot and the slots behind it, while these are less than `end`. The block's
    indices stand in `index_table` from `begin` on, or are the numbers from `begin` on where that is None.
    """
    # In columns: before scattered stores of a whole block, Triton would move all of it between threads.
    for number in tl.static_range(WIDTH):
        is_hit = select_column(keep, number, WIDTH)
        live = (is_hit > 0) & (slots < end)
        index = begin + tl.arange(0, BLOCK // WIDTH) * WIDTH + number
        if index_table is not None:
            index = tl.load(index_table + index, mask=live, other=0)
        tl.store(indices + slots, index, mask=live)
        tl.store(values + slots, select_column(bits, number, WIDTH).to(tl.float32, bitcast=True), mask=live)
        slots += is_hit


@triton.jit
def exclusive_cumsum(counts):
    """Return the sum (m,) of the counts before each."""
    return tl.cumsum(counts, 0) - counts


@triton.jit
def store_marks_and_count(marks, keep, BLOCK: constexpr):
    """Store one bit for each element of this program's block; return how many are marked.

    Each row of `keep` (BLOCK / 32, 32) is a word, whose lowest bit is the first element.
    """
    bits = tl.sum(keep.to(tl.uint32) << tl.arange(0, MARKS_PER_WORD)[None, :].to(tl.uint32), 1)
    words = tl.program_id(0) * (BLOCK // MARKS_PER_WORD) + tl.arange(0, BLOCK // MARKS_PER_WORD)
    tl.store(marks + words, bits.to(tl.int32, bitcast=True))
    return tl.sum(popcount(bits), 0)


@triton.jit
def popcount(x):
    """Count the bits, int32, that are set in uint32 numbers. Hacker's Delight, figure 5-2."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def exponent_of_power_of_2(x):
    """Return the exponents, int32, of powers of 2, uint32, read off a float; of 0 a negative number."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def gather_words(acc, acc_stride, words, bits, indices, values, slots):
    """Gather the elements whose marks are set in words (m,), each word's from its slot on, ascending."""
    for _ in range(tl.max(popcount(bits), 0)):
        rest = bits & (bits - 1)
        index = words * MARKS_PER_WORD + exponent_of_power_of_2(bits ^ rest)
        live = bits != 0
        value = tl.load(acc + index.to(tl.int64) * acc_stride, mask=live, other=0.0)
        tl.store(indices + slots, index, mask=live)
        tl.store(values + slots, value, mask=live)
        bits = rest
        slots += 1


@triton.jit
def find_kth_bin(histogram, k, SIZE: constexpr):
    """Find the bin of the k-th largest; return it, and how many are above it; zeros if there is no k-th."""
    order = tl.arange(0, SIZE)
    counts = tl.load(histogram + (SIZE - 1 - order))
    above = exclusive_cumsum(counts)
    is_hit = (above < k) & (above + counts >= k)
    return tl.sum(tl.where(is_hit, SIZE - 1 - order, 0), 0), tl.sum(tl.where(is_hit, above, 0), 0)


@triton.jit
def find_kth_upper_bits_and_num_above(high, middle, k):
    """Find the upper and middle bits of the k-th largest key; return them, and how many keys are above."""
    upper, above = find_kth_bin(high, k, HIGH_BINS)
    inner, more = find_kth_bin(middle, k - above, LOW_BINS)
    return (upper << 10) | inner, above + more


@triton.jit
def find_kth_key(high, middle, low, k):
    """Find the k-th largest key by three histograms; return it, its lower bits, and how many are above."""
    upper_bits, above = find_kth_upper_bits_and_num_above(high, middle, k)
    lower, more = find_kth_bin(low, k - above, LOW_BINS)
    return (upper_bits << 10) | lower, lower, above + more


@triton.jit
def emit_range(
    indices,
    values,
    counter,
    end,
    tie_slot,
    x,
    stride,
    base,
    index_table,
    first,
    last,
    kth,
    BLOCK: constexpr,
    WIDTH: constexpr,
):
    """Emit the elements x [first, last) whose keys are at least the k-th, while slots are less than `end`.

    Keys above the k-th go to slots that `counter` gives away, in no order; those equal to it to slots from
    `tie_slot` on. Indices are counted from `base` on, or stand in `index_table` where that is not None.
    """
    offsets = block_offsets(BLOCK, WIDTH)
    for begin in range(first, last, BLOCK):
        loaded, live = load_block_and_mask(x, last, stride, begin, offsets, BLOCK)
        keys = magnitude_keys(loaded)
        bits = loaded.to(tl.int32, bitcast=True)
        larger = (live & (keys > kth)).to(tl.int32)
        counts = tl.sum(larger, 1)
        total = tl.sum(counts, 0)
        if total > 0:
            slots = tl.atomic_add(counter, total, sem="relaxed") + exclusive_cumsum(counts)
            store_kept(indices, values, slots, end, base + begin, index_table, larger, bits, BLOCK, WIDTH)
        equal = (live & (keys == kth)).to(tl.int32)
        counts = tl.sum(equal, 1)
        total = tl.sum(counts, 0)
        if total > 0:
            slots = tie_slot + exclusive_cumsum(counts)
            store_kept(indices, values, slots, end, base + begin, index_table, equal, bits, BLOCK, WIDTH)
        tie_slot += total


@triton.jit
def hash_to_31_bits(number, turn):
    """Return pseudo-random numbers of 31 bits for two int32 numbers."""
    x = number.to(tl.uint32) * 0x2C1B3C6D + turn.to(tl.uint32) * 0x297A2D39
    x = (x ^ (x >> 15)) * 0x2C1B3C6D
    x = (x ^ (x >> 12)) * 0x297A2D39
    return (x ^ (x >> 15)) >> 1


@triton.jit
def program_range(n, BLOCK: constexpr):
    """Return the range of this program's elements, of n: some blocks in a row."""
    num_blocks = (n + BLOCK - 1) // BLOCK
    length = (num_blocks + tl.num_programs(0) - 1) // tl.num_programs(0)
    first = tl.program_id(0) * length * BLOCK  # behind n, where there is nothing left
    return first, tl.minimum(first + length * BLOCK, n)


@triton.jit
def count_keys(
    values,
    stride,
    first,
    last,
    prefix,
    PREFIX: constexpr,
    SHIFT: constexpr,
    SIZE: constexpr,
    BLOCK: constexpr,
):
    """Count keys of values [first, last) with `prefix` from bit PREFIX on, by their bits from SHIFT on."""
    counts = tl.zeros([SIZE], tl.int32)
    offsets = tl.arange(0, BLOCK)
    for begin in range(first, last, BLOCK):
        loaded, inside = load_block_and_mask(values, last, stride, begin, offsets, BLOCK)
        keys = magnitude_keys(loaded)
        if PREFIX < 31:
            inside = inside & ((keys >> PREFIX) == prefix)
        counts += tl.histogram((keys >> SHIFT) & (SIZE - 1), SIZE, mask=inside)
    return counts


@triton.jit
def count_candidate_or_all_keys(
    acc,
    work,
    values,
    n,
    acc_stride,
    prefix,
    PREFIX: constexpr,
    SHIFT: constexpr,
    BLOCK: constexpr,
    CANDIDATE_BLOCK: constexpr,
):
    """Count as `count_keys` this program's range of the candidates, or of all elements: (LOW_BINS,)."""
    if tl.load(work + SEARCHES_ALL) != 0:
        first, last = program_range(n, BLOCK)
        counts = count_keys(acc, acc_stride, first, last, prefix, PREFIX, SHIFT, LOW_BINS, BLOCK)
    else:
        first, last = program_range(tl.load(work + NUM_CANDIDATES), CANDIDATE_BLOCK)
        counts = count_keys(values, 1, first, last, prefix, PREFIX, SHIFT, LOW_BINS, CANDIDATE_BLOCK)
    return counts


@triton.jit
def add_counts(histogram, counts, SIZE: constexpr):
    """Add this program's counts to a histogram."""
    tl.atomic_add(histogram + tl.arange(0, SIZE), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def add_and_store_counts(histogram, rows, counts):
    """Add this program's counts to a histogram, and store them in its row of (programs, LOW_BINS)."""
    add_counts(histogram, counts, LOW_BINS)
    tl.store(rows + tl.program_id(0).to(tl.int64) * LOW_BINS + tl.arange(0, LOW_BINS), counts)


@triton.jit
def increase(counter, amount):
    """Add to a number in memory that no other program writes."""
    tl.store(counter, tl.load(counter) + amount)
