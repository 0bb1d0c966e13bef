"""Fig. 4 of Yoon and Oh 2022: breakdown of an iteration into FP, BP, compression and communication."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.records import phases
from analysis.records.frames import Frames
from analysis.records.steps import mean_phase_seconds, phase_summary
from analysis.stats import Estimate
from analysis.tables import Table
from analysis.times.attribution import COMMUNICATION, PHASES_BY_CAUSE, REST, explained_percent, mean_waits_ms
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import claim, of_methods, words

TITLE = "Breakdown of an iteration"
MODE = "serialised"
# The paper's four first, then what its bars leave out.
ORDER = (
    "forward", "backward", "select", "exchange", "wait", "transfer", "synchronize", "scatter", "update", "io",
    "check", "validate", "unaccounted",
)  # fmt: skip
SCALE = yoon2022.TIMING_SCALE
published_results = yoon2022.published_results
READABLE = 0.05  # of the axis: a part smaller than this carries no number


def runs(profile: str) -> list[Run]:
    return yoon2022.timing_runs(profile, MODE, more={"timing.span_steps": None})


def draw(frames: Frames, profile: str) -> plots.Figure:
    methods, simulated = yoon2022.measured_methods(frames, MODE), captions.simulated_suffix(frames)
    ours = {method: parts_ms(frames, method) for method in methods}
    steps = {method: step_ms(frames, method) for method in methods}
    theirs = {m: yoon2022.published_phases_ms(m) for m in methods if m in yoon2022.METHODS}
    xlim, highest = (-0.5, len(methods) - 0.5), max(step.high or step.value for step in steps.values())

    def times(axes: plots.Axes) -> None:
        bars = [plots.StackedBar(style.method_style(method).label, parts) for method, parts in ours.items()]
        ylabel = f"Time per iteration (ms{simulated})"
        plots.stacked_bars_panel(
            bars, least=READABLE * highest, xlim=xlim, ylim=(0, 1.1 * highest), ylabel=ylabel
        )(axes)
        for x, (method, step) in enumerate(steps.items()):
            marks.draw_interval(axes, x + 0.24, step)
            top = max(sum(ours[method].values()), step.high or 0)
            plots.annotate_above(axes, x, top, f"{format_number(step.value)} ms")

    shares = []
    for method in methods:
        shares.append(_share(method, ours[method], "ours", -0.21 if method in theirs else 0))
        if method in theirs:
            shares.append(_share(method, theirs[method], "paper", 0.21))
    seen = {phase for parts in (*ours.values(), *theirs.values()) for phase in parts}
    right = plots.stacked_bars_panel(
        shares, width=0.38, least=7, ylabel=f"Share of the iteration (%{simulated})",
        xlim=xlim, ylim=(0, 116), yticks=range(0, 101, 20),
    )  # fmt: skip
    keys = marks.phase_legend_handles([phase for phase in ORDER if phase in seen])
    return plots.compose_figure([times, right], 3.2, keys=keys, ncols=4)


def _share(method: str, parts: Mapping[str, float], whose: str, place: float) -> plots.StackedBar:
    whole, faint = sum(parts.values()), whose == "paper"
    text = f"{whose}\n{format_number(whole)} ms" if faint else whose
    shares = {phase: 100 * part / whole for phase, part in parts.items()}
    return plots.StackedBar(style.method_style(method).label, shares, text, place, faint)


def parts_ms(frames: Frames, method: str) -> dict[str, float]:
    """Mean milliseconds per phase, bottom of the bar first; the parts add up to the step."""
    seconds = mean_phase_seconds(frames, yoon2022.method_keys(frames, method, MODE))
    # Two clocks may overlap by microseconds; a bar cannot be negative.
    return {phase: max(0.0, 1e3 * float(seconds[phase])) for phase in ORDER if phase in seconds}


def step_ms(frames: Frames, method: str) -> Estimate:
    """Mean milliseconds of an iteration, over ranks, with its interval."""
    step = yoon2022.method_phases(frames, method, ("step",))
    assert step is not None  # every run has steps
    return step


def table(frames: Frames) -> list[Table]:
    """Mean and median of every phase, the interval of the whole, and what the wait comes from."""
    methods, simulated = yoon2022.measured_methods(frames, MODE), captions.simulated_suffix(frames)
    keys = {
        style.method_style(method).label: yoon2022.method_keys(frames, method, MODE) for method in methods
    }
    summaries = {label: phase_summary(frames, own) for label, own in keys.items()}
    counts = captions.join_words(f"{label} {summary['n'].iloc[0]}" for label, summary in summaries.items())
    means, medians = (_by_phase(summaries, name) for name in ("mean", "median"))
    means.iloc[-1, 1:] = pd.Series(
        {style.method_style(method).label: step_ms(frames, method) for method in methods}
    )
    causes, milliseconds = (*PHASES_BY_CAUSE, REST), dict.fromkeys(keys, "ms")
    waits = {label: mean_waits_ms(frames, own).reindex(causes).to_numpy() for label, own in keys.items()}
    shares = {
        label: [explained_percent(frames, own, cause) for cause in causes] for label, own in keys.items()
    }
    late, when = f"Wait, because the last rank was late{simulated}", {"late in": causes}
    return [
        *(
            Table(
                f"Time per iteration, {name} of the steps{simulated}", times, milliseconds,
                f"Steps: {counts}; ranks averaged first.",
            )
            for name, times in (("mean", means), ("median", medians))
        ),
        Table(f"{late}: time", pd.DataFrame(when | waits), milliseconds),
        Table(
            f"{late}: share", pd.DataFrame(when | shares), dict.fromkeys(keys, "%"),
            words("yoon2022.fig4.signed"),
        ),
    ]  # fmt: skip


def _by_phase(summaries: Mapping[str, pd.DataFrame], name: str) -> pd.DataFrame:
    """Milliseconds of each phase that a method has, a row each, and of the step."""
    times = pd.DataFrame({label: 1e3 * summary[name] for label, summary in summaries.items()})
    times = times.reindex([*ORDER, "step"]).dropna(how="all").astype(object)
    times = times.rename(index=lambda phase: phases.find_phase(phase).label)
    named: pd.DataFrame = times.rename_axis("phase").reset_index()
    return named


def facts(frames: Frames) -> dict[str, str]:
    """What is in none of the paper's bars, of its dense iteration."""
    dense = yoon2022.published_phases_ms("dense")
    left_out = {name: dense[name] for name in ("validate", "io", "unaccounted")}
    share = 100 * sum(left_out.values()) / sum(dense.values())
    return {"left_out": format_number(share)} | {name: format_number(part) for name, part in left_out.items()}


def claims() -> list[Claim]:
    return [
        claim("yoon2022.fig4.compression-dominates", dominance, "topk"),
        claim("yoon2022.fig4.waiting-for-selection", _explained, "topk", "selection"),
        claim(
            "yoon2022.fig4.topk-communicates-longer", yoon2022.extra_phase_ms, "topk", "dense", COMMUNICATION
        ),
        *of_methods("yoon2022.fig4.communication", yoon2022.method_phases, yoon2022.METHODS, COMMUNICATION),
        claim("yoon2022.fig4.compression.topk", yoon2022.method_phases, "topk", ("select",)),
        claim("yoon2022.fig4.compression.randomk", yoon2022.method_phases, "randomk", ("select",)),
    ]


def dominance(frames: Frames, method: str) -> Estimate | None:
    """Compression less the larger of FP + BP and communication, in % of the iteration."""
    return yoon2022.method_phases(
        frames, method, ("select", "forward", "backward", "wait", "transfer", "step"),
        lambda select, fp, bp, wait, sent, step: 100 * (select - np.maximum(fp + bp, wait + sent)) / step,
        (-100.0, 100.0),
    )  # fmt: skip


def _explained(frames: Frames, method: str, cause: str) -> Estimate | None:
    return explained_percent(frames, yoon2022.method_keys(frames, method, MODE), cause, COMMUNICATION)
