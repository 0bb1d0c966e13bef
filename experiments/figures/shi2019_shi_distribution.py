"""Shi et al. 2019: how what Top-k selects from, gradient plus residual, is distributed during training."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import style
from analysis.records.frames import Frames
from analysis.records.schema import ALL
from analysis.stats import SHARE
from analysis.tables import Table
from experiments.figures import _looks as looks
from experiments.figures.papers import claim, claim_each

TITLE = "What Top-k selects from: gradients plus residuals, from the first step to the last"
SHADES = ("#BBBBBB", "#88CCEE", "#4477AA", "#332288")  # from the first step to the last
NORMAL = style.Look("normal", "black", "", "")
TENSOR = style.Look("each tensor, last step", "#999999", "", "")
WITHIN = 68.27  # %, within the standard deviation of a normal distribution
FLOOR = 1e-4  # of the drawn densities
runs = looks.runs


def draw(frames: Frames, profile: str) -> plots.Figure:
    firsts = {model: looks.first(of_model) for model, of_model in looks.models(frames).items()}
    over_all = [_panel(_over_steps(run), title=model) for model, run in firsts.items()]
    by_tensor = [_panel(_of_tensors(run)) for run in firsts.values()]
    labels = ("Density, all tensors", "Density, tensor by tensor")
    return plots.picture([*over_all, *by_tensor], 4.2, rows=2, ylabel=labels, ncols=6, sharey=True)


def _over_steps(run: Frames) -> list[plots.Curve]:
    """The whole model's densities at some steps."""
    table = looks.seen(run, "histogram", ALL)
    steps = looks.some_steps(list(table["step"]))
    at = {step: table[table["step"] == step] for step in steps}
    return [
        plots.Curve(style.Look(f"step {step + 1}", colour, "", ""), at[step]["x"], _drawn(at[step]))
        for colour, step in zip(SHADES, steps, strict=False)
    ]


def _of_tensors(run: Frames) -> list[plots.Curve]:
    return [plots.Curve(TENSOR, at["x"], _drawn(at), {"linewidth": 0.5}) for _, at in last_of_each(run)]


def _drawn(density: pd.DataFrame) -> pd.Series[float]:
    return density["value"].clip(lower=FLOOR / 2)


def _panel(lines: list[plots.Curve], **words: Any) -> plots.Panel:
    x = np.linspace(-6, 6, 241)
    normal = plots.Curve(NORMAL, x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), {"linestyle": ":"})
    words |= {"yscale": "log", "ylim": (FLOOR, 20), "xlabel": "Value / RMS"}
    return plots.curves([*lines, normal], grid=None, **words)


def last_of_each(run: Frames) -> list[tuple[str, pd.DataFrame]]:
    """The last histogram of each tensor, the whole model's apart."""
    found = looks.seen(run, "histogram")
    last = found[found["of"].ne(ALL) & found["step"].eq(found["step"].max())]
    return [(str(name), at) for name, at in last.groupby("of")]


def table(frames: Frames) -> Table:
    measures: looks.Measures = {
        "rise": (rise, SHARE),
        "within 0.2 RMS": (partial(within, edge=0.2), SHARE),
        "within 1 RMS": (partial(within, edge=1.0), SHARE),
    }
    units = dict.fromkeys(measures, "%") | {"rise": "% of the peak"}
    return Table.of("How the values lie, mean over steps", looks.rows(frames, measures), units)


def rise(run: Frames) -> float:
    """The most by which the density rises again on the way from its peak outwards, in % of the peak: 0 of a
    bell. The mean over steps.
    """
    table = looks.seen(run, "histogram", ALL).sort_values(["step", "x"])
    return float(np.mean([100 * _rise(at["value"].to_numpy()) for _, at in table.groupby("step")]))


def _rise(density: np.ndarray) -> float:
    peak = int(density.argmax())
    sides = (density[peak:], density[peak::-1])
    rises = [float((side - np.minimum.accumulate(side)).max()) for side in sides]
    return max(rises) / float(density.max())


def within(run: Frames, edge: float) -> float:
    """% of the values no further from 0 than so many RMS. The mean over steps."""
    table = looks.seen(run, "histogram", ALL)
    width = float(np.diff(np.unique(table["x"]))[0])
    inside = table[table["x"].abs() < edge]
    return 100 * width * float(inside.groupby("step")["value"].sum().mean())


def claims() -> list[Claim]:
    return [
        *claim_each("shi2019.bell", looks.of_model, looks.MODELS, rise, SHARE),
        *(
            claim(
                "zhang.near-zero", looks.of_model, task, _above_normal, (-WITHIN, 100 - WITHIN), case=task,
                label=label, answers=("zhang.26", *looks.SPARSE_TOO.get(task, ())),
            )
            for task, label in looks.MODELS.items()
        ),
    ]  # fmt: skip


def _above_normal(run: Frames) -> float:
    return within(run, 1.0) - WITHIN
