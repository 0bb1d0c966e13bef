"""The benchmark of selections as a picture and a page, drawn from its records, without torch.

It is no item of experiments/figures, which are drawn from runs; `python -m experiments figures` draws both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from analysis import plots, style
from analysis.captions import listed
from analysis.files import Damaged, write_atomic
from analysis.numbers import number
from experiments.bench.select import page as select_page
from experiments.bench.select.records import DENSITY, LARGE_N, LOOKS, NORMAL, Record, floor_of, read
from experiments.config.folders import Folders

FLOORS = {"add": "in-place add", "copy": "copy"}
Spread = tuple[float, float, float]  # median, low, high


def redraw(folders: Folders, say: Callable[[str], None] = print) -> list[Path]:
    """Every device's figure, from this checkout's records where there are any, else from the shipped ones;
    says what had to be left out."""
    stores = {
        path.name: path
        for folder in (folders.shipped, folders.results)
        for path in sorted((folder / "bench").glob("select-*.jsonl"))
    }
    drawn = []
    for _, store in sorted(stores.items()):
        try:
            drawn.append(draw_one(store, folders.figures, say))
        except Damaged as damage:
            say(f"left out: {damage}")
    return drawn


def draw_one(store: Path, folder: Path, say: Callable[[str], None] = print) -> Path:
    """One device's picture (returned, PNG and PDF) and page.

    Raises:
        Damaged: it has no records of this kind.
    """
    rows, starts = read(store, say)
    if not rows:
        raise Damaged(store, "has no row of a case")
    folder.mkdir(parents=True, exist_ok=True)
    picture = style.save(draw(rows), folder, store.stem)
    write_atomic(folder / f"{store.stem}.md", select_page.page(rows, starts, store.stem))
    return picture


def draw(rows: Sequence[Record]) -> plots.Figure:
    """Left time against n, right the ratio to the floor against density."""
    done = [row for row in rows if "median_ms" in row and row["distribution"] == NORMAL]
    by_n = [row for row in done if row["density"] == DENSITY] or done
    n = dense_n(done)
    floor = floor_of(done)
    by_density = [row for row in done if row["n"] == n and row["row"] != floor]
    with plots.canvas(style.two_columns(3.6), 1, 2) as (figure, (times, ratios)):
        lines(times, by_n, "n", lambda row: (row["median_ms"], row["low_ms"], row["high_ms"]))
        lines(ratios, by_density, "density", lambda row: triple(row.get(f"over_{floor}")))
        ratios.axhline(1, color=LOOKS[floor].colour, linestyle="--", linewidth=1)
        for axes in (times, ratios):
            axes.set(xscale="log", yscale="log")
            axes.grid(visible=True, axis="y")
            axes.tick_params(axis="x", which="minor", labelbottom=False)
        times.set(xlabel=f"elements n (density {densities(by_n)}, normal)", ylabel="Time of a step (ms)")
        ratios.set(
            xlabel=f"density k/n (n = {number(n)}, normal)", ylabel=f"Time / time of the {FLOORS[floor]}"
        )
        handles, labels = times.get_legend_handles_labels()
        for handle, label in zip(*ratios.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles, labels = [*handles, handle], [*labels, label]
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def lines(
    axes: plots.Axes, rows: Sequence[Record], x: str, values: Callable[[Record], Spread | None]
) -> None:
    """A line with bars for each row of the benchmark."""
    for name, look in LOOKS.items():
        points = sorted((row[x], found) for row in rows if row["row"] == name and (found := values(row)))
        if not points:
            continue
        at = [point for point, _ in points]
        middle, low, high = ([value[i] for _, value in points] for i in range(3))
        bars = [
            [m - a for m, a in zip(middle, low, strict=True)],
            [b - m for m, b in zip(middle, high, strict=True)],
        ]
        floor = name in FLOORS
        axes.errorbar(
            at, middle, bars, color=look.colour, marker=look.marker, linestyle="--" if floor else "-",
            linewidth=1 if floor else 1.3, elinewidth=0.8, capsize=2, label=look.label, zorder=3,
        )  # fmt: skip


def triple(ratio: Record | None) -> Spread | None:
    return (ratio["median"], ratio["low"], ratio["high"]) if ratio else None


def densities(rows: Sequence[Record]) -> str:
    return listed(map(number, sorted({row["density"] for row in rows}))) if rows else number(DENSITY)


def dense_n(rows: Sequence[Record]) -> int:
    """The size that densities are compared at: 25.6 million, else the one with the most densities."""
    found: dict[int, set[float]] = {}
    for row in rows:
        found.setdefault(row["n"], set()).add(row["density"])
    if LARGE_N in found or not found:
        return LARGE_N
    return max(found, key=lambda n: (len(found[n]), n))
