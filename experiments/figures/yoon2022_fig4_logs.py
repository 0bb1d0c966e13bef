"""Fig. 4 of Yoon and Oh 2022 from its own job logs: the breakdown without validation, and what waiting is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots, published, style
from analysis.claims import Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.published import rederived
from analysis.published.rederived import JOB, estimate
from analysis.stats import Value
from analysis.tables import Table
from experiments.figures import _published as printed
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Breakdown of an iteration, and waiting, from the authors' logs"
METHODS = ("dense", "topk", "randomk")
PHASES = ("forward", "backward", "select", "synchronize", "wait", "transfer", "io", "unaccounted")
SCATTERED = (("A100", "topk"), ("V100", "topk"), ("A100", "randomk"))
READABLE = 0.06  # of the axis: a part smaller than this carries no number
ONCE = "They ran each configuration once; 10 % is granted."
INSIDE = 0.995  # share of the iterations that a scatter's axes show


def runs(profile: str) -> list[list[str]]:
    return []


def draw(frames: Frames, profile: str) -> plots.Figure:
    with plots.canvas(style.two_columns(5.2), 2, 3, height_ratios=(1.25, 1)) as (figure, (above, below)):
        for axes, method in zip(above, METHODS, strict=True):
            _bars(axes, method)
        for axes, (gpu, method) in zip(below, SCATTERED, strict=True):
            _scatter(axes, gpu, method)
        above[0].set_ylabel("Time per iteration (ms)")
        below[0].set_ylabel("Communication (ms)")
        figure.legend(handles=plots.phase_keys(PHASES), loc="outside upper center", ncols=4)
    return figure


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
    waits, sends = float(rederived.communication_ms(job)[0]), float(rederived.last_rank_ms(job)[0])
    parts = _computing(job) | {"wait": waits - sends, "transfer": sends, "io": float(_row(job)["io_ms"])}
    return parts | {"unaccounted": float(rederived.iteration_ms(job)[0]) - sum(parts.values())}


def table(frames: Frames) -> list[Table]:
    """Every number of the picture, and their intervals."""
    times: dict[str, Callable[[int], Value | float | None]] = {
        "iteration, as published": rederived.published_iteration_ms,
        "iteration without validation": lambda job: estimate(rederived.iteration_ms(job)),
        "one validation": lambda job: estimate(rederived.stall_ms(job)),
        "compression": lambda job: estimate(rederived.compression_ms(job)) if _selects(job) else None,
        "lateness of the last rank in it": lambda job: (
            estimate(rederived.lateness_ms(job)) if _selects(job) else None
        ),
        "communication without stalls": lambda job: estimate(rederived.communication_ms(job)),
        "of it the last rank's": lambda job: estimate(rederived.last_rank_ms(job)),
        "communication, sparse filter": lambda job: rederived.filtered_communication_ms(job).sparse,
        "communication, dense filter, at least": lambda job: rederived.filtered_communication_ms(job).dense,
        "communication at no lateness": lambda job: _line(job, "intercept"),
        "the same without loops' first iterations": lambda job: _line(job, "intercept", loop_starts=False),
    }
    shares: dict[str, Callable[[int], Value | float | None]] = {
        "share of waiting in the communication": lambda job: estimate(rederived.waiting_share(job)),
        "communication per lateness": lambda job: _line(job, "slope"),
        "their correlation": lambda job: _line(job, "correlation"),
        "communication per lateness without loops' first iterations": lambda job: _line(
            job, "slope", loop_starts=False
        ),
        "their correlation without them": lambda job: _line(job, "correlation", loop_starts=False),
    }
    columns = {printed.label(gpu, method): job for (gpu, method), job in JOB.items()}
    tables = []
    for title, rows, unit in (("Times", times, "ms"), ("Waiting for the last rank", shares, "")):
        cells = [
            {"quantity": name, **{of: cell(job) for of, job in columns.items()}}
            for name, cell in rows.items()
        ]
        tables.append(Table(title, pd.DataFrame(cells), dict.fromkeys(columns, unit)))
    return tables


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
        f"is BP. {printed.LOGS} {printed.INTERVALS}"
    )


def _bars(axes: plots.Axes, method: str) -> None:
    gpus = [gpu for gpu, of in JOB if of == method]
    bars = {(gpu, part): part(gpu, method) for gpu in gpus for part in (as_published, without_validation)}
    highest = max(sum(parts.values()) for parts in bars.values())
    for i, ((_, part), parts) in enumerate(bars.items()):
        x = i + 0.5 * (i // 2)
        top = plots.stack(axes, x, parts, width=0.8, faint=part is as_published, least=READABLE * highest)
        plots.above(axes, x, top, number(top))
    places = [i + 0.5 * (i // 2) for i in range(len(bars))]
    axes.set_xticks(places, ["P" if part is as_published else "V" for _, part in bars])
    for i, gpu in enumerate(gpus):
        plots.above(axes, 2.5 * i + 0.5, 0, f"8 {gpu}", xytext=(0, -14), va="top")
    axes.tick_params(axis="x", length=0)
    axes.set(ylim=(0, 1.12 * highest), title=style.look(method).label, xlim=(-0.7, 4.2))


def _scatter(axes: plots.Axes, gpu: str, method: str) -> None:
    job, look = JOB[gpu, method], style.look(method)
    table = rederived.settled(job)
    table = table[table["long_waits"] == 0]
    late, wait = (table["comp_max_ms"] - table["comp_mean_ms"]).to_numpy(), table["comm_mean_ms"].to_numpy()
    starts = rederived.starts_a_loop(table)
    dots: dict[str, Any] = {"rasterized": True, "mew": 0}
    axes.plot(late[~starts], wait[~starts], ".", color=look.colour, markersize=1.2, alpha=0.25, **dots)
    axes.plot(late[starts], wait[starts], "x", color="#777777", markersize=2.5, **(dots | {"mew": 0.4}))
    right, top = (float(np.quantile(values, INSIDE)) for values in (late, wait))
    ends, inside = np.array([0.0, right]), rederived.lateness_line(job, loop_starts=False)
    axes.plot(ends, inside.intercept[0] + inside.slope[0] * ends, color="#111111", linewidth=1.0)
    axes.set(xlim=(0, right), ylim=(0, 1.8 * top), xlabel="Lateness of the last rank (ms)")
    axes.set_title(printed.label(gpu, method, ", "))
    text = (
        f"y = {number(inside.slope[0])} x + {number(inside.intercept[0])} ms, "
        f"r = {number(inside.correlation[0])}"
    )
    every = rederived.lateness_line(job).correlation[0]
    place: dict[str, Any] = {"transform": axes.transAxes, "va": "top", "fontsize": 6.5}
    axes.text(0.03, 0.99, f"{text}\nwith the crosses r = {number(every)}", **place)


def _computing(job: int) -> dict[str, float]:
    row, select = _row(job), float(rederived.compression_ms(job)[0])
    return {"forward": float(row["fp_ms"]), "backward": float(row["bp_ms"]) - select, "select": select}


def _row(job: int) -> dict[str, float]:
    row: dict[str, float] = published.jobs().set_index("job").loc[job].to_dict()
    return row


def _selects(job: int) -> bool:
    return bool(rederived.compression_ms(job)[0])


def _line(job: int, part: str, loop_starts: bool = True) -> Value | None:
    """Of the line of least squares: communication against the lateness of the last rank."""
    return estimate(getattr(rederived.lateness_line(job, loop_starts), part)) if _selects(job) else None


def claims() -> list[Claim]:
    a100, v100 = JOB["A100", "topk"], JOB["V100", "topk"]
    return [
        *[_dominates(gpu) for gpu in ("A100", "V100")],
        *[_small_part(method) for method in METHODS],
        *[_communication(method) for method in METHODS],
        Claim(
            text="Top-k's communication is longer than dense's",
            paper=15.62,
            unit="ms",
            source="text under Fig. 4; 16.86 - 1.24",
            kind="ratio",
            tolerance=0.1,
            reason=f"Without stalls, nothing else filtered out. {ONCE}",
            ours=lambda _: estimate(
                rederived.communication_ms(a100) - rederived.communication_ms(JOB["A100", "dense"])
            ),
            rederived=True,
        ),
        *[_straggler(gpu) for gpu in ("A100", "V100")],
        Claim(
            text="Random-k's communication does not come from late selection (variance left unexplained)",
            paper="the cause is Top-k's compression",
            unit="%",
            source="text under Fig. 4, the contrary of its statement on Top-k; logs of 8 A100",
            kind="ordering",
            tolerance=90.0,
            reason=(
                "A tenth explained is granted. Without the first iteration of each training loop of 48, in "
                "which both are long for another reason."
            ),
            ours=lambda _: _explained("A100", "randomk", left=True),
            rederived=True,
        ),
        Claim(
            text="the A100 does not compress faster than the V100 (by how much longer it takes)",
            paper="Top-k gains nothing from the quicker GPU",
            unit="%",
            source="text of the section on GPU capability; logs",
            kind="ordering",
            tolerance=0.0,
            reason="Any margin counts. Compression is timed without synchronising: 7 to 12 ms of it are BP.",
            ours=lambda _: estimate(
                100 * (rederived.compression_ms(a100) / rederived.compression_ms(v100) - 1)
            ),
            rederived=True,
        ),
    ]


def _dominates(gpu: str) -> Claim:
    job = JOB[gpu, "topk"]
    return Claim(
        text=f"compression dominates Top-k's iteration without validation, 8 {gpu} (margin over all else)",
        paper="compression dominates",
        unit="% of the iteration",
        source="text under Fig. 4; 77 % of the iteration with validation on 8 A100, 68 % on 8 V100",
        kind="ordering",
        tolerance=0.0,
        reason="More than half of the iteration is above 0.",
        ours=lambda _: estimate(100 * (2 * rederived.compression_ms(job) / rederived.iteration_ms(job) - 1)),
        group=yoon2022.TOPK_SELECTION,
        rederived=True,
    )


def _small_part(method: str) -> Claim:
    job = JOB["A100", method]
    return Claim(
        text=f"communication is a small part of {style.look(method).label}'s iteration: less than a tenth by",
        paper="a small part",
        unit="% of the iteration",
        source="text under Fig. 4; logs of 8 A100, without validation",
        kind="ordering",
        tolerance=0.0,
        reason="Small is taken as less than a tenth.",
        ours=lambda _: estimate(10 - 100 * rederived.communication_ms(job) / rederived.iteration_ms(job)),
        group="communication is a small part",
        rederived=True,
    )


def _communication(method: str) -> Claim:
    return Claim(
        text=f"communication per iteration, {style.look(method).label}, one filter for all",
        paper=yoon2022.ITERATIONS[method].communication,
        unit="ms",
        source="text under Fig. 4; logs of 8 A100",
        kind="ratio",
        tolerance=0.1,
        reason=(
            "Theirs is after a filter that for dense alone drops what is below 0.1 ms; ours is all but the "
            f"stalls. {ONCE}"
        ),
        ours=lambda _: estimate(rederived.communication_ms(JOB["A100", method])),
        rederived=True,
    )


def _straggler(gpu: str) -> Claim:
    return Claim(
        text=f"late selection of the last rank explains Top-k's communication, 8 {gpu} (share of variance)",
        paper="the straggler in compression is the cause",
        unit="%",
        source="text under Fig. 4; least squares over the iterations of the logs",
        kind="ordering",
        tolerance=50.0,
        reason="More than half. Communication against the longest compression less the mean, over ranks.",
        ours=lambda _: _explained(gpu, "topk"),
        rederived=True,
    )


def _explained(gpu: str, method: str, left: bool = False) -> Value:
    """Share of the variance of communication that lateness explains, %; `left`: that it leaves, in loops."""
    share = 100 * rederived.lateness_line(JOB[gpu, method], loop_starts=not left).correlation ** 2
    return estimate(100 - share if left else share)
