"""Panels of pictures by kind, of an item's data, and figures of panels.

A panel is a function of axes. Each kind makes one of its data: `curves_panel`, `horizontal_stacks_panel`,
`stacked_bars_panel`, `grouped_bars_panel`, `dots_panel`, `heatmap_panel`.
`compose_figure` lays panels out on a page, with the legend outside. Further words of a kind (`title`,
`xlabel`, `ylim`, ...) are those of `Axes.set`.

Exports Axes, Figure and the single marks as well: only this folder imports matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec

import numpy as np
import pandas as pd
from matplotlib.artist import Artist

from analysis.pictures import marks, style
from analysis.pictures.marks import (
    Axes,
    Figure,
    annotate_above,
    draw_horizontal_line_with_band,
    draw_mean_curve_with_band,
    draw_points_with_intervals,
    draw_samples,
    new_figure,
    set_log_y_ticks,
    set_up_x_axis_with_ticks,
)
from analysis.pictures.style import MethodStyle
from analysis.stats import Estimate

__all__ = [
    "Axes",
    "Figure",
    "annotate_above",
    "draw_horizontal_line_with_band",
    "draw_mean_curve_with_band",
    "draw_points_with_intervals",
    "draw_samples",
    "new_figure",
    "set_log_y_ticks",
    "set_up_x_axis_with_ticks",
]
NOTHING_TO_DRAW = "nothing to draw: there is no run"
GridAxes = Literal["x", "y", "both"]
Panel = Callable[[Axes], None]
P = ParamSpec("P")
REFERENCE_LINE: dict[str, Any] = {
    "color": "#777777",
    "linewidth": 0.6,
    "zorder": 0,
}  # a level to compare with
BarGroups = Mapping[
    str, Sequence[tuple[MethodStyle, str, Estimate]]
]  # of bars: look, origin (`marks.FILL_BY_ORIGIN`), value
PUBLISHED_LINE: dict[str, Any] = {
    "linestyle": ":",
    "linewidth": 0.8,
    "marker": "",
    "label": None,
}  # published


def compose_figure(
    panels: Sequence[Panel],
    height_inches: float,
    *,
    num_rows: int = 1,
    ylabel: str | Sequence[str] = "",
    first_legend_entries: Iterable[Artist] = (),
    legend_loc: Any = "outside lower center",
    legend_columns: int = 0,
    **subplot_options: Any,
) -> Figure:
    """Return a figure as wide as a page, with panels beside each other in `num_rows` rows.

    Args:
        panels: from the upper left, row by row.
        num_rows: of panels.
        ylabel: of the first panel of each row; one for all, or one for each.
        first_legend_entries: first entries of the legend, before all that has a label.
        legend_loc: where the legend stands outside the panels.
        legend_columns: of the legend; by default as many as fit, up to one for each entry.
        subplot_options: for `Figure.subplots`.

    Raises:
        ValueError: there is no panel.
    """
    if not panels:
        raise ValueError(NOTHING_TO_DRAW)
    columns = len(panels) // num_rows
    with new_figure(
        style.two_column_rc_settings(height_inches), num_rows, columns, squeeze=False, **subplot_options
    ) as (
        figure,
        grid,
    ):
        for axes, panel in zip(grid.flat, panels, strict=True):
            panel(axes)
        for axes, label in zip(
            grid[:, 0], [ylabel] * num_rows if isinstance(ylabel, str) else ylabel, strict=True
        ):
            axes.set_ylabel(label or axes.get_ylabel())
        entries = [*first_legend_entries, *_labelled_handles(grid.flat)]
        if entries:
            _add_legend(
                figure,
                entries,
                legend_loc,
                [legend_columns] if legend_columns else range(len(entries), 0, -1),
            )
    return figure


def _add_legend(figure: Figure, entries: Sequence[Artist], loc: Any, ncols: Iterable[int]) -> None:
    """Add a legend in the first of these numbers of columns with which it fits the figure, or in the last."""
    names = [str(entry.get_label()) for entry in entries]
    for columns in ncols:
        for wider_legend in figure.legends:
            wider_legend.remove()
        legend = figure.legend(entries, names, loc=loc, ncols=columns)
        if legend.get_window_extent().width <= figure.bbox.width:
            break


def _labelled_handles(panels: Iterable[Axes]) -> list[Artist]:
    """Return handles of all that has a label, each label once."""
    handle_by_label: dict[str, Artist] = {}
    for axes in panels:
        if axes.get_legend() is None:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handle_by_label.setdefault(label, handle)
    return list(handle_by_label.values())


def panel_maker(draw: Callable[Concatenate[Axes, P], None]) -> Callable[P, Panel]:
    """Return a function that makes a panel, of one that draws on axes."""

    @wraps(draw)
    def make_panel(*args: P.args, **kwargs: P.kwargs) -> Panel:
        return lambda axes: draw(axes, *args, **kwargs)

    return make_panel


class Curve(NamedTuple):
    """A line or marks, and what `Axes.plot` takes to draw them in another way than their look.

    Its y is numbers, or a list of values with intervals, or a table with the columns mean, low and high;
    without an x it is one value, and the line goes across.
    """

    look: MethodStyle
    x: Any
    y: Any
    line_options: Mapping[str, Any] = {}


class FilledArea(NamedTuple):
    """An area between two curves."""

    look: MethodStyle
    x: Any
    low: Any
    high: Any
    alpha: float = 0.18


@panel_maker
def curves_panel(
    axes: Axes,
    /,
    lines: Iterable[Curve | FilledArea],
    *,
    doubling_x_ticks: Sequence[float] = (),
    log_y_ticks: Sequence[float] = (),
    reference_y: float | None = None,
    grid: GridAxes | None = "both",
    **axes_settings: Any,
) -> None:
    """Draw lines over one axis, with bands or intervals where they have them.

    Args:
        axes: to draw on.
        lines: curves and areas.
        doubling_x_ticks: the ticks of x, each twice the one before or more.
        log_y_ticks: the ticks of y, which is then logarithmic.
        reference_y: of y, drawn across.
        grid: along which axis, if any.
        axes_settings: for `Axes.set`.
    """
    for line in lines:
        _draw_line(axes, line)
    if reference_y is not None:
        axes.axhline(reference_y, **REFERENCE_LINE)
    if doubling_x_ticks:
        set_doubling_x_ticks(axes, doubling_x_ticks)
    finish_axes(axes, log_y_ticks=log_y_ticks, grid=grid, **axes_settings)


def _draw_line(axes: Axes, line: Curve | FilledArea) -> None:
    if isinstance(line, FilledArea):
        axes.fill_between(line.x, line.low, line.high, color=line.look.colour, alpha=line.alpha, linewidth=0)
    elif line.x is None:
        draw_horizontal_line_with_band(axes, line.y, line.look, **line.line_options)
    elif not len(line.x):
        return  # nothing was measured: no entry in the legend
    elif isinstance(line.y, pd.DataFrame):
        draw_mean_curve_with_band(axes, line.x, line.y, line.look, **line.line_options)
    elif isinstance(line.y, list) and isinstance(line.y[0], Estimate):
        draw_points_with_intervals(axes, line.x, line.y, line.look, **line.line_options)
    else:
        _draw_curve(axes, line)


def _draw_curve(axes: Axes, curve: Curve, **defaults: Any) -> None:
    look = {"color": curve.look.colour, "marker": curve.look.marker, "label": curve.look.label}
    axes.plot(curve.x, curve.y, **look | defaults | dict(curve.line_options))


def overlay_panels(*panels: Panel) -> Panel:
    """Return a panel that draws these panels over each other, on the same axes."""

    def draw(axes: Axes) -> None:
        for panel in panels:
            panel(axes)

    return draw


@panel_maker
def shaded_span_panel(
    axes: Axes, /, along: Literal["x", "y"], low: float, high: float, colour: str = "#F0F0F0"
) -> None:
    """Draw a grey area behind all that lies between two values of x, or of y."""
    span = axes.axvspan if along == "x" else axes.axhspan
    span(low, high, color=colour, zorder=-1)


@panel_maker
def legend_panel(axes: Axes, /, **legend_options: Any) -> None:
    """Draw a legend inside the axes, whose entries are not those of the whole picture."""
    axes.legend(**legend_options)


@panel_maker
def vertical_line_panel(axes: Axes, /, x: float, **line_options: Any) -> None:
    """Draw a thin line up, where something changes."""
    thin_line: dict[str, Any] = {"color": "#AAAAAA", "linewidth": 0.6, "zorder": 0}
    axes.axvline(x, **thin_line | line_options)


class StackedBar(NamedTuple):
    """A whole with its parts, by phase, and the text at its end."""

    label: str  # of its place
    value_by_phase: Mapping[str, float]
    text: str = ""
    x_offset: float = 0.0  # aside of its place
    is_published: bool = False  # drawn faintly


@panel_maker
def horizontal_stacks_panel(axes: Axes, /, bars: Sequence[StackedBar], **axes_settings: Any) -> None:
    """Draw stacked bars of phases below bar other, each with a text behind it."""
    for y, bar in enumerate(bars):
        left_edge = 0.0
        for phase, width in bar.value_by_phase.items():
            colour, hatch = marks.phase_colour_and_hatch(phase)
            edge: dict[str, Any] = {"hatch": hatch, "edgecolor": "#7A7A7A", "linewidth": 0.4}
            axes.barh(y, width, 0.62, left=left_edge, color=colour, **edge)
            left_edge += width
        text_options: dict[str, Any] = {"xytext": (3, 0), "ha": "left", "va": "center"}
        annotate_above(axes, sum(bar.value_by_phase.values()), y, bar.text, **text_options)
    set_y_row_labels(axes, [bar.label for bar in bars])
    finish_axes(axes, **axes_settings)


@panel_maker
def stacked_bars_panel(
    axes: Axes,
    /,
    bars: Sequence[StackedBar],
    *,
    width: float = 0.6,
    min_labelled_part: float = np.inf,
    **axes_settings: Any,
) -> None:
    """Draw stacked bars of phases beside bar other, each with a text above it.

    Bars with the same label share a place.

    Args:
        axes: to draw on.
        bars: from the left.
        width: of a bar.
        min_labelled_part: parts of so much show their number.
        axes_settings: for `Axes.set`.
    """
    labels = list(dict.fromkeys(bar.label for bar in bars))
    for bar in bars:
        x = labels.index(bar.label) + bar.x_offset
        top = marks.draw_stacked_phase_bar(
            axes, x, bar.value_by_phase, width, bar.is_published, min_labelled_part
        )
        annotate_above(
            axes, x, top, bar.text, **({"color": "#777777", "fontsize": 6} if bar.is_published else {})
        )
    set_x_place_labels(axes, labels)
    finish_axes(axes, **axes_settings)


@panel_maker
def grouped_bars_panel(
    axes: Axes, /, groups: BarGroups, *, reference_y: float | None = None, **axes_settings: Any
) -> None:
    """Draw bars with intervals and numbers, in groups."""
    width = 0.8 / max((len(group) for group in groups.values()), default=1)
    for x, group in enumerate(groups.values()):
        for place, (look, origin, value) in enumerate(group):
            position = x + (place - (len(group) - 1) / 2) * width
            marks.draw_bar_with_interval(axes, position, value, look, 0.9 * width, origin)
    if reference_y is not None:
        axes.axhline(reference_y, **REFERENCE_LINE)
    set_x_place_labels(axes, list(groups))
    axes.margins(y=0.12)
    finish_axes(axes, **axes_settings)


@panel_maker
def dots_panel(
    axes: Axes,
    /,
    points: Iterable[Curve],
    *,
    row_labels: Sequence[str] = (),
    grid: GridAxes | None = None,
    log_y_ticks: Sequence[float] = (),
    has_factor_axis: bool = False,
    **axes_settings: Any,
) -> None:
    """Draw single marks; with `row_labels`, from the top, y is the number of the row.

    Args:
        axes: to draw on.
        points: what to draw.
        row_labels: their names.
        grid: along which axis, if any.
        log_y_ticks: the ticks of y, which is then logarithmic.
        has_factor_axis: x is logarithmic, with factors such as x 2 as its ticks.
        axes_settings: for `Axes.set`.
    """
    for point in points:
        _draw_curve(axes, point, linestyle="")
    if row_labels:
        set_y_row_labels(axes, row_labels)
    if has_factor_axis:
        marks.set_log_factor_x_axis(axes)
    finish_axes(axes, grid=grid, log_y_ticks=log_y_ticks, **axes_settings)


@panel_maker
def heatmap_panel(axes: Axes, /, cells: np.ndarray, right_x: float, **axes_settings: Any) -> None:
    """Draw rows of cells from the bottom in blues: white is none, darkest four times the mean.

    Args:
        axes: to draw on.
        cells: (rows, columns).
        right_x: the x of the right edge.
        axes_settings: for `Axes.set`.
    """
    relative = cells / max(float(cells.mean()), 1e-12)
    image_options: dict[str, Any] = {
        "origin": "lower",
        "aspect": "auto",
        "vmin": 0,
        "vmax": 4,
        "cmap": "Blues",
    }
    axes.imshow(relative, extent=(0, right_x, 0, len(cells)), **image_options)
    finish_axes(axes, **axes_settings)


def finish_axes(
    axes: Axes,
    *,
    log_y_ticks: Sequence[float] = (),
    grid: GridAxes | None = None,
    note: str = "",
    **axes_settings: Any,
) -> None:
    """Set labels, limits, ticks of a logarithmic y, a grid, and a note at the upper left."""
    axes.set(**axes_settings)
    if note:
        axes.text(0.03, 0.99, note, transform=axes.transAxes, va="top", fontsize=6.5)
    if len(log_y_ticks):
        set_log_y_ticks(axes, log_y_ticks)
    if grid:
        axes.grid(visible=True, axis=grid)


def set_doubling_x_ticks(axes: Axes, sizes: Sequence[float], labels: Sequence[str] = ()) -> None:
    """Set a logarithmic x axis of sizes that double, with a tick at each."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, labels or [str(size) for size in sizes])


def set_y_row_labels(axes: Axes, labels: Sequence[str]) -> None:
    """Set a y axis with a row for each of these labels, the first at the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def set_x_place_labels(axes: Axes, labels: Sequence[str]) -> None:
    """Set an x axis with a place for each of these labels."""
    axes.set_xticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels])
    axes.tick_params(axis="x", length=0)
