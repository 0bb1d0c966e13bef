"""The straggler of Yoon and Oh 2022 by experiment: communication while one worker is made late.

It is late by another time in each step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, style
from analysis.pictures.numbers import format_number
from analysis.published import rederived
from analysis.published.block_intervals import jackknife_estimate
from analysis.published.rederived import JOB_BY_GPU_AND_METHOD
from analysis.records.frames import Frames
from analysis.records.steps import BLOCKS, ENOUGH_LAUNCHES, LAUNCHES, warm_steps
from analysis.stats import PERCENT, UNBOUNDED, Bounds, Estimate, estimate_mean
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import make_claim, make_claims_by_method

TITLE = "One late worker: what communication becomes"
SCALE = yoon2022.TIMING_SCALE
LATEST_S = 0.064  # twice the range of the published job's eight workers in compression
LATE = {"late.draw": "uniform", "late.s": LATEST_S, "late.rank": 1}
MODE = "serialised"
METHODS = yoon2022.METHODS
INSIDE = 0.995  # share of the steps that the axes show
THEIRS = ("A100", "V100")
OURS, LOGS = (
    style.MethodStyle("measured here", "#111111", "", ""),
    style.MethodStyle("from the authors' logs", "#777777", "", ""),
)


def runs(profile: str) -> list[Run]:
    variants = yoon2022.small_model_settings_by_variant("straggler", profile)
    return yoon2022.timing_runs(profile, MODE, variants, LATE, scale_item="straggler")


def draw(frames: Frames, profile: str) -> plots.Figure:
    methods = [method for method in METHODS if method in yoon2022.measured_methods(frames, MODE)]
    ylabel = f"Communication (ms{captions.simulated_suffix(frames)})"
    return plots.compose_figure(
        [_scatter_panel(frames, method) for method in methods], 2.6, ylabel=ylabel, sharey=True
    )


def _scatter_panel(frames: Frames, method: str) -> plots.Panel:
    """Return communication against lateness in every step, with our line of least squares and theirs."""
    look = style.method_style(method)
    steps = lateness_table_of_warm_steps(frames, method)
    line = rederived.fit_lateness_regression(JOB_BY_GPU_AND_METHOD["A100", "topk"])
    right, top = steps[["late", "spent"]].quantile(INSIDE)
    ends = np.array([0.0, right])
    ours = np.polyfit(steps["late"], steps["spent"], 1)
    dots = {"marker": ".", "linestyle": "", "markersize": 3.5, "alpha": 0.5, "mew": 0, "label": None}
    dashed = {"linestyle": (0, (4, 2)), "linewidth": 1.0}
    lines = [
        plots.Curve(look, steps["late"].to_numpy(), steps["spent"].to_numpy(), dots),
        plots.Curve(OURS, ends, np.polyval(ours, ends), {"linewidth": 1.0}),
        plots.Curve(LOGS, ends, line.intercept[0] + line.slope[0] * ends, dashed),
    ]
    return plots.curves_panel(
        lines, grid=None, title=look.label, xlabel="Lateness of the late worker (ms)", xlim=(0, right),
        ylim=(0, 1.35 * top), note=f"y = {format_number(ours[0])} x + {format_number(ours[1])} ms",
    )  # fmt: skip


def table(frames: Frames) -> Table:
    """Return the lines, ours and those of the authors' logs."""
    columns = ["of", "communication per lateness", "communication at no lateness", "variance explained"]
    measured = [
        (
            f"{style.method_style(method).label}, lateness injected",
            *(quantity(frames, method) for quantity in LINE_QUANTITIES),
        )
        for method in yoon2022.measured_methods(frames, MODE)
    ]
    logged = []
    for gpu in THEIRS:
        line = rederived.fit_lateness_regression(JOB_BY_GPU_AND_METHOD[gpu, "topk"])
        parts = (line.slope, line.intercept, 100 * line.correlation**2)
        name = f"{yoon2022.job_label(gpu, 'topk')}, lateness in compression, logs"
        logged.append((name, *map(jackknife_estimate, parts)))
    frame = pd.DataFrame([*measured, *logged], columns=columns)
    units = dict(zip(columns[2:], ("ms", "%"), strict=True))
    return Table("Communication against the lateness of the last worker", frame, units)


def facts(frames: Frames) -> dict[str, str]:
    """Return the line of their logs, and the scale of the axes."""
    line = rederived.fit_lateness_regression(JOB_BY_GPU_AND_METHOD["A100", "topk"])
    numbers = {"slope": line.slope[0], "intercept": line.intercept[0], "latest": 1e3 * LATEST_S}
    return {name: format_number(number) for name, number in (numbers | {"inside": 100 * INSIDE}).items()}


def claims() -> list[Claim]:
    regression = rederived.fit_lateness_regression(JOB_BY_GPU_AND_METHOD["A100", "topk"])
    published = round(float(regression.slope[0]), 2)
    return [
        make_claim(
            "yoon2022.straggler.grows-with-lateness", communication_per_lateness, "topk", paper=published
        ),
        *make_claims_by_method("yoon2022.straggler.lateness-explains", variance_explained_percent, METHODS),
    ]


def communication_per_lateness(frames: Frames, method: str) -> Estimate | None:
    """Return the milliseconds of communication for each of lateness."""
    return _estimate_statistic(frames, method, lambda late, spent: float(np.polyfit(late, spent, 1)[0]))


def communication_ms_at_no_lateness(frames: Frames, method: str) -> Estimate | None:
    """Return communication at no lateness, in ms."""
    return _estimate_statistic(frames, method, lambda late, spent: float(np.polyfit(late, spent, 1)[1]))


def variance_explained_percent(frames: Frames, method: str) -> Estimate | None:
    """Return the share of the variance of communication that lateness explains, in percent."""
    return _estimate_statistic(
        frames, method, lambda late, spent: 100 * float(np.corrcoef(late, spent)[0, 1]) ** 2, PERCENT
    )


LINE_QUANTITIES = (communication_per_lateness, communication_ms_at_no_lateness, variance_explained_percent)


def lateness_table_of_warm_steps(frames: Frames, method: str) -> pd.DataFrame:
    """Return a row per warm step: `late` and `spent` in communication, in ms, and its launch and block."""
    tables = [pd.DataFrame(columns=["late", "spent", "launch", "block"])]
    for key in yoon2022.method_run_keys(frames, method, MODE):
        steps = warm_steps(frames, key).steps
        by_step = steps.assign(spent=steps["wait_s"] + steps["transfer_s"]).groupby("step")
        late_s = by_step["late_s"].max() - by_step["late_s"].mean()
        table = 1e3 * pd.DataFrame({"late": late_s, "spent": by_step["spent"].mean()})
        tables.append(table.assign(launch=key, block=by_step["block"].first().fillna(0).astype(int)))
    rows: pd.DataFrame = pd.concat(tables[1:] or tables)
    return rows


def _estimate_statistic(
    frames: Frames,
    method: str,
    statistic: Callable[[pd.Series[float], pd.Series[float]], float],
    bounds: Bounds = UNBOUNDED,
) -> Estimate | None:
    """Return a statistic of all steps together, with the interval of what the blocks say one by one."""
    steps = lateness_table_of_warm_steps(frames, method)
    if not len(steps):
        return None
    by_launch = steps["launch"].nunique() >= ENOUGH_LAUNCHES
    units = steps.groupby("launch" if by_launch else ["launch", "block"], sort=False)
    samples = [statistic(unit["late"], unit["spent"]) for _, unit in units]
    kind = LAUNCHES if by_launch else BLOCKS
    return estimate_mean(samples, bounds, kind, statistic(steps["late"], steps["spent"]))
