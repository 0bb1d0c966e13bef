"""The straggler of Yoon and Oh 2022 by experiment: one worker is made late, by another time in each step, and
communication is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import number
from analysis.published import rederived
from analysis.published.rederived import JOB, estimate
from analysis.records.frames import Frames
from analysis.records.steps import warm
from analysis.stats import ANY, SHARE, Value, over_units
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import claim

TITLE = "One late worker: what communication becomes"
SCALE = yoon2022.TIMING_SCALE
LATEST_S = 0.064  # twice the range of the published job's eight workers in compression
LATE = {"late.draw": "uniform", "late.s": LATEST_S, "late.rank": 1}
# Blocks long enough for a line of their own; the model is small, so that little else makes workers wait.
SCALES = {
    "smoke": {**yoon2022.TIMING["smoke"], "alternate.block_steps": 8},
    "laptop": {
        **yoon2022.TIMING["laptop"], "task": "cnn_cifar10", "timing.warmup_steps": 5,
        "alternate.block_steps": 20, "alternate.limit_min": 6,
    },
    "paper": {"cluster": "local", "alternate.block_steps": 20, "alternate.limit_min": 30},
}  # fmt: skip
MODE = "serialised"
METHODS = ("dense", "topk", "randomk")
INSIDE = 0.995  # share of the steps that the axes show
THEIRS = ("A100", "V100")
LINES = {"measured here": "#111111", "from the authors' logs": "#777777"}


def runs(profile: str) -> list[Run]:
    variants = {
        method: {**yoon2022.TIMED[method], **yoon2022.small_density(method, profile)} for method in METHODS
    }
    return yoon2022.timing_runs(profile, MODE, variants, LATE, scales=SCALES)


def draw(frames: Frames, profile: str) -> plots.Figure:
    methods = [method for method in METHODS if method in yoon2022.present(frames, MODE)]
    ylabel = f"Communication (ms{captions.simulated(frames)})"
    return plots.picture([_scatter(frames, method) for method in methods], 2.6, ylabel=ylabel, sharey=True)


def _scatter(frames: Frames, method: str) -> plots.Panel:
    """Communication against lateness in every step, with our line of least squares and theirs."""
    look, found = style.look(method), points(frames, method)
    line = rederived.lateness_line(JOB["A100", "topk"])
    right, top = (float(np.quantile(found[column], INSIDE)) for column in ("late", "spent"))
    ends, ours = np.array([0.0, right]), np.polyfit(found["late"], found["spent"], 1)
    theirs = line.intercept[0] + line.slope[0] * ends
    dots = {"marker": ".", "linestyle": "", "markersize": 3.5, "alpha": 0.5, "mew": 0, "label": None}
    dashed = {"linestyle": (0, (4, 2)), "linewidth": 1.0}
    here, logs = (style.Look(label, colour, "", "") for label, colour in LINES.items())
    lines = [
        plots.Curve(look, found["late"].to_numpy(), found["spent"].to_numpy(), dots),
        plots.Curve(here, ends, np.polyval(ours, ends), {"linewidth": 1.0}),
        plots.Curve(logs, ends, theirs, dashed),
    ]

    def panel(axes: plots.Axes) -> None:
        plots.curves(lines, grid=None, title=look.label, xlabel="Lateness of the late worker (ms)")(axes)
        axes.set(xlim=(0, right), ylim=(0, 1.35 * top))
        text = f"y = {number(ours[0])} x + {number(ours[1])} ms"
        axes.text(0.04, 0.97, text, transform=axes.transAxes, va="top", fontsize=6.5)

    return panel


def table(frames: Frames) -> Table:
    """The lines, ours and those of the authors' logs."""
    rows: list[dict[str, Any]] = [
        {
            "of": f"{style.look(method).label}, lateness injected",
            "communication per lateness": slope(frames, method),
            "communication at no lateness": intercept(frames, method),
            "variance explained": explained(frames, method),
        }
        for method in yoon2022.present(frames, MODE)
    ]
    for gpu in THEIRS:
        line = rederived.lateness_line(JOB[gpu, "topk"])
        rows.append({
            "of": f"{yoon2022.of_job(gpu, 'topk')}, lateness in compression, logs",
            "communication per lateness": estimate(line.slope),
            "communication at no lateness": estimate(line.intercept),
            "variance explained": estimate(100 * line.correlation**2),
        })  # fmt: skip
    units = {"communication at no lateness": "ms", "variance explained": "%"}
    return Table("Communication against the lateness of the last worker", pd.DataFrame(rows), units)


def caption(frames: Frames, profile: str) -> str:
    line = rederived.lateness_line(JOB["A100", "topk"])
    return (
        "Communication (wait and transfer) of a step, mean over workers, against by how much the late worker "
        "was later than the mean of all: in each step it did nothing for a time drawn anew, between 0 and "
        f"{number(1e3 * LATEST_S)} ms, at the end of backward. Solid: the line of least squares; dashed: "
        "that of the published job of Top-k on 8 A100, whose workers were late in compression, "
        f"y = {number(line.slope[0])} x + {number(line.intercept[0])} ms, *derived from the authors' own job "
        "logs* (github.com/kljp/topk_results) as are the table's last rows. Axes show "
        f"{number(100 * INSIDE)} % of the steps. {captions.setting(frames)} {captions.timing(frames)}"
    )


def claims() -> list[Claim]:
    published = round(float(rederived.lateness_line(JOB["A100", "topk"]).slope[0]), 2)
    label = {method: style.look(method).label for method in METHODS}
    return [
        claim("yoon2022.straggler.grows-with-lateness", slope, "topk", paper=published),
        *(
            claim("yoon2022.straggler.lateness-explains", explained, method, case=method, label=label[method])
            for method in METHODS
        ),
    ]


def slope(frames: Frames, method: str) -> Value | None:
    """Milliseconds of communication for each of lateness."""
    return _of_blocks(frames, method, lambda late, spent: float(np.polyfit(late, spent, 1)[0]))


def intercept(frames: Frames, method: str) -> Value | None:
    """Communication at no lateness, ms."""
    return _of_blocks(frames, method, lambda late, spent: float(np.polyfit(late, spent, 1)[1]))


def explained(frames: Frames, method: str) -> Value | None:
    """The share of the variance of communication that lateness explains, %."""
    return _of_blocks(
        frames, method, lambda late, spent: 100 * float(np.corrcoef(late, spent)[0, 1]) ** 2, SHARE
    )


def points(frames: Frames, method: str) -> pd.DataFrame:
    """A row per warm step: `late` and `spent` in communication, in ms, and the `unit` that it belongs to."""
    parts = []
    for key in yoon2022.keys(frames, method, MODE):
        steps = warm(frames, key).steps
        spent = steps["wait_s"] + steps["transfer_s"]
        of_step = pd.DataFrame({"late": steps["late_s"], "spent": spent}).groupby(steps["step"])
        table = 1e3 * pd.DataFrame({
            "late": of_step["late"].max() - of_step["late"].mean(), "spent": of_step["spent"].mean()
        })  # fmt: skip
        block = steps.groupby("step")["block"].first().fillna(0).astype(int).astype(str)
        parts.append(table.assign(unit=f"{key} " + block))
    found: pd.DataFrame = pd.concat(parts) if parts else pd.DataFrame(columns=["late", "spent", "unit"])
    return found


def _of_blocks(
    frames: Frames,
    method: str,
    statistic: Callable[[np.ndarray, np.ndarray], float],
    bounds: tuple[float, float] = ANY,
) -> Value | None:
    """A statistic of all steps together, with the interval of what the blocks say one by one."""
    found = points(frames, method)
    if not len(found):
        return None
    blocks = [
        statistic(of_unit["late"].to_numpy(), of_unit["spent"].to_numpy())
        for _, of_unit in found.groupby("unit", sort=False)
    ]
    overall = statistic(found["late"].to_numpy(), found["spent"].to_numpy())
    return over_units(blocks, bounds, "blocks", overall)
