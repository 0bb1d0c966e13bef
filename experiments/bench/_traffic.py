"""Bytes of memory traffic that a step takes, counted from what its algorithm reads and writes."""

from __future__ import annotations

from typing import NamedTuple

LINE = {"cpu": 64, "cuda": 32}  # bytes that move when one element is touched: a cache line, a sector
INT64, INT32, FLOAT = 8, 4, 4
ABS = (8.0, "8 abs")


class Seen(NamedTuple):
    """What the bytes of a step depend on, besides n."""

    device: str  # cpu, or cuda
    density: float  # what was selected, / n
    waits: float  # host synchronisations per step: each is one pass over a mask
    candidates: float  # elements that reached a guessed bound, / n
    gradient: int = FLOAT  # bytes of an element of the gradient


class Traffic(NamedTuple):
    """Bytes of memory traffic per element, counted from what the algorithm reads and writes."""

    total: float | None  # None: not counted
    words: str


def winners(seen: Seen, index: int, gathered: bool) -> tuple[float, str]:
    """What moves for the selected elements: index and value written, a line read and written to empty each,
    and one read to gather its value, unless the pass already has it.
    """
    lines = LINE[seen.device] * (3 if gathered else 2)
    return seen.density * (index + FLOAT + lines), f"{index + FLOAT + lines} selected/n"


def counted(seen: Seen, *terms: tuple[float, str], index: int = INT64, gathered: bool = True) -> Traffic:
    """The sum of terms and what moves for the selected elements."""
    terms = (*terms, winners(seen, index, gathered))
    return Traffic(sum(number for number, _ in terms), " + ".join(words for _, words in terms))


def adding(seen: Seen, word: str = "add") -> tuple[float, str]:
    """acc read and written, the gradient read."""
    total = 2 * FLOAT + seen.gradient
    return float(total), f"{total} {word}"


def of_add(seen: Seen) -> Traffic:
    return Traffic(*adding(seen))


def of_fallback(seen: Seen) -> Traffic:
    """On a CPU: once more to count, once more to collect."""
    more = (8.0, "8 read twice more") if seen.device == "cpu" else (16.0, "16 read four times more")
    return counted(seen, adding(seen, "fused"), more, index=INT32, gathered=False)


def of_copy(seen: Seen) -> Traffic:
    first = "; a CPU may read the lines that it is to write, 6 more" if seen.device == "cpu" else ""
    return Traffic(12.0, f"12 (6 read, 6 written{first})")


def of_eager(seen: Seen) -> Traffic:
    # CUDA: four radix passes and one that gathers. CPU: pairs of value and index, 16 bytes, written and read.
    topk = (20.0, "20 topk (5 passes)") if seen.device == "cuda" else (36.0, "36 topk (4 read, 2 x 16 pairs)")
    return counted(seen, adding(seen), ABS, topk)


def of_sort(seen: Seen) -> Traffic:
    if seen.device != "cuda":
        return Traffic(None, "not counted: merges, as deep as log n")
    passes = (100.0, "100 sort (4 read, 4 radix passes of keys and int64 indices)")
    return counted(seen, adding(seen), ABS, passes)


def of_masked(seen: Seen) -> Traffic:
    return counted(seen, adding(seen, "fused"), (3.0, "3 mask (1 written, 2 read)"))


def of_gaussiank(seen: Seen) -> Traffic:
    passes = (7 * seen.waits, f"7 x {seen.waits:.3g} thresholds (4 compared, 1 mask written, 2 read)")
    return counted(seen, adding(seen), ABS, (4.0, "4 mean and deviation"), passes)


def of_dgc(seen: Seen) -> Traffic:
    passes = (7 * seen.waits, f"7 x {seen.waits:.3g} thresholds (4 compared, 1 mask written, 2 read)")
    line = LINE[seen.device]
    sample = (0.01 * line, f"{0.01 * line:.2g} sample (a line for 1 % of the elements)")
    return counted(seen, adding(seen), ABS, sample, passes)


def of_fused(seen: Seen) -> Traffic:
    candidates = (16 * seen.candidates, "16 candidates/n")  # index and value, written and read
    return counted(seen, adding(seen, "fused"), candidates, index=INT32, gathered=False)


def of_threshold(seen: Seen) -> Traffic:
    return counted(
        seen, adding(seen, "fused"), (16 * seen.density, "16 selected/n"), index=INT32, gathered=False
    )


def of_paper_kernel(seen: Seen) -> Traffic:
    return counted(seen, adding(seen), ABS, (72.0, "72 topk (18 passes)"))
