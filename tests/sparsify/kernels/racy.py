# mypy: ignore-errors
"""Small Triton kernels, most of them wrong: what test_races.py must find."""

import triton
import triton.language as tl


@triton.jit
def count_plainly(counter):
    """Programs may load the same count, and then one of them is not counted."""
    tl.store(counter, tl.load(counter) + 1)


@triton.jit
def store_twice(places):
    tl.store(places + tl.arange(0, 4) // 2, 1)


@triton.jit
def number(places, counter):
    """Each has memory of its own, and a number of its own, in no order."""
    at = tl.atomic_add(counter, 1, sem="relaxed")
    tl.store(places + at, tl.program_id(0))
