"""The bandwidth at which two methods take as long, from ratios of step times at several bandwidths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from analysis.pictures import captions
from analysis.pictures.numbers import number
from analysis.records.steps import LAUNCHES
from analysis.stats import POSITIVE, Value, over_units

BELOW, ABOVE = 0.0, np.inf  # where no link is that slow, or that fast


def crossing(gbit_s: Sequence[float] | np.ndarray, ratios: Sequence[float] | np.ndarray) -> float:
    """The bandwidth at which a ratio of step times is 1: linear in both logarithms between the two bandwidths
    around it, once the ratios are made to rise. `BELOW` or `ABOVE` all of them where there are no such two.

    Args:
        gbit_s: rising.
    """
    x, y = np.log(gbit_s), rising(np.log(ratios))
    if y[0] > 0:
        return BELOW
    if y[-1] < 0:
        return ABOVE
    at = int(np.argmax(y >= 0))
    return float(np.exp(np.interp(0.0, y[at - 1 : at + 1], x[at - 1 : at + 1]) if at else x[0]))


def rising(values: np.ndarray) -> np.ndarray:
    """The rising sequence with the least squares to these: their isotonic regression, by its min-max formula
    (Robertson et al. 1988, theorem 1.4.4). A faster link helps dense more: what falls is noise.
    """
    n = len(values)
    means = np.array([[values[a : b + 1].mean() if a <= b else np.nan for b in range(n)] for a in range(n)])
    return np.array([max(means[a, i:].min() for a in range(i + 1)) for i in range(n)])


def mean(found: Mapping[int, float]) -> Value | None:
    """The mean over launches; None where one of them lies outside, or there is none."""
    is_inside = all(BELOW < gbit_s < ABOVE for gbit_s in found.values())
    return over_units(list(found.values()), POSITIVE, LAUNCHES) if found and is_inside else None


def outside(found: Mapping[int, float], ends: tuple[float, float]) -> str:
    """'above 1.92 Gbit/s in 5 of 5 launches'.

    Args:
        ends: the slowest and the fastest link.
    """
    of_ends = {f"below {number(ends[0])}": BELOW, f"above {number(ends[1])}": ABOVE}
    counts = {words: sum(value == end for value in found.values()) for words, end in of_ends.items()}
    told = [f"{words} Gbit/s in {n} of {len(found)} launches" for words, n in counts.items() if n]
    return captions.listed(told or ["within the links"])
