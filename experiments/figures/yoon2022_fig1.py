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
published_results = yoon2022.published_results_by_method
LANE_IN = 0.24  # inches of height per rank
runs = fig4.runs


def draw(frames: Frames, profile: str) -> plots.Figure:
    spans_by_method = _typical_iterations(frames)
    spans = pd.concat(spans_by_method)
    ranks = range(spans["rank"].nunique())
    end_ms = float((spans["start_ms"] + spans["took_ms"]).max())
    xlabel = f"Time since the step began (ms{captions.simulated_suffix(frames)})"
    labels = dict.fromkeys(spans_by_method, "") | {[*spans_by_method][-1]: xlabel}
    present = set(spans["phase"])
    return plots.compose_figure(
        [_lanes_panel(method, of_method, ranks, end_ms, labels[method])
         for method, of_method in spans_by_method.items()],
        1.1 + len(labels) * (0.45 + LANE_IN * len(ranks)),
        num_rows=len(labels),
        first_legend_entries=marks.phase_legend_handles(
            [phase for phase in phases.NAMES if phase in present]
        ),
        legend_columns=5,
        sharex=True,
    )  # fmt: skip


@plots.panel_maker
def _lanes_panel(
    axes: plots.Axes, /, method: str, spans: pd.DataFrame, ranks: range, end_ms: float, xlabel: str
) -> None:
    """Draw a lane of phases for each rank."""
    for rank in ranks:
        marks.draw_rank_lane(axes, rank, spans[spans["rank"] == rank], end_ms)
    plots.set_y_row_labels(axes, [f"rank {rank}" for rank in ranks])
    axes.set_title(style.method_style(method).label, loc="left")
    plots.finish_axes(axes, xlim=(0, end_ms * 1.01), xlabel=xlabel, grid="x")


def table(frames: Frames) -> Table:
    """Return the time that each rank was in each phase."""
    tables = []
    for method, spans in _typical_iterations(frames).items():
        took = spans.pivot_table(index="rank", columns="phase", values="took_ms", aggfunc="sum")
        tables.append(took.assign(method=style.method_style(method).label, rank=took.index.astype(str)))
    frame = pd.concat(tables).reindex(columns=["method", "rank", *phases.NAMES])
    frame = frame.dropna(axis="columns", how="all").rename(
        columns=lambda name: phases.find_phase_or_default(name).label
    )
    return Table(
        f"Time in each phase{captions.simulated_suffix(frames)}",
        frame,
        dict.fromkeys(frame.columns[2:], "ms"),
    )


def typical_iteration_spans(frames: Frames, key: str) -> pd.DataFrame:
    """Return a typical step of a run: rank, phase, start_ms, took_ms; see `spans_from_step_start_ms`."""
    spans = timeline.spans_of_run(frames, key)
    return timeline.spans_from_step_start_ms(
        spans[spans["step"] == timeline.find_typical_step_with_spans(frames, key)]
    )


def facts(frames: Frames) -> dict[str, str]:
    """Return how the methods that are drawn were measured."""
    drawn_runs = select_runs(
        frames, [key for method in _methods(frames) for key in yoon2022.method_run_keys(frames, method)]
    )
    return {
        "setting": captions.describe_setting_with_remarks(drawn_runs),
        "timing": captions.describe_timing_and_samples(drawn_runs),
    }


def _typical_iterations(frames: Frames) -> dict[str, pd.DataFrame]:
    return {
        method: typical_iteration_spans(frames, yoon2022.method_run_keys(frames, method, MODE)[0])
        for method in _methods(frames)
    }


def _methods(frames: Frames) -> list[str]:
    methods = [method for method in METHODS if yoon2022.method_run_keys(frames, method, MODE)]
    return methods or yoon2022.measured_methods(frames, MODE)[:2]
