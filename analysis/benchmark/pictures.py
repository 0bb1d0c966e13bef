"""Pictures of a link: loss over time with levels, and performance profiles."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from analysis import plots
from analysis.benchmark.cells import BASELINE, Cell
from analysis.benchmark.summaries import MAX_FACTOR, PROFILE_SHARES, curve_by_seconds, time_factors_by_entry
from analysis.pictures import style
from analysis.pictures.numbers import format_number

OTHER_COLOURS = (
    "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#332288", "#44AA99", "#999933",
)  # fmt: skip
OTHER_MARKERS = "^vDhX*P<>dH8"
LINE_STYLES = ("-", "--")  # of methods with a style of their own, and of others
SECOND_TICKS = tuple(digit * 10**power for power in range(-3, 6) for digit in (1, 2, 5))
Styles = Mapping[str, style.MethodStyle]


def styles_by_entry(cells: Sequence[Cell]) -> Styles:
    """Return each entry's style: that of its name in all figures, else one by its place among the others."""
    places = itertools.count()
    styles = dict[str, style.MethodStyle]()
    for name in dict.fromkeys(cell.entry for cell in cells):
        if name in style.METHOD_STYLES:
            styles[name] = style.method_style(name)._replace(label=name)
        else:
            place = next(places)
            colour = OTHER_COLOURS[place % len(OTHER_COLOURS)]
            styles[name] = style.MethodStyle(name, colour, OTHER_MARKERS[place % len(OTHER_MARKERS)], "")
    return styles


def draw_loss_over_time(cells: Sequence[Cell], tasks: Sequence[str], workers: Sequence[int]) -> plots.Figure:
    """Return a picture of a link: a panel for each task and number of workers, all entries in it."""
    styles = styles_by_entry(cells)
    panels = [
        _loss_panel(
            [cell for cell in cells if (cell.task, cell.workers) == (task, size)],
            styles,
            title=f"{task}, {size} workers",
        )
        for size in workers
        for task in tasks
    ]
    height = 2.6 * len(workers) + 1.0
    return plots.compose_figure(
        panels, height, num_rows=len(workers), ylabel="Best validation loss so far (nats)"
    )


@plots.panel_maker
def _loss_panel(axes: plots.Axes, /, cells: Sequence[Cell], styles: Styles, title: str) -> None:
    axes.set(title=title, xscale="log", xlabel="Seconds")
    top = 0.0
    for cell in cells:
        seconds, losses = curve_by_seconds(cell)
        look = styles[cell.entry]
        is_base = cell.entry == BASELINE
        axes.plot(
            seconds,
            losses,
            color=look.colour,
            marker=look.marker,
            markevery=(len(losses) // 3, len(losses) // 3 + 1),
            markersize=3,
            linewidth=2.2 if is_base else 0.9,
            linestyle=LINE_STYLES[look.marker in OTHER_MARKERS],
            zorder=3 if is_base else 2,
            label=look.label,
        )
        if is_base:
            top = float(losses[0])
            for level in cell.levels:
                axes.axhline(level.loss, **plots.REFERENCE_LINE)
                if level.share != 0.9:  # whose name would stand in that of 100 %
                    name = f"{100 * level.share:.0f} %"
                    place = (1.01, level.loss)
                    axes.annotate(name, place, xycoords=("axes fraction", "data"), fontsize=5, va="center")
    if top:
        axes.set_ylim(top=top)
    low, high = axes.get_xlim()
    ticks = [tick for tick in SECOND_TICKS if low <= tick <= high]
    axes.set_xticks(ticks, labels=[format_number(tick) for tick in ticks])
    axes.set_xticks([], minor=True)


def draw_performance_profiles(cells: Sequence[Cell]) -> plots.Figure:
    """Return a picture of a link: in which share of combinations an entry is how far behind the quickest."""
    styles = styles_by_entry(cells)
    panels = [
        _profile_panel(time_factors_by_entry(cells, share), styles, title=f"{100 * share:.0f} % level")
        for share in PROFILE_SHARES
    ]
    return plots.compose_figure(panels, 3.4, ylabel="Share of combinations")


@plots.panel_maker
def _profile_panel(
    axes: plots.Axes, /, factors: Mapping[str, Sequence[float]], styles: Styles, title: str
) -> None:
    for place, (entry, own) in enumerate(factors.items()):
        ends = [1.0, *sorted(factor for factor in own if factor <= MAX_FACTOR), MAX_FACTOR]
        shares = [
            np.mean(np.array(own) <= end) + 0.004 * place for end in ends
        ]  # apart, where they are equal
        look = styles[entry]
        axes.plot(
            ends,
            shares,
            drawstyle="steps-post",
            color=look.colour,
            marker=look.marker,
            markersize=3,
            linewidth=2.2 if entry == BASELINE else 0.9,
            linestyle=LINE_STYLES[look.marker in OTHER_MARKERS],
            label=look.label,
        )
    axes.set(title=title, xlabel="Time over that of the quickest", xlim=(1, MAX_FACTOR), ylim=(-0.02, 1.07))
