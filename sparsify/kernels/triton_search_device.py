# mypy: ignore-errors
# ruff: noqa: SIM108 (a branch on what is read at run time is a statement to Triton)
"""What runs on the GPU, in Triton; triton_search.py says in which order.

triton_device_functions.py says what a key is, and what lies in `work`. Within one launch programs meet in
atomics only, and none waits for another.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from sparsify.kernels import triton_device_functions as device


@triton.jit(do_not_specialize=["n", "rank", "least", "forced"])
def guess_bound(
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
    SAMPLE_NUMEL: constexpr,
):
    """One program: clear `work`; find the key that `rank` of a sample reach, from its upper 16 bits."""
    number = tl.arange(0, 16)
    tl.store(
        work + number, tl.zeros([16], tl.int32), mask=number > device.BOUND
    )  # the bound is stored below
    shares = tl.arange(0, device.MAX_PROGRAMS)
    tl.store(work + device.CANDIDATES_BY_PROGRAM + shares, tl.zeros([device.MAX_PROGRAMS], tl.int32))
    tl.store(
        work + device.HIGH + tl.arange(0, device.HISTOGRAMS_NUMEL), tl.zeros([device.HISTOGRAMS_NUMEL], tl.int32)
    )
    low = tl.full((), 0, tl.int32)
    if SAMPLED:
        # One run from each of equally long stretches, at another place each turn.
        runs: constexpr = SAMPLE_NUMEL // device.RUN_NUMEL
        run = tl.arange(0, runs)
        whole = tl.cast(n // device.RUN_NUMEL, tl.int64)
        begin = run.to(tl.int64) * whole // runs
        end = (run.to(tl.int64) + 1) * whole // runs
        turn = tl.load(totals + device.STEPS).to(tl.int32)
        start = (begin + device.pseudo_random(run, turn).to(tl.int64) % (end - begin)) * device.RUN_NUMEL
        places = start[:, None] + tl.arange(0, device.RUN_NUMEL)[None, :].to(tl.int64)
        sums = tl.load(acc + places * acc_stride)
        if ADD:
            sums = sums + tl.load(grad + places * grad_stride).to(tl.float32)
        keys = device.magnitude_keys(sums)
        bit = tl.full((), 1 << 30, tl.int32)
        for _ in range(16):
            trial = low | bit
            reached = tl.sum((keys >= trial).to(tl.int32))
            low = tl.where(reached >= rank, trial, low)
            bit = bit >> 1
        low = tl.maximum(low, least)
    low = tl.where(forced >= 0, forced, low)
    tl.store(work + device.BOUND, low)


@triton.jit(do_not_specialize=["n", "programs"])
def accumulate_and_mark(
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
    BLOCK: constexpr,
):
    """The pass: acc += grad; what reaches the bound is marked, and counted for the program that will gather
    it. Nothing waits for these counts, so the next tiles are read meanwhile.
    """
    lanes = device.block_offsets(BLOCK, device.MARKS_PER_WORD)
    if GUESSED:
        bound = tl.load(
            work + device.BOUND
        )  # before anything is stored, so that it need not be waited for
        sums, inside = device.accumulate(acc, grad, n, acc_stride, grad_stride, lanes, ADD, BLOCK)
        count = device.store_marks(marks, inside & (device.magnitude_keys(sums) >= bound), BLOCK)
        share = (tl.num_programs(0) + programs - 1) // programs
        to = work + device.CANDIDATES_BY_PROGRAM + tl.program_id(0) // share
        tl.atomic_add(to, count, mask=count > 0, sem="relaxed")
    else:
        device.accumulate(acc, grad, n, acc_stride, grad_stride, lanes, ADD, BLOCK)


@triton.jit(do_not_specialize=["n", "k", "capacity"])
def gather_candidates(
    acc,
    work,
    marks,
    indices,  # of candidates, (capacity,)
    values,  # likewise
    n,
    acc_stride,
    k,
    capacity,
    MARK_BLOCK: constexpr,  # elements of a tile when they were marked
    WORD_BLOCK: constexpr,  # of marks that a program takes at a time
    BLOCK: constexpr,
    CANDIDATE_BLOCK: constexpr,
):
    """The marked are the candidates, in order of their indices, if they are enough and there is room for
    them: their keys are counted by their upper bits. Otherwise all keys are.
    """
    program = tl.program_id(0)
    others = tl.arange(0, device.MAX_PROGRAMS)
    counts = tl.load(work + device.CANDIDATES_BY_PROGRAM + others)
    count = tl.sum(counts, 0)
    right = (count >= k) & (count <= capacity)
    if program == 0:
        tl.store(work + device.NUM_CANDIDATES, count)
        tl.store(work + device.SEARCHES_ALL, 1 - right.to(tl.int32))
    if right:
        first = tl.sum(tl.where(others < program, counts, 0), 0)
        last = first + tl.sum(tl.where(others == program, counts, 0), 0)
        begin, end = device.program_range(n, MARK_BLOCK)
        slot = first
        for word in range(begin // device.MARKS_PER_WORD, (end + device.MARKS_PER_WORD - 1) // device.MARKS_PER_WORD, WORD_BLOCK):
            words = word + tl.arange(0, WORD_BLOCK)
            live = words * device.MARKS_PER_WORD < end
            bits = tl.load(marks + words, mask=live, other=0).to(tl.uint32, bitcast=True)
            ones = device.popcount(bits)
            slots = slot + device.exclusive_cumsum(ones)
            slot += tl.sum(ones, 0)
            for _ in range(tl.max(ones, 0)):
                rest = bits & (bits - 1)
                index = words * device.MARKS_PER_WORD + device.exponent(bits ^ rest)
                live = bits != 0
                value = tl.load(acc + index.to(tl.int64) * acc_stride, mask=live, other=0.0)
                tl.store(indices + slots, index, mask=live)
                tl.store(values + slots, value, mask=live)
                bits = rest
                slots += 1
        if last > first:
            tl.debug_barrier()  # what other threads have stored is read
            high = device.count_range(values, 1, first, last, 0, 31, 20, device.HIGH_BINS, CANDIDATE_BLOCK)
            device.add_counts(work + device.HIGH, high, device.HIGH_BINS)
    else:
        first, last = device.program_range(n, BLOCK)
        high = device.count_range(acc, acc_stride, first, last, 0, 31, 20, device.HIGH_BINS, BLOCK)
        device.add_counts(work + device.HIGH, high, device.HIGH_BINS)


@triton.jit(do_not_specialize=["n", "k"])
def count_middle_bits(acc, work, values, n, acc_stride, k, BLOCK: constexpr, CANDIDATE_BLOCK: constexpr):
    """Keys of the bin that the k-th falls into are counted by their next bits."""
    high, _above, _inside = device.find_bin(work + device.HIGH, k, device.HIGH_BINS)
    counts = device.count_program_range(
        acc, work, values, n, acc_stride, high, 20, 10, BLOCK, CANDIDATE_BLOCK
    )
    device.add_counts(work + device.MIDDLE, counts, device.LOW_BINS)


@triton.jit(do_not_specialize=["n", "k"])
def count_low_bits(acc, work, values, rows, n, acc_stride, k, BLOCK: constexpr, CANDIDATE_BLOCK: constexpr):
    """And by their last; each program's own count as well, (programs, LOW_BINS)."""
    high, above, _inside = device.find_bin(work + device.HIGH, k, device.HIGH_BINS)
    middle, _above, _inside = device.find_bin(work + device.MIDDLE, k - above, device.LOW_BINS)
    counts = device.count_program_range(
        acc, work, values, n, acc_stride, (high << 10) | middle, 10, 0, BLOCK, CANDIDATE_BLOCK
    )
    device.add_counts(work + device.LOW, counts, device.LOW_BINS)
    tl.store(rows + tl.program_id(0) * device.LOW_BINS + tl.arange(0, device.LOW_BINS), counts)


@triton.jit(do_not_specialize=["n", "k"])
def emit_largest(
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
    BLOCK: constexpr,
    COUNT_BLOCK: constexpr,  # tile of the kernels that have counted, by which elements are shared out
    CANDIDATE_WIDTH: constexpr,  # neighbours among candidates
    CANDIDATE_BLOCK: constexpr,
):
    """All keys above the k-th, of those equal to it the first by index; totals."""
    program = tl.program_id(0)
    whole = tl.load(work + device.SEARCHES_ALL) != 0
    if program == 0:
        tl.store(totals + device.STEPS, tl.load(totals + device.STEPS) + 1)
        if whole & GUESSED:
            tl.store(totals + device.FALLBACKS, tl.load(totals + device.FALLBACKS) + 1)
        else:
            tl.store(totals + device.SELECTED, tl.load(totals + device.SELECTED) + k)
            count = tl.load(work + device.NUM_CANDIDATES)
            tl.store(totals + device.CANDIDATES, tl.load(totals + device.CANDIDATES) + count)
    kth, low, above = device.kth_key(
        work + device.HIGH, work + device.MIDDLE, work + device.LOW, k
    )
    # Programs take consecutive shares in order of indices, so equal keys of smaller ones are the earlier's.
    earlier = tl.arange(0, device.MAX_PROGRAMS)
    ties = tl.load(rows + earlier * device.LOW_BINS + low, mask=earlier < program, other=0)
    taken = above + tl.sum(ties, 0)
    counter = work + device.NUM_EMITTED
    if whole:
        first, last = device.program_range(n, COUNT_BLOCK)
        device.emit_range(
            out_indices, out_values, counter, k, taken, acc, acc_stride, None, first, last, kth, BLOCK, WIDTH
        )
    else:
        first, last = device.program_range(tl.load(work + device.NUM_CANDIDATES), CANDIDATE_BLOCK)
        device.emit_range(
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
            CANDIDATE_BLOCK,
            CANDIDATE_WIDTH,
        )


@triton.jit(do_not_specialize=["n"])
def accumulate_and_mark_above(
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
    BLOCK: constexpr,
):
    """acc += grad; what reaches the threshold is marked, and counted in each tile."""
    least = tl.load(threshold)
    lanes = device.block_offsets(BLOCK, device.MARKS_PER_WORD)
    sums, inside = device.accumulate(acc, grad, n, acc_stride, grad_stride, lanes, ADD, BLOCK)
    if STRICT:
        keep = tl.abs(sums) > least
    else:
        keep = tl.abs(sums) >= least
    tl.store(counted + tl.program_id(0), device.store_marks(marks, inside & keep, BLOCK))


@triton.jit(do_not_specialize=["n"])
def gather_marked(acc, marks, ends, out_indices, out_values, n, acc_stride, BLOCK: constexpr):
    """What is marked, ascending; each tile's share ends in the result where `ends` (programs,) int64 says."""
    words = tl.program_id(0) * (BLOCK // device.MARKS_PER_WORD) + tl.arange(0, BLOCK // device.MARKS_PER_WORD)
    bits = tl.load(marks + words).to(tl.uint32, bitcast=True)
    first, counts = words * device.MARKS_PER_WORD, device.popcount(bits)
    slots = tl.load(ends + tl.program_id(0)) - tl.sum(counts, 0) + device.exclusive_cumsum(counts)
    for _ in range(tl.max(counts, 0)):
        rest = bits & (bits - 1)
        index = first + device.exponent(bits ^ rest)
        live = bits != 0
        value = tl.load(acc + index.to(tl.int64) * acc_stride, mask=live, other=0.0)
        tl.store(out_indices + slots, index, mask=live)
        tl.store(out_values + slots, value, mask=live)
        bits = rest
        slots += 1
