"""Invented cells."""

from __future__ import annotations

from analysis.benchmark.cells import Cell, CellWord
from analysis.stats import Estimate

IN_MINUTES, RATIO = Estimate(2.0, 1.8, 2.2, 5), Estimate(2.0, 1.9, 2.1, 5)


def cell(
    entry: str = "topk",
    task: str = "gpt-ptb",
    workers: int = 4,
    link: str = "internet_100m_50ms",
    word: CellWord = "faster",
    minutes: Estimate | None = IN_MINUTES,
    step_ratio: Estimate | None = RATIO,
) -> Cell:
    """Return a cell of a table, by default of a measured entry."""
    return Cell(
        entry, task, workers, link, word, Estimate(1.9, 1.6, 2.2, 5), minutes,
        Estimate(200.0, 190.0, 210.0, 5),
        step_ratio, 5, 5, 5, 2.0, Estimate(1.9, 1.85, 1.95, 5), 12.0, 0.099, 50.6, False,
        ("2026-11-27", "2026-11-27"), "a processor",
    )  # fmt: skip
