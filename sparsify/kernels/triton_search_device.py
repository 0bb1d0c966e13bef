# mypy: ignore-errors
# ruff: noqa: SIM108 (a branch on what is read at run time is a statement to Triton)
"""Triton's kernels that search one bucket; triton_search.py says in which order they run.

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
    """Clear `work`, and find the key that `rank` of a sample reach, by its upper 16 bits, in one program."""
    number = tl.arange(0, 8192)  # a power of 2
    # All but the bound, which is stored below.
    tl.store(work + number, 0, mask=(number < device.WORK_NUMEL) & (number != device.BOUND))
    low = tl.full((), 0, tl.int32)
    if SAMPLED:
        # One run from each of equally long stretches, at another place each step.
        runs: constexpr = SAMPLE_NUMEL // device.RUN_NUMEL
        run = tl.arange(0, runs)
        whole = tl.cast(n // device.RUN_NUMEL, tl.int64)
        begin = run.to(tl.int64) * whole // runs
        end = (run.to(tl.int64) + 1) * whole // runs
        step = tl.load(totals + device.STEPS).to(tl.int32)
        start = (begin + device.hash_to_31_bits(run, step).to(tl.int64) % (end - begin)) * device.RUN_NUMEL
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
    marks,  # (n / 32, rounded up to whole blocks) int32
    n,
    acc_stride,
    grad_stride,
    programs,  # that loop, in later kernels
    GUESSED: constexpr,  # is there a bound?
    ADD: constexpr,
    BLOCK: constexpr,
):
    """Add grad to acc; mark the elements that reach the bound, and count them.

    They are counted for the program that will gather them. Nothing waits for these counts, so the next blocks
    are read meanwhile.
    """
    begin = tl.program_id(0) * BLOCK
    offsets = device.block_offsets(BLOCK, device.MARKS_PER_WORD)
    # Before anything is stored, so that it need not be waited for.
    bound = tl.load(work + device.BOUND)
    sums, inside = device.accumulate_block(acc, grad, n, acc_stride, grad_stride, begin, offsets, ADD, BLOCK)
    if GUESSED:
        count = device.store_marks_and_count(marks, inside & (device.magnitude_keys(sums) >= bound), BLOCK)
        share = (tl.num_programs(0) + programs - 1) // programs
        counter = work + device.CANDIDATES_BY_PROGRAM + tl.program_id(0) // share
        tl.atomic_add(counter, count, mask=count > 0, sem="relaxed")


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
    MARK_BLOCK: constexpr,  # elements of a block when they were marked
    WORD_BLOCK: constexpr,  # words of marks that a program takes at a time
    BLOCK: constexpr,
    CANDIDATE_BLOCK: constexpr,
):
    """Gather the marked elements in order of their indices, and count their keys by their upper bits.

    They are the candidates, if they are enough and there is room for them. Otherwise all keys are counted.
    """
    program = tl.program_id(0)
    others = tl.arange(0, device.MAX_PROGRAMS)
    counts = tl.load(work + device.CANDIDATES_BY_PROGRAM + others)
    count = tl.sum(counts, 0)
    is_bound_right = (count >= k) & (count <= capacity)
    if program == 0:
        tl.store(work + device.NUM_CANDIDATES, count)
        tl.store(work + device.SEARCHES_ALL, 1 - is_bound_right.to(tl.int32))
    if is_bound_right:
        first = tl.sum(tl.where(others < program, counts, 0), 0)
        last = first + tl.sum(tl.where(others == program, counts, 0), 0)
        begin, end = device.program_range(n, MARK_BLOCK)
        slot = first
        for word in range(
            begin // device.MARKS_PER_WORD,
            (end + device.MARKS_PER_WORD - 1) // device.MARKS_PER_WORD,
            WORD_BLOCK,
        ):
            words = word + tl.arange(0, WORD_BLOCK)
            live = words * device.MARKS_PER_WORD < end
            bits = tl.load(marks + words, mask=live, other=0).to(tl.uint32, bitcast=True)
            counts = device.popcount(bits)
            slots = slot + device.exclusive_cumsum(counts)
            slot += tl.sum(counts, 0)
            device.gather_words(acc, acc_stride, words, bits, indices, values, slots)
        if last > first:
            tl.debug_barrier()  # what other threads have stored is read
            high = device.count_keys(values, 1, first, last, 0, 31, 20, device.HIGH_BINS, CANDIDATE_BLOCK)
            device.add_counts(work + device.HIGH, high, device.HIGH_BINS)
    else:
        first, last = device.program_range(n, BLOCK)
        high = device.count_keys(acc, acc_stride, first, last, 0, 31, 20, device.HIGH_BINS, BLOCK)
        device.add_counts(work + device.HIGH, high, device.HIGH_BINS)


@triton.jit(do_not_specialize=["n", "k"])
def count_middle_bits(acc, work, values, n, acc_stride, k, BLOCK: constexpr, CANDIDATE_BLOCK: constexpr):
    """Count keys of the bin that the k-th falls into by their middle bits."""
    high, _above = device.find_kth_bin(work + device.HIGH, k, device.HIGH_BINS)
    counts = device.count_candidate_or_all_keys(
        acc, work, values, n, acc_stride, high, 20, 10, BLOCK, CANDIDATE_BLOCK
    )
    device.add_counts(work + device.MIDDLE, counts, device.LOW_BINS)


@triton.jit(do_not_specialize=["n", "k"])
def count_low_bits(acc, work, values, rows, n, acc_stride, k, BLOCK: constexpr, CANDIDATE_BLOCK: constexpr):
    """Count keys of the bin that the k-th falls into by their low bits.

    Each program's own count is stored as well, in rows (programs, LOW_BINS).
    """
    upper_bits, _above = device.find_kth_upper_bits_and_num_above(work + device.HIGH, work + device.MIDDLE, k)
    counts = device.count_candidate_or_all_keys(
        acc, work, values, n, acc_stride, upper_bits, 10, 0, BLOCK, CANDIDATE_BLOCK
    )
    device.add_and_store_counts(work + device.LOW, rows, counts)


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
    COUNT_BLOCK: constexpr,  # block of the kernels that have counted, by which elements are divided
    CANDIDATE_WIDTH: constexpr,  # neighbours among candidates
    CANDIDATE_BLOCK: constexpr,
):
    """Emit all keys above the k-th, and of those equal to it the first by index; update the totals."""
    program = tl.program_id(0)
    searches_all = tl.load(work + device.SEARCHES_ALL) != 0
    if program == 0:
        device.increase(totals + device.STEPS, 1)
        if searches_all & GUESSED:
            device.increase(totals + device.FALLBACKS, 1)
        else:
            device.increase(totals + device.SELECTED, k)
            device.increase(totals + device.CANDIDATES, tl.load(work + device.NUM_CANDIDATES))
    kth, low, above = device.find_kth_key(work + device.HIGH, work + device.MIDDLE, work + device.LOW, k)
    # Programs take consecutive ranges in order of indices, so equal keys of smaller ones are the earlier's.
    earlier = tl.arange(0, device.MAX_PROGRAMS)
    ties = tl.load(rows + earlier * device.LOW_BINS + low, mask=earlier < program, other=0)
    tie_slot = above + tl.sum(ties, 0)
    counter = work + device.NUM_EMITTED
    if searches_all:
        first, last = device.program_range(n, COUNT_BLOCK)
        device.emit_range(
            out_indices,
            out_values,
            counter,
            k,
            tie_slot,
            acc,
            acc_stride,
            0,
            None,
            first,
            last,
            kth,
            BLOCK,
            WIDTH,
        )
    else:
        first, last = device.program_range(tl.load(work + device.NUM_CANDIDATES), CANDIDATE_BLOCK)
        device.emit_range(
            out_indices,
            out_values,
            counter,
            k,
            tie_slot,
            values,
            1,
            0,
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
    marks,  # (n / 32, rounded up to whole blocks) int32
    counted,  # (programs,) int32
    n,
    acc_stride,
    grad_stride,
    ADD: constexpr,
    STRICT: constexpr,
    BLOCK: constexpr,
):
    """Add grad to acc; mark the elements that reach the threshold, and count them in each block."""
    least = tl.load(threshold)
    begin = tl.program_id(0) * BLOCK
    offsets = device.block_offsets(BLOCK, device.MARKS_PER_WORD)
    sums, inside = device.accumulate_block(acc, grad, n, acc_stride, grad_stride, begin, offsets, ADD, BLOCK)
    if STRICT:
        keep = tl.abs(sums) > least
    else:
        keep = tl.abs(sums) >= least
    tl.store(counted + tl.program_id(0), device.store_marks_and_count(marks, inside & keep, BLOCK))


@triton.jit(do_not_specialize=["n"])
def gather_marked(acc, marks, ends, out_indices, out_values, n, acc_stride, BLOCK: constexpr):
    """Gather the marked elements, ascending; those of a block end where `ends` (programs,) int64 says."""
    words = tl.program_id(0) * (BLOCK // device.MARKS_PER_WORD) + tl.arange(0, BLOCK // device.MARKS_PER_WORD)
    bits = tl.load(marks + words).to(tl.uint32, bitcast=True)
    counts = device.popcount(bits)
    slots = tl.load(ends + tl.program_id(0)) - tl.sum(counts, 0) + device.exclusive_cumsum(counts)
    device.gather_words(acc, acc_stride, words, bits, out_indices, out_values, slots)
