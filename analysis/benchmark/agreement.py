"""Two measurements of the same entries: do they order them alike, and contain each other?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from analysis.benchmark.cells import Cell
from analysis.stats import Estimate, student_quantile

CellPlace = tuple[str, str, int, str]  # entry, task, workers, link
CellPair = tuple[Cell, Cell]  # of one place, once measured and again


class LinkAgreement(NamedTuple):
    """Of one link."""

    link: str
    cells: int  # that both have timed
    reached: int  # of them, whose target every seed reaches; the baseline's own not among them
    # Kendall's, means over tasks and numbers of workers:
    tau: float  # of the minutes to the target, in which all that misses it is last
    reached_tau: float  # of the minutes of those that reach it, the baseline among them
    steps_tau: float  # of the steps, which all have
    # Shares of cells:
    contained: float  # of those that reach it, each interval of the times as soon has the other's estimate
    same_word: float  # of those that reach it
    steps_contained: float  # of all, the same of the step's ratio, in which no training has a part
    repeated: float  # the same, were both drawn from one normal distribution


def compare_measurements(first: Sequence[Cell], second: Sequence[Cell]) -> list[LinkAgreement]:
    """Of each link that both have."""
    there = {_place(cell): cell for cell in second}
    pairs = [(cell, there[_place(cell)]) for cell in first if _place(cell) in there]
    pairs = [
        (one, other) for one, other in pairs if one.minutes_to is not None and other.minutes_to is not None
    ]
    links = dict.fromkeys(one.link for one, _ in pairs)
    return [_link_agreement(link, [pair for pair in pairs if pair[0].link == link]) for link in links]


def _place(cell: Cell) -> CellPlace:
    return cell.entry, cell.task, cell.workers, cell.link


def _link_agreement(link: str, pairs: Sequence[CellPair]) -> LinkAgreement:
    reach = [pair for pair in pairs if pair[0].minutes and pair[1].minutes]
    # The baseline is compared with itself.
    others, there = ([pair for pair in each if pair[0].word != "baseline"] for each in (pairs, reach))
    launches = min((cell.launches for pair in others for cell in pair), default=0)
    return LinkAgreement(
        link, len(pairs), len(there),
        _mean_tau(pairs, _minutes), _mean_tau(reach, _minutes), _mean_tau(pairs, _step_ms),
        _mean([_contain_each_other(one.sooner, other.sooner) for one, other in there if one.sooner and other.sooner]),
        _mean([one.word == other.word for one, other in there]),
        _mean([_contain_each_other(one.times, other.times) for one, other in others if one.times and other.times]),
        expected_containment(launches),
    )  # fmt: skip


def _mean_tau(pairs: Sequence[CellPair], of: Callable[[Cell], float]) -> float:
    """The mean over tasks and numbers of workers, where there are several to order."""
    groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one, other in pairs:
        groups.setdefault((one.task, one.workers), []).append((of(one), of(other)))
    return _mean([kendall_tau(each) for each in groups.values() if len(each) > 1])


def _minutes(cell: Cell) -> float:
    return np.nan if cell.minutes_to is None else cell.minutes_to


def _step_ms(cell: Cell) -> float:
    return cell.step_ms.value if cell.step_ms else np.nan


def _contain_each_other(one: Estimate, other: Estimate) -> bool:
    return _contains(one, other.value) and _contains(other, one.value)


def _contains(interval: Estimate, number: float) -> bool:
    return interval.low is not None and interval.high is not None and interval.low <= number <= interval.high


def _mean(found: Sequence[float]) -> float:
    return float(np.mean(found)) if found else np.nan


@cache
def expected_containment(launches: int) -> float:
    """How often the 95 % intervals of two samples of one normal distribution contain each other's mean, by
    100,000 pairs drawn: 81 % of samples of five. What is measured twice can't be asked for more.
    """
    if launches < 2:
        return np.nan
    drawn = np.random.default_rng(0).standard_normal((2, 100_000, launches))
    half = student_quantile(launches - 1) * drawn.std(axis=2, ddof=1) / np.sqrt(launches)
    return float(np.mean(abs(np.diff(drawn.mean(axis=2), axis=0)) < half.min(axis=0)))


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of two orders: 1 if they are the same, -1 if one is the other's reverse."""
    from scipy.stats import kendalltau

    ones, others = zip(*pairs, strict=True)
    found = float(kendalltau(ones, others).statistic)
    return 1.0 if np.isnan(found) and ones == others else found
