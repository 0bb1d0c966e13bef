# mypy: ignore-errors
# ruff: noqa: SIM108 (a branch on what is read at run time is a statement to Triton)
"""What runs on the GPU, in Triton; triton_search.py says in which order.

triton_device_functions.py says what a key is, and what lies in `work`. Within one launch programs meet in
atomics only, and none waits for another.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from sparsify.kernels import triton_device_functions as functions


@triton.jit(do_not_specialize=["n", "rank", "least", "forced"])
def guess(
    acc,
    grad,
    work,
    totals,
    n,  # elements
    acc_stride,
    grad_stride,
    rank,  # so many of the sample are to reach the bound
    least,  # no smaller bound
    forced,  # for trials: the bound, if not negative
    SAMPLED: constexpr,
    ADD: constexpr,
    SAMPLE: constexpr,
):
    """One program: clear `work`; find the key that `rank` of a sample reach, from its upper 16 bits."""
    number = tl.arange(0, 16)
    tl.store(
        work + number, tl.zeros([16], tl.int32), mask=number > functions.BOUND
    )  # the bound is stored below
    shares = tl.arange(0, functions.MOST_PROGRAMS)
    tl.store(work + functions.SHARES + shares, tl.zeros([functions.MOST_PROGRAMS], tl.int32))
    tl.store(
        work + functions.HIGH + tl.arange(0, functions.HISTOGRAMS), tl.zeros([functions.HISTOGRAMS], tl.int32)
    )
    low = tl.full((), 0, tl.int32)
    if SAMPLED:
        # One run from each of equally long stretches, at another place each turn.
        runs: constexpr = SAMPLE // functions.RUN
        run = tl.arange(0, runs)
        whole = tl.cast(n // functions.RUN, tl.int64)
        begin = run.to(tl.int64) * whole // runs
        end = (run.to(tl.int64) + 1) * whole // runs
        turn = tl.load(totals + functions.STEPS).to(tl.int32)
        start = (begin + functions.scattered(run, turn).to(tl.int64) % (end - begin)) * functions.RUN
        places = start[:, None] + tl.arange(0, functions.RUN)[None, :].to(tl.int64)
        sums = tl.load(acc + places * acc_stride)
        if ADD:
            sums = sums + tl.load(grad + places * grad_stride).to(tl.float32)
        keys = functions.magnitude(sums)
        bit = tl.full((), 1 << 30, tl.int32)
        for _ in range(16):
            trial = low | bit
            reached = tl.sum((keys >= trial).to(tl.int32))
            low = tl.where(reached >= rank, trial, low)
            bit = bit >> 1
        low = tl.maximum(low, least)
    low = tl.where(forced >= 0, forced, low)
    tl.store(work + functions.BOUND, low)


@triton.jit(do_not_specialize=["n", "programs"])
def stream(
    acc,
    grad,
    work,
    marks,  # (n / 32, rounded up to whole tiles) int32
    n,
    acc_stride,
    grad_stride,
    programs,  # that loop, in later kernels
    GUESSED: constexpr,  # is there a bound?
    ADD: constexpr,
    TILE: constexpr,
):
    """The pass: acc += grad; what reaches the bound is marked, and counted for the program that will gather
    it. Nothing waits for these counts, so the next tiles are read meanwhile.
    """
    lanes = functions.tile_of_rows(TILE, functions.WORD)
    if GUESSED:
        bound = tl.load(
            work + functions.BOUND
        )  # before anything is stored, so that it need not be waited for
        sums, inside = functions.accumulate(acc, grad, n, acc_stride, grad_stride, lanes, ADD, TILE)
        count = functions.mark(marks, inside & (functions.magnitude(sums) >= bound), TILE)
        share = (tl.num_programs(0) + programs - 1) // programs
        to = work + functions.SHARES + tl.program_id(0) // share
        tl.atomic_add(to, count, mask=count > 0, sem="relaxed")
    else:
        functions.accumulate(acc, grad, n, acc_stride, grad_stride, lanes, ADD, TILE)


@triton.jit(do_not_specialize=["n", "k", "capacity"])
def gather(
    acc,
    work,
    marks,
    indices,  # of candidates, (capacity,)
    values,  # likewise
    n,
    acc_stride,
    k,
    capacity,
    MARKED: constexpr,  # elements of a tile when they were marked
    WORDS: constexpr,  # of marks that a program takes at a time
    TILE: constexpr,
    CHUNK: constexpr,
):
    """The marked are the candidates, in order of their indices, if they are enough and there is room for
    them: their keys are counted by their upper bits. Otherwise all keys are.
    """
    program = tl.program_id(0)
    others = tl.arange(0, functions.MOST_PROGRAMS)
    counts = tl.load(work + functions.SHARES + others)
    count = tl.sum(counts, 0)
    right = (count >= k) & (count <= capacity)
    if program == 0:
        tl.store(work + functions.COUNT, count)
        tl.store(work + functions.ALL, 1 - right.to(tl.int32))
    if right:
        first = tl.sum(tl.where(others < program, counts, 0), 0)
        last = first + tl.sum(tl.where(others == program, counts, 0), 0)
        begin, end = functions.share_of(n, MARKED)
        slot = first
        for word in range(begin // functions.WORD, (end + functions.WORD - 1) // functions.WORD, WORDS):
            words = word + tl.arange(0, WORDS)
            live = words * functions.WORD < end
            bits = tl.load(marks + words, mask=live, other=0).to(tl.uint32, bitcast=True)
            ones = functions.popcount(bits)
            slots = slot + functions.in_order(ones)
            slot += tl.sum(ones, 0)
            for _ in range(tl.max(ones, 0)):
                rest = bits & (bits - 1)
                index = words * functions.WORD + functions.exponent(bits ^ rest)
                live = bits != 0
                value = tl.load(acc + index.to(tl.int64) * acc_stride, mask=live, other=0.0)
                tl.store(indices + slots, index, mask=live)
                tl.store(values + slots, value, mask=live)
                bits = rest
                slots += 1
        if last > first:
            tl.debug_barrier()  # what other threads have stored is read
            high = functions.histogram_of(values, 1, first, last, 0, 31, 20, functions.BINS, CHUNK)
            functions.add_counts(work + functions.HIGH, high, functions.BINS)
    else:
        first, last = functions.share_of(n, TILE)
        high = functions.histogram_of(acc, acc_stride, first, last, 0, 31, 20, functions.BINS, TILE)
        functions.add_counts(work + functions.HIGH, high, functions.BINS)


@triton.jit(do_not_specialize=["n", "k"])
def count_next(acc, work, values, n, acc_stride, k, TILE: constexpr, CHUNK: constexpr):
    """Keys of the bin that the k-th falls into are counted by their next bits."""
    high, _above, _inside = functions.crossing(work + functions.HIGH, k, functions.BINS)
    counts = functions.counts_of(acc, work, values, n, acc_stride, high, 20, 10, TILE, CHUNK)
    functions.add_counts(work + functions.MIDDLE, counts, functions.FEW)


@triton.jit(do_not_specialize=["n", "k"])
def count_last(acc, work, values, rows, n, acc_stride, k, TILE: constexpr, CHUNK: constexpr):
    """And by their last; each program's own count as well, (programs, FEW)."""
    high, above, _inside = functions.crossing(work + functions.HIGH, k, functions.BINS)
    middle, _above, _inside = functions.crossing(work + functions.MIDDLE, k - above, functions.FEW)
    counts = functions.counts_of(acc, work, values, n, acc_stride, (high << 10) | middle, 10, 0, TILE, CHUNK)
    functions.add_counts(work + functions.LOW, counts, functions.FEW)
    tl.store(rows + tl.program_id(0) * functions.FEW + tl.arange(0, functions.FEW), counts)


@triton.jit(do_not_specialize=["n", "k"])
def emit(
    acc,
    work,
    indices,
    values,
    rows,
    totals,
    out_indices,
    out_values,
    n,
    acc_stride,
    k,
    GUESSED: constexpr,
    WIDTH: constexpr,  # neighbours in acc that one thread has, so that each is in a register of its own
    TILE: constexpr,
    LONG: constexpr,  # tile of the kernels that have counted, by which elements are shared out
    CHUNK_WIDTH: constexpr,  # neighbours among candidates
    CHUNK: constexpr,
):
    """All keys above the k-th, of those equal to it the first by index; totals."""
    program = tl.program_id(0)
    whole = tl.load(work + functions.ALL) != 0
    if program == 0:
        tl.store(totals + functions.STEPS, tl.load(totals + functions.STEPS) + 1)
        if whole & GUESSED:
            tl.store(totals + functions.FALLBACKS, tl.load(totals + functions.FALLBACKS) + 1)
        else:
            tl.store(totals + functions.SELECTED, tl.load(totals + functions.SELECTED) + k)
            count = tl.load(work + functions.COUNT)
            tl.store(totals + functions.CANDIDATES, tl.load(totals + functions.CANDIDATES) + count)
    kth, low, above = functions.kth_key(
        work + functions.HIGH, work + functions.MIDDLE, work + functions.LOW, k
    )
    # Programs take consecutive shares in order of indices, so equal keys of smaller ones are the earlier's.
    earlier = tl.arange(0, functions.MOST_PROGRAMS)
    ties = tl.load(rows + earlier * functions.FEW + low, mask=earlier < program, other=0)
    taken = above + tl.sum(ties, 0)
    counter = work + functions.EMITTED
    if whole:
        first, last = functions.share_of(n, LONG)
        functions.emit_range(
            out_indices, out_values, counter, k, taken, acc, acc_stride, None, first, last, kth, TILE, WIDTH
        )
    else:
        first, last = functions.share_of(tl.load(work + functions.COUNT), CHUNK)
        functions.emit_range(
            out_indices,
            out_values,
            counter,
            k,
            taken,
            values,
            1,
            indices,
            first,
            last,
            kth,
            CHUNK,
            CHUNK_WIDTH,
        )


@triton.jit(do_not_specialize=["n"])
def stream_above(
    acc,
    grad,
    threshold,  # (1,) float32
    marks,  # (n / 32, rounded up to whole tiles) int32
    counted,  # (programs,) int32
    n,
    acc_stride,
    grad_stride,
    ADD: constexpr,
    STRICT: constexpr,
    TILE: constexpr,
):
    """acc += grad; what reaches the threshold is marked, and counted in each tile."""
    least = tl.load(threshold)
    lanes = functions.tile_of_rows(TILE, functions.WORD)
    sums, inside = functions.accumulate(acc, grad, n, acc_stride, grad_stride, lanes, ADD, TILE)
    if STRICT:
        keep = tl.abs(sums) > least
    else:
        keep = tl.abs(sums) >= least
    tl.store(counted + tl.program_id(0), functions.mark(marks, inside & keep, TILE))


@triton.jit(do_not_specialize=["n"])
def gather_in_order(acc, marks, ends, out_indices, out_values, n, acc_stride, TILE: constexpr):
    """What is marked, ascending; each tile's share ends in the result where `ends` (programs,) int64 says."""
    words = tl.program_id(0) * (TILE // functions.WORD) + tl.arange(0, TILE // functions.WORD)
    bits = tl.load(marks + words).to(tl.uint32, bitcast=True)
    first, counts = words * functions.WORD, functions.popcount(bits)
    slots = tl.load(ends + tl.program_id(0)) - tl.sum(counts, 0) + functions.in_order(counts)
    for _ in range(tl.max(counts, 0)):
        rest = bits & (bits - 1)
        index = first + functions.exponent(bits ^ rest)
        live = bits != 0
        value = tl.load(acc + index.to(tl.int64) * acc_stride, mask=live, other=0.0)
        tl.store(out_indices + slots, index, mask=live)
        tl.store(out_values + slots, value, mask=live)
        bits = rest
        slots += 1
