"""Fig. 3 (and 2) of Yoon and Oh 2022 at the paper's accuracy: fig3-slim with a network that reaches it."""

from __future__ import annotations

from analysis.claims import Claim
from analysis.records.frames import Frames
from analysis.stats import Estimate, final_value
from experiments.config.run import Run
from experiments.figures import yoon2022_fig3_slim as slim
from experiments.figures._runs import MORE_SEEDS, SEEDS
from experiments.figures.papers import claim

TITLE = "Validation accuracy and loss at the paper's level, at density 0.001 and 0.01"
SCALE = slim.SCALE
published_results = slim.published_results
facts, draw, table = slim.facts, slim.draw, slim.table
LEVEL = 90  # % top-1; theirs ended at 92.99, with a model 13 times as large and 16 times the images


def runs(profile: str) -> list[Run]:
    return slim.planned("fig3-level", profile, SEEDS[profile])


def more_runs(profile: str) -> list[Run]:
    return slim.planned("fig3-level", profile, MORE_SEEDS[profile])


def claims() -> list[Claim]:
    level = claim("yoon2022.fig3-level.dense-reaches-the-level", above_level, "dense", LEVEL, level=LEVEL)
    return [level, *slim.claims()]


def above_level(frames: Frames, name: str, level: float) -> Estimate | None:
    """Points by which a method's trainings end above so many % of top-1."""
    end = final_value(frames, slim.keys(frames, name), slim.COLUMN)
    if end is None:
        return None
    low, high = (None if edge is None else edge - level for edge in (end.low, end.high))
    return end._replace(value=end.value - level, low=low, high=high)
