"""Fig. 4 of Yoon and Oh 2022 from its own job logs: the breakdown without validation, and what waiting is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots, published
from analysis.claims import Claim
from analysis.pictures import marks, style
from analysis.pictures.numbers import format_number
from analysis.published import rederived
from analysis.published.block_intervals import (
    JackknifeParts,
    combine_independent_estimates,
    jackknife_estimate,
)
from analysis.published.rederived import (
    JOB_BY_GPU_AND_METHOD,
    fit_lateness_regression,
    mean_communication_ms,
    mean_compression_ms,
)
from analysis.published.validation_free import validation_free_step_ms
from analysis.records.frames import Frames
from analysis.stats import PERCENT, Estimate
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures._published import JobName, no_runs
from experiments.figures.papers import make_claim, make_claims_by_method

TITLE = "Breakdown of an iteration, and waiting, from the authors' logs"
SCALE = yoon2022.TIMING_SCALE
METHODS = yoon2022.METHODS
GPUS = ("A100", "V100")
PHASES = ("forward", "backward", "select", "synchronize", "wait", "transfer", "io", "unaccounted")
SCATTERED = (("A100", "topk"), ("V100", "topk"), ("A100", "randomk"))
READABLE = 0.06  # of the axis: a part smaller than this carries no number
INSIDE = 0.995  # share of the iterations that a scatter's axes show
runs = no_runs


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [*map(_bars_panel, METHODS), *(_scatter_panel(*job) for job in SCATTERED)]
    return plots.compose_figure(
        panels, 5.2, num_rows=2, ylabel=("Time per iteration (ms)", "Communication (ms)"),
        first_legend_entries=marks.phase_legend_handles(PHASES), legend_loc="outside upper center",
        legend_columns=4, height_ratios=(1.25, 1),
    )  # fmt: skip


def published_ms_by_phase(gpu: str, method: str) -> dict[str, float]:
    """Return the parts of their bar in ms, bottom first, and what it leaves out of the logged time."""
    job = JOB_BY_GPU_AND_METHOD[gpu, method]
    communication = rederived.filtered_communication_ms(job)
    wait = communication.dense_filter_ms if method == "dense" else communication.sparse_filter_ms
    return _complete_parts(job, {"synchronize": wait}, rederived.published_iteration_ms(job))


def validation_free_ms_by_phase(gpu: str, method: str) -> dict[str, float]:
    """Return the parts of an iteration in which nobody validates in ms, bottom first."""
    job = JOB_BY_GPU_AND_METHOD[gpu, method]
    waiting_ms = float(mean_communication_ms(job)[0])
    sending_ms = float(rederived.last_rank_communication_ms(job)[0])
    parts = {"wait": waiting_ms - sending_ms, "transfer": sending_ms, "io": float(_job_row(job)["io_ms"])}
    return _complete_parts(job, parts, validation_free_step_ms(job).value)


def _complete_parts(job: int, parts: dict[str, float], whole_ms: float) -> dict[str, float]:
    """Return computing, a bar's own parts, and the rest of the whole."""
    row = _job_row(job)
    select_ms = float(mean_compression_ms(job)[0])
    backward_ms = float(row["bp_ms"]) - select_ms
    parts = {"forward": float(row["fp_ms"]), "backward": backward_ms, "select": select_ms, **parts}
    return parts | {"unaccounted": whole_ms - sum(parts.values())}


def _job_row(job: int) -> dict[str, float]:
    row: dict[str, float] = published.job_table().set_index("job").loc[job].to_dict()
    return row


def table(frames: Frames) -> list[Table]:
    """Return every number of the picture, and their intervals."""
    jobs = {yoon2022.job_label(gpu, method): job for (gpu, method), job in JOB_BY_GPU_AND_METHOD.items()}
    tables = []
    for title, rows, unit in (("Times", TIMES, "ms"), ("Waiting for the last rank", SHARES, "")):
        cells = {label: [quantity(job) for quantity in rows.values()] for label, job in jobs.items()}
        frame = pd.DataFrame({"quantity": list(rows), **cells})
        tables.append(Table(title, frame, dict.fromkeys(jobs, unit)))
    return tables


def _job_estimate(
    parts: Callable[[int], JackknifeParts], selecting: bool = False
) -> Callable[[int], Estimate | None]:
    """Return an estimate of each job; where it is about selecting, of those that select."""
    return lambda job: (
        jackknife_estimate(parts(job)) if mean_compression_ms(job)[0] or not selecting else None
    )


def _line_estimate(part: str, loop_starts: bool = True) -> Callable[[int], Estimate | None]:
    """Return a part of the line of least squares: communication against the lateness of the last rank."""
    return _job_estimate(lambda job: getattr(fit_lateness_regression(job, loop_starts), part), selecting=True)


# What the tables show of each job.
TIMES: dict[str, Callable[[int], Estimate | float | None]] = {
    "iteration, as published": rederived.published_iteration_ms,
    "iteration without validation": validation_free_step_ms,
    "one validation": _job_estimate(rederived.mean_stall_ms),
    "compression": _job_estimate(mean_compression_ms, selecting=True),
    "lateness of the last rank in it": _job_estimate(rederived.mean_lateness_ms, selecting=True),
    "communication without stalls": _job_estimate(mean_communication_ms),
    "of it the last rank's": _job_estimate(rederived.last_rank_communication_ms),
    "communication, sparse filter": lambda job: rederived.filtered_communication_ms(job).sparse_filter_ms,
    "communication, dense filter, at least": (
        lambda job: rederived.filtered_communication_ms(job).dense_filter_ms
    ),
    "communication at no lateness": _line_estimate("intercept"),
    "the same without loops' first iterations": _line_estimate("intercept", loop_starts=False),
}
SHARES: dict[str, Callable[[int], Estimate | None]] = {
    "share of waiting in the communication": _job_estimate(rederived.mean_waiting_share_of_communication),
    "communication per lateness": _line_estimate("slope"),
    "their correlation": _line_estimate("correlation"),
    "communication per lateness without loops' first iterations": _line_estimate("slope", loop_starts=False),
    "their correlation without them": _line_estimate("correlation", loop_starts=False),
}


def facts(frames: Frames) -> dict[str, object]:
    """Return the stalls, and communication under one filter for both."""
    (stalls,) = set(published.iteration_table().groupby("job")["long_waits"].sum())  # the same in every job
    dense, randomk = (
        rederived.filtered_communication_ms(JOB_BY_GPU_AND_METHOD["A100", method])
        for method in ("dense", "randomk")
    )
    return {
        "stalls": stalls, "inside": format_number(100 * INSIDE),
        "dense": format_number(dense.sparse_filter_ms),
        "randomk": format_number(randomk.sparse_filter_ms),
        "least": format_number(randomk.dense_filter_ms),
        **yoon2022.BLOCK_FACTS,
    }  # fmt: skip


def _bars_panel(method: str) -> plots.Panel:
    """Return the bar as published (P) and without validation (V), of each GPU."""
    gpus = [gpu for gpu, job_method in JOB_BY_GPU_AND_METHOD if job_method == method]
    bars = []
    for gpu in gpus:
        bars += [("P", published_ms_by_phase(gpu, method)), ("V", validation_free_ms_by_phase(gpu, method))]
    highest = max(sum(parts.values()) for _, parts in bars)
    places = [bar + 0.5 * (bar // 2) for bar in range(len(bars))]

    def panel(axes: plots.Axes) -> None:
        for x, (letter, parts) in zip(places, bars, strict=True):
            top = marks.draw_stacked_phase_bar(
                axes, x, parts, width=0.8, faint=letter == "P", min_labelled_height=READABLE * highest
            )
            plots.annotate_above(axes, x, top, format_number(top))
        plots.set_x_place_labels(axes, [letter for letter, _ in bars])
        axes.set_xticks(places)
        for i, gpu in enumerate(gpus):
            plots.annotate_above(axes, 2.5 * i + 0.5, 0, f"8 {gpu}", xytext=(0, -14), va="top")
        axes.set(ylim=(0, 1.12 * highest), title=style.method_style(method).label, xlim=(-0.7, 4.2))

    return panel


def _scatter_panel(gpu: str, method: str) -> plots.Panel:
    """Return communication against lateness in every iteration, with the line of least squares."""
    job = JOB_BY_GPU_AND_METHOD[gpu, method]
    look = style.method_style(method)
    table = rederived.settled_iterations(job)
    table = table[table["long_waits"] == 0]
    late = (table["comp_max_ms"] - table["comp_mean_ms"]).to_numpy()
    wait = table["comm_mean_ms"].to_numpy()
    starts = rederived.loop_start_mask(table)
    right, top = (float(np.quantile(values, INSIDE)) for values in (late, wait))
    slope, intercept, correlation = (part[0] for part in fit_lateness_regression(job, with_loop_starts=False))
    with_starts = fit_lateness_regression(job).correlation[0]
    ends = np.array([0.0, right])
    small: dict[str, Any] = {"rasterized": True, "mew": 0, "linestyle": "", "label": None}
    dots = {"marker": ".", "markersize": 1.2, "alpha": 0.25}
    crosses = {"marker": "x", "color": "#777777", "markersize": 2.5, "mew": 0.4}
    lines = [
        plots.Curve(look, late[~starts], wait[~starts], small | dots),
        plots.Curve(look, late[starts], wait[starts], small | crosses),
        plots.Curve(
            style.MethodStyle("", "#111111", "", ""), ends, intercept + slope * ends, {"linewidth": 1.0}
        ),
    ]
    text = f"y = {format_number(slope)} x + {format_number(intercept)} ms, r = {format_number(correlation)}"
    return plots.curves_panel(
        lines, grid=None, title=yoon2022.job_label(gpu, method, ", "),
        xlabel="Lateness of the last rank (ms)",
        xlim=(0, right), ylim=(0, 1.8 * top),
        note=f"{text}\nwith the crosses r = {format_number(with_starts)}",
    )  # fmt: skip


# Of a job, or of two: what the claims are about, in % or ms.
JOB_MEASURES: dict[str, Callable[..., Estimate]] = {
    "compression over all else": lambda job: combine_independent_estimates(
        lambda part, whole: 100 * (2 * part / whole - 1),
        jackknife_estimate(mean_compression_ms(job)),
        validation_free_step_ms(job),
    ),
    "communication below a tenth": lambda job: combine_independent_estimates(
        lambda part, whole: 10 - 100 * part / whole,
        jackknife_estimate(mean_communication_ms(job)),
        validation_free_step_ms(job),
    ),
    "communication": lambda job: jackknife_estimate(mean_communication_ms(job)),
    "more communication": lambda job, other: jackknife_estimate(
        mean_communication_ms(job) - mean_communication_ms(other)
    ),
    "longer compression": lambda job, other: jackknife_estimate(
        100 * (mean_compression_ms(job) / mean_compression_ms(other) - 1)
    ),
    "variance explained by lateness": lambda job: jackknife_estimate(
        100 * fit_lateness_regression(job).correlation ** 2, PERCENT
    ),
    "variance left inside loops": lambda job: jackknife_estimate(
        100 - 100 * fit_lateness_regression(job, False).correlation ** 2, PERCENT
    ),
}


def estimate_job_measure(_: Frames, measure: str, *jobs: JobName) -> Estimate:
    """Return one of `JOB_MEASURES`, of the jobs of these GPUs and methods."""
    return JOB_MEASURES[measure](*(JOB_BY_GPU_AND_METHOD[job] for job in jobs))


def estimate_a100_measure(frames: Frames, method: str, measure: str) -> Estimate:
    """Return one of `JOB_MEASURES`, of a method's job on 8 A100."""
    return estimate_job_measure(frames, measure, ("A100", method))


def claims() -> list[Claim]:
    family = "yoon2022.fig4-logs"
    topk = ("A100", "topk")
    other = ("V100", "topk")
    dense = ("A100", "dense")
    by_gpu = {
        "compression-dominates": "compression over all else",
        "lateness-explains": "variance explained by lateness",
    }
    dominates, explains = (
        [
            make_claim(f"{family}.{name}", estimate_job_measure, measure, (gpu, "topk"), case=gpu, gpu=gpu)
            for gpu in GPUS
        ]
        for name, measure in by_gpu.items()
    )
    return [
        *dominates,
        *make_claims_by_method(
            f"{family}.small-part", estimate_a100_measure, METHODS, "communication below a tenth"
        ),
        *make_claims_by_method(f"{family}.communication", estimate_a100_measure, METHODS, "communication"),
        make_claim(
            f"{family}.topk-communicates-longer", estimate_job_measure, "more communication", topk, dense
        ),
        *explains,
        make_claim(
            f"{family}.randomk-not-late", estimate_a100_measure, "randomk", "variance left inside loops"
        ),
        make_claim(f"{family}.a100-not-faster", estimate_job_measure, "longer compression", topk, other),
    ]
