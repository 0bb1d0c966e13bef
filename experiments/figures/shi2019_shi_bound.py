"""Shi et al. 2019: what Top-k leaves out against Random-k's exact bound and their tighter one."""

from __future__ import annotations

from functools import partial

import numpy as np

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.pictures.numbers import format_number
from analysis.records.frames import Frames
from analysis.records.schema import ALL
from analysis.stats import PERCENT, POSITIVE
from analysis.tables import Table
from experiments.figures import _selection_looks as looks
from experiments.figures.papers import make_claim, published_value

TITLE = "What Top-k leaves out of gradient plus residual, and how it is bounded"
SCALE = published_value("shi2019.scale.training")
SHOWN = (0.001, 0.01, 0.1)  # densities in the table
OURS = style.MethodStyle("Top-k, measured: mean, and all steps", "#0072B2", "", "")
RANDOMK = style.MethodStyle("1 - k/d, Random-k's", "#D55E00", "", "")
THEIRS = style.MethodStyle("(1 - k/d)², theirs", "black", "", "")
runs = looks.training_runs_with_looks


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [_panel(model, runs) for model, runs in looks.frames_by_model(frames).items()]
    return plots.compose_figure(panels, 2.6, ylabel="Share of the energy left out", sharey=True)


def _panel(model: str, frames: Frames) -> plots.Panel:
    by_density = looks.select_looks(frames, "left_out", ALL).groupby("x")["value"]
    x = by_density.mean().index.to_numpy()
    return plots.curves_panel(
        [
            plots.FilledArea(OURS, x, by_density.min(), by_density.max(), 0.25),
            plots.Curve(OURS, x, by_density.mean()),
            plots.Curve(RANDOMK, x, 1 - x, {"linestyle": "--"}),
            plots.Curve(THEIRS, x, (1 - x) ** 2, {"linestyle": ":"}),
        ],
        grid=None, xscale="log", xlabel="k/d", title=model, ylim=(0, 1.02),
    )  # fmt: skip


def table(frames: Frames) -> Table:
    shares: looks.Measures = {
        f"k/d = {format_number(density)}": (partial(mean_percent_left_out, density=density), PERCENT)
        for density in SHOWN
    }
    rows = looks.rows_of_means_by_model(
        frames, {**shares, "kept / 1 - (1 - k/d)², least": (least_kept_over_bound, POSITIVE)}
    )
    return Table.from_rows("Energy left out, mean over steps", rows, dict.fromkeys(shares, "%"))


def mean_percent_left_out(run: Frames, density: float) -> float:
    """Return the percent of energy left out at the nearest looked-at density, the mean over steps."""
    table = looks.select_looks(run, "left_out", ALL)
    nearest = min(table["x"].unique(), key=lambda x: abs(np.log(x / density)))
    return 100 * float(table.loc[table["x"] == nearest, "value"].mean())


def least_kept_over_bound(run: Frames) -> float:
    """Return the least ratio of what was kept to 1 - (1 - k/d)^2, over all steps and densities."""
    table = looks.select_looks(run, "left_out", ALL)
    return float(((1 - table["value"]) / (1 - (1 - table["x"]) ** 2)).min())


def claims() -> list[Claim]:
    return [
        make_claim(
            "shi2019.bound",
            looks.mean_over_task_runs,
            task,
            least_kept_over_bound,
            POSITIVE,
            case=task,
            label=label,
            answers=("shi2019.21", *looks.MORE_ANSWERS.get(task, ())),
        )
        for task, label in looks.MODELS.items()
    ]
