"""Marks that pictures are drawn with: curves with bands, stacked bars, bars with intervals, lanes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes as Axes
from matplotlib.figure import Figure as Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch as Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullFormatter

from analysis.pictures.numbers import CHOSEN_DIGITS, format_number, format_with_interval
from analysis.pictures.style import MethodStyle
from analysis.records import phases as phase_list
from analysis.stats import Estimate

if TYPE_CHECKING:
    from matplotlib.typing import RcKeyType

LOG_AXIS_RATIO = 10.0  # times its smallest value: from there on an axis is logarithmic
PUBLISHED_OPACITY = 0.45  # opacity of the paper's data, next to ours
# Published values as marks, open.
OPEN_MARKS: dict[str, Any] = {
    "mfc": "white",
    "alpha": PUBLISHED_OPACITY + 0.2,
    "markersize": 3.2,
    "linestyle": "",
}
FACTOR_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
LABEL_FONT_PT = 5.5  # of names beside points
MIN_TEXT_SHARE = 0.055  # share of the axis: a shorter span has no room for its number


@contextmanager
def new_figure(
    settings: Mapping[RcKeyType, Any], rows: int = 1, columns: int = 1, **subplot_options: Any
) -> Iterator[tuple[Figure, Any]]:
    """Yield a new figure and its axes, to be drawn on inside the block; then lay the figure out.

    Args:
        settings: matplotlib's.
        rows: of axes.
        columns: of axes; one row and column gives axes, more give an array of them.
        subplot_options: for `Figure.subplots`.
    """
    with matplotlib.rc_context(dict(settings)):
        figure = Figure(layout="constrained")
        yield figure, figure.subplots(rows, columns, **subplot_options)
        engine = figure.get_layout_engine()
        assert engine is not None, "the layout is constrained"
        engine.execute(figure)
        figure.set_layout_engine(None)  # laid out once, not again for every file format
        for axes in figure.axes:  # the last bits of what the layout solves are not always the same
            left, bottom, width, height = (round(edge, 6) for edge in axes.get_position().bounds)
            axes.set_position((left, bottom, width, height))


def draw_mean_curve_with_band(
    axes: Axes, x: pd.Series, table: pd.DataFrame, look: MethodStyle, alpha: float = 1.0, **line_options: Any
) -> None:
    """Draw a mean over epochs, and its interval as a band where there are enough runs for one."""
    usual: dict[str, Any] = {
        "marker": look.marker,
        "markevery": max(1, len(x) // 10),
        "label": look.label,
        "zorder": 3,
    }
    axes.plot(x, table["mean"], color=look.colour, alpha=alpha, **usual | line_options)
    if table["low"].notna().any():
        faint: dict[str, Any] = {"alpha": 0.18 * alpha, "linewidth": 0, "zorder": 2}
        axes.fill_between(x, table["low"], table["high"], color=look.colour, **faint)


def draw_published_curve(axes: Axes, x: pd.Series, table: pd.DataFrame, look: MethodStyle) -> None:
    """Draw a published curve, faintly below ours, and the range of several (columns mean, low, high)."""
    faint: dict[str, Any] = {"color": look.colour, "alpha": PUBLISHED_OPACITY, "zorder": 1}
    axes.plot(x, table["mean"], linestyle=(0, (1, 1.2)), linewidth=0.9, **faint)
    if table["low"].notna().any():
        axes.fill_between(x, table["low"], table["high"], **faint | {"alpha": 0.12}, linewidth=0)


def add_published_legend_entry(axes: Axes, label: str) -> None:
    """Add the legend entry of `draw_published_curve` and `draw_published_points`."""
    style: dict[str, Any] = {"color": "#777777", "linestyle": (0, (1, 1.2)), "linewidth": 0.9}
    axes.plot([], [], marker="o", mfc="white", label=label, **style)


def draw_samples(axes: Axes, x: float, values: Sequence[float], look: MethodStyle) -> None:
    """Draw the single values behind a mean."""
    axes.plot([x] * len(values), values, look.marker, color=look.colour, alpha=0.55, markersize=2.6, mew=0)


def draw_mean_with_interval(axes: Axes, x: float, value: Estimate, look: MethodStyle) -> None:
    """Draw a mean with its interval, as a bar across and a line up and down."""
    axes.plot(x, value.value, "_", color=look.colour, markersize=7, markeredgewidth=1.2)
    if value.low is not None and value.high is not None:
        axes.plot([x, x], [value.low, value.high], color=look.colour, linewidth=1)


def draw_points_with_intervals(
    axes: Axes, x: Sequence[float], values: Sequence[Estimate], look: MethodStyle, **line_options: Any
) -> None:
    """Draw values with their intervals, joined by a line."""
    line: dict[str, Any] = {"color": look.colour, "marker": look.marker, "label": look.label}
    axes.plot(x, [value.value for value in values], **line | line_options)
    for position, value in zip(x, values, strict=True):
        draw_mean_with_interval(axes, position, value, look)


def draw_horizontal_line_with_band(
    axes: Axes, value: Estimate, look: MethodStyle, **line_options: Any
) -> None:
    """Draw a value that holds for every x, as a line across, and its interval as a band."""
    line: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.0, "label": look.label, "zorder": 1}
    axes.axhline(value.value, color=look.colour, **line | line_options)
    if value.low is not None and value.high is not None:
        axes.axhspan(value.low, value.high, color=look.colour, alpha=0.12, linewidth=0, zorder=0)


def set_up_x_axis_with_ticks(axes: Axes, position_by_value: Mapping[Any, float], label: str) -> None:
    """Set label, scale and margins of an x axis, with a tick at each value; logarithmic if they span much."""
    positions = list(position_by_value.values())
    axes.set_xlabel(label)
    spans_much = bool(positions) and 0 < LOG_AXIS_RATIO * min(positions) <= max(positions)
    if spans_much and list(position_by_value) == positions:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(positions))
    axes.xaxis.set_major_formatter(
        FixedFormatter(
            [format_number(x, CHOSEN_DIGITS) if isinstance(x, float) else str(x) for x in position_by_value]
        )
    )
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.08)


def draw_labelled_points_log_x(
    axes: Axes, x: Sequence[float], y: Sequence[float], names: Sequence[str], inches: tuple[float, float]
) -> None:
    """Draw points on a logarithmic x axis with a name beside each, which covers neither a point nor a name.

    Args:
        axes: to draw on.
        x: of the points.
        y: of the points.
        names: of the points.
        inches: the width and the height of the axes, about.
    """
    axes.plot(x, y, "o", color="#0072B2", ms=3)
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.06)
    left, right = np.log10(axes.get_xlim())
    bottom, top = axes.get_ylim()
    origin = np.array([left, bottom])
    scale = np.array(inches) / (right - left, top - bottom)
    places = (np.column_stack([np.log10(x), y]) - origin) * scale
    occupied: list[Box] = [(*(place - 0.03), *(place + 0.03)) for place in places]
    line: dict[str, Any] = {"arrowstyle": "-", "lw": 0.3, "color": "#999999", "shrinkA": 0, "shrinkB": 0}
    for index in np.argsort(-np.asarray(y)):
        across, up = places[index]
        boxes = list(_candidate_boxes(across, up, 0.6 * len(names[index]) * LABEL_FONT_PT / 72))
        box = next((candidate for candidate in boxes if _is_free(candidate, occupied, inches)), boxes[0])
        occupied.append(box)
        exponent, level = np.array([box[0], (box[1] + box[3]) / 2]) / scale + origin
        point = (x[index], y[index])
        axes.annotate(
            names[index], point, (10**exponent, level), fontsize=LABEL_FONT_PT, va="center", arrowprops=line
        )


Box = tuple[float, float, float, float]  # left, below, right, above


def _candidate_boxes(x: float, y: float, width: float) -> Iterator[Box]:
    """Yield where a text of this width may stand beside a point, the nearest place first."""
    height = LABEL_FONT_PT / 72
    for far in np.arange(0.0, 1.5, 0.06):
        for up in (0, far, -far):
            for left in (x + 0.06 + far / 3, x - 0.06 - far / 3 - width, x - width / 2):
                yield left, y + up - height / 2, left + width, y + up + height / 2


def _is_free(box: Box, others: Sequence[Box], inches: tuple[float, float]) -> bool:
    """Return True where a box lies inside the axes and over none of the others."""
    left, below, right, above = box
    if left < 0 or below < 0 or right > inches[0] or above > inches[1]:
        return False
    return all(
        right <= other[0] or left >= other[2] or above <= other[1] or below >= other[3] for other in others
    )


def draw_curve_with_end_label(
    axes: Axes, x: pd.Series, y: pd.Series, look: MethodStyle, opacity: float
) -> None:
    """Draw one of several curves of a method, told apart by opacity and a label at its end."""
    axes.plot(x, y, color=look.colour, alpha=opacity)
    axes.annotate(look.label, (float(x.iloc[-1]), float(y.iloc[-1])), xytext=(2, 0),
                  textcoords="offset points", va="center", fontsize=6, color=look.colour)  # fmt: skip


def draw_published_points(axes: Axes, x: float, values: Sequence[float], look: MethodStyle) -> None:
    """Draw single published values, open."""
    axes.plot([x] * len(values), values, marker=look.marker, mec=look.colour, **OPEN_MARKS)


def draw_stacked_phase_bar(
    axes: Axes,
    x: float,
    height_by_phase: Mapping[str, float],
    width: float = 0.6,
    faint: bool = False,
    min_labelled_height: float = np.inf,
) -> float:
    """Draw a stacked bar of phases, from the bottom up, and return its height.

    Args:
        axes: to draw on.
        x: of its middle.
        height_by_phase: of its parts, from the bottom up.
        width: of the bar.
        faint: of published data.
        min_labelled_height: parts of at least this height show their number.
    """
    bottom = 0.0
    for phase, height in height_by_phase.items():
        colour, hatch = phase_colour_and_hatch(phase)
        edge: dict[str, Any] = {
            "edgecolor": "#7A7A7A",
            "linewidth": 0.4,
            "alpha": PUBLISHED_OPACITY if faint else 1.0,
        }
        axes.bar(x, height, width, bottom=bottom, color=colour, hatch=hatch, **edge)
        if height >= min_labelled_height:
            _write_inside(axes, x, bottom + height / 2, height, phase, faint)
        bottom += height
    return bottom


def phase_legend_handles(phases: Iterable[str], label_by_phase: Mapping[str, str] = {}) -> list[Patch]:
    """Return legend entries of phases, as in bars and lanes; labels of `label_by_phase` replace the usual."""
    edge: dict[str, Any] = {"edgecolor": "#7A7A7A", "lw": 0.4}
    return [
        Patch(
            facecolor=phase.colour,
            hatch=phase.hatch,
            label=label_by_phase.get(phase.name, phase.label),
            **edge,
        )
        for phase in map(phase_list.find_phase_or_default, phases)
    ]


# How bars of one quantity differ by where the number comes from. `None` takes the method's colour.
FILL_BY_ORIGIN: dict[str, dict[str, Any]] = {
    "ours": {"facecolor": None},
    "ours, the published protocol": {"facecolor": "none", "hatch": "////"},
    "published, 8 A100": {"facecolor": None, "alpha": 0.3},
    "published, corrected": {"facecolor": "none", "linestyle": (0, (3, 1.5))},
    "as published": {"facecolor": None, "alpha": 0.3},
    "without validation": {"facecolor": None},
}


def draw_bar_with_interval(
    axes: Axes, x: float, value: Estimate, look: MethodStyle, width: float, origin: str = "ours"
) -> None:
    """Draw one bar with its interval and its number."""
    axes.bar(x, value.value, width, edgecolor=look.colour, linewidth=0.8, **_bar_fill(origin, look.colour))
    draw_interval(axes, x, value)
    top = max(value.value, value.high or value.value)
    plain = {"facecolor": "white", "edgecolor": "none", "pad": 0.2}  # no line runs through it
    annotate_above(axes, x, top, format_number(value.value), fontsize=6, bbox=plain)  # narrower than the bar


def draw_interval(axes: Axes, x: float, value: Estimate) -> None:
    """Draw a value's interval, where it has one."""
    if value.low is not None and value.high is not None:
        error = [[max(0.0, value.value - value.low)], [max(0.0, value.high - value.value)]]
        axes.errorbar(x, value.value, error, fmt="none", ecolor="#444444", elinewidth=0.8, capsize=2)


def draw_dot_with_interval(
    axes: Axes, y: float, value: Estimate, marker: str, colour: str, shows_interval: bool = False
) -> None:
    """Draw one value at a height, with its interval along the x axis and its number beside it.

    Args:
        axes: to draw on.
        y: the height.
        value: the number and its interval.
        marker: of the number.
        colour: of all.
        shows_interval: the interval also has ends that stand out of a small marker, and is written.
    """
    low, high = (edge if edge is not None else value.value for edge in (value.low, value.high))
    ends = "|" if shows_interval and low < high else ""
    axes.plot(
        [low, high], [y, y], color=colour, linewidth=1.0, solid_capstyle="butt", zorder=2,
        marker=ends, markersize=6,
    )  # fmt: skip
    axes.plot(
        [value.value], [y], marker=marker, color=colour, markersize=2.5 if shows_interval else 4, zorder=3
    )
    text = format_with_interval(value) if shows_interval else format_number(value.value)
    annotate_above(axes, high, y, text, xytext=(4, 0), ha="left", va="center", color=colour)


def dot_legend_handles(look_by_label: Mapping[str, tuple[str, str]]) -> list[Line2D]:
    """Return legend entries of `draw_dot_with_interval`, of markers and colours by label."""
    return [
        Line2D([], [], linestyle="", marker=marker, markersize=3.5, color=colour, label=label)
        for label, (marker, colour) in look_by_label.items()
    ]


def set_log_factor_x_axis(axes: Axes) -> None:
    """Set a logarithmic x axis of factors, in plain numbers, with room for text at the right end."""
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.1, high * 1.6)
    ticks = [tick for tick in FACTOR_TICKS if low / 1.1 <= tick <= high * 1.6]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value, CHOSEN_DIGITS)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, axis="x")


def annotate_above(axes: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """Write small text just above a point; `options` override its placement and style."""
    place = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": 6.5}
    merged: dict[str, Any] = place | options
    axes.annotate(text, (x, y), **merged)


def origin_legend_handles(origins: Iterable[str]) -> list[Patch]:
    """Return legend entries of `draw_bar_with_interval`, in grey because every method has these origins."""
    grey = "#555555"
    return [
        Patch(edgecolor=grey, linewidth=0.8, label=origin, **_bar_fill(origin, grey)) for origin in origins
    ]


def draw_rank_lane(axes: Axes, y: float, spans: pd.DataFrame, axis_ms: float, height: float = 0.7) -> None:
    """Draw one rank's spans (columns start_ms, took_ms, phase) as a horizontal lane at `y`."""
    for phase, of_phase in spans.groupby("phase", sort=False):
        colour, hatch = phase_colour_and_hatch(str(phase))
        bars = list(zip(of_phase["start_ms"], of_phase["took_ms"], strict=True))
        axes.broken_barh(
            bars, (y - height / 2, height), facecolor=colour, hatch=hatch, edgecolor="#7A7A7A", lw=0.3
        )
        for start, took in bars:
            if took >= MIN_TEXT_SHARE * axis_ms:
                _write_inside(axes, start + took / 2, y, took, str(phase))


def set_log_y_ticks(axes: Axes, ticks: Sequence[float]) -> None:
    """Set a logarithmic y axis with plain numbers at these ticks."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_number(value, CHOSEN_DIGITS)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _bar_fill(origin: str, colour: str) -> dict[str, Any]:
    """Return the filling of a bar of this origin, in the method's colour."""
    fill = FILL_BY_ORIGIN[origin]
    return fill | {"facecolor": fill["facecolor"] or colour}


def _write_inside(axes: Axes, x: float, y: float, value: float, phase: str, faint: bool = False) -> None:
    """Write a phase's number in the middle of its bar, on a plain patch where a hatch would cross it."""
    colour, hatch = phase_colour_and_hatch(phase)
    text = axes.text(
        x,
        y,
        format_number(value),
        ha="center",
        va="center",
        fontsize=6,
        color=readable_text_colour(colour, faint),
    )
    if hatch:
        text.set_bbox({"facecolor": colour, "edgecolor": "none", "pad": 0.8})


def phase_colour_and_hatch(phase: str) -> tuple[str, str]:
    """Return colour and hatch of a phase's bars."""
    listed_phase = phase_list.find_phase_or_default(phase)
    return listed_phase.colour, listed_phase.hatch


def readable_text_colour(colour: str, faint: bool = False) -> str:
    """Return black or white, whichever is easier to read on `colour`, by its luma (ITU-R BT.601)."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#111111" if faint or 0.299 * red + 0.587 * green + 0.114 * blue > 130 else "white"
