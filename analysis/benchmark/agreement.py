"""Two measurements of the same entries: do they order them alike, and contain each other?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.benchmark.cells import Cell

Place = tuple[str, str, int, str]  # entry, task, workers, link


class MeasuredTwice(NamedTuple):
    """Of one link, or of all."""

    link: str
    cells: int  # that both have timed
    tau: float  # Kendall's, the mean over tasks and numbers of workers
    contained: float  # share of cells in which each interval of the step's ratio has the other's estimate
    same_word: float  # share of cells


def agreements(first: Sequence[Cell], second: Sequence[Cell]) -> list[MeasuredTwice]:
    """Of each link that both have."""
    there = {_place(cell): cell for cell in second}
    pairs = [(cell, there[_place(cell)]) for cell in first if _place(cell) in there]
    pairs = [
        (one, other) for one, other in pairs if one.minutes_to is not None and other.minutes_to is not None
    ]
    links = dict.fromkeys(one.link for one, _ in pairs)
    return [_of_link(link, [pair for pair in pairs if pair[0].link == link]) for link in links]


def _place(cell: Cell) -> Place:
    return cell.entry, cell.task, cell.workers, cell.link


def _of_link(link: str, pairs: Sequence[tuple[Cell, Cell]]) -> MeasuredTwice:
    groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one, other in pairs:
        times = (float(one.minutes_to or 0), float(other.minutes_to or 0))
        groups.setdefault((one.task, one.workers), []).append(times)
    taus = [tau(each) for each in groups.values() if len(each) > 1]
    others = [pair for pair in pairs if pair[0].word != "baseline"]  # which is compared with itself
    compared = [(one.times, other.times) for one, other in others if one.times and other.times]
    inside = [
        one.low <= other.value <= one.high and other.low <= one.value <= other.high
        for one, other in compared
        if one.low is not None and one.high is not None and other.low is not None and other.high is not None
    ]
    same = [one.word == other.word for one, other in others]
    return MeasuredTwice(
        link, len(pairs), float(np.mean(taus)) if taus else np.nan,
        float(np.mean(inside)) if inside else np.nan, float(np.mean(same)) if same else np.nan,
    )  # fmt: skip


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of two orders: 1 if they are the same, -1 if one is the other's reverse."""
    from scipy.stats import kendalltau

    ones, others = zip(*pairs, strict=True)
    found = float(kendalltau(ones, others).statistic)
    return 1.0 if np.isnan(found) and ones == others else found
