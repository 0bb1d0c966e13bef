"""Fig. 4 of Yoon and Oh 2022: breakdown of an iteration into FP, BP, compression and communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis import captions, plots, style
from analysis.attribution import CAUSES, COMMUNICATION, REST, explained, waits_ms
from analysis.claims import ANY_GPU, Claim
from analysis.frames import Frames
from analysis.numbers import number
from analysis.stats import POSITIVE, Bounds, Value, of_phases, phase_difference
from analysis.steps import breakdown, phase_summary
from analysis.tables import Table
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
    simulated = captions.simulated(frames)
    with plots.canvas(style.two_columns(3.2), 1, 2) as (figure, (times, shares)):
        for x, (method, parts) in enumerate(ours.items()):
            top = plots.stack(times, x, parts, least=READABLE * highest)
            step = step_ms(frames, method)
            plots.whisker(times, x + 0.24, step)
            plots.above(times, x, max(top, step.high or 0), f"{number(step.value)} ms")
            place = x - 0.21 if method in yoon2022.ITERATIONS else x
            plots.stack(shares, place, _shares(parts), width=0.38, least=7)
            plots.above(shares, place, 100, "ours", fontsize=6)
            if method in yoon2022.ITERATIONS:
                paper = yoon2022.ITERATIONS[method]
                plots.stack(shares, x + 0.21, _shares(paper.parts()), width=0.38, faint=True, least=7)
                plots.above(
                    shares, x + 0.21, 100, f"paper\n{number(paper.total)} ms", color="#777777", fontsize=6
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


def table(frames: Frames) -> list[Table]:
    """Mean and median of every phase, the interval of the whole, and what the wait comes from."""
    methods = yoon2022.present(frames, MODE)
    summaries = {method: phase_summary(frames, yoon2022.keys(frames, method, MODE)) for method in methods}
    counts = captions.listed(
        f"{style.look(method).label} {summary['n'].iloc[0]}" for method, summary in summaries.items()
    )
    note = f"Steps: {counts}; ranks averaged first."
    return [_phases_table(frames, summaries, name, note) for name in ("mean", "median")] + _waits(
        frames, methods
    )


def _phases_table(frames: Frames, summaries: Mapping[str, pd.DataFrame], name: str, note: str) -> Table:
    """Milliseconds of each phase, a column for each method."""
    rows = []
    for phase in (*ORDER, "step"):
        cells: dict[str, Value | float | None] = {
            style.look(method).label: 1e3 * float(summary[name][phase]) if phase in summary.index else None
            for method, summary in summaries.items()
        }
        if phase == "step" and name == "mean":
            cells = {style.look(method).label: step_ms(frames, method) for method in summaries}
        if any(cell is not None for cell in cells.values()):
            rows.append({"phase": style.PHASE_LABELS.get(phase, phase), **cells})
    units = {style.look(method).label: "ms" for method in summaries}
    title = f"Time per iteration, {name} of the steps{captions.simulated(frames)}"
    return Table(title, pd.DataFrame(rows), units, note)


SIGNED = (
    "The parts and the rest add up to the wait, each with its sign: a rank that is late in one phase may "
    "have been early in another, so a part may be below 0 or above 100 %."
)


def _waits(frames: Frames, methods: Sequence[str]) -> list[Table]:
    """What the last rank's lateness makes of the wait, by the part of the step, in ms and percent."""
    keys = {style.look(method).label: yoon2022.keys(frames, method, MODE) for method in methods}
    waits = {label: waits_ms(frames, own) for label, own in keys.items()}
    causes = (*CAUSES, REST)
    shares = [
        {"late in": cause, **{label: explained(frames, own, cause) for label, own in keys.items()}}
        for cause in causes
    ]
    times = [
        {"late in": row["late in"], **{label: waits[label][cause] if row[label] else None for label in keys}}
        for cause, row in zip(causes, shares, strict=True)
    ]
    what = f"Wait, because the last rank was late{captions.simulated(frames)}"
    return [
        Table(f"{what}: time", pd.DataFrame(times), dict.fromkeys(keys, "ms")),
        Table(f"{what}: share", pd.DataFrame(shares), dict.fromkeys(keys, "%"), SIGNED),
    ]


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
        f"In none of the paper's bars is {number(share)} % of its dense iteration; by the authors' logs it "
        "is rank 0's validation in every 49th iteration, for which the others wait "
        f"({number(left_out['validate'])} ms of each), input ({number(left_out['io'])} ms), and the rest "
        f"({number(left_out['unaccounted'])} ms)."
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
