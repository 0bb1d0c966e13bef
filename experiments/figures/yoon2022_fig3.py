"""Fig. 3 of Yoon and Oh 2022: validation top-1 accuracy of Top-k SGD, Random-k SGD, and baseline."""

from __future__ import annotations

from analysis import plots
from analysis.claims import Claim
from analysis.records.frames import Frames
from analysis.tables import Table
from experiments.figures import _convergence as convergence
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig2 as fig2
from experiments.figures.papers import make_claim

TITLE = "Validation top-1 accuracy of dense, Top-k and Random-k SGD"
COLUMN = "val_top1"
SCALE = yoon2022.TRAINING_SCALE
published_results = yoon2022.published_results_by_method
LAST_BEHIND = 4  # the last logged epoch at which their Top-k was behind their Random-k
runs = fig2.runs
more_runs = fig2.more_runs
facts = convergence.convergence_facts


def draw(frames: Frames, profile: str) -> plots.Figure:
    return convergence.draw_curves_and_ends(
        frames, convergence.replicates_by_method(frames), {COLUMN: "Validation top-1 (%)"}
    )


def table(frames: Frames) -> Table:
    return convergence.final_values_table(frames, convergence.replicates_by_method(frames), {COLUMN: "%"})


def claims() -> list[Claim]:
    steps = yoon2022.STEPS_PER_EPOCH
    overtaking = make_claim(
        "yoon2022.fig3.topk-overtakes-randomk", convergence.overtaking_step, "topk", "randomk",
        paper=(LAST_BEHIND + 1) * steps, tolerance=3 * steps,
    )  # fmt: skip
    return [
        *convergence.final_value_claims("yoon2022.fig3.end", COLUMN),
        *convergence.fig3_order_claims(),
        overtaking,
    ]
