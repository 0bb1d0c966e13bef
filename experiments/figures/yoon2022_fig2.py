"""Fig. 2 of Yoon and Oh 2022: validation loss of Top-k SGD, Random-k SGD, and baseline."""

from __future__ import annotations

from typing import Any

from analysis import plots
from analysis.claims import Claim
from analysis.records.frames import Frames
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _convergence as convergence
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Validation loss of dense, Top-k and Random-k SGD"
COLUMN = "val_loss"
SCALE = yoon2022.TRAINING_SCALE
published_results = yoon2022.published_results_by_method
runs = yoon2022.convergence_runs
facts = convergence.convergence_facts


def more_runs(profile: str) -> list[Run]:
    return yoon2022.convergence_runs(profile, yoon2022.MORE_SEEDS)


def draw(frames: Frames, profile: str) -> plots.Figure:
    return convergence.draw_curves_and_ends(
        frames, convergence.replicates_by_method(frames), {COLUMN: "Validation loss"}
    )


def table(frames: Frames) -> Table:
    return convergence.final_values_table(frames, convergence.replicates_by_method(frames), {COLUMN: ""})


def claims() -> list[Claim]:
    flips: dict[str, Any] = {"settles_at": convergence.overtaking_step}
    return [
        *convergence.final_value_claims("yoon2022.fig2.end", COLUMN),
        convergence.final_gap_claim("yoon2022.fig2.topk-ends-slightly-above", "topk", "dense", COLUMN),
        convergence.final_gap_claim("yoon2022.fig2.randomk-ends-above", "randomk", "topk", COLUMN, **flips),
    ]
