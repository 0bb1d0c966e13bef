"""Agreement of two measurements: whether they order entries alike, and contain each other's estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from analysis.benchmark.cells import Cell
from analysis.stats import Estimate, student_quantile

CellPair = tuple[Cell, Cell]  # of one place, once measured and again


class MeasurementAgreement(NamedTuple):
    """The agreement of two measurements over one link."""

    link: str
    cells: int  # that both have timed
    cells_at_target: int  # of them, whose target every seed reaches; the baseline's own not among them
    # Kendall's, means over tasks and numbers of workers:
    tau: float  # of the minutes to the target, in which all that misses it is last
    reached_tau: float  # of the minutes of those that reach it, the baseline among them
    steps_tau: float  # of the steps, which all have
    # Shares of cells:
    speedup_containment: (
        float  # of those that reach it, each interval of the speedup has the other's estimate
    )
    same_word_share: float  # of those that reach it
    step_containment: float  # of all, the same of the step's ratio, in which no training has a part
    expected_containment: float  # the same, were both drawn from one normal distribution


def compare_measurements(first: Sequence[Cell], second: Sequence[Cell]) -> list[MeasurementAgreement]:
    """Return the agreement of two measurements on each link that both have."""
    second_by_place = {cell.place: cell for cell in second}
    pairs_by_link: dict[str, list[CellPair]] = {}
    for cell in first:
        again = second_by_place.get(cell.place)
        if again is not None and cell.step_ms is not None and again.step_ms is not None:
            pairs_by_link.setdefault(cell.link, []).append((cell, again))
    return [_link_agreement(link, pairs) for link, pairs in pairs_by_link.items()]


def _link_agreement(link: str, pairs: Sequence[CellPair]) -> MeasurementAgreement:
    reaching = [pair for pair in pairs if pair[0].minutes and pair[1].minutes]
    # The baseline is compared with itself.
    others, others_reaching = (
        [pair for pair in chosen if pair[0].word != "baseline"] for chosen in (pairs, reaching)
    )
    launches = min((cell.launches for pair in others for cell in pair), default=0)
    return MeasurementAgreement(
        link=link,
        cells=len(pairs),
        cells_at_target=len(others_reaching),
        tau=_mean_tau(pairs, _minutes),
        reached_tau=_mean_tau(reaching, _minutes),
        steps_tau=_mean_tau(pairs, _step_ms),
        speedup_containment=_contained_share(
            [(one.speedup, other.speedup) for one, other in others_reaching]
        ),
        same_word_share=_mean([one.word == other.word for one, other in others_reaching]),
        step_containment=_contained_share([(one.step_ratio, other.step_ratio) for one, other in others]),
        expected_containment=expected_containment(launches),
    )


def _mean_tau(pairs: Sequence[CellPair], quantity: Callable[[Cell], float]) -> float:
    """Return the mean over tasks and numbers of workers, where there are several cells to order."""
    groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for one, other in pairs:
        groups.setdefault((one.task, one.workers), []).append((quantity(one), quantity(other)))
    return _mean([kendall_tau(values) for values in groups.values() if len(values) > 1])


def _minutes(cell: Cell) -> float:
    return np.nan if cell.minutes_to_target is None else cell.minutes_to_target


def _step_ms(cell: Cell) -> float:
    return cell.step_ms.value if cell.step_ms else np.nan


def _contained_share(pairs: Sequence[tuple[Estimate | None, Estimate | None]]) -> float:
    """Return the share of pairs that contain each other's estimates, of those that have both."""
    return _mean(
        [_contains(one, other.value) and _contains(other, one.value) for one, other in pairs if one and other]
    )


def _contains(estimate: Estimate, value: float) -> bool:
    return estimate.low is not None and estimate.high is not None and estimate.low <= value <= estimate.high


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else np.nan


@cache
def expected_containment(launches: int) -> float:
    """Return how often the 95 % intervals of two samples of one distribution contain each other's mean.

    By 100,000 pairs drawn of a normal one: 81 % of samples of five. What is measured twice can't be asked for
    more.
    """
    if launches < 2:
        return np.nan
    drawn = np.random.default_rng(0).standard_normal((2, 100_000, launches))
    half_width = student_quantile(launches - 1) * drawn.std(axis=2, ddof=1) / np.sqrt(launches)
    return float(np.mean(abs(np.diff(drawn.mean(axis=2), axis=0)) < half_width.min(axis=0)))


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau-b of two orders: 1 if they are the same, -1 if one is the other's reverse."""
    from scipy.stats import kendalltau

    ones, others = zip(*pairs, strict=True)
    tau = float(kendalltau(ones, others).statistic)
    return 1.0 if np.isnan(tau) and ones == others else tau
