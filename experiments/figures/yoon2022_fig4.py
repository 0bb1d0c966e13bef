"""Fig. 4 of Yoon and Oh 2022: breakdown of an iteration into FP, BP, compression and communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots
from analysis.attribution import CAUSES, COMMUNICATION, REST, explained, waits_ms
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import number
from analysis.records import phases
from analysis.records.frames import Frames
from analysis.records.steps import breakdown, phase_summary
from analysis.stats import Value
from analysis.tables import Table
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import claim

TITLE = "Breakdown of an iteration"
MODE = "serialised"
# The paper's four first, then what its bars leave out.
ORDER = (
    "forward", "backward", "select", "exchange", "wait", "transfer", "synchronize", "scatter", "update", "io",
    "check", "validate", "unaccounted",
)  # fmt: skip
SCALE = yoon2022.TIMING_SCALE
READABLE = 0.05  # of the axis: a part smaller than this carries no number
SIGNED = (
    "The parts and the rest add up to the wait, each with its sign: a rank that is late in one phase may "
    "have been early in another, so a part may be below 0 or above 100 %."
)


def runs(profile: str) -> list[Run]:
    return yoon2022.timing_runs(profile, MODE, yoon2022.TIMED, {"timing.span_steps": None})


def draw(frames: Frames, profile: str) -> plots.Figure:
    methods, simulated = yoon2022.present(frames, MODE), captions.simulated(frames)
    ours = {method: parts_ms(frames, method) for method in methods}
    steps = {method: step_ms(frames, method) for method in methods}
    theirs = {m: yoon2022.published_parts(m) for m in methods if m in yoon2022.METHODS}
    xlim, highest = (-0.5, len(methods) - 0.5), max(step.high or step.value for step in steps.values())

    def times(axes: plots.Axes) -> None:
        bars = [plots.Bar(style.look(method).label, parts) for method, parts in ours.items()]
        plots.stacks(bars, least=READABLE * highest, xlim=xlim, ylim=(0, 1.1 * highest))(axes)
        axes.set_ylabel(f"Time per iteration (ms{simulated})")
        for x, (method, step) in enumerate(steps.items()):
            marks.whisker(axes, x + 0.24, step)
            top = max(sum(ours[method].values()), step.high or 0)
            plots.above(axes, x, top, f"{number(step.value)} ms")

    shares = [
        bar
        for method in methods
        for bar in (
            _share(method, ours[method], "ours", -0.21 if method in theirs else 0),
            *(_share(m, parts, "paper", 0.21) for m, parts in theirs.items() if m == method),
        )
    ]
    words: dict[str, Any] = {"xlim": xlim, "ylim": (0, 116), "yticks": range(0, 101, 20)}
    seen = {phase for parts in (*ours.values(), *theirs.values()) for phase in parts}
    keys = marks.phase_keys([phase for phase in ORDER if phase in seen])
    ylabel = f"Share of the iteration (%{simulated})"
    right = plots.stacks(shares, width=0.38, least=7, ylabel=ylabel, **words)
    return plots.picture([times, right], 3.2, keys=keys, ncols=4)


def _share(method: str, parts: Mapping[str, float], whose: str, place: float) -> plots.Bar:
    whole, faint = sum(parts.values()), whose == "paper"
    text = f"{whose}\n{number(whole)} ms" if faint else whose
    shares = {phase: 100 * part / whole for phase, part in parts.items()}
    return plots.Bar(style.look(method).label, shares, text, place, faint)


def parts_ms(frames: Frames, method: str) -> dict[str, float]:
    """Mean milliseconds per phase, bottom of the bar first; the parts add up to the step."""
    seconds = breakdown(frames, yoon2022.keys(frames, method, MODE))
    parts = {phase: 1e3 * float(seconds[phase]) for phase in ORDER if phase in seconds}
    # Two clocks may overlap by microseconds; a bar cannot be negative.
    return {phase: max(0.0, value) for phase, value in parts.items()}


def step_ms(frames: Frames, method: str) -> Value:
    """Mean milliseconds of an iteration, over ranks, with its interval."""
    step = yoon2022.phases(frames, method, ("step",))
    assert step is not None  # every run has steps
    return step


def table(frames: Frames) -> list[Table]:
    """Mean and median of every phase, the interval of the whole, and what the wait comes from."""
    methods = yoon2022.present(frames, MODE)
    keys = {style.look(method).label: yoon2022.keys(frames, method, MODE) for method in methods}
    simulated, milliseconds = captions.simulated(frames), dict.fromkeys(keys, "ms")
    summaries = {label: phase_summary(frames, own) for label, own in keys.items()}
    counts = captions.listed(f"{label} {summary['n'].iloc[0]}" for label, summary in summaries.items())
    steps = {style.look(method).label: step_ms(frames, method) for method in methods}
    means, medians = (_by_phase(summaries, name) for name in ("mean", "median"))
    means[-1] |= steps

    causes, waits = (*CAUSES, REST), {label: waits_ms(frames, own) for label, own in keys.items()}
    shares = [
        {"late in": cause} | {label: explained(frames, own, cause) for label, own in keys.items()}
        for cause in causes
    ]
    times = [
        {"late in": cause} | {label: waits[label][cause] if row[label] else None for label in keys}
        for cause, row in zip(causes, shares, strict=True)
    ]
    late = f"Wait, because the last rank was late{simulated}"
    return [
        *(
            Table(
                f"Time per iteration, {name} of the steps{simulated}",
                pd.DataFrame(rows),
                milliseconds,
                f"Steps: {counts}; ranks averaged first.",
            )
            for name, rows in (("mean", means), ("median", medians))
        ),
        Table(f"{late}: time", pd.DataFrame(times), milliseconds),
        Table(f"{late}: share", pd.DataFrame(shares), dict.fromkeys(keys, "%"), SIGNED),
    ]


def _by_phase(summaries: Mapping[str, pd.DataFrame], name: str) -> list[dict[str, Any]]:
    """Milliseconds of each phase that a method has, a row each, and of the step."""
    return [
        {"phase": phases.find(phase).label}
        | {
            label: 1e3 * float(summary[name][phase]) if phase in summary.index else None
            for label, summary in summaries.items()
        }
        for phase in (*ORDER, "step")
        if any(phase in summary.index for summary in summaries.values())
    ]


def caption(frames: Frames, profile: str) -> str:
    dense = yoon2022.published_parts("dense")
    validation, io, rest = left_out = [dense[phase] for phase in ("validate", "io", "unaccounted")]
    return (
        "Mean time of an iteration by phase, with the 95 % interval of the whole (left), and as shares "
        "beside the paper's (right, light; its communication is the unsplit final wait). In none of the "
        f"paper's bars is {number(100 * sum(left_out) / sum(dense.values()))} % of its dense iteration; by "
        "the authors' logs it is rank 0's validation in every 49th iteration, for which the others wait "
        f"({number(validation)} ms of each), input ({number(io)} ms), and the rest ({number(rest)} ms). "
        f"{captions.setting(frames)} {captions.timing(frames)} Phases are means over ranks and warm steps; "
        "*own guard* is this project's check for finite gradients."
    )


def claims() -> list[Claim]:
    label = {method: style.look(method).label for method in yoon2022.METHODS}
    compression = {
        "topk": "They timed it without synchronising, so 10 to 12 ms of it belong to BP.",
        "randomk": "Theirs is the time to launch an asynchronous kernel, not its cost, which is the 5 ms "
        "that their Random-k has more in BP than dense; so ours, synchronised, must be larger.",
    }
    longer = ("topk", "dense", COMMUNICATION)
    return [
        claim("yoon2022.fig4.compression-dominates", dominance, "topk"),
        claim("yoon2022.fig4.waiting-for-selection", _explained, "topk", "selection"),
        claim("yoon2022.fig4.topk-communicates-longer", yoon2022.more_ms, *longer),
        *(
            claim(
                "yoon2022.fig4.communication", yoon2022.phases, method, COMMUNICATION,
                case=method, method=method, label=label[method],
            )
            for method in yoon2022.METHODS
        ),
        *(
            claim(
                "yoon2022.fig4.compression", yoon2022.phases, method, ("select",),
                case=method, method=method, label=label[method], more=more,
            )
            for method, more in compression.items()
        ),
    ]  # fmt: skip


def dominance(frames: Frames, method: str) -> Value | None:
    """Compression less the larger of FP + BP and communication, in % of the iteration."""
    return yoon2022.phases(
        frames, method, ("select", "forward", "backward", "wait", "transfer", "step"),
        lambda select, fp, bp, wait, sent, step: 100 * (select - np.maximum(fp + bp, wait + sent)) / step,
        (-100.0, 100.0),
    )  # fmt: skip


def _explained(frames: Frames, method: str, cause: str) -> Value | None:
    return explained(frames, yoon2022.keys(frames, method, MODE), cause, COMMUNICATION)
