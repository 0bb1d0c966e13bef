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
from analysis.published.block_intervals import JackknifeParts, combine_estimates, jackknife_estimate
from analysis.published.rederived import (
    JOB_BY_GPU_AND_METHOD,
    communication_ms,
    compression_ms,
    lateness_line,
)
from analysis.published.validation_free import validation_free_step_ms
from analysis.records.frames import Frames
from analysis.stats import PERCENT, UNBOUNDED, Bounds, Estimate
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import claim, of_methods

TITLE = "Breakdown of an iteration, and waiting, from the authors' logs"
SCALE = yoon2022.TIMING_SCALE
METHODS = yoon2022.METHODS
GPUS = ("A100", "V100")
PHASES = ("forward", "backward", "select", "synchronize", "wait", "transfer", "io", "unaccounted")
SCATTERED = (("A100", "topk"), ("V100", "topk"), ("A100", "randomk"))
READABLE = 0.06  # of the axis: a part smaller than this carries no number
INSIDE = 0.995  # share of the iterations that a scatter's axes show


def runs(profile: str) -> list[Run]:
    return []


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [*map(_bars, METHODS), *(_scatter(*each) for each in SCATTERED)]
    return plots.compose_figure(
        panels, 5.2, rows=2, ylabel=("Time per iteration (ms)", "Communication (ms)"),
        keys=marks.phase_legend_handles(PHASES), loc="outside upper center", ncols=4, height_ratios=(1.25, 1),
    )  # fmt: skip


def as_published(gpu: str, method: str) -> dict[str, float]:
    """The parts of their bar in ms, bottom first, and what it leaves out of the logged time."""
    job = JOB_BY_GPU_AND_METHOD[gpu, method]
    communication = rederived.filtered_communication_ms(job)
    wait = communication.dense if method == "dense" else communication.sparse
    return _parts(job, {"synchronize": wait}, rederived.published_iteration_ms(job))


def without_validation(gpu: str, method: str) -> dict[str, float]:
    """The parts of an iteration in which nobody validates, ms, bottom first."""
    job = JOB_BY_GPU_AND_METHOD[gpu, method]
    waits, sends = float(communication_ms(job)[0]), float(rederived.last_rank_ms(job)[0])
    own = {"wait": waits - sends, "transfer": sends, "io": float(_row(job)["io_ms"])}
    return _parts(job, own, validation_free_step_ms(job).value)


def _parts(job: int, own: dict[str, float], whole: float) -> dict[str, float]:
    """Computing, a bar's own parts, and the rest of the whole."""
    row, select = _row(job), float(compression_ms(job)[0])
    computing = {"forward": float(row["fp_ms"]), "backward": float(row["bp_ms"]) - select, "select": select}
    parts = computing | own
    return parts | {"unaccounted": whole - sum(parts.values())}


def _row(job: int) -> dict[str, float]:
    row: dict[str, float] = published.job_table().set_index("job").loc[job].to_dict()
    return row


def table(frames: Frames) -> list[Table]:
    """Every number of the picture, and their intervals."""
    jobs = {yoon2022.job_label(gpu, method): job for (gpu, method), job in JOB_BY_GPU_AND_METHOD.items()}
    tables = []
    for title, rows, unit in (("Times", TIMES, "ms"), ("Waiting for the last rank", SHARES, "")):
        cells = {of: [cell(job) for cell in rows.values()] for of, job in jobs.items()}
        frame = pd.DataFrame({"quantity": list(rows), **cells})
        tables.append(Table(title, frame, dict.fromkeys(jobs, unit)))
    return tables


def _of_job(
    of: Callable[[int], JackknifeParts], selecting: bool = False, bounds: Bounds = UNBOUNDED
) -> Callable[[int], Estimate | None]:
    """An estimate of each job; where it is about selecting, of those that select."""
    return lambda job: (
        jackknife_estimate(of(job), bounds) if compression_ms(job)[0] or not selecting else None
    )


def _of_line(part: str, loop_starts: bool = True) -> Callable[[int], Estimate | None]:
    """A part of the line of least squares: communication against the lateness of the last rank."""
    return _of_job(lambda job: getattr(lateness_line(job, loop_starts), part), selecting=True)


# What the tables show of each job.
TIMES: dict[str, Callable[[int], Estimate | float | None]] = {
    "iteration, as published": rederived.published_iteration_ms,
    "iteration without validation": validation_free_step_ms,
    "one validation": _of_job(rederived.stall_ms),
    "compression": _of_job(compression_ms, selecting=True),
    "lateness of the last rank in it": _of_job(rederived.lateness_ms, selecting=True),
    "communication without stalls": _of_job(communication_ms),
    "of it the last rank's": _of_job(rederived.last_rank_ms),
    "communication, sparse filter": lambda job: rederived.filtered_communication_ms(job).sparse,
    "communication, dense filter, at least": lambda job: rederived.filtered_communication_ms(job).dense,
    "communication at no lateness": _of_line("intercept"),
    "the same without loops' first iterations": _of_line("intercept", loop_starts=False),
}
SHARES: dict[str, Callable[[int], Estimate | None]] = {
    "share of waiting in the communication": _of_job(rederived.mean_waiting_share),
    "communication per lateness": _of_line("slope"),
    "their correlation": _of_line("correlation"),
    "communication per lateness without loops' first iterations": _of_line("slope", loop_starts=False),
    "their correlation without them": _of_line("correlation", loop_starts=False),
}


def facts(frames: Frames) -> dict[str, object]:
    """The stalls, and communication under one filter for both."""
    (stalls,) = set(published.iteration_table().groupby("job")["long_waits"].sum())  # the same in every job
    dense, randomk = (
        rederived.filtered_communication_ms(JOB_BY_GPU_AND_METHOD["A100", each])
        for each in ("dense", "randomk")
    )
    filtered = {"dense": dense.sparse, "randomk": randomk.sparse, "least": randomk.dense}
    words = {name: format_number(ms) for name, ms in filtered.items()}
    return {"stalls": stalls, "inside": format_number(100 * INSIDE), **words, **yoon2022.BLOCK_FACTS}


def _bars(method: str) -> plots.Panel:
    """The bar as published (P) and without validation (V), of each GPU."""
    gpus = [gpu for gpu, of in JOB_BY_GPU_AND_METHOD if of == method]
    bars = [(part, part(gpu, method)) for gpu in gpus for part in (as_published, without_validation)]
    highest = max(sum(parts.values()) for _, parts in bars)
    places = [i + 0.5 * (i // 2) for i in range(len(bars))]

    def panel(axes: plots.Axes) -> None:
        for x, (part, parts) in zip(places, bars, strict=True):
            top = marks.draw_stacked_bar(
                axes, x, parts, width=0.8, faint=part is as_published, least=READABLE * highest
            )
            plots.annotate_above(axes, x, top, format_number(top))
        plots.set_place_labels(axes, ["P" if part is as_published else "V" for part, _ in bars])
        axes.set_xticks(places)
        for i, gpu in enumerate(gpus):
            plots.annotate_above(axes, 2.5 * i + 0.5, 0, f"8 {gpu}", xytext=(0, -14), va="top")
        axes.set(ylim=(0, 1.12 * highest), title=style.method_style(method).label, xlim=(-0.7, 4.2))

    return panel


def _scatter(gpu: str, method: str) -> plots.Panel:
    """Communication against lateness in every iteration, with the line of least squares."""
    job, look = JOB_BY_GPU_AND_METHOD[gpu, method], style.method_style(method)
    table = rederived.settled_iterations(job)
    table = table[table["long_waits"] == 0]
    late, wait = (table["comp_max_ms"] - table["comp_mean_ms"]).to_numpy(), table["comm_mean_ms"].to_numpy()
    starts = rederived.is_first_of_loop(table)
    right, top = (float(np.quantile(values, INSIDE)) for values in (late, wait))
    inside, every = lateness_line(job, loop_starts=False), lateness_line(job).correlation[0]
    ends, (slope, intercept, r) = np.array([0.0, right]), (part[0] for part in inside)
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
    text = f"y = {format_number(slope)} x + {format_number(intercept)} ms, r = {format_number(r)}"
    return plots.curves_panel(
        lines, grid=None, title=yoon2022.job_label(gpu, method, ", "),
        xlabel="Lateness of the last rank (ms)",
        xlim=(0, right), ylim=(0, 1.8 * top), note=f"{text}\nwith the crosses r = {format_number(every)}",
    )  # fmt: skip


# Of a job, or of two: what the claims are about, in % or ms.
MEASURES: dict[str, Callable[..., Estimate]] = {
    "compression over all else": lambda job: combine_estimates(
        lambda part, whole: 100 * (2 * part / whole - 1),
        jackknife_estimate(compression_ms(job)),
        validation_free_step_ms(job),
    ),
    "communication below a tenth": lambda job: combine_estimates(
        lambda part, whole: 10 - 100 * part / whole,
        jackknife_estimate(communication_ms(job)),
        validation_free_step_ms(job),
    ),
    "communication": lambda job: jackknife_estimate(communication_ms(job)),
    "more communication": lambda job, other: jackknife_estimate(
        communication_ms(job) - communication_ms(other)
    ),
    "longer compression": lambda job, other: jackknife_estimate(
        100 * (compression_ms(job) / compression_ms(other) - 1)
    ),
    "variance explained by lateness": lambda job: jackknife_estimate(
        100 * lateness_line(job).correlation ** 2, PERCENT
    ),
    "variance left inside loops": lambda job: jackknife_estimate(
        100 - 100 * lateness_line(job, False).correlation ** 2, PERCENT
    ),
}


def measured(_: Frames, name: str, *jobs: tuple[str, str]) -> Estimate:
    """One of `MEASURES`, of the jobs of these GPUs and methods."""
    return MEASURES[name](*(JOB_BY_GPU_AND_METHOD[job] for job in jobs))


def on_a100(frames: Frames, method: str, name: str) -> Estimate:
    """One of `MEASURES`, of a method's job on 8 A100."""
    return measured(frames, name, ("A100", method))


def claims() -> list[Claim]:
    def of_gpus(name: str, measure: str) -> list[Claim]:
        about = f"yoon2022.fig4-logs.{name}"
        return [claim(about, measured, measure, (gpu, "topk"), case=gpu, gpu=gpu) for gpu in GPUS]

    topk, other, dense = ("A100", "topk"), ("V100", "topk"), ("A100", "dense")
    longer = ("more communication", topk, dense)
    return [
        *of_gpus("compression-dominates", "compression over all else"),
        *of_methods("yoon2022.fig4-logs.small-part", on_a100, METHODS, "communication below a tenth"),
        *of_methods("yoon2022.fig4-logs.communication", on_a100, METHODS, "communication"),
        claim("yoon2022.fig4-logs.topk-communicates-longer", measured, *longer),
        *of_gpus("lateness-explains", "variance explained by lateness"),
        claim("yoon2022.fig4-logs.randomk-not-late", on_a100, "randomk", "variance left inside loops"),
        claim("yoon2022.fig4-logs.a100-not-faster", measured, "longer compression", topk, other),
    ]
