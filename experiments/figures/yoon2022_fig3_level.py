"""Fig. 3 (and 2) of Yoon and Oh 2022 at the paper's accuracy: fig3-slim with a network that reaches it."""

from __future__ import annotations

from functools import partial

from analysis.claims import Claim
from analysis.records.frames import Frames
from analysis.stats import Estimate, final_mean
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig3_slim as slim
from experiments.figures._runs import MORE_SEEDS
from experiments.figures.papers import make_claim

TITLE = "Validation accuracy and loss at the paper's level, at density 0.001 and 0.01"
SCALE = slim.SCALE
published_results = slim.published_results
facts = slim.facts
draw = slim.draw
table = slim.table
LEVEL = 90  # % top-1; theirs ended at 92.99, with a model 13 times as large and 16 times the images


runs = partial(slim.training_runs_of_item, item="fig3-level")
more_runs = partial(runs, seeds_by_profile=MORE_SEEDS)


def claims() -> list[Claim]:
    level = make_claim(
        "yoon2022.fig3-level.dense-reaches-the-level", final_top1_above_level, "dense", LEVEL, level=LEVEL
    )
    return [level, *slim.claims()]


def final_top1_above_level(frames: Frames, name: str, level: float) -> Estimate | None:
    """Return the points of top-1 by which a method's trainings end above a level in percent."""
    end = final_mean(frames, slim.training_run_keys(frames, name), slim.COLUMN)
    return end and yoon2022.subtract_exact(end, level)
