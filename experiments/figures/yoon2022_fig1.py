"""Fig. 1 of Yoon and Oh 2022: conventional gradient averaging beside Top-k sparsification.

A schematic there; here one measured iteration of each, every rank a lane. Nothing is claimed: that Top-k
selects and dense does not is how they are made, so no measurement could deny it.
"""

from __future__ import annotations

import pandas as pd

from analysis import plots
from analysis.pictures import captions, marks, style, timeline
from analysis.records import phases
from analysis.records.frames import Frames, select_runs
from analysis.tables import Table
from experiments.figures import _yoon2022 as yoon2022
from experiments.figures import yoon2022_fig4 as fig4

TITLE = "One measured iteration: gradient averaging beside Top-k sparsification"
MODE = fig4.MODE
METHODS = ("dense", "topk")
SCALE = yoon2022.TIMING_SCALE
published_results = yoon2022.published_results
LANE_IN = 0.24  # inches of height per rank
runs = fig4.runs


def draw(frames: Frames, profile: str) -> plots.Figure:
    drawn = _iterations(frames)
    ranks = max(spans["rank"].nunique() for spans in drawn.values())
    end = max((spans["start_ms"] + spans["took_ms"]).max() for spans in drawn.values())

    def lanes(method: str, spans: pd.DataFrame) -> plots.Panel:
        def panel(axes: plots.Axes) -> None:
            for rank in range(ranks):
                marks.draw_lane(axes, rank, spans[spans["rank"] == rank], end)
            plots.set_row_labels(axes, [f"rank {rank}" for rank in range(ranks)])
            axes.set_title(style.method_style(method).label, loc="left")
            is_last = method == list(drawn)[-1]
            xlabel = f"Time since the step began (ms{captions.simulated_suffix(frames)})" if is_last else ""
            plots.finish_axes(axes, xlim=(0, end * 1.01), xlabel=xlabel, grid="x")

        return panel

    seen = {phase for spans in drawn.values() for phase in spans["phase"]}
    return plots.compose_figure(
        [lanes(*each) for each in drawn.items()],
        1.1 + len(drawn) * (0.45 + LANE_IN * ranks),
        rows=len(drawn),
        keys=marks.phase_legend_handles([phase for phase in phases.NAMES if phase in seen]),
        ncols=5,
        sharex=True,
    )


def table(frames: Frames) -> Table:
    """Time that each rank was in each phase."""
    found = []
    for method, spans in _iterations(frames).items():
        took = spans.pivot_table(index="rank", columns="phase", values="took_ms", aggfunc="sum")
        found.append(took.assign(method=style.method_style(method).label, rank=took.index.astype(str)))
    frame = pd.concat(found).reindex(columns=["method", "rank", *phases.NAMES])
    frame = frame.dropna(axis="columns", how="all").rename(columns=lambda name: phases.find_phase(name).label)
    return Table(
        f"Time in each phase{captions.simulated_suffix(frames)}",
        frame,
        dict.fromkeys(frame.columns[2:], "ms"),
    )


def iteration(frames: Frames, key: str) -> pd.DataFrame:
    """A typical step of a run: rank, phase, start_ms, took_ms, as `timeline.align_spans` has them."""
    spans = timeline.spans_of_run(frames, key)
    return timeline.align_spans(spans[spans["step"] == timeline.find_typical_step(frames, key)])


def facts(frames: Frames) -> dict[str, str]:
    """Of the methods that are drawn."""
    shown = select_runs(
        frames, [key for method in _methods(frames) for key in yoon2022.method_keys(frames, method)]
    )
    return {"setting": captions.describe_setting(shown), "timing": captions.describe_timing(shown)}


def _iterations(frames: Frames) -> dict[str, pd.DataFrame]:
    return {
        method: iteration(frames, yoon2022.method_keys(frames, method, MODE)[0])
        for method in _methods(frames)
    }


def _methods(frames: Frames) -> list[str]:
    methods = [method for method in METHODS if yoon2022.method_keys(frames, method, MODE)]
    return methods or yoon2022.measured_methods(frames, MODE)[:2]
