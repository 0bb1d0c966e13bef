"""Shi et al. 2019: what Top-k leaves out against Random-k's exact bound and their tighter one."""

from __future__ import annotations

from functools import partial

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.looks import ALL
from analysis.numbers import number
from analysis.stats import POSITIVE, SHARE, Value
from analysis.tables import Table
from experiments.figures import _looks as looks

TITLE = "What Top-k leaves out of gradient plus residual, and how it is bounded"
SHOWN = (0.001, 0.01, 0.1)  # densities in the table


def runs(profile: str) -> list[list[str]]:
    return looks.runs(profile)


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not len(frames.runs):
        raise ValueError("nothing to draw: there is no run")
    found = looks.models(frames)
    with plots.canvas(style.two_columns(2.6), 1, len(found), squeeze=False, sharey=True) as (figure, (row,)):
        for axes, (model, of_model) in zip(row, found.items(), strict=True):
            by_density = looks.seen(of_model, "left_out", ALL).groupby("x")["value"]
            x = by_density.mean().index.to_numpy()
            axes.fill_between(x, by_density.min(), by_density.max(), color="#0072B2", alpha=0.25, linewidth=0)
            axes.plot(x, by_density.mean(), color="#0072B2", label="Top-k, measured: mean, and all steps")
            axes.plot(x, 1 - x, color="#D55E00", linestyle="--", label="1 - k/d, Random-k's")
            axes.plot(x, (1 - x) ** 2, color="black", linestyle=":", label="(1 - k/d)², theirs")
            axes.set(xscale="log", xlabel="k/d", title=model, ylim=(0, 1.02))
        row[0].set_ylabel("Share of the energy left out")
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


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
    """What was left out over (1 - k/d)^2, where it is largest, of all steps and densities."""
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
        Claim(
            text=f"Top-k leaves out less than (1 - k/d)² of the {label}'s energy: the largest ratio of both",
            paper="(1 - k/d)²",
            unit="x",
            source="theorem on the tighter bound",
            kind="limit",
            tolerance=1.0,
            reason="A bound is never exceeded: the largest over all densities and steps counts.",
            ours=partial(_largest_ratio, task=task),
        )
        for task, label in looks.MODELS.items()
    ]
