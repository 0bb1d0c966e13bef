"""The benchmark of selections as a picture and a page, drawn from its records, without torch.

A file for each device, a line for each row and invocation. The picture is no item of experiments/figures,
which are drawn from runs; `python -m experiments figures` draws both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import yaml
from msgspec import Meta, Struct, ValidationError, convert

from analysis import plots
from analysis.pictures import marks
from analysis.pictures.captions import join_words
from analysis.pictures.numbers import format_number, format_with_interval
from analysis.pictures.style import MethodStyle
from analysis.records.schema import Finite, WholeNumber
from analysis.stats import Estimate
from analysis.tables import Table
from experiments.bench._pages import Page, Say, dated, distinct, of_schema
from experiments.bench._runner import Record, rendered

DENSITY, NORMAL, LARGE_N = 0.001, "normal", 25_600_000  # the standard case
_file = yaml.safe_load(Path(__file__).with_name("select_rows.yaml").read_text())
ABOUT, TERMS = _file["rows"], _file["terms"]
LOOKS = {name: MethodStyle(*row["look"]) for name, row in ABOUT.items()}
FLOORS = {"add": "in-place add", "copy": "copy"}
BLUES = ("#A6CEE3", "#6BAED6", "#3787C0", "#1C5FA0", "#0B3C7C", "#041E42")  # smallest to largest n
ORANGES = ("#FDC086", "#F58C2A", "#C75A08", "#6E2C00")  # sparsest to densest
ROW_HEIGHT, AROUND_ROWS = 0.4, 1.25  # inches: of a selection; of titles, keys and axis
SPREAD = 0.8  # of a row's height, for its values below each other
UNITS = {"time of a step": "ms", "CPU time": "ms", "fallbacks": "%", "speed": "GB/s"}


class RatioSpread(Struct, frozen=True):
    median: Finite
    low: Finite
    high: Finite
    n: WholeNumber


class BenchStart(Struct, frozen=True):
    """A line of the benchmark of selections: one invocation."""

    at: datetime
    flush_bytes: WholeNumber


class BenchRow(Struct, frozen=True):
    """A line of it: what stands in each row of a case."""

    at: datetime
    device: str
    name: str
    torch: str
    n: Annotated[int, Meta(ge=1, le=2**53)]
    density: Annotated[float, Meta(gt=0, le=1)]
    distribution: str
    k: WholeNumber
    source: str
    row: str
    what: str
    commit: str | None = None
    dirty: str | None = None


class BenchUnmade(BenchRow, frozen=True, kw_only=True):
    """One that was not run."""

    why: str


class BenchTimed(BenchRow, frozen=True, kw_only=True):
    """One that was."""

    repeats: WholeNumber
    median_ms: Annotated[float, Meta(gt=0, lt=1e12)]
    low_ms: Finite
    high_ms: Finite
    spread: str
    host_syncs: Finite
    bytes_words: str
    kernel: str | None = None
    cpu_ms: RatioSpread | None = None
    over_add: RatioSpread | None = None
    over_copy: RatioSpread | None = None
    eager_over: RatioSpread | None = None
    eager_hugepages_over: RatioSpread | None = None
    bytes_per_element: Finite | None = None
    fallback_rate: Finite | None = None
    selected_over_k: Finite | None = None


def floor_of(rows: Sequence[Record]) -> str:
    """The row that no step can be faster than: the in-place add; in older records, the copy."""
    return "add" if any(row.get("over_add") for row in rows) else "copy"


def read(path: Path, say: Say = print) -> tuple[list[Record], list[Record]]:
    """The newest row of each case, and the invocations; a row with times replaces one without. `of_schema`
    refuses and leaves out.
    """
    rows, starts = of_schema(path, _fits, say)
    newest: dict[tuple[Any, ...], Record] = {}
    for row in rows:
        case = (row["n"], row["density"], row["distribution"], row["row"])
        if "median_ms" in row or "median_ms" not in newest.get(case, {}):
            newest[case] = row
    return list(newest.values()), starts


def _fits(record: Record) -> bool:
    schema: type[Any] = BenchTimed if "median_ms" in record else BenchUnmade
    try:
        convert(record, BenchStart if record.get("kind") == "invocation" else schema)
    except ValidationError:
        return False
    return record.get("kind") == "invocation" or (record.get("kind") == "row" and record["row"] in LOOKS)


def draw(rows: Sequence[Record]) -> plots.Figure:
    """Ratios to the floor, a row for each selection: left for each n, right for each density."""
    done = [row for row in rows if "median_ms" in row and row["distribution"] == NORMAL]
    by_n = [row for row in done if row["density"] == DENSITY] or done
    n, floor = dense_n(done), floor_of(done)
    by_density = [row for row in done if row["n"] == n]
    names = in_order(done, by_n, n, floor)
    densities = join_words(
        [format_number(each) for each in sorted({row["density"] for row in by_n}) or [DENSITY]]
    )
    about = {
        "n": (by_n, f"by elements n (density {densities})", BLUES),
        "density": (by_density, f"by density k/n (n = {format_number(n)})", ORANGES),
    }
    panels = [
        ratios(own, names, x, floor, shades, title=title, numbered=n if x == "n" else None)
        for x, (own, title, shades) in about.items()
    ]
    return plots.compose_figure(panels, AROUND_ROWS + ROW_HEIGHT * max(len(names), 3), sharey=True)


def in_order(done: Sequence[Record], by_n: Sequence[Record], n: int, floor: str) -> list[str]:
    """The rows that have a ratio, the quickest at the largest common n first, without the floor."""
    over = f"over_{floor}"
    medians = {row["row"]: row[over]["median"] for row in by_n if row["n"] == n and row.get(over)}
    known = {row["row"] for row in done if row.get(over)} - {floor}
    last = [*LOOKS]
    return sorted(known, key=lambda name: (medians.get(name, float("inf")), last.index(name)))


@plots.panel_maker
def ratios(
    axes: plots.Axes,
    /,
    rows: Sequence[Record],
    names: Sequence[str],
    x: str,
    floor: str,
    shades: Sequence[str],
    numbered: int | None = None,
    **words: Any,
) -> None:
    """For each row of the benchmark a dot and its interval for each value of `x`, below each other.

    Args:
        numbered: for which value of `x` the ratio is written beside the dot.
    """
    found = sorted({row[x] for row in rows})
    shown = {
        each: shades[round(i * (len(shades) - 1) / max(len(found) - 1, 1))] for i, each in enumerate(found)
    }
    over = {(row["row"], row[x]): ratio for row in rows if (ratio := row.get(f"over_{floor}"))}
    step = SPREAD / max(len(found), 2)
    for (name, at), ratio in over.items():
        if name not in names:
            continue
        colour = shown[at]
        y = names.index(name) + (found.index(at) - (len(found) - 1) / 2) * step
        axes.plot(
            [ratio["low"], ratio["high"]], [y, y], color=colour, linewidth=1, solid_capstyle="butt", zorder=2
        )
        axes.plot([ratio["median"]], [y], marker="o", color=colour, markersize=3.2, zorder=3)
    for i, name in enumerate(names):
        axes.axhline(i - 0.5, color="#E6E6E6", linewidth=0.8, zorder=0)
        if told := over.get((name, numbered)):
            right = max(ratio["high"] for (of, _), ratio in over.items() if of == name)
            text, colour = format_number(float(f"{told['median']:.3g}")), shown[numbered]
            marks.annotate_above(axes, right, i, text, xytext=(4, 0), ha="left", va="center", color=colour)
    axes.axvline(1, color=LOOKS[floor].colour, linestyle="--", linewidth=0.8, zorder=1)
    plots.set_row_labels(axes, [LOOKS[name].label for name in names])
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda at, _: format_number(at))
    keys = marks.dot_legend_handles({format_number(each): ("o", colour) for each, colour in shown.items()})
    axes.legend(handles=keys, loc="lower center", bbox_to_anchor=(0.5, 1.04), ncols=3, handletextpad=0.1)
    plots.finish_axes(axes, grid="x", xlabel=f"Time / time of the {FLOORS[floor]}", **words)


def dense_n(rows: Sequence[Record]) -> int:
    """The size that densities are compared at: 25.6 million, else the one with the most densities."""
    found = Counter(n for n, _ in {(row["n"], row["density"]) for row in rows})
    return LARGE_N if LARGE_N in found or not found else max(found, key=lambda n: (found[n], n))


def table(rows: Iterable[Record]) -> str:
    """The rows of one case as Markdown; below it why some were not run."""
    measured, missing = [], dict[str, list[str]]()  # reason -> rows
    for row in rows:
        if "median_ms" in row:
            measured.append(cells(row))
        else:
            missing.setdefault(row["why"], []).append(row["row"])
    note = "; ".join(f"{join_words(names)} not run: {why}" for why, names in missing.items())
    return Table("", pd.DataFrame(measured), UNITS, note).markdown() if measured else f"{note}\n"


def cells(row: Record) -> dict[str, Estimate | float | str | None]:
    per_element, fallback = row["bytes_per_element"], row["fallback_rate"]
    kernel = f" ({row['kernel']})" if row.get("kernel") else ""
    return {
        "row": row["row"] + kernel,
        "time of a step": Estimate(row["median_ms"], row["low_ms"], row["high_ms"], row["repeats"]),
        "CPU time": spread(row.get("cpu_ms")),
        "repetitions": row["repeats"],
        "/ add": spread(row.get("over_add")),
        "/ copy": spread(row["over_copy"]),
        "eager / it": spread(row["eager_over"]),
        "eager in huge pages / it": spread(row.get("eager_hugepages_over")),
        "bytes per element": per_element,
        "speed": None if per_element is None else 1e-6 * per_element * row["n"] / row["median_ms"],
        "fallbacks": None if fallback is None else 100 * fallback,
        "host syncs": row["host_syncs"],
        "sent / k": row["selected_over_k"],
    }


def spread(ratio: Record | None) -> Estimate | None:
    return Estimate(ratio["median"], ratio["low"], ratio["high"], ratio["n"]) if ratio else None


def times(ratio: Record | None) -> str:
    return format_with_interval(spread(ratio))


def page(rows: Sequence[Record], starts: Sequence[Record], name: str) -> str:
    """Picture, how it was measured, a table for each case, what the rows are and what their bytes are."""
    told = dated(rows)
    as_listed = sorted(told, key=lambda row: list(LOOKS).index(row["row"]))
    cases = [[*own] for _, own in groupby(sorted(as_listed, key=place), place)]
    standard = {row["row"]: row for row in told if place(row) == (False, NORMAL, LARGE_N, DENSITY)}
    floor, at = floor_of(rows), {row["at"] for row in rows}
    return rendered(
        "select.md.jinja",
        {"number": format_number, "times": times, "table": table, "listed": distinct},
        name=name, rows=told, floor=floor, cases=cases,
        starts=[{"flushed": f"{each['flush_bytes'] >> 20} MiB"} for each in starts if each["at"] in at],
        gains=[row for each in ("fused", "numpy") if (row := standard.get(each, {})).get("eager_over")],
        by_row=[own for each in LOOKS if (own := [row for row in told if row["row"] == each])],
    )  # fmt: skip


def place(row: Record) -> tuple[bool, str, int, float]:
    """Where the case of a row stands on the page."""
    return row["distribution"] != NORMAL, row["distribution"], row["n"], row["density"]


PAGE = Page("select", read, draw, page)
