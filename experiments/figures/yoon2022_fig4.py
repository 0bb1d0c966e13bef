"""Fig. 4 of Yoon and Oh 2022: breakdown of an iteration into FP, BP, compression and communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.attribution import CAUSES, COMMUNICATION, REST, explained, waits_ms
from analysis.claims import ANY_GPU, Claim
from analysis.frames import Frames
from analysis.stats import POSITIVE, Bounds, Value, of_phases, phase_difference
from analysis.steps import breakdown, phase_summary
from experiments.figures import _yoon2022 as yoon2022

TITLE = "Breakdown of an iteration"
MODE = "serialised"
# The paper's four first, then what its bars leave out.
ORDER = (
    "forward", "backward", "select", "exchange", "wait", "transfer", "synchronize", "scatter", "update", "io",
    "check", "validate", "unaccounted",
)  # fmt: skip
SCALE = yoon2022.TIMING_SCALE
READABLE = 0.05  # of the axis: a part smaller than this carries no number
ONCE = "They ran each configuration once, on 8 A100 with Horovod and torch 1.8.1; 10 % is granted."


def runs(profile: str) -> list[list[str]]:
    return yoon2022.timing_runs(profile, MODE, yoon2022.TIMED, "timing.span_steps=null")


def draw(frames: Frames, profile: str) -> plots.Figure:
    methods = yoon2022.present(frames, MODE)
    ours = {method: parts_ms(frames, method) for method in methods}
    highest = max(step.high or step.value for step in (step_ms(frames, method) for method in methods))
    simulated = ", simulated" if captions.is_simulated(frames) else ""
    with plots.canvas(style.two_columns(3.2), 1, 2) as (figure, (times, shares)):
        for x, (method, parts) in enumerate(ours.items()):
            top = plots.stack(times, x, parts, least=READABLE * highest)
            step = step_ms(frames, method)
            plots.whisker(times, x + 0.24, step)
            plots.above(times, x, max(top, step.high or 0), f"{plots.number(step.value)} ms")
            place = x - 0.21 if method in yoon2022.ITERATIONS else x
            plots.stack(shares, place, _shares(parts), width=0.38, least=7)
            plots.above(shares, place, 100, "ours", fontsize=6)
            if method in yoon2022.ITERATIONS:
                paper = yoon2022.ITERATIONS[method]
                plots.stack(shares, x + 0.21, _shares(paper.parts()), width=0.38, faint=True, least=7)
                plots.above(
                    shares, x + 0.21, 100, f"paper\n{paper.total:.0f} ms", color="#777777", fontsize=6
                )
        for axes in (times, shares):
            labels = [style.look(method).label.replace(", ", ",\n") for method in methods]
            axes.set_xticks(range(len(methods)), labels)
            axes.tick_params(axis="x", length=0)
            axes.set_xlim(-0.5, len(methods) - 0.5)
        times.set(ylabel=f"Time per iteration (ms{simulated})", ylim=(0, 1.1 * highest))
        shares.set(ylabel=f"Share of the iteration (%{simulated})", ylim=(0, 116), yticks=range(0, 101, 20))
        seen = {phase for parts in ours.values() for phase in parts} | {
            "synchronize",
            "validate",
            "unaccounted",
        }
        keys = plots.phase_keys([phase for phase in ORDER if phase in seen])
        figure.legend(handles=keys, loc="outside lower center", ncols=4)
    return figure


def parts_ms(frames: Frames, method: str) -> dict[str, float]:
    """Mean milliseconds per phase, bottom of the bar first; the parts add up to the step."""
    seconds = breakdown(frames, yoon2022.keys(frames, method, MODE))
    parts = {phase: 1e3 * float(seconds[phase]) for phase in ORDER if phase in seconds}
    # Two clocks may overlap by microseconds; a bar cannot be negative.
    return {phase: max(0.0, value) for phase, value in parts.items()}


def step_ms(frames: Frames, method: str) -> Value:
    """Mean milliseconds of an iteration, over ranks, with its interval."""
    step = _phases(frames, method, ("step",), lambda seconds: 1e3 * seconds, POSITIVE)
    assert step is not None  # every run has steps
    return step


def table(frames: Frames) -> str:
    """Mean and median of every phase, and the interval of the whole, in ms."""
    methods = yoon2022.present(frames, MODE)
    summaries = {method: phase_summary(frames, yoon2022.keys(frames, method, MODE)) for method in methods}
    unit = "ms, *simulated*" if captions.is_simulated(frames) else "ms"
    lines = [f"| {unit} | " + " | ".join(f"{style.look(m).label}: mean (median)" for m in methods) + " |"]
    lines.append("|---|" + "---|" * len(methods))
    for phase in (*ORDER, "step"):
        cells = [_cell(summary, phase) for summary in summaries.values()]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {style.PHASE_LABELS.get(phase, phase)} | " + " | ".join(cells) + " |")
    counts = ", ".join(
        f"{style.look(method).label} {summary['n'].iloc[0]}" for method, summary in summaries.items()
    )
    whole = [step_ms(frames, method) for method in methods]
    lines.append("| mean of the step, 95 % | " + " | ".join(map(plots.with_interval, whole)) + " |")
    steps = f"Steps: {counts}; ranks averaged first."
    return "\n".join(lines) + f"\n\n{steps}\n\n{waits_table(frames, methods)}"


SIGNED = (
    "The parts and the rest add up to the wait, each with its sign: a rank that is late in one phase may "
    "have been early in another, so a part may be below 0 or above 100 %."
)


def waits_table(frames: Frames, methods: Sequence[str]) -> str:
    """What the last rank's lateness makes of the wait, by the part of the step, in ms and percent."""
    keys = {method: yoon2022.keys(frames, method, MODE) for method in methods}
    waits = {method: waits_ms(frames, own) for method, own in keys.items()}
    lines = [
        "| wait, because the last rank was late in | "
        + " | ".join(style.look(m).label for m in methods)
        + " |"
    ]
    lines.append("|---|" + "---|" * len(methods))
    for cause in (*CAUSES, REST):
        cells = [
            f"{plots.number(waits[method][cause])} ms; {plots.with_interval(share)} %" if share else "-"
            for method, share in ((method, explained(frames, own, cause)) for method, own in keys.items())
        ]
        lines.append(f"| {cause} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{SIGNED}\n"


def caption(frames: Frames, profile: str) -> str:
    return (
        "Mean time of an iteration by phase, with the 95 % interval of the whole (left), and as shares "
        "beside the paper's (right, light; its communication is the unsplit final wait). "
        f"{_unaccounted()} "
        f"{captions.setting(frames)} {captions.timing(frames)} "
        "Phases are means over ranks and warm steps; *own guard* is this project's check for finite "
        "gradients."
    )


def _unaccounted() -> str:
    """What the paper's dense bar leaves out."""
    parts = yoon2022.ITERATIONS["dense"].parts()
    left_out = {phase: parts[phase] for phase in ("validate", "io", "unaccounted")}
    share = 100 * sum(left_out.values()) / sum(parts.values())
    return (
        f"In none of the paper's bars is {share:.0f} % of its dense iteration; by the authors' logs it is "
        "rank 0's validation in every 49th iteration, for which the others wait "
        f"({left_out['validate']:.1f} ms of each), input ({left_out['io']:.1f} ms), and the rest "
        f"({left_out['unaccounted']:.1f} ms)."
    )


def claims() -> list[Claim]:
    return [
        Claim(
            text="compression dominates Top-k's iteration (its margin over FP + BP)",
            paper=70.9,
            unit="% of the iteration",
            source="text under Fig. 4; (211.78 - 16.86) of 275.00 ms, from the authors' logs",
            kind="ordering",
            tolerance=0.0,
            reason="Compression less the larger of FP + BP and communication; dominant means above 0.",
            ours=lambda frames: dominance(frames, "topk"),
            accelerator=ANY_GPU,
            timed=True,
            group=yoon2022.TOPK_SELECTION,
        ),
        Claim(
            text="Top-k's communication is mostly waiting for the others' selection",
            paper="stated",
            unit="% of the communication",
            source="text under Fig. 4: 'the message of several workers may arrive late'",
            kind="ordering",
            tolerance=50.0,
            reason=(
                "What the last rank's lateness in selection makes of wait and transfer together, step by "
                "step (analysis/attribution.py); above half is most. That ranks wait long proves nothing: "
                "dense ones do, too."
            ),
            ours=lambda frames: explained(
                frames, yoon2022.keys(frames, "topk", MODE), "selection", COMMUNICATION
            ),
            accelerator=ANY_GPU,
            timed=True,
        ),
        Claim(
            text="Top-k communicates longer than dense does",
            paper=15.62,
            unit="ms",
            source="text under Fig. 4; 16.86 - 1.24",
            kind="ordering",
            tolerance=0.0,
            reason="Wait and transfer together, as in the paper. On a slow link dense takes longer.",
            ours=_longer_communication,
            accelerator=ANY_GPU,
            link="NVLink",
            timed=True,
        ),
        *[_communication(method) for method in yoon2022.METHODS],
        _compression("topk", "They timed it without synchronising, so 10 to 12 ms of it belong to BP."),
        _compression(
            "randomk",
            "Theirs is the time to launch an asynchronous kernel, not its cost, which is the 5 ms that "
            "their Random-k has more in BP than dense; so ours, synchronised, must be larger.",
        ),
    ]  # fmt: skip


def _communication(method: str) -> Claim:
    return Claim(
        text=f"communication per iteration, {style.look(method).label}",
        paper=yoon2022.ITERATIONS[method].communication,
        unit="ms",
        source="text under Fig. 4",
        kind="ratio",
        tolerance=0.1,
        reason=f"{ONCE} Theirs is the time in the final wait, after filters that differ by method.",
        ours=lambda frames: _phases(
            frames, method, ("wait", "transfer"), lambda wait, transfer: 1e3 * (wait + transfer), POSITIVE
        ),
        accelerator="A100",
        link="NVLink",
        timed=True,
    )


def _compression(method: str, reason: str) -> Claim:
    return Claim(
        text=f"compression per iteration, {style.look(method).label}",
        paper=yoon2022.ITERATIONS[method].select,
        unit="ms",
        source="bar of Fig. 4, from the authors' logs",
        kind="ratio",
        tolerance=0.1,
        reason=f"{ONCE} {reason}",
        ours=lambda frames: _phases(frames, method, ("select",), lambda seconds: 1e3 * seconds, POSITIVE),
        accelerator="A100",
        timed=True,
    )


def _phases(
    frames: Frames, method: str, phases: tuple[str, ...], statistic: Callable[..., Any], bounds: Bounds
) -> Value | None:
    return of_phases(frames, yoon2022.keys(frames, method, MODE), phases, statistic, bounds)


def dominance(frames: Frames, method: str) -> Value | None:
    """By how much of the iteration, in %, compression exceeds the larger of FP + BP and communication."""
    phases = ("select", "forward", "backward", "wait", "transfer", "step")
    return _phases(
        frames, method, phases,
        lambda select, fp, bp, wait, sent, step: 100 * (select - np.maximum(fp + bp, wait + sent)) / step,
        (-100.0, 100.0),
    )  # fmt: skip


def _longer_communication(frames: Frames) -> Value | None:
    topk, dense = (yoon2022.keys(frames, method, MODE) for method in ("topk", "dense"))
    longer = phase_difference(frames, topk, dense, ("wait", "transfer"))
    return longer.times(1e3) if longer else None


def _shares(parts: dict[str, float]) -> dict[str, float]:
    whole = sum(parts.values())
    return {phase: 100 * part / whole for phase, part in parts.items()}


def _cell(summary: pd.DataFrame, phase: str) -> str:
    if phase not in summary.index:
        return "-"
    mean, median = (1e3 * float(summary[name][phase]) for name in ("mean", "median"))
    return f"{plots.number(mean)} ({plots.number(median)})"
