"""Fig. 4 of Yoon and Oh 2022 from its own job logs: the breakdown without validation, and what waiting is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots, published
from analysis.claims import Claim
from analysis.pictures import marks, style
from analysis.pictures.numbers import number
from analysis.published import rederived
from analysis.published.rederived import (
    JOB,
    communication_ms,
    compression_ms,
    estimate,
    iteration_ms,
    lateness_line,
)
from analysis.records.frames import Frames
from analysis.stats import Value
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import claim

TITLE = "Breakdown of an iteration, and waiting, from the authors' logs"
METHODS = ("dense", "topk", "randomk")
PHASES = ("forward", "backward", "select", "synchronize", "wait", "transfer", "io", "unaccounted")
SCATTERED = (("A100", "topk"), ("V100", "topk"), ("A100", "randomk"))
READABLE = 0.06  # of the axis: a part smaller than this carries no number
INSIDE = 0.995  # share of the iterations that a scatter's axes show


def runs(profile: str) -> list[Run]:
    return []


def draw(frames: Frames, profile: str) -> plots.Figure:
    panels = [
        *(_bars(method, "Time per iteration (ms)" if method == METHODS[0] else "") for method in METHODS),
        *(_scatter(gpu, method, "Communication (ms)" if at == 0 else "")
          for at, (gpu, method) in enumerate(SCATTERED)),
    ]  # fmt: skip
    return plots.picture(
        panels, 5.2, rows=2, keys=marks.phase_keys(PHASES), loc="outside upper center", ncols=4,
        height_ratios=(1.25, 1),
    )  # fmt: skip


def as_published(gpu: str, method: str) -> dict[str, float]:
    """The parts of their bar in ms, bottom first, and what it leaves out of the logged time."""
    job = JOB[gpu, method]
    communication = rederived.filtered_communication_ms(job)
    parts = _computing(job) | {
        "synchronize": communication.dense if method == "dense" else communication.sparse
    }
    return parts | {"unaccounted": rederived.published_iteration_ms(job) - sum(parts.values())}


def without_validation(gpu: str, method: str) -> dict[str, float]:
    """The parts of an iteration in which nobody validates, ms, bottom first."""
    job = JOB[gpu, method]
    waits, sends = float(communication_ms(job)[0]), float(rederived.last_rank_ms(job)[0])
    parts = _computing(job) | {"wait": waits - sends, "transfer": sends, "io": float(_row(job)["io_ms"])}
    return parts | {"unaccounted": float(iteration_ms(job)[0]) - sum(parts.values())}


def table(frames: Frames) -> list[Table]:
    """Every number of the picture, and their intervals."""
    columns = {yoon2022.of_job(gpu, method): job for (gpu, method), job in JOB.items()}
    return [
        Table(
            title,
            pd.DataFrame([
                {"quantity": name} | {of: cell(job) for of, job in columns.items()}
                for name, cell in rows.items()
            ]),
            dict.fromkeys(columns, unit),
        )
        for title, rows, unit in (("Times", TIMES, "ms"), ("Waiting for the last rank", SHARES, ""))
    ]  # fmt: skip


def _line(job: int, part: str, loop_starts: bool = True) -> Value | None:
    """A part of the line of least squares: communication against the lateness of the last rank."""
    return estimate(getattr(lateness_line(job, loop_starts), part)) if _selects(job) else None


def _selects(job: int) -> bool:
    return bool(compression_ms(job)[0])


def _if_selects(of: Callable[[int], rederived.Resampled]) -> Callable[[int], Value | None]:
    return lambda job: estimate(of(job)) if _selects(job) else None


# What the tables show of each job.
TIMES: dict[str, Callable[[int], Value | float | None]] = {
    "iteration, as published": rederived.published_iteration_ms,
    "iteration without validation": lambda job: estimate(iteration_ms(job)),
    "one validation": lambda job: estimate(rederived.stall_ms(job)),
    "compression": _if_selects(compression_ms),
    "lateness of the last rank in it": _if_selects(rederived.lateness_ms),
    "communication without stalls": lambda job: estimate(communication_ms(job)),
    "of it the last rank's": lambda job: estimate(rederived.last_rank_ms(job)),
    "communication, sparse filter": lambda job: rederived.filtered_communication_ms(job).sparse,
    "communication, dense filter, at least": lambda job: rederived.filtered_communication_ms(job).dense,
    "communication at no lateness": lambda job: _line(job, "intercept"),
    "the same without loops' first iterations": lambda job: _line(job, "intercept", loop_starts=False),
}
SHARES: dict[str, Callable[[int], Value | float | None]] = {
    "share of waiting in the communication": lambda job: estimate(rederived.waiting_share(job)),
    "communication per lateness": lambda job: _line(job, "slope"),
    "their correlation": lambda job: _line(job, "correlation"),
    "communication per lateness without loops' first iterations": lambda job: _line(job, "slope", False),
    "their correlation without them": lambda job: _line(job, "correlation", loop_starts=False),
}


def caption(frames: Frames, profile: str) -> str:
    (stalls,) = set(published.iterations().groupby("job")["long_waits"].sum())  # the same in every job
    dense = rederived.filtered_communication_ms(JOB["A100", "dense"])
    randomk = rederived.filtered_communication_ms(JOB["A100", "randomk"])
    return (
        "Top: an iteration as the paper's Fig. 4 counts it (P) and without rank 0's validation, which stood "
        f"inside the timed loop and made the other seven ranks wait {stalls} times (V: validation taken "
        "out). FP, BP and input are means as logged; compression is taken out of BP, inside which it ran; "
        "communication is the final wait, of which the last rank's share is sending and what the others wait "
        "longer is waiting. Bottom: communication of an iteration, mean over ranks, against by how much the "
        "last rank's compression was longer than the mean, with the line of least squares; crosses, left out "
        "of the line: the first of each 48 iterations, before which the training loop turns; axes show "
        f"{number(100 * INSIDE)} % of the iterations. Their filter for dense logs drops communication below "
        f"0.1 ms, that for sparse logs does not: under one filter dense has {number(dense.sparse)} and "
        f"Random-k {number(randomk.sparse)} ms; with the dense filter Random-k would have had at least "
        f"{number(randomk.dense)}. Compression is timed without synchronising the GPU, so some of it "
        f"is BP. {yoon2022.LOGS} {yoon2022.INTERVALS}"
    )


def _bars(method: str, ylabel: str) -> plots.Panel:
    """The bar as published (P) and without validation (V), of each GPU."""
    gpus = [gpu for gpu, of in JOB if of == method]
    bars = {(gpu, part): part(gpu, method) for gpu in gpus for part in (as_published, without_validation)}
    highest = max(sum(parts.values()) for parts in bars.values())
    places = [i + 0.5 * (i // 2) for i in range(len(bars))]

    def panel(axes: plots.Axes) -> None:
        for x, ((_, part), parts) in zip(places, bars.items(), strict=True):
            is_theirs = part is as_published
            top = marks.stack(axes, x, parts, width=0.8, faint=is_theirs, least=READABLE * highest)
            plots.above(axes, x, top, number(top))
        plots.beside(axes, ["P" if part is as_published else "V" for _, part in bars])
        axes.set_xticks(places)
        for i, gpu in enumerate(gpus):
            plots.above(axes, 2.5 * i + 0.5, 0, f"8 {gpu}", xytext=(0, -14), va="top")
        axes.set(ylim=(0, 1.12 * highest), title=style.look(method).label, xlim=(-0.7, 4.2), ylabel=ylabel)

    return panel


def _scatter(gpu: str, method: str, ylabel: str) -> plots.Panel:
    """Communication against lateness in every iteration, with the line of least squares."""
    job, look = JOB[gpu, method], style.look(method)
    table = rederived.settled(job)
    table = table[table["long_waits"] == 0]
    late, wait = (table["comp_max_ms"] - table["comp_mean_ms"]).to_numpy(), table["comm_mean_ms"].to_numpy()
    starts = rederived.starts_a_loop(table)
    right, top = (float(np.quantile(values, INSIDE)) for values in (late, wait))
    ends, inside = np.array([0.0, right]), lateness_line(job, loop_starts=False)
    slope, intercept, r = (part[0] for part in (inside.slope, inside.intercept, inside.correlation))
    every = lateness_line(job).correlation[0]
    line = style.Look("", "#111111", "", "")
    small: dict[str, Any] = {"rasterized": True, "mew": 0, "linestyle": "", "label": None}
    dots = {"marker": ".", "markersize": 1.2, "alpha": 0.25}
    crosses = {"marker": "x", "color": "#777777", "markersize": 2.5, "mew": 0.4}

    def panel(axes: plots.Axes) -> None:
        lines = [
            plots.Curve(look, late[~starts], wait[~starts], small | dots),
            plots.Curve(look, late[starts], wait[starts], small | crosses),
            plots.Curve(line, ends, intercept + slope * ends, {"linewidth": 1.0}),
        ]
        plots.curves(lines, grid=None, ylabel=ylabel, xlabel="Lateness of the last rank (ms)")(axes)
        axes.set(xlim=(0, right), ylim=(0, 1.8 * top), title=yoon2022.of_job(gpu, method, ", "))
        text = f"y = {number(slope)} x + {number(intercept)} ms, r = {number(r)}"
        place: dict[str, Any] = {"transform": axes.transAxes, "va": "top", "fontsize": 6.5}
        axes.text(0.03, 0.99, f"{text}\nwith the crosses r = {number(every)}", **place)

    return panel


def _computing(job: int) -> dict[str, float]:
    row, select = _row(job), float(compression_ms(job)[0])
    return {"forward": float(row["fp_ms"]), "backward": float(row["bp_ms"]) - select, "select": select}


def _row(job: int) -> dict[str, float]:
    row: dict[str, float] = published.jobs().set_index("job").loc[job].to_dict()
    return row


# Of a job, or of two: what the claims are about, in % or ms.
MEASURES: dict[str, Callable[..., rederived.Resampled]] = {
    "compression over all else": lambda job: 100 * (2 * compression_ms(job) / iteration_ms(job) - 1),
    "communication below a tenth": lambda job: 10 - 100 * communication_ms(job) / iteration_ms(job),
    "communication": communication_ms,
    "more communication": lambda job, other: communication_ms(job) - communication_ms(other),
    "longer compression": lambda job, other: 100 * (compression_ms(job) / compression_ms(other) - 1),
    "variance explained by lateness": lambda job: 100 * lateness_line(job).correlation ** 2,
    "variance left inside loops": lambda job: 100 - 100 * lateness_line(job, False).correlation ** 2,
}  # fmt: skip


def measured(_: Frames, name: str, *jobs: tuple[str, str]) -> Value:
    """One of `MEASURES`, of the jobs of these GPUs and methods."""
    return estimate(MEASURES[name](*(JOB[job] for job in jobs)))


def claims() -> list[Claim]:
    def of(name: str, measure: str, *jobs: tuple[str, str], **own: str) -> Claim:
        return claim(f"yoon2022.fig4-logs.{name}", measured, measure, *jobs, **own)

    def of_method(name: str, measure: str, method: str) -> Claim:
        label = style.look(method).label
        return of(name, measure, ("A100", method), case=method, method=method, label=label)

    def of_gpu(name: str, measure: str, gpu: str) -> Claim:
        return of(name, measure, (gpu, "topk"), case=gpu, gpu=gpu)

    a100, v100 = ("A100", "topk"), ("V100", "topk")
    return [
        *(of_gpu("compression-dominates", "compression over all else", gpu) for gpu in ("A100", "V100")),
        *(of_method("small-part", "communication below a tenth", method) for method in METHODS),
        *(of_method("communication", "communication", method) for method in METHODS),
        of("topk-communicates-longer", "more communication", a100, ("A100", "dense")),
        *(of_gpu("lateness-explains", "variance explained by lateness", gpu) for gpu in ("A100", "V100")),
        of("randomk-not-late", "variance left inside loops", ("A100", "randomk")),
        of("a100-not-faster", "longer compression", a100, v100),
    ]
