"""Pictures of benchmarks: ratios of times, a line of dots for each row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from analysis import plots
from analysis.pictures import marks
from analysis.pictures.captions import join_with_and
from analysis.pictures.numbers import CHOSEN_DIGITS, format_number
from experiments.bench._compared_rows import (
    DDP,
    FLOORS,
    NETWORK_TITLES,
    PAGE_SIZES,
    SELECT_ROWS,
    STANDARD_SELECTION_CASE,
    STEP_ROWS,
    STYLES,
)
from experiments.bench._runner import Record
from experiments.bench._targets import to_estimate

BLUES = ("#A6CEE3", "#6BAED6", "#3787C0", "#1C5FA0", "#0B3C7C", "#041E42")  # smallest to largest n
ORANGES = ("#FDC086", "#F58C2A", "#C75A08", "#6E2C00")  # sparsest to densest
SELECT_ROW_INCHES = 0.4
SELECT_MARGIN_INCHES = 1.25  # of titles, legends and axis
STEP_ROW_INCHES = 0.19
STEP_MARGIN_INCHES = 0.75
FUSED_INCHES = 2.8
GRADIENT_MARKERS = {"normal": "o", "vgg16": "D", "decoder": "s"}
USED_ROW_SHARE = 0.8  # of a row's height, for its dots below each other


def floor_row_name(rows: Sequence[Record]) -> str:
    """Return the name of the fastest possible row: the in-place add; in older records, the copy."""
    return "add" if any(row.get("over_add") for row in rows) else "copy"


def draw_selection_ratios(rows: Sequence[Record]) -> plots.Figure:
    """Draw ratios to the floor: left for each n, right for each density."""
    timed_rows = [
        row for row in rows
        if "median_ms" in row and row["distribution"] == STANDARD_SELECTION_CASE.distribution
    ]  # fmt: skip
    floor = floor_row_name(timed_rows)
    by_n = [row for row in timed_rows if row["density"] == STANDARD_SELECTION_CASE.density] or timed_rows
    n = choose_standard_n_or_most_densities(timed_rows)
    by_density = [row for row in timed_rows if row["n"] == n]
    names = row_names_quickest_first(timed_rows, by_n, n, floor)
    densities = sorted({row["density"] for row in by_n}) or [STANDARD_SELECTION_CASE.density]
    density_words = join_with_and(map(format_number, densities))
    panel_by_n = floor_ratio_panel(
        by_n, names, "n", floor, BLUES, labelled_value=n, title=f"by elements n (density {density_words})"
    )
    panel_by_density = floor_ratio_panel(
        by_density, names, "density", floor, ORANGES, title=f"by density k/n (n = {format_number(n)})"
    )
    height = SELECT_MARGIN_INCHES + SELECT_ROW_INCHES * max(len(names), 3)
    return plots.compose_figure([panel_by_n, panel_by_density], height, sharey=True)


def row_names_quickest_first(
    timed_rows: Sequence[Record], rows_by_n: Sequence[Record], n: int, floor: str
) -> list[str]:
    """Return the names of rows with a ratio, without the floor, the quickest at this n first."""
    over = f"over_{floor}"
    medians = {row["row"]: row[over]["median"] for row in rows_by_n if row["n"] == n and row.get(over)}
    names = {row["row"] for row in timed_rows if row.get(over)} - {floor}
    order = [*SELECT_ROWS]
    return sorted(names, key=lambda name: (medians.get(name, float("inf")), order.index(name)))


def choose_standard_n_or_most_densities(rows: Sequence[Record]) -> int:
    """Return the n at which densities are compared: 25.6 million, else the one with the most densities."""
    densities_by_n = defaultdict[int, set[float]](set)
    for row in rows:
        densities_by_n[row["n"]].add(row["density"])
    if STANDARD_SELECTION_CASE.n in densities_by_n or not densities_by_n:
        return STANDARD_SELECTION_CASE.n
    return max(densities_by_n, key=lambda n: (len(densities_by_n[n]), n))


@plots.panel_maker
def floor_ratio_panel(
    axes: plots.Axes,
    /,
    rows: Sequence[Record],
    names: Sequence[str],
    field: str,
    floor: str,
    shades: Sequence[str],
    labelled_value: int | None = None,
    **axes_settings: Any,
) -> None:
    """Draw for each name a dot and its interval for each value of a field, below each other.

    Args:
        labelled_value: the value whose ratio is written beside its dot.
    """
    values = sorted({row[field] for row in rows})
    step = USED_ROW_SHARE / max(len(values), 2)
    last_shade = len(shades) - 1
    colours = {
        value: shades[round(index * last_shade / max(len(values) - 1, 1))]
        for index, value in enumerate(values)
    }
    ratios = {(row["row"], row[field]): row.get(f"over_{floor}") for row in rows}
    right_ends = dict.fromkeys(names, 0.0)
    for (name, value), ratio in ratios.items():
        if name not in names or not ratio:
            continue
        y = names.index(name) + (values.index(value) - (len(values) - 1) / 2) * step
        line: dict[str, Any] = {"color": colours[value], "linewidth": 1, "solid_capstyle": "butt"}
        axes.plot([ratio["low"], ratio["high"]], [y, y], zorder=2, **line)
        axes.plot([ratio["median"]], [y], marker="o", color=colours[value], markersize=3.2, zorder=3)
        right_ends[name] = max(right_ends[name], ratio["high"])
    for index, name in enumerate(names):
        axes.axhline(index - 0.5, color="#E6E6E6", linewidth=0.8, zorder=0)
        ratio = ratios.get((name, labelled_value))
        if ratio:
            text = format_number(ratio["median"])
            place: dict[str, Any] = {"xytext": (4, 0), "ha": "left", "va": "center"}
            marks.annotate_above(axes, right_ends[name], index, text, color=colours[labelled_value], **place)
    axes.axvline(1, color=STYLES[floor].colour, linestyle="--", linewidth=0.8, zorder=1)
    plots.set_y_row_labels(axes, [STYLES[name].label for name in names])
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda tick, _: format_number(tick, CHOSEN_DIGITS))
    handles = marks.dot_legend_handles({format_number(v): ("o", colour) for v, colour in colours.items()})
    axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.04), ncols=3, handletextpad=0.1)
    plots.finish_axes(axes, grid="x", xlabel=f"Time / time of the {FLOORS[floor]}", **axes_settings)


def draw_fused_ratios(rows: Sequence[Record]) -> plots.Figure:
    """Draw torch.topk's time over the fused step's against n: a panel for each size of pages."""
    timed = [row for row in rows if row.get("ratio")]
    ylim = (0, 1.05 * max((row["ratio"]["high"] for row in timed), default=1.0))
    panels = [
        fused_ratio_panel([row for row in timed if row["pages"] == pages], title=f"{pages} pages", ylim=ylim)
        for pages in PAGE_SIZES[:2]
    ]
    return plots.compose_figure(panels, FUSED_INCHES, sharex=True, sharey=True, ylabel="torch.topk / fused")


@plots.panel_maker
def fused_ratio_panel(axes: plots.Axes, /, rows: Sequence[Record], **axes_settings: Any) -> None:
    """Draw a line for each density of normal numbers, and a dot for each other gradient and density."""
    densities = sorted({row["density"] for row in rows})
    rows = sorted(
        rows, key=lambda row: (row["gradient"] != "normal", row["gradient"], row["density"], row["n"])
    )
    for (gradient, density), series in groupby(rows, lambda row: (row["gradient"], row["density"])):
        sizes = []
        ratios = []
        for row in series:
            sizes.append(row["n"])
            ratios.append(row["ratio"])
        medians = [ratio["median"] for ratio in ratios]
        below = [ratio["median"] - ratio["low"] for ratio in ratios]
        above = [ratio["high"] - ratio["median"] for ratio in ratios]
        axes.errorbar(
            sizes, medians, [below, above], capsize=2,
            color=ORANGES[densities.index(density) % len(ORANGES)],
            linestyle="-" if gradient == "normal" else "none",
            marker=GRADIENT_MARKERS.get(gradient, "^"), markersize=3.2,
            label=f"{gradient}, {format_number(density)}",
        )  # fmt: skip
    axes.set_xscale("log")
    plots.finish_axes(axes, grid="both", xlabel="Elements n", **axes_settings)


def draw_step_ratios(rows: Sequence[Record]) -> plots.Figure:
    """Draw ratios to plain DDP, a panel for each network, of the fewest workers that were timed."""
    timed_rows = [row for row in rows if row["part"] == "time" and row["row"] != DDP]
    fewest_workers = min((row["workers"] for row in timed_rows), default=1)
    timed_rows = [row for row in timed_rows if row["workers"] == fewest_workers]
    timed_rows.sort(key=lambda row: network_sort_key(row["network"]))
    names = [name for name in STEP_ROWS if any(row["row"] == name for row in timed_rows)]
    panels = [
        cpu_over_ddp_panel([*network_rows], names, title=title)
        for title, network_rows in groupby(timed_rows, network_title)
    ]
    if not panels:
        panels = [cpu_over_ddp_panel([], [*STEP_ROWS], title="no step was timed")]
    height = STEP_MARGIN_INCHES + STEP_ROW_INCHES * max(len(names), 3)
    return plots.compose_figure(panels, height, sharey=True)


@plots.panel_maker
def cpu_over_ddp_panel(
    axes: plots.Axes, /, rows: Sequence[Record], names: Sequence[str], **axes_settings: Any
) -> None:
    """Draw a dot with its interval and its number for each row, and a line at 1."""
    for row in rows:
        look = STYLES[row["row"]]
        ratio = to_estimate(row["cpu_over_ddp"])
        marks.draw_dot_with_interval(axes, names.index(row["row"]), ratio, look.marker, look.colour)
    axes.axvline(1, color=STYLES[DDP].colour, linestyle="--", linewidth=0.8, zorder=1)
    plots.set_y_row_labels(axes, [STYLES[name].label for name in names])
    marks.set_log_factor_x_axis(axes)
    plots.finish_axes(axes, xlabel="CPU time / plain DDP", **axes_settings)


def network_sort_key(network: str) -> tuple[int, str]:
    """Return a key that sorts networks, unknown ones last."""
    names = [*NETWORK_TITLES]
    return names.index(network) if network in names else len(names), network


def network_title(row: Record) -> str:
    """Return the network of a row, in words."""
    title = NETWORK_TITLES.get(row["network"], str(row["network"]))
    return f"{row['layers']} {title}" if row.get("layers") else title
