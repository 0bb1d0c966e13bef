# mypy: ignore-errors
"""Small Triton kernels, most of them wrong: what test_races.py must find."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def count_plainly(counter):
    """Programs may load the same count, and then one of them is not counted."""
    tl.store(counter, tl.load(counter) + 1)


@triton.jit
def count_atomically(counter):
    tl.atomic_add(counter, 1, sem="relaxed")


@triton.jit
def fill(places, SIZE: constexpr):
    """All programs store their number in the same elements: whose is left may differ between elements."""
    lanes = tl.arange(0, SIZE)
    tl.store(places + lanes, tl.zeros([SIZE], tl.int32) + tl.program_id(0))


@triton.jit
def own(places, counter):
    """Each has memory of its own, and a number of its own, in no order."""
    number = tl.atomic_add(counter, 1, sem="relaxed")
    tl.store(places + number, tl.program_id(0))


@triton.jit
def fail(places):
    """The second program fails while others are in the middle of something."""
    tl.store(places + tl.program_id(0), 1)
    assert tl.program_id(0) != 1, "the second program"
    tl.store(places + tl.program_id(0), 2)
