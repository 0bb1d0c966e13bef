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
    draw_line_across,
    draw_mean_curve,
    draw_points,
    draw_samples,
    new_figure,
    set_log_ticks,
    set_value_ticks,
)
from analysis.pictures.style import MethodStyle
from analysis.stats import Estimate

__all__ = [
    "Axes",
    "Figure",
    "annotate_above",
    "draw_line_across",
    "draw_mean_curve",
    "draw_points",
    "draw_samples",
    "new_figure",
    "set_log_ticks",
    "set_value_ticks",
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
    height: float,
    *,
    rows: int = 1,
    ylabel: str | Sequence[str] = "",
    keys: Iterable[Artist] = (),
    loc: Any = "outside lower center",
    ncols: int = 0,
    **subplot_options: Any,
) -> Figure:
    """Return a figure as wide as a page, with panels beside each other in as many rows.

    Args:
        panels: from the upper left, row by row.
        height: in inches.
        rows: of panels.
        ylabel: of the first panel of each row; one for all, or one for each.
        keys: first entries of the legend, before all that has a label.
        loc: where the legend stands outside the panels.
        ncols: of the legend; by default as many as fit, up to one for each entry.
        subplot_options: for `Figure.subplots`.

    Raises:
        ValueError: there is no panel.
    """
    if not panels:
        raise ValueError(NOTHING_TO_DRAW)
    columns = len(panels) // rows
    with new_figure(style.two_column_settings(height), rows, columns, squeeze=False, **subplot_options) as (
        figure,
        grid,
    ):
        for axes, panel in zip(grid.flat, panels, strict=True):
            panel(axes)
        for axes, label in zip(
            grid[:, 0], [ylabel] * rows if isinstance(ylabel, str) else ylabel, strict=True
        ):
            axes.set_ylabel(label or axes.get_ylabel())
        if entries := [*keys, *_labelled_handles(grid.flat)]:
            _add_legend(figure, entries, loc, [ncols] if ncols else range(len(entries), 0, -1))
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
    sizes: Sequence[float] = (),
    log: Sequence[float] = (),
    level: float | None = None,
    grid: GridAxes | None = "both",
    **axes_settings: Any,
) -> None:
    """Draw lines over one axis, with bands or intervals where they have them.

    Args:
        axes: to draw on.
        lines: curves and areas.
        sizes: the ticks of x, each twice the one before or more.
        log: the ticks of y, which is then logarithmic.
        level: of y, drawn across.
        grid: along which axis, if any.
        axes_settings: for `Axes.set`.
    """
    for line in lines:
        _draw_line(axes, line)
    if level is not None:
        axes.axhline(level, **REFERENCE_LINE)
    if sizes:
        set_doubling_ticks(axes, sizes)
    finish_axes(axes, log=log, grid=grid, **axes_settings)


def _draw_line(axes: Axes, line: Curve | FilledArea) -> None:
    if isinstance(line, FilledArea):
        axes.fill_between(line.x, line.low, line.high, color=line.look.colour, alpha=line.alpha, linewidth=0)
    elif line.x is None:
        draw_line_across(axes, line.y, line.look, **line.line_options)
    elif not len(line.x):
        return  # nothing was measured: no entry in the legend
    elif isinstance(line.y, pd.DataFrame):
        draw_mean_curve(axes, line.x, line.y, line.look, **line.line_options)
    elif isinstance(line.y, list) and isinstance(line.y[0], Estimate):
        draw_points(axes, line.x, line.y, line.look, **line.line_options)
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
    thin: dict[str, Any] = {"color": "#AAAAAA", "linewidth": 0.6, "zorder": 0}
    axes.axvline(x, **thin | line_options)


class StackedBar(NamedTuple):
    """A whole with its parts, by phase, and the text at its end."""

    label: str  # of its place
    parts: Mapping[str, float]
    text: str = ""
    offset: float = 0.0  # aside of its place
    faint: bool = False  # published


@panel_maker
def horizontal_stacks_panel(axes: Axes, /, bars: Sequence[StackedBar], **axes_settings: Any) -> None:
    """Draw stacked bars of phases below bar other, each with a text behind it."""
    for y, bar in enumerate(bars):
        left = 0.0
        for phase, width in bar.parts.items():
            colour, hatch = marks.phase_fill(phase)
            edge: dict[str, Any] = {"hatch": hatch, "edgecolor": "#7A7A7A", "linewidth": 0.4}
            axes.barh(y, width, 0.62, left=left, color=colour, **edge)
            left += width
        behind: dict[str, Any] = {"xytext": (3, 0), "ha": "left", "va": "center"}
        annotate_above(axes, sum(bar.parts.values()), y, bar.text, **behind)
    set_row_labels(axes, [bar.label for bar in bars])
    finish_axes(axes, **axes_settings)


@panel_maker
def stacked_bars_panel(
    axes: Axes,
    /,
    bars: Sequence[StackedBar],
    *,
    width: float = 0.6,
    least: float = np.inf,
    **axes_settings: Any,
) -> None:
    """Draw stacked bars of phases beside bar other, each with a text above it.

    Bars with the same label share a place.

    Args:
        axes: to draw on.
        bars: from the left.
        width: of a bar.
        least: parts of so much show their number.
        axes_settings: for `Axes.set`.
    """
    labels = list(dict.fromkeys(bar.label for bar in bars))
    for bar in bars:
        x = labels.index(bar.label) + bar.offset
        top = marks.draw_stacked_bar(axes, x, bar.parts, width, bar.faint, least)
        annotate_above(axes, x, top, bar.text, **({"color": "#777777", "fontsize": 6} if bar.faint else {}))
    set_place_labels(axes, labels)
    finish_axes(axes, **axes_settings)


@panel_maker
def grouped_bars_panel(
    axes: Axes, /, groups: BarGroups, *, level: float | None = None, **axes_settings: Any
) -> None:
    """Draw bars with intervals and numbers, in groups."""
    width = 0.8 / max((len(group) for group in groups.values()), default=1)
    for x, group in enumerate(groups.values()):
        for place, (look, origin, value) in enumerate(group):
            position = x + (place - (len(group) - 1) / 2) * width
            marks.draw_bar(axes, position, value, look, 0.9 * width, origin)
    if level is not None:
        axes.axhline(level, **REFERENCE_LINE)
    set_place_labels(axes, list(groups))
    axes.margins(y=0.12)
    finish_axes(axes, **axes_settings)


@panel_maker
def dots_panel(
    axes: Axes,
    /,
    points: Iterable[Curve],
    *,
    rows: Sequence[str] = (),
    grid: GridAxes | None = None,
    log: Sequence[float] = (),
    factors: bool = False,
    **axes_settings: Any,
) -> None:
    """Draw single marks; with `rows`, from the top, y is the number of the row.

    Args:
        axes: to draw on.
        points: what to draw.
        rows: their names.
        grid: along which axis, if any.
        log: the ticks of y, which is then logarithmic.
        factors: x is of factors, which are ticks of a logarithmic axis.
        axes_settings: for `Axes.set`.
    """
    for point in points:
        _draw_curve(axes, point, linestyle="")
    if rows:
        set_row_labels(axes, rows)
    if factors:
        marks.set_factor_axis(axes)
    finish_axes(axes, grid=grid, log=log, **axes_settings)


@panel_maker
def heatmap_panel(axes: Axes, /, cells: np.ndarray, end: float, **axes_settings: Any) -> None:
    """Draw rows of cells from the bottom in blues: white is none, darkest four times the mean.

    Args:
        axes: to draw on.
        cells: (rows, columns).
        end: the x of the right edge.
        axes_settings: for `Axes.set`.
    """
    relative = cells / max(float(cells.mean()), 1e-12)
    shown: dict[str, Any] = {"origin": "lower", "aspect": "auto", "vmin": 0, "vmax": 4, "cmap": "Blues"}
    axes.imshow(relative, extent=(0, end, 0, len(cells)), **shown)
    finish_axes(axes, **axes_settings)


def finish_axes(
    axes: Axes,
    *,
    log: Sequence[float] = (),
    grid: GridAxes | None = None,
    note: str = "",
    **axes_settings: Any,
) -> None:
    """Set labels, limits, ticks of a logarithmic y, a grid, and a note at the upper left."""
    axes.set(**axes_settings)
    if note:
        axes.text(0.03, 0.99, note, transform=axes.transAxes, va="top", fontsize=6.5)
    if len(log):
        set_log_ticks(axes, log)
    if grid:
        axes.grid(visible=True, axis=grid)


def set_doubling_ticks(axes: Axes, sizes: Sequence[float], labels: Sequence[str] = ()) -> None:
    """Set a logarithmic x axis of sizes that double, with a tick at each."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, labels or [str(size) for size in sizes])


def set_row_labels(axes: Axes, labels: Sequence[str]) -> None:
    """Set a y axis with a row for each of these labels, the first at the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def set_place_labels(axes: Axes, labels: Sequence[str]) -> None:
    """Set an x axis with a place for each of these labels."""
    axes.set_xticks(range(len(labels)), [label.replace(", ", ",\n") for label in labels])
    axes.tick_params(axis="x", length=0)
