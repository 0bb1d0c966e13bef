"""Shi et al. 2019: how what Top-k selects from, gradient plus residual, is distributed during training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.looks import ALL
from analysis.numbers import number
from analysis.stats import SHARE, Bounds, Value
from analysis.tables import Table
from experiments.figures import _looks as looks

TITLE = "What Top-k selects from: gradients plus residuals, from the first step to the last"
COLOURS = ("#BBBBBB", "#88CCEE", "#4477AA", "#332288")
NORMAL = 68.27  # %, within the standard deviation of a normal distribution
RISE = 0.05  # of the peak, by which a density may rise again away from it: what the eye takes for one bell
FLOOR = 1e-4  # of the drawn densities


def runs(profile: str) -> list[list[str]]:
    return looks.runs(profile)


def draw(frames: Frames, profile: str) -> plots.Figure:
    if not len(frames.runs):
        raise ValueError("nothing to draw: there is no run")
    found = looks.models(frames)
    size = style.two_columns(4.2)
    with plots.canvas(size, 2, len(found), squeeze=False, sharey=True) as (figure, (row, layers)):
        for axes, (model, of_model) in zip(row, found.items(), strict=True):
            of_first = looks.first(of_model)
            table = looks.seen(of_first, "histogram", ALL)
            for colour, step in zip(COLOURS, looks.some_steps(list(table["step"])), strict=False):
                at = table[table["step"] == step]
                axes.plot(at["x"], at["value"].clip(lower=FLOOR / 2), color=colour, label=f"step {step + 1}")
            axes.set(title=model)
        for axes, of_model in zip(layers, found.values(), strict=True):
            for _, at in last_of_each(looks.first(of_model)):
                axes.plot(at["x"], at["value"].clip(lower=FLOOR / 2), color="#999999", linewidth=0.5)
        for axes in (*row, *layers):
            x = np.linspace(-6, 6, 241)
            axes.plot(
                x, np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), color="black", linestyle=":", label="normal"
            )
            axes.set(yscale="log", ylim=(FLOOR, 20), xlabel="Value / RMS")
        row[0].set_ylabel("Density, all tensors")
        layers[0].set_ylabel("Density, tensor by tensor")
        handles, labels = row[0].get_legend_handles_labels()
        handles, labels = handles + layers[0].lines[:1], [*labels, "each tensor, last step"]
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
    return figure


def last_of_each(run: Frames) -> list[tuple[str, pd.DataFrame]]:
    """The last histogram of each tensor, the whole model's apart."""
    found = looks.seen(run, "histogram")
    last = found[found["of"].ne(ALL) & found["step"].eq(found["step"].max())]
    return [(str(name), at) for name, at in last.groupby("of")]


def table(frames: Frames) -> Table:
    rows = [
        {
            "model": model,
            "rise": looks.over_runs(of_model, rise, SHARE),
            "within 0.2 RMS": looks.over_runs(of_model, lambda run: within(run, 0.2), SHARE),
            "within 1 RMS": looks.over_runs(of_model, lambda run: within(run, 1.0), SHARE),
        }
        for model, of_model in looks.models(frames).items()
    ]
    units = {"rise": "% of the peak", "within 0.2 RMS": "%", "within 1 RMS": "%"}
    return Table("How the values lie, mean over steps", pd.DataFrame(rows), units)


def rise(run: Frames) -> float:
    """The most by which the density rises again on the way from its peak outwards, in % of the peak: 0 of a
    bell. The mean over steps.
    """
    return _mean(run, lambda density: 100 * _rise(density))


def _rise(density: np.ndarray) -> float:
    peak = int(density.argmax())
    sides = (density[peak:], density[peak::-1])
    rises = [float((side - np.minimum.accumulate(side)).max()) for side in sides]
    return max(rises) / float(density.max())


def within(run: Frames, edge: float) -> float:
    """% of the values no further from 0 than so many RMS. The mean over steps."""
    table = looks.seen(run, "histogram", ALL)
    width = float(np.diff(np.unique(table["x"]))[0]) if len(table) else 0.0
    inside = table[table["x"].abs() < edge]
    return 100 * width * float(inside.groupby("step")["value"].sum().mean()) if len(table) else float("nan")


def _mean(run: Frames, of_density: Callable[[np.ndarray], float]) -> float:
    table = looks.seen(run, "histogram", ALL).sort_values(["step", "x"])
    each = [of_density(at["value"].to_numpy()) for _, at in table.groupby("step")]
    return float(np.mean(each)) if each else float("nan")


def caption(frames: Frames, profile: str) -> str:
    return (
        "Density of gradient plus residual on rank 0 in the first seed's training with Top-k, in units of "
        "the root mean square. Top: over all tensors, at four steps; bottom: of every tensor of 1,000 "
        "elements and more by itself, at the last of them. Dotted: the normal distribution of the same "
        "spread. "
        f"{captions.setting(frames)}"
    )


def claims() -> list[Claim]:
    return [
        *(_bell(task, label) for task, label in looks.MODELS.items()),
        *(_near_zero(task, label) for task, label in looks.MODELS.items()),
    ]


def _bell(task: str, label: str) -> Claim:
    return Claim(
        text=f"the values of the {label} lie like a bell: how much their density rises again off its peak",
        paper="bell-shaped",
        unit="% of the peak",
        source="section on gradient distributions, and its figure",
        kind="limit",
        tolerance=100 * RISE,
        reason=f"A bell falls on both sides; {number(100 * RISE)} % of the peak are what eyes forgive.",
        ours=lambda frames: _of(frames, task, rise, SHARE),
    )


def _near_zero(task: str, label: str) -> Claim:
    return Claim(
        text=f"most values of the {label} are near zero: share within the RMS, above that of a normal one",
        paper="most values are near zero",
        unit="points",
        source="Zhang's slides, 'Why Sparsity?', after this paper's figure",
        kind="ordering",
        tolerance=0.0,
        reason="Of a normal distribution 68.3 % lie within its standard deviation; more lie nearer to zero.",
        ours=lambda frames: _of(frames, task, lambda run: within(run, 1.0) - NORMAL, (-NORMAL, 100 - NORMAL)),
    )


def _of(frames: Frames, task: str, what: Callable[[Frames], float], bounds: Bounds) -> Value | None:
    return looks.over_runs(looks.of_task(frames, task), what, bounds)
