"""The benchmark of selections as a picture and a page, drawn from its records, without torch.

A file for each device, a line for each row and invocation. The picture is no item of experiments/figures,
which are drawn from runs; `python -m experiments figures` draws both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import yaml
from msgspec import Meta, Struct, ValidationError, convert

from analysis import plots
from analysis.pictures import style
from analysis.pictures.captions import listed
from analysis.pictures.numbers import number, with_interval
from analysis.pictures.style import Look
from analysis.records.files import Damaged, write_atomic
from analysis.records.log import read_lines
from analysis.records.schema import Finite, Whole
from analysis.stats import Value
from analysis.tables import Table
from experiments.bench._runner import SCHEMA, Record, newest_stores, rendered
from experiments.config.folders import Folders

DENSITY, NORMAL, LARGE_N = 0.001, "normal", 25_600_000  # the standard case
_file = yaml.safe_load(Path(__file__).with_name("select_rows.yaml").read_text())
ABOUT, TERMS = _file["rows"], _file["terms"]
LOOKS = {name: Look(*row["look"]) for name, row in ABOUT.items()}
FLOORS = {"add": "in-place add", "copy": "copy"}
UNITS = {"time of a step": "ms", "CPU time": "ms", "fallbacks": "%", "speed": "GB/s"}


class RatioSpread(Struct, frozen=True):
    median: Finite
    low: Finite
    high: Finite
    n: Whole


class BenchStart(Struct, frozen=True):
    """A line of the benchmark of selections: one invocation."""

    at: datetime
    flush_bytes: Whole


class BenchRow(Struct, frozen=True):
    """A line of it: what stands in each row of a case."""

    at: datetime
    device: str
    name: str
    torch: str
    n: Annotated[int, Meta(ge=1, le=2**53)]
    density: Annotated[float, Meta(gt=0, le=1)]
    distribution: str
    k: Whole
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

    repeats: Whole
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


def read(path: Path, say: Callable[[str], None] = print) -> tuple[list[Record], list[Record]]:
    """The newest row of each case, and the invocations; a row with times replaces one without. Says how many
    lines are left out because they are no such records.

    Raises:
        Damaged: it is no file of records.
    """
    lines, broken = read_lines(path)
    ours = [record for record in lines if record.get("schema") == SCHEMA]
    records = [record for record in ours if _fits(record)]
    if damaged := broken + len(ours) - len(records):
        say(f"left out {damaged} lines of {path}: they are not as they were written")
    newest: dict[tuple[Any, ...], Record] = {}
    for row in records:
        if row["kind"] == "row":
            case = (row["n"], row["density"], row["distribution"], row["row"])
            if "median_ms" in row or "median_ms" not in newest.get(case, {}):
                newest[case] = row
    return list(newest.values()), [record for record in records if record["kind"] == "invocation"]


def _fits(record: Record) -> bool:
    schema: type[Any] = BenchTimed if "median_ms" in record else BenchUnmade
    try:
        convert(record, BenchStart if record.get("kind") == "invocation" else schema)
    except ValidationError:
        return False
    return record.get("kind") == "invocation" or (record.get("kind") == "row" and record["row"] in LOOKS)


def redraw(folders: Folders, say: Callable[[str], None] = print) -> list[Path]:
    """Every device's figure, from this checkout's records where there are any, else from the shipped ones;
    says what had to be left out."""
    drawn = []
    for store in newest_stores("select", folders):
        try:
            drawn.append(draw_one(store, folders.figures, say))
        except Damaged as damage:
            say(f"left out: {damage}")
    return drawn


def draw_one(store: Path, folder: Path, say: Callable[[str], None] = print) -> Path:
    """One device's picture (returned, PNG and PDF) and page; Damaged where it has no such records."""
    rows, starts = read(store, say)
    if not rows:
        raise Damaged(store, "has no row of a case")
    folder.mkdir(parents=True, exist_ok=True)
    picture = style.save(draw(rows), folder, store.stem)
    write_atomic(folder / f"{store.stem}.md", page(rows, starts, store.stem))
    return picture


def draw(rows: Sequence[Record]) -> plots.Figure:
    """Left time against n, right the ratio to the floor against density."""
    done = [row for row in rows if "median_ms" in row and row["distribution"] == NORMAL]
    by_n = [row for row in done if row["density"] == DENSITY] or done
    n, floor = dense_n(done), floor_of(done)
    densities = sorted({row["density"] for row in by_n}) or [DENSITY]
    by_density = [row for row in done if row["n"] == n and row["row"] != floor]
    times = lines(
        by_n, "n", lambda row: {limit: row[f"{limit}_ms"] for limit in ("median", "low", "high")},
        xlabel=f"elements n (density {listed(map(number, densities))}, normal)", ylabel="Time of a step (ms)",
    )  # fmt: skip
    ratios = lines(
        by_density, "density", lambda row: row.get(f"over_{floor}"), level=LOOKS[floor].colour,
        xlabel=f"density k/n (n = {number(n)}, normal)", ylabel=f"Time / time of the {FLOORS[floor]}",
    )  # fmt: skip
    return plots.picture([times, ratios], 3.6, ncols=3)


@plots.kind
def lines(
    axes: plots.Axes,
    /,
    rows: Sequence[Record],
    x: str,
    values: Callable[[Record], Record | None],
    level: str = "",
    **words: Any,
) -> None:
    """A line with bars for each row of the benchmark.

    Args:
        level: the colour of a line across at 1, if any.
    """
    for name, look in LOOKS.items():
        found = sorted(
            (row[x], value["median"], value["median"] - value["low"], value["high"] - value["median"])
            for row in rows if row["row"] == name and (value := values(row))
        )  # fmt: skip
        if not found:
            continue
        at, middle, below, above = map(list, zip(*found, strict=True))
        line: dict[str, Any] = {"linestyle": "--", "linewidth": 1} if name in FLOORS else {"linewidth": 1.3}
        axes.errorbar(
            at, middle, [below, above], color=look.colour, marker=look.marker, elinewidth=0.8, capsize=2,
            label=look.label, zorder=3, **{"linestyle": "-"} | line,
        )  # fmt: skip
    if level:
        axes.axhline(1, color=level, linestyle="--", linewidth=1)
    plots.finish(axes, grid="y", xscale="log", yscale="log", **words)
    axes.tick_params(axis="x", which="minor", labelbottom=False)


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
    note = "; ".join(f"{listed(names)} not run: {why}" for why, names in missing.items())
    return Table("", pd.DataFrame(measured), UNITS, note).markdown() if measured else f"{note}\n"


def cells(row: Record) -> dict[str, Value | float | str | None]:
    per_element, fallback = row["bytes_per_element"], row["fallback_rate"]
    kernel = f" ({row['kernel']})" if row.get("kernel") else ""
    return {
        "row": row["row"] + kernel,
        "time of a step": Value(row["median_ms"], row["low_ms"], row["high_ms"], row["repeats"]),
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


def spread(ratio: Record | None) -> Value | None:
    return Value(ratio["median"], ratio["low"], ratio["high"], ratio["n"]) if ratio else None


def times(ratio: Record | None) -> str:
    return with_interval(spread(ratio))


def page(rows: Sequence[Record], starts: Sequence[Record], name: str) -> str:
    """Picture, how it was measured, a table for each case, what the rows are and what their bytes are."""
    commits = [(row["commit"] or "unknown")[:7] + (" with changes" if row["dirty"] else "") for row in rows]
    told = [
        row | {"day": row["at"][:10], "commit": commit} for row, commit in zip(rows, commits, strict=True)
    ]
    in_order = sorted(told, key=lambda row: list(LOOKS).index(row["row"]))
    cases = [[*own] for _, own in groupby(sorted(in_order, key=place), place)]
    standard = {row["row"]: row for row in told if place(row) == (False, NORMAL, LARGE_N, DENSITY)}
    floor, at = floor_of(rows), {row["at"] for row in rows}
    return rendered(
        "select.md.jinja",
        {"number": number, "times": times, "table": table, "listed": distinct},
        name=name, rows=told, floor=floor, cases=cases,
        starts=[{"flushed": f"{each['flush_bytes'] >> 20} MiB"} for each in starts if each["at"] in at],
        gains=[row for each in ("fused", "numpy") if (row := standard.get(each, {})).get("eager_over")],
        by_row=[own for each in LOOKS if (own := [row for row in told if row["row"] == each])],
    )  # fmt: skip


def place(row: Record) -> tuple[bool, str, int, float]:
    """Where the case of a row stands on the page."""
    return row["distribution"] != NORMAL, row["distribution"], row["n"], row["density"]


def distinct(rows: Iterable[Record], field: str) -> str:
    """The values of a field, in words."""
    return listed(sorted({row[field] for row in rows if field in row}))
