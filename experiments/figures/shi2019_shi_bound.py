"""Shi et al. 2019: what Top-k leaves out against Random-k's exact bound and their tighter one."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import number
from analysis.records.frames import Frames
from analysis.records.schema import ALL
from analysis.stats import POSITIVE, SHARE, Value
from analysis.tables import Table
from experiments.figures import _looks as looks
from experiments.figures.papers import claim

TITLE = "What Top-k leaves out of gradient plus residual, and how it is bounded"
SHOWN = (0.001, 0.01, 0.1)  # densities in the table
OURS = style.Look("Top-k, measured: mean, and all steps", "#0072B2", "", "")
RANDOMK = style.Look("1 - k/d, Random-k's", "#D55E00", "", "")
THEIRS = style.Look("(1 - k/d)², theirs", "black", "", "")
runs = looks.runs


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [_panel(model, of_model) for model, of_model in looks.models(frames).items()]
    return plots.picture(panels, 2.6, ylabel="Share of the energy left out", sharey=True)


def _panel(model: str, frames: Frames) -> plots.Panel:
    by_density = looks.seen(frames, "left_out", ALL).groupby("x")["value"]
    x = by_density.mean().index.to_numpy()
    return plots.curves(
        [
            plots.Band(OURS, x, by_density.min(), by_density.max(), 0.25),
            plots.Curve(OURS, x, by_density.mean()),
            plots.Curve(RANDOMK, x, 1 - x, {"linestyle": "--"}),
            plots.Curve(THEIRS, x, (1 - x) ** 2, {"linestyle": ":"}),
        ],
        grid=None, xscale="log", xlabel="k/d", title=model, ylim=(0, 1.02),
    )  # fmt: skip


def table(frames: Frames) -> Table:
    rows = []
    for model, of_model in looks.models(frames).items():
        row: dict[str, object] = {"model": model}
        for density in SHOWN:
            row[f"k/d = {number(density)}"] = looks.over_runs(
                of_model, partial(_percent, density=density), SHARE
            )
        row["most over (1 - k/d)²"] = looks.over_runs(of_model, ratio, POSITIVE)
        rows.append(row)
    units = {f"k/d = {number(density)}": "%" for density in SHOWN}
    return Table("Energy left out, mean over steps", pd.DataFrame(rows), units)


def left_out(run: Frames, density: float) -> float:
    """The mean over steps at the density next to this one."""
    table = looks.seen(run, "left_out", ALL)
    if not len(table):
        return float("nan")
    nearest = min(table["x"].unique(), key=lambda x: abs(np.log(x / density)))
    return float(table.loc[table["x"] == nearest, "value"].mean())


def _percent(run: Frames, density: float) -> float:
    return 100 * left_out(run, density)


def ratio(run: Frames) -> float:
    """Largest ratio of what was left out to (1 - k/d)^2, over all steps and densities."""
    table = looks.seen(run, "left_out", ALL)
    return float((table["value"] / (1 - table["x"]) ** 2).max()) if len(table) else float("nan")


def _largest_ratio(frames: Frames, task: str) -> Value | None:
    return looks.over_runs(looks.of_task(frames, task), ratio, POSITIVE)


def caption(frames: Frames, profile: str) -> str:
    return (
        "Share of the squared norm of gradient plus residual that the k largest of d elements leave "
        "out, against "
        "k/d: mean and range over all steps that were looked at and all seeds, during training with Top-k at "
        f"density 0.01. {captions.setting(frames)}"
    )


def claims() -> list[Claim]:
    return [
        claim(
            "shi2019.bound", _largest_ratio, task, case=task, label=label,
            answers=("shi2019.21", *looks.SPARSE_TOO.get(task, ())),
        )
        for task, label in looks.MODELS.items()
    ]  # fmt: skip
