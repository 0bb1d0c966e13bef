"""Fig. 4 of Yoon and Oh 2022: breakdown of an iteration into FP, BP, compression and communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from analysis import plots
from analysis.claims import Claim
from analysis.pictures import captions, marks, style
from analysis.pictures.numbers import format_number
from analysis.records import phases
from analysis.records.frames import Frames
from analysis.records.steps import mean_phase_seconds, summarize_phase_seconds
from analysis.stats import Estimate
from analysis.tables import Table
from analysis.times.attribution import (
    COMMUNICATION,
    PHASES_BY_CAUSE,
    REST,
    mean_wait_ms_by_cause,
    wait_percent_explained,
)
from experiments.config.run import Run
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures.papers import make_claim, make_claims_by_method, text_template_or_empty

TITLE = "Breakdown of an iteration"
MODE = "serialised"
# The paper's four first, then what its bars leave out.
ORDER = (
    "forward", "backward", "select", "exchange", "wait", "transfer", "synchronize", "scatter", "update", "io",
    "check", "validate", "unaccounted",
)  # fmt: skip
SCALE = yoon2022.TIMING_SCALE
published_results = yoon2022.published_results_by_method
READABLE = 0.05  # of the axis: a part smaller than this carries no number


def runs(profile: str) -> list[Run]:
    return yoon2022.timing_runs(profile, MODE, overrides={"timing.span_steps": None})


def draw(frames: Frames, profile: str) -> plots.Figure:
    methods = yoon2022.measured_methods(frames, MODE)
    simulated = captions.simulated_suffix(frames)
    ours = {method: mean_ms_by_phase(frames, method) for method in methods}
    published = {
        method: yoon2022.published_ms_by_phase(method) for method in methods if method in yoon2022.METHODS
    }
    steps = {method: mean_step_ms(frames, method) for method in methods}
    xlim = (-0.5, len(methods) - 0.5)
    shares = []
    for method in methods:
        shares.append(_share_bar(method, ours[method], "ours", -0.21 if method in published else 0))
        if method in published:
            shares.append(_share_bar(method, published[method], "paper", 0.21))
    share_panel = plots.stacked_bars_panel(
        shares, width=0.38, min_labelled_part=7, ylabel=f"Share of the iteration (%{simulated})",
        xlim=xlim, ylim=(0, 116), yticks=range(0, 101, 20),
    )  # fmt: skip
    seen = {phase for parts in (*ours.values(), *published.values()) for phase in parts}
    return plots.compose_figure(
        [_times_panel(ours, steps, xlim=xlim, ylabel=f"Time per iteration (ms{simulated})"), share_panel],
        3.2,
        first_legend_entries=marks.phase_legend_handles([phase for phase in ORDER if phase in seen]),
        legend_columns=4,
    )


@plots.panel_maker
def _times_panel(
    axes: plots.Axes,
    /,
    parts: Mapping[str, Mapping[str, float]],
    steps: Mapping[str, Estimate],
    **axes_settings: Any,
) -> None:
    """Draw the milliseconds of each phase by method, with the interval of the whole."""
    highest = max(step.high or step.value for step in steps.values())
    bars = [plots.StackedBar(style.method_style(method).label, parts[method]) for method in steps]
    plots.stacked_bars_panel(
        bars, min_labelled_part=READABLE * highest, ylim=(0, 1.1 * highest), **axes_settings
    )(axes)
    for x, (method, step) in enumerate(steps.items()):
        marks.draw_interval(axes, x + 0.24, step)
        top = max(sum(parts[method].values()), step.high or 0)
        plots.annotate_above(axes, x, top, f"{format_number(step.value)} ms")


def _share_bar(method: str, parts: Mapping[str, float], whose: str, place: float) -> plots.StackedBar:
    whole = sum(parts.values())
    is_published = whose == "paper"
    text = f"{whose}\n{format_number(whole)} ms" if is_published else whose
    shares = {phase: 100 * part / whole for phase, part in parts.items()}
    return plots.StackedBar(style.method_style(method).label, shares, text, place, is_published)


def mean_ms_by_phase(frames: Frames, method: str) -> dict[str, float]:
    """Return mean milliseconds per phase, bottom of the bar first; the parts add up to the step."""
    seconds = mean_phase_seconds(frames, yoon2022.method_run_keys(frames, method, MODE))
    # Two clocks may overlap by microseconds; a bar cannot be negative.
    return {phase: max(0.0, 1e3 * float(seconds[phase])) for phase in ORDER if phase in seconds}


def mean_step_ms(frames: Frames, method: str) -> Estimate:
    """Return mean milliseconds of an iteration, over ranks, with its interval."""
    step = yoon2022.estimate_phase_statistic(frames, method, ("step",))
    assert step is not None  # every run has steps
    return step


def table(frames: Frames) -> list[Table]:
    """Return mean and median of every phase, the interval of the whole, and what the wait comes from."""
    simulated = captions.simulated_suffix(frames)
    causes = (*PHASES_BY_CAUSE, REST)
    steps = {}
    summaries = {}
    waits = {}
    shares = {}
    for method in yoon2022.measured_methods(frames, MODE):
        label = style.method_style(method).label
        keys = yoon2022.method_run_keys(frames, method, MODE)
        steps[label] = mean_step_ms(frames, method)
        summaries[label] = summarize_phase_seconds(frames, keys)
        waits[label] = mean_wait_ms_by_cause(frames, keys).reindex(causes).to_numpy()
        shares[label] = [wait_percent_explained(frames, keys, cause) for cause in causes]
    counts = captions.join_with_and(f"{label} {summary['n'].iloc[0]}" for label, summary in summaries.items())
    means, medians = (_by_phase(summaries, name) for name in ("mean", "median"))
    means.iloc[-1, 1:] = pd.Series(steps)
    milliseconds = dict.fromkeys(steps, "ms")
    percent = dict.fromkeys(steps, "%")
    late = f"Wait, because the last rank was late{simulated}"
    first = {"late in": causes}
    note = f"Steps: {counts}; ranks averaged first."
    return [
        Table(f"Time per iteration, mean of the steps{simulated}", means, milliseconds, note),
        Table(f"Time per iteration, median of the steps{simulated}", medians, milliseconds, note),
        Table(f"{late}: time", pd.DataFrame(first | waits), milliseconds),
        Table(
            f"{late}: share",
            pd.DataFrame(first | shares),
            percent,
            text_template_or_empty("yoon2022.fig4.signed"),
        ),
    ]


def _by_phase(summaries: Mapping[str, pd.DataFrame], name: str) -> pd.DataFrame:
    """Return milliseconds of each phase that a method has, a row each, and of the step."""
    times = pd.DataFrame({label: 1e3 * summary[name] for label, summary in summaries.items()})
    times = times.reindex([*ORDER, "step"]).dropna(how="all").astype(object)
    times = times.rename(index=lambda phase: phases.find_phase_or_default(phase).label)
    table: pd.DataFrame = times.rename_axis("phase").reset_index()
    return table


def facts(frames: Frames) -> dict[str, str]:
    """Return what is in none of the paper's bars, of its dense iteration."""
    dense = yoon2022.published_ms_by_phase("dense")
    left_out = {name: dense[name] for name in ("validate", "io", "unaccounted")}
    share = 100 * sum(left_out.values()) / sum(dense.values())
    return {"left_out": format_number(share)} | {name: format_number(part) for name, part in left_out.items()}


def claims() -> list[Claim]:
    return [
        make_claim("yoon2022.fig4.compression-dominates", compression_dominance_percent, "topk"),
        make_claim("yoon2022.fig4.waiting-for-selection", _explained_percent_by_cause, "topk", "selection"),
        make_claim(
            "yoon2022.fig4.topk-communicates-longer", yoon2022.extra_phase_ms, "topk", "dense", COMMUNICATION
        ),
        *make_claims_by_method(
            "yoon2022.fig4.communication", yoon2022.estimate_phase_statistic, yoon2022.METHODS, COMMUNICATION
        ),
        make_claim("yoon2022.fig4.compression.topk", yoon2022.estimate_phase_statistic, "topk", ("select",)),
        make_claim(
            "yoon2022.fig4.compression.randomk", yoon2022.estimate_phase_statistic, "randomk", ("select",)
        ),
    ]


def compression_dominance_percent(frames: Frames, method: str) -> Estimate | None:
    """Return compression less the larger of FP + BP and communication, in percent of the iteration."""
    return yoon2022.estimate_phase_statistic(
        frames, method, ("select", "forward", "backward", "wait", "transfer", "step"),
        lambda select, fp, bp, wait, sent, step: 100 * (select - np.maximum(fp + bp, wait + sent)) / step,
        (-100.0, 100.0),
    )  # fmt: skip


def _explained_percent_by_cause(frames: Frames, method: str, cause: str) -> Estimate | None:
    return wait_percent_explained(
        frames, yoon2022.method_run_keys(frames, method, MODE), cause, COMMUNICATION
    )
