"""Invented cells."""

from __future__ import annotations

from analysis.benchmark.cells import Cell, LevelScore, LevelWord
from analysis.stats import Estimate


def cell(
    entry: str = "topk",
    task: str = "gpt-ptb",
    workers: int = 4,
    link: str = "internet_100m_50ms",
    word: LevelWord = "faster",
    share: float = 0.5,
    seconds: float = 120.0,
) -> Cell:
    """Return a cell of a table, by default of a measured entry, with one level."""
    level = LevelScore(share, 2.0, word, word, Estimate(1.9, 1.6, 2.2, 5), seconds, lead=0.1)
    return Cell(
        entry, task, workers, link, [level], [(30.0, 2.5), (60.0, 1.9)], Estimate(200.0, 190.0, 210.0, 5),
        5, 5, 0.099, 50.6, False, ("2026-11-27", "2026-11-27"), "a processor",
    )  # fmt: skip
