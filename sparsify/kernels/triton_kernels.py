# mypy: ignore-errors
# ruff: noqa: SIM108 (a branch on what is read at run time is a statement to Triton)
"""What runs on the GPU, in Triton; gpu.py says in which order.

triton_parts.py says what a key is, and what lies in `work`. Within one launch programs meet in atomics only,
and none waits for another.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from sparsify.kernels import triton_parts as parts


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
        work + number, tl.zeros([16], tl.int32), mask=number > parts.SHIFT
    )  # BOUND and SHIFT are stored below
    tl.store(work + parts.FIRST + tl.arange(0, parts.HISTOGRAMS), tl.zeros([parts.HISTOGRAMS], tl.int32))
    low = tl.full((), 0, tl.int32)
    shift = tl.full((), 20, tl.int32)
    if SAMPLED:
        # One run from each of equally long stretches, at another place each turn.
        runs: constexpr = SAMPLE // parts.RUN
        run = tl.arange(0, runs)
        whole = tl.cast(n // parts.RUN, tl.int64)
        begin = run.to(tl.int64) * whole // runs
        end = (run.to(tl.int64) + 1) * whole // runs
        turn = tl.load(totals + parts.STEPS).to(tl.int32)
        start = (begin + parts.scattered(run, turn).to(tl.int64) % (end - begin)) * parts.RUN
        places = start[:, None] + tl.arange(0, parts.RUN)[None, :].to(tl.int64)
        sums = tl.load(acc + places * acc_stride)
        if ADD:
            sums = sums + tl.load(grad + places * grad_stride).to(tl.float32)
        keys = parts.magnitude(sums)
        bit = tl.full((), 1 << 30, tl.int32)
        for _ in range(16):
            trial = low | bit
            reached = tl.sum((keys >= trial).to(tl.int32))
            low = tl.where(reached >= rank, trial, low)
            bit = bit >> 1
        low = tl.maximum(low, least)
        # Bins as narrow as they can be with the sample's largest still inside: they share out the atomics.
        spread = tl.max(keys) - low
        shift = tl.full((), 14, tl.int32)
        for _ in range(6):
            shift += ((spread >> shift) >= parts.BINS - 1).to(tl.int32)
    low = tl.where(forced >= 0, forced, low)
    tl.store(work + parts.BOUND, low)
    tl.store(work + parts.SHIFT, shift)


@triton.jit(do_not_specialize=["n", "capacity"])
def stream(
    acc,
    grad,
    work,
    indices,  # of candidates, (capacity,)
    values,  # likewise
    n,
    acc_stride,
    grad_stride,
    capacity,
    ADD: constexpr,
    WIDTH: constexpr,  # neighbours that one thread has, so that each is in a register of its own
    TILE: constexpr,
):
    """The pass: acc += grad; what reaches the bound joins the candidates, if it can, and is counted."""
    bound = tl.load(work + parts.BOUND)  # before anything is stored, so that it need not be waited for then
    shift = tl.load(work + parts.SHIFT)
    lanes = parts.tile_of_rows(TILE, WIDTH)
    sums, inside = parts.accumulate(acc, grad, n, acc_stride, grad_stride, lanes, ADD, TILE)
    bits = sums.to(tl.int32, bitcast=True)
    kept = (inside & (parts.magnitude(sums) >= bound)).to(tl.int32)
    counts = tl.sum(kept, 1)
    total = tl.sum(counts, 0)
    if total > 0:
        begin = tl.atomic_add(work + parts.COUNT, total, sem="relaxed")
        slots = begin + parts.in_order(counts)
        parts.put(indices, values, slots, capacity, tl.program_id(0) * TILE, kept, bits, TILE, WIDTH)
        if begin < capacity:
            for number in tl.static_range(WIDTH):
                excess = (parts.column(bits, number, WIDTH) & 0x7FFFFFFF) - bound
                here = parts.column(kept, number, WIDTH) > 0
                tl.atomic_add(
                    work + parts.FIRST + parts.first_bin(excess, shift), 1, mask=here, sem="relaxed"
                )


@triton.jit(do_not_specialize=["k", "capacity"])
def refine(work, values, k, capacity, CHUNK: constexpr):
    """Count the candidates of the k-th's bin in narrower ones."""
    count = tl.load(work + parts.COUNT)
    if (count >= k) & (count <= capacity):
        bound = tl.load(work + parts.BOUND)
        shift = tl.load(work + parts.SHIFT)
        edge, _above, _inside = parts.crossing(work + parts.FIRST, k, parts.BINS)
        for start in range(tl.program_id(0) * CHUNK, count, tl.num_programs(0) * CHUNK):
            slots = start + tl.arange(0, CHUNK)
            live = slots < count
            excess = parts.magnitude(tl.load(values + slots, mask=live, other=0.0)) - bound
            live = live & (parts.first_bin(excess, shift) == edge)
            tl.atomic_add(work + parts.SECOND + parts.second_bin(excess, shift), 1, mask=live, sem="relaxed")


@triton.jit(do_not_specialize=["n", "k", "capacity", "room"])
def split(
    acc,
    work,
    indices,
    values,
    edge_indices,  # (room,)
    edge_values,  # (room,)
    out_indices,  # (k,)
    out_values,  # (k,)
    n,
    acc_stride,
    k,
    capacity,
    room,
    REFINED: constexpr,  # are there narrower bins within the k-th's?
    TILE: constexpr,
    CHUNK: constexpr,
):
    """Candidates above the k-th's bin are selected; those in it are kept aside. If that can't be done: the
    first of three counts of all keys.
    """
    count = tl.load(work + parts.COUNT)
    edge, above, tied = parts.crossing(work + parts.FIRST, k, parts.BINS)
    if REFINED:
        narrow, more, tied = parts.crossing(work + parts.SECOND, k - above, parts.BINS)
        above += more
    failed = (count < k) | (count > capacity) | (tied > room)
    if tl.program_id(0) == 0:
        tl.store(work + parts.ABOVE, above)
        tl.store(work + parts.EDGE, tied)
        tl.store(work + parts.FAILED, failed.to(tl.int32))
    if failed:
        parts.add_counts(
            work + parts.HIGH,
            parts.part_histogram(acc, n, acc_stride, 0, 31, 20, parts.BINS, TILE),
            parts.BINS,
        )
    else:
        bound = tl.load(work + parts.BOUND)
        shift = tl.load(work + parts.SHIFT)
        for start in range(tl.program_id(0) * CHUNK, count, tl.num_programs(0) * CHUNK):
            slots = start + tl.arange(0, CHUNK)
            live = slots < count
            index = tl.load(indices + slots, mask=live, other=0)
            value = tl.load(values + slots, mask=live, other=0.0)
            excess = parts.magnitude(value) - bound
            bin = parts.first_bin(excess, shift)
            larger = bin > edge
            kin = live & (bin == edge)
            if REFINED:
                sub = parts.second_bin(excess, shift)
                larger = larger | (kin & (sub > narrow))
                kin = kin & (sub == narrow)
            chosen = live & larger
            to = parts.reserve(work + parts.EMITTED, chosen)
            tl.store(out_indices + to, index, mask=chosen)
            tl.store(out_values + to, value, mask=chosen)
            to = parts.reserve(work + parts.EDGED, kin)
            tl.store(edge_indices + to, index, mask=kin)
            tl.store(edge_values + to, value, mask=kin)


@triton.jit(do_not_specialize=["n", "k"])
def settle(
    acc,
    work,
    edge_indices,
    edge_values,
    out_indices,
    out_values,
    n,
    acc_stride,
    k,
    TILE: constexpr,
    CHUNK: constexpr,
):
    """What is kept aside is ranked by (key descending, index ascending): the rank is the slot, if it is left.
    After a failure: the second count.
    """
    if tl.load(work + parts.FAILED) != 0:
        high, _above, _inside = parts.crossing(work + parts.HIGH, k, parts.BINS)
        parts.add_counts(
            work + parts.MIDDLE,
            parts.part_histogram(acc, n, acc_stride, high, 20, 10, parts.FEW, TILE),
            parts.FEW,
        )
    else:
        above = tl.load(work + parts.ABOVE)
        count = tl.load(work + parts.EDGE)
        for start in range(tl.program_id(0) * CHUNK, count, tl.num_programs(0) * CHUNK):
            slots = start + tl.arange(0, CHUNK)
            live = slots < count
            index = tl.load(edge_indices + slots, mask=live, other=0)
            value = tl.load(edge_values + slots, mask=live, other=0.0)
            key = parts.magnitude(value)
            rank = tl.zeros([CHUNK], tl.int32)
            for at in range(0, count, CHUNK):
                others = at + tl.arange(0, CHUNK)
                real = others < count
                index_2 = tl.load(edge_indices + others, mask=real, other=0)
                key_2 = parts.magnitude(tl.load(edge_values + others, mask=real, other=0.0))
                tie = (key_2[None, :] == key[:, None]) & (index_2[None, :] < index[:, None])
                before = ((key_2[None, :] > key[:, None]) | tie) & real[None, :]
                rank += tl.sum(before.to(tl.int32), 1)
            chosen = live & (above + rank < k)
            tl.store(out_indices + above + rank, index, mask=chosen)
            tl.store(out_values + above + rank, value, mask=chosen)


@triton.jit(do_not_specialize=["n", "k"])
def count_last(acc, work, rows, n, acc_stride, k, TILE: constexpr):
    """After a failure: the third count; each program's own as well, (programs, FEW)."""
    if tl.load(work + parts.FAILED) != 0:
        high, above, _inside = parts.crossing(work + parts.HIGH, k, parts.BINS)
        middle, _above, _inside = parts.crossing(work + parts.MIDDLE, k - above, parts.FEW)
        counts = parts.part_histogram(acc, n, acc_stride, (high << 10) | middle, 10, 0, parts.FEW, TILE)
        parts.add_counts(work + parts.LOW, counts, parts.FEW)
        tl.store(rows + tl.program_id(0) * parts.FEW + tl.arange(0, parts.FEW), counts)


@triton.jit(do_not_specialize=["n", "k"])
def emit(
    acc,
    work,
    rows,
    totals,
    out_indices,
    out_values,
    n,
    acc_stride,
    k,
    SAMPLED: constexpr,
    WIDTH: constexpr,
    TILE: constexpr,
    PROGRAMS: constexpr,  # a power of 2, at least as many as there are
):
    """After a failure: all keys above the k-th, of those equal to it the first by index. Always: totals."""
    program = tl.program_id(0)
    failed = tl.load(work + parts.FAILED) != 0
    if program == 0:
        tl.store(totals + parts.STEPS, tl.load(totals + parts.STEPS) + 1)
        if failed:
            tl.store(totals + parts.FALLBACKS, tl.load(totals + parts.FALLBACKS) + 1)
        else:
            tl.store(totals + parts.SELECTED, tl.load(totals + parts.SELECTED) + k)
            if SAMPLED:
                tl.store(
                    totals + parts.CANDIDATES,
                    tl.load(totals + parts.CANDIDATES) + tl.load(work + parts.COUNT),
                )
    if failed:
        kth, low, above = parts.kth_key(work + parts.HIGH, work + parts.MIDDLE, work + parts.LOW, k)
        # Programs take consecutive shares of acc, so equal keys of smaller indices are the earlier programs'.
        earlier = tl.arange(0, PROGRAMS)
        ties = tl.load(rows + earlier * parts.FEW + low, mask=earlier < program, other=0)
        taken = above + tl.sum(ties, 0)
        tiles = (n + TILE - 1) // TILE
        share = (tiles + tl.num_programs(0) - 1) // tl.num_programs(0)
        first = program * share
        lanes = parts.tile_of_rows(TILE, WIDTH)
        for tile in range(first, tl.minimum(first + share, tiles)):
            begin = tile * TILE
            value, inside = parts.read(acc, n, acc_stride, begin, lanes, TILE)
            taken = parts.emit_tile(
                out_indices,
                out_values,
                work + parts.EMITTED,
                0,
                k,
                taken,
                begin,
                inside,
                value,
                kth,
                TILE,
                WIDTH,
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
    lanes = parts.tile_of_rows(TILE, parts.WORD)
    sums, inside = parts.accumulate(acc, grad, n, acc_stride, grad_stride, lanes, ADD, TILE)
    if STRICT:
        keep = tl.abs(sums) > least
    else:
        keep = tl.abs(sums) >= least
    tl.store(counted + tl.program_id(0), parts.mark(marks, inside & keep, TILE))


@triton.jit(do_not_specialize=["n"])
def gather_in_order(acc, marks, ends, out_indices, out_values, n, acc_stride, TILE: constexpr):
    """What is marked, ascending; each tile's share ends in the result where `ends` (programs,) int64 says."""
    words = tl.program_id(0) * (TILE // parts.WORD) + tl.arange(0, TILE // parts.WORD)
    bits = tl.load(marks + words).to(tl.uint32, bitcast=True)
    first, counts = words * parts.WORD, parts.popcount(bits)
    slots = tl.load(ends + tl.program_id(0)) - tl.sum(counts, 0) + parts.in_order(counts)
    for _ in range(tl.max(counts, 0)):
        rest = bits & (bits - 1)
        index = first + parts.exponent(bits ^ rest)
        live = bits != 0
        value = tl.load(acc + index.to(tl.int64) * acc_stride, mask=live, other=0.0)
        tl.store(out_indices + slots, index, mask=live)
        tl.store(out_values + slots, value, mask=live)
        bits = rest
        slots += 1
