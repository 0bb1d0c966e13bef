"""Agreement of two measurements: whether they order entries alike, and contain each other's estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from analysis.benchmark.cells import Cell
from analysis.stats import Estimate, student_t_quantile

CellPair = tuple[Cell, Cell]  # of one place, first and second measurement


class MeasurementAgreement(NamedTuple):
    """The agreement of two measurements of the benchmark's cells over one link."""

    link: str
    num_cells: int  # that both have timed
    num_cells_at_target: int  # of them, whose target every seed reaches; the baseline's own not among them
    # Kendall's, means over tasks and numbers of workers:
    time_to_target_tau: float  # of the minutes to the target, in which all that misses it is last
    reached_time_to_target_tau: float  # of the minutes of those that reach it, the baseline among them
    step_time_tau: float  # of the steps, which all have
    # Shares of cells:
    speedup_containment: float  # of those that reach it, each interval has the other's estimate
    same_word_share: float  # of those that reach it
    step_containment: float  # of all, the same of the step's ratio, in which no training has a part
    expected_containment: float  # the same, were both drawn from one normal distribution


def compare_measurements(first: Sequence[Cell], second: Sequence[Cell]) -> list[MeasurementAgreement]:
    """Return the agreement of two measurements on each link that both have."""
    second_by_place = {cell.place: cell for cell in second}
    pairs_by_link: dict[str, list[CellPair]] = {}
    for cell in first:
        second_cell = second_by_place.get(cell.place)
        if second_cell is not None and cell.step_ms is not None and second_cell.step_ms is not None:
            pairs_by_link.setdefault(cell.link, []).append((cell, second_cell))
    return [_link_agreement(link, pairs) for link, pairs in pairs_by_link.items()]


def _link_agreement(link: str, pairs: Sequence[CellPair]) -> MeasurementAgreement:
    reaching = [pair for pair in pairs if pair[0].minutes and pair[1].minutes]
    compared = _without_baseline(pairs)
    compared_reaching = _without_baseline(reaching)
    launches = min((cell.launches for pair in compared for cell in pair), default=0)
    return MeasurementAgreement(
        link=link,
        num_cells=len(pairs),
        num_cells_at_target=len(compared_reaching),
        time_to_target_tau=_mean_tau(pairs, _minutes_or_nan),
        reached_time_to_target_tau=_mean_tau(reaching, _minutes_or_nan),
        step_time_tau=_mean_tau(pairs, _step_ms_or_nan),
        speedup_containment=_contained_share(
            [(first.speedup, second.speedup) for first, second in compared_reaching]
        ),
        same_word_share=_mean([first.word == second.word for first, second in compared_reaching]),
        step_containment=_contained_share(
            [(first.step_ratio, second.step_ratio) for first, second in compared]
        ),
        expected_containment=expected_interval_containment(launches),
    )


def _without_baseline(pairs: Sequence[CellPair]) -> list[CellPair]:
    """Return the pairs of cells but those of the baseline, which is compared with itself."""
    return [pair for pair in pairs if pair[0].word != "baseline"]


def _mean_tau(pairs: Sequence[CellPair], quantity: Callable[[Cell], float]) -> float:
    """Return the mean over tasks and numbers of workers, where there are several cells to order."""
    values_by_place: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for first, second in pairs:
        place = (first.task, first.workers)
        values_by_place.setdefault(place, []).append((quantity(first), quantity(second)))
    return _mean([kendall_tau(values) for values in values_by_place.values() if len(values) > 1])


def _minutes_or_nan(cell: Cell) -> float:
    return np.nan if cell.minutes_to_target is None else cell.minutes_to_target


def _step_ms_or_nan(cell: Cell) -> float:
    return cell.step_ms.value if cell.step_ms else np.nan


def _contained_share(pairs: Sequence[tuple[Estimate | None, Estimate | None]]) -> float:
    """Return the share of pairs that contain each other's estimates, of those that have both."""
    return _mean(
        [
            _contains(first, second.value) and _contains(second, first.value)
            for first, second in pairs
            if first and second
        ]
    )


def _contains(estimate: Estimate, value: float) -> bool:
    return estimate.low is not None and estimate.high is not None and estimate.low <= value <= estimate.high


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else np.nan


@cache
def expected_interval_containment(launches: int) -> float:
    """Return how often the 95 % intervals of two samples of one distribution contain each other's mean.

    By 100,000 pairs drawn of a normal one: 81 % of samples of five. What is measured twice can't be asked for
    more.
    """
    if launches < 2:
        return np.nan
    samples = np.random.default_rng(0).standard_normal((2, 100_000, launches))
    half_width = student_t_quantile(launches - 1) * samples.std(axis=2, ddof=1) / np.sqrt(launches)
    return float(np.mean(abs(np.diff(samples.mean(axis=2), axis=0)) < half_width.min(axis=0)))


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Return Kendall's tau-b of two orders: 1 if they are the same, -1 if one is the other's reverse."""
    from scipy.stats import kendalltau

    first, second = zip(*pairs, strict=True)
    tau = float(kendalltau(first, second).statistic)
    return 1.0 if np.isnan(tau) and first == second else tau
