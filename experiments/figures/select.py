"""The benchmark of selections as a picture and a page, from its records; no item of a paper, and no runs.

`make bench BENCH=select` writes one file of records for each device; of each case the newest row counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from analysis import plots, style
from analysis.captions import listed
from analysis.records import read_lines, write_atomic
from analysis.style import Look
from experiments.planning import Folders

Record = dict[str, Any]

SCHEMA = 1  # of the records; others are not read
DENSITY, NORMAL, LARGE_N = 0.001, "normal", 25_600_000
LOOKS = {
    "copy": Look("copy of 12n bytes (the floor)", "#000000", "", ""),
    "fused": Look("fused, exact", "#D55E00", "o", ""),
    "numpy": Look("numpy, exact", "#E69F00", "D", ""),
    "threshold": Look("fused, threshold given", "#F0A35E", "v", ""),
    "eager": Look("torch.topk, exact", "#0072B2", "s", ""),
    "sort": Look("torch.sort, exact", "#332288", "P", ""),
    "compile": Look("torch.compile, threshold given", "#56B4E9", "<", ""),
    "dgc": Look("DGC's sample, about k", "#009E73", "^", ""),
    "gaussiank": Look("Gaussian-k as published, about k", "#999933", "X", ""),
    "paper_kernel": Look("one thread block, exact", "#882255", "*", ""),
}


def stem(row: Record) -> str:
    """The files of a device."""
    words = re.sub(r"\((r|tm)\)|processor|cpu|@.*", " ", row["name"].lower())
    slug = "-".join(re.findall(r"[a-z0-9]+", words))
    return f"select-{'cpu-' if row['device'] == 'cpu' else ''}{slug}"


def read(path: Path) -> tuple[list[Record], list[Record]]:
    """The newest row of each case, and the invocations. One that was measured counts more than one that
    says why it was not.
    """
    records = [record for record in read_lines(path)[0] if record.get("schema") == SCHEMA]
    newest: dict[tuple, Record] = {}
    for row in records:
        if row["kind"] == "row":
            case = (row["n"], row["density"], row["distribution"], row["row"])
            if "median_ms" in row or "median_ms" not in newest.get(case, {}):
                newest[case] = row
    return list(newest.values()), [one for one in records if one["kind"] == "invocation"]


def redraw(folders: Folders) -> list[Path]:
    """Every device's figure, from this checkout's records where there are any, else from the shipped ones."""
    stores = {
        path.name: path
        for folder in (folders.shipped, folders.results)
        for path in sorted((folder / "bench").glob("select-*.jsonl"))
    }
    return [draw_one(store, folders.figures) for _, store in sorted(stores.items())]


def draw_one(store: Path, folder: Path) -> Path:
    """One device's picture (returned, PNG and PDF) and page."""
    rows, starts = read(store)
    folder.mkdir(parents=True, exist_ok=True)
    picture = style.save(draw(rows), folder, store.stem)
    write_atomic(folder / f"{store.stem}.md", page(rows, starts, store.stem))
    return picture


def draw(rows: Sequence[Record]) -> plots.Figure:
    """Left time against n, right the ratio to the copy against density."""
    done = [row for row in rows if "median_ms" in row and row["distribution"] == NORMAL]
    by_n = [row for row in done if row["density"] == DENSITY] or done
    n = dense_n(done)
    by_density = [row for row in done if row["n"] == n and row["row"] != "copy"]
    with plots.canvas(style.two_columns(3.6), 1, 2) as (figure, (times, ratios)):
        lines(times, by_n, "n", lambda row: (row["median_ms"], row["low_ms"], row["high_ms"]))
        lines(ratios, by_density, "density", lambda row: triple(row["over_copy"]))
        ratios.axhline(1, color=LOOKS["copy"].colour, linestyle="--", linewidth=1)
        for axes in (times, ratios):
            axes.set(xscale="log", yscale="log")
            axes.grid(visible=True, axis="y")
            axes.tick_params(axis="x", which="minor", labelbottom=False)
        times.set(xlabel=f"elements n (density {densities(by_n)}, normal)", ylabel="Time of a step (ms)")
        ratios.set(xlabel=f"density k/n (n = {n:,}, normal)", ylabel="Time / time of the copy")
        handles, labels = times.get_legend_handles_labels()
        for handle, label in zip(*ratios.get_legend_handles_labels(), strict=True):
            if label not in labels:
                handles, labels = [*handles, handle], [*labels, label]
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def lines(axes: Any, rows: Iterable[Record], x: str, values: Callable[[Record], tuple | None]) -> None:
    """A line with bars for each row of the benchmark."""
    rows = list(rows)
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
        floor = name == "copy"
        axes.errorbar(
            at, middle, bars, color=look.colour, marker=look.marker, linestyle="--" if floor else "-",
            linewidth=1 if floor else 1.3, elinewidth=0.8, capsize=2, label=look.label, zorder=3,
        )  # fmt: skip


def triple(ratio: Record | None) -> tuple[float, float, float] | None:
    return (ratio["median"], ratio["low"], ratio["high"]) if ratio else None


def densities(rows: Iterable[Record]) -> str:
    return listed(sorted({row["density"] for row in rows})) if rows else f"{DENSITY:g}"


def dense_n(rows: Sequence[Record]) -> int:
    """The size that densities are compared at: 25.6 million, else the one with the most densities."""
    found: dict[int, set[float]] = {}
    for row in rows:
        found.setdefault(row["n"], set()).add(row["density"])
    if LARGE_N in found or not found:
        return LARGE_N
    return max(found, key=lambda n: (len(found[n]), n))


HEAD = (
    "row", "ms: median [spread]", "repetitions", "/ copy", "eager / it", "bytes per element", "GB/s",
    "fallbacks", "host syncs", "sent / k",
)  # fmt: skip


def table(rows: Iterable[Record]) -> str:
    """The rows of one case as Markdown; below it why some were not run."""
    out = ["| " + " | ".join(HEAD) + " |", "|---|" + "---:|" * (len(HEAD) - 1)]
    missing: dict[str, list[str]] = {}  # reason -> rows
    for row in rows:
        if "median_ms" in row:
            out.append("| " + " | ".join(cells(row)) + " |")
        else:
            missing.setdefault(row["why"], []).append(f"`{row['row']}`")
    if len(out) == 2:
        out.clear()
    elif missing:
        out.append("")
    return "\n".join([*out, *(f"- {listed(names)} not run: {why}" for why, names in missing.items())]) + "\n"


def cells(row: Record) -> list[str]:
    per_element = row["bytes_per_element"]
    speed = "" if per_element is None else plots.number(1e-6 * per_element * row["n"] / row["median_ms"])
    name = row["row"] + (f" ({row['kernel']})" if row.get("kernel") else "")
    return [
        name,
        f"{plots.number(row['median_ms'])} [{plots.number(row['low_ms'])}, {plots.number(row['high_ms'])}]",
        str(row["repeats"]),
        times(row["over_copy"]),
        times(row["eager_over"]),
        "" if per_element is None else f"{per_element:.3g}",
        speed,
        "" if row["fallback_rate"] is None else f"{row['fallback_rate']:.1%}",
        f"{row['host_syncs']:.3g}",
        "" if row["selected_over_k"] is None else f"{row['selected_over_k']:.3g}",
    ]


def times(ratio: Record | None) -> str:
    if not ratio:
        return ""
    return f"{plots.number(ratio['median'])} [{plots.number(ratio['low'])}, {plots.number(ratio['high'])}]"


def page(rows: Sequence[Record], starts: Sequence[Record], name: str) -> str:
    """Picture, how it was measured, a table for each case, what the rows are and what their bytes are."""
    at = sorted({row["at"] for row in rows})
    used = [start for start in starts if start["at"] in at]
    parts = [
        f"# select: selecting k of n, with error feedback\n\n![select]({name}.png)\n",
        "Time of one whole step (acc += grad, select, indices and values out, zeros in acc) against n, and "
        f"as a multiple of a copy that moves 12n bytes. {setting(rows, used)}\n",
        *headline(rows),
    ]
    cases = sorted(
        {(row["distribution"] != NORMAL, row["distribution"], row["n"], row["density"]) for row in rows}
    )
    for _, distribution, n, density in cases:
        own = [r for r in rows if (r["n"], r["density"], r["distribution"]) == (n, density, distribution)]
        own.sort(key=lambda row: list(LOOKS).index(row["row"]))
        title = f"## n = {n:,}, density {density:g}, {distribution}\n"
        parts += [title, f"{own[0]['source']}; k = {own[0]['k']:,}.\n", table(own)]
    parts += ["## The rows, and their bytes\n", legend(rows)]
    return "\n".join(parts)


def setting(rows: Sequence[Record], starts: Sequence[Record]) -> str:
    """Where, with what and how."""
    first = rows[0]
    versions = sorted({row["torch"] for row in rows})
    commits = sorted(
        {f"{(r['commit'] or 'unknown')[:7]}{' with changes' if r['dirty'] else ''}" for r in rows}
    )
    flushes = sorted({f"{start['flush_bytes'] >> 20} MiB" for start in starts})
    spreads = sorted({row["spread"] for row in rows if "spread" in row})
    clock = "CUDA events" if first["device"] == "cuda" else "the host's clock"
    days = listed(sorted({row["at"][:10] for row in rows}))
    return (
        f"{first['name']}; torch {listed(versions)}; commit {listed(commits)}; {days}. Medians by {clock}, "
        f"spread {listed(spreads)}; in each repetition all rows take their turn on the same residual and "
        f"gradient, after {listed(flushes)} were read to empty the caches; ratios are "
        "taken within repetitions. Rows that take long have fewer of them. Bytes are counted, not measured."
    )


def headline(rows: Sequence[Record]) -> list[str]:
    """The ratios that the page is about, in a sentence."""
    own = {
        row["row"]: row
        for row in rows
        if (row["n"], row["density"], row["distribution"]) == (LARGE_N, DENSITY, NORMAL)
        and "median_ms" in row
    }
    said = []
    for name in ("fused", "numpy"):
        if name in own and own[name]["eager_over"]:
            said.append(f"`{name}` is {times(own[name]['eager_over'])} times as fast as torch.topk's step"
                        + (f" and takes {times(own[name]['over_copy'])} times as long as the copy"
                           if own[name]["over_copy"] else ""))  # fmt: skip
    return [f"At n = {LARGE_N:,}, density {DENSITY:g}, normal: {'; '.join(said)}.\n"] if said else []


def legend(rows: Sequence[Record]) -> str:
    """A line for each row: what it does, and the bytes per element of its last case."""
    lines = []
    for name in LOOKS:
        own = [row for row in rows if row["row"] == name]
        if own:
            counted = [row["bytes_words"] for row in own if "bytes_words" in row]
            bytes_ = f". Bytes, in the last case: {counted[-1]}" if counted else ""
            lines.append(f"- `{name}`: {own[-1]['what']}{bytes_}")
    return "\n".join(lines) + "\n"
