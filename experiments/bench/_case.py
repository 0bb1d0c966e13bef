"""What is measured, and what became of it: a case, one row's samples, their spread and ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from experiments.bench._steps import Row

PERCENTILES_FROM = 20  # repetitions; of fewer, the spread is from the smallest to the largest


class Case(NamedTuple):
    n: int
    density: float
    distribution: str

    def __str__(self) -> str:
        return f"n = {self.n:,}, density {self.density:g}, {self.distribution}"


@dataclass
class Timed:
    """What became of one row in one case."""

    row: Row
    samples: dict[int, float] = field(default_factory=dict)  # repetition -> ms
    cpu: dict[int, float] = field(default_factory=dict)  # repetition -> ms of all threads' CPU time
    selected: list[int] = field(default_factory=list)
    kernel: str | None = None
    waits: int = 0
    steps: int = 0  # calls of the kernel, over which `fallbacks` and `candidates` are counted
    fallbacks: int = 0
    candidates: int = 0
    why: str | None = None  # the reason, if it was not run

    @property
    def spent_s(self) -> float:
        return sum(self.samples.values()) / 1000


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, and where the values lie."""
    low, high, words = min(values), max(values), "min to max"
    if len(values) >= PERCENTILES_FROM:
        cuts = statistics.quantiles(values, n=20, method="inclusive")
        low, high, words = cuts[0], cuts[-1], "5 to 95 %"
    digits = (rounded(number) for number in (statistics.median(values), low, high))
    return dict(zip(("median", "low", "high"), digits, strict=True)) | {"n": len(values), "spread": words}


def rounded(value: float) -> float:
    """Five digits."""
    return round(value, 4 - math.floor(math.log10(value))) if value > 0 else value


def ratio(above: Timed | None, below: Timed | None, cpu: bool = False) -> dict[str, Any] | None:
    """Of two rows' times, or CPU times, taken within each repetition in which both ran."""
    if above is None or below is None:
        return None
    over, under = (timed.cpu if cpu else timed.samples for timed in (above, below))
    both = [over[turn] / under[turn] for turn in over if under.get(turn)]
    return spread(both) if both else None
