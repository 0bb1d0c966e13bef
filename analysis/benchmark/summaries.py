"""Summaries of cells: methods that beat the baseline, the frontier, performance profiles, agreement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from analysis.benchmark.cells import (
    BASELINE,
    DECISIONS,
    REPEATED_BASELINE,
    SHARES,
    Cell,
    LevelScore,
)
from analysis.pictures.captions import join_with_and
from analysis.pictures.numbers import format_number
from analysis.significance import ALPHA

FRONTIER_TIMES = 400  # at which losses are compared, equally spaced on the log scale
PROFILE_SHARES = (0.5, 0.9)  # levels of performance profiles
MAX_FACTOR = 4.0  # of performance profiles
WordPlace = tuple[str, str, int, str, float]  # entry, task, workers, link, and level


class LevelSummary(NamedTuple):
    """Count of combinations in which an entry is faster than the baseline at a level."""

    entry: str
    faster: int  # tested together with all cells of the link and level
    faster_alone: int
    slower: int
    combinations: int  # that have the level
    speedup: float  # the median of the combinations in which it is faster, alone if in none together


def summarize_level(cells: Iterable[Cell], share: float) -> list[LevelSummary]:
    """Return the entries that are faster at a level somewhere: those in most combinations first.

    Of as many the fastest comes first.

    Args:
        cells: of one link.
        share: the level.
    """
    scores_by_entry: dict[str, list[LevelScore]] = {}
    for cell in cells:
        score = cell.level(share)
        if score is not None and cell.entry != REPEATED_BASELINE:
            scores_by_entry.setdefault(cell.entry, []).append(score)
    summaries = list[LevelSummary]()
    for entry, scores in scores_by_entry.items():
        alone = [score for score in scores if score.word_alone == "faster" and score.speedup]
        together = [score for score in alone if score.word == "faster"]
        if alone:
            summaries.append(
                LevelSummary(
                    entry,
                    faster=len(together),
                    faster_alone=len(alone),
                    slower=sum(score.word in DECISIONS[1:] for score in scores),
                    combinations=len(scores),
                    speedup=float(
                        np.median([score.speedup.value for score in together or alone if score.speedup])
                    ),
                )
            )
    return sorted(summaries, key=lambda each: (-each.faster, -each.speedup))


class FrontierPart(NamedTuple):
    """A stretch of time in which an entry has the lowest loss of all."""

    entry: str
    from_s: float


def find_frontier(cells: Sequence[Cell]) -> list[FrontierPart]:
    """Return who has the lowest loss from when on, of the entries of one task, number of workers and link.

    An entry keeps its lowest loss after its budget.
    """
    curves = {
        cell.entry: curve_by_seconds(cell)
        for cell in cells
        if cell.step_ms and cell.entry != REPEATED_BASELINE
    }
    if not curves:
        return []
    ends = [seconds[[0, -1]] for seconds, _ in curves.values()]
    times = np.geomspace(np.min(ends), np.max(ends), FRONTIER_TIMES)
    losses = [np.interp(times, *curve, left=np.inf) for curve in curves.values()]
    leaders = [[*curves][place] for place in np.argmin(losses, axis=0)]
    parts = [FrontierPart(name, float(time)) for name, time in zip(leaders, times, strict=True)]
    return [
        part for before, part in pairwise([None, *parts]) if part and (not before or before[0] != part[0])
    ]


def curve_by_seconds(cell: Cell) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds of a cell's validations, and its mean best losses."""
    steps, losses = np.array(cell.curve).T
    assert cell.step_ms is not None, "it was timed"
    return steps * cell.step_ms.value / 1e3, losses


def time_factors_by_entry(cells: Iterable[Cell], share: float) -> dict[str, list[float]]:
    """Return each entry's time to a level over the quickest entry's, for each task and number of workers.

    It is infinite where an entry does not reach the level. A performance profile is the share of these
    factors that are at most some factor (Dolan and More, Mathematical Programming 91, 2002).

    Args:
        cells: of one link, the baseline's among them.
        share: the level.
    """
    seconds_by_place: dict[tuple[str, int], dict[str, float]] = {}
    for cell in cells:
        score = cell.level(share)
        if score is not None and score.seconds is not None and cell.entry != REPEATED_BASELINE:
            seconds_by_place.setdefault((cell.task, cell.workers), {})[cell.entry] = score.seconds
    factors: dict[str, list[float]] = {}
    for seconds_by_entry in seconds_by_place.values():
        quickest = min(seconds_by_entry.values())
        for entry, seconds in seconds_by_entry.items():
            factors.setdefault(entry, []).append(seconds / quickest)
    return factors


class WordAgreement(NamedTuple):
    """Agreement of the words of two measurements over a link."""

    link: str
    words: int  # of cells and levels that both have
    same: int
    opposite: int  # faster in one and slower in the other


def compare_words(cells: Iterable[Cell], words_before: Mapping[WordPlace, str]) -> list[WordAgreement]:
    """Return the agreement of words with earlier ones, for each link that has both.

    Args:
        cells: of this measurement.
        words_before: by entry, task, workers, link, and level.
    """
    pairs_by_link: dict[str, list[set[str]]] = {}
    for cell in cells:
        for level in cell.levels:
            before = words_before.get((*cell.place, level.share))
            if before is not None:
                pairs_by_link.setdefault(cell.link, []).append({level.word, before})
    return [
        WordAgreement(
            link,
            words=len(pairs),
            same=sum(len(pair) == 1 for pair in pairs),
            opposite=sum("faster" in pair and bool(pair & {*DECISIONS[1:]}) for pair in pairs),
        )
        for link, pairs in pairs_by_link.items()
    ]


class FalseWords(NamedTuple):
    """Decisions on the baseline that was entered twice, all of which are false."""

    together: int  # tested together with all cells of a link and level
    alone: int
    expected_alone: float
    words: int


def count_false_words(cells: Iterable[Cell]) -> FalseWords:
    """Return how many words of the repeated baseline are decisions."""
    levels = [level for cell in cells if cell.entry == REPEATED_BASELINE for level in cell.levels]
    return FalseWords(
        together=sum(level.word in DECISIONS for level in levels),
        alone=sum(level.word_alone in DECISIONS for level in levels),
        expected_alone=ALPHA * len(levels),
        words=len(levels),
    )


def describe_best(cells: Sequence[Cell]) -> str:
    """Return which entry is faster than the baseline most often, level by level, over one link."""
    levels_by_entry: dict[str, list[str]] = {}
    without = list[str]()
    for share in SHARES:
        best = next(iter(summarize_level(cells, share)), None)
        level = f"{100 * share:.0f} %"
        if best is None or 2 * best.faster < best.combinations:
            without.append(level)
        else:
            count = f"{best.faster} of {best.combinations}, {format_number(best.speedup, 2)} times as fast"
            levels_by_entry.setdefault(best.entry, []).append(f"{level} ({count})")
    bests = [f"{entry} to the level of {join_with_and(levels)}" for entry, levels in levels_by_entry.items()]
    levels = f"the level of {join_with_and(without)}" if bests else "any level"
    nothing = f"No method is faster than {BASELINE} in half of the combinations to {levels}."
    return " ".join(
        [f"Most often faster than {BASELINE}: {'; '.join(bests)}."] * bool(bests) + [nothing] * bool(without)
    )


def count_decided(cells: Iterable[Cell]) -> tuple[int, int]:
    """Return how many cells have a decision at some level, and how many there are beside the baseline's."""
    others = [cell for cell in cells if cell.entry not in (BASELINE, REPEATED_BASELINE)]
    return sum(any(level.word in DECISIONS for level in cell.levels) for cell in others), len(others)
