"""The benchmark of selections as a page: how it was measured, and a table for each case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from analysis.captions import listed
from analysis.numbers import number, with_interval
from analysis.stats import Value
from analysis.tables import Table
from experiments.bench.select.records import DENSITY, LARGE_N, LOOKS, NORMAL, Record, floor_of

FLOORS = {
    "add": "the in-place add of the gradient, which no step can do without",
    "copy": "a copy that moves 12n bytes",
}
UNITS = {"time of a step": "ms", "CPU time": "ms", "fallbacks": "%", "speed": "GB/s"}


def table(rows: Iterable[Record]) -> str:
    """The rows of one case as Markdown; below it why some were not run."""
    measured, missing = [], dict[str, list[str]]()  # reason -> rows
    for row in rows:
        if "median_ms" in row:
            measured.append(cells(row))
        else:
            missing.setdefault(row["why"], []).append(row["row"])
    note = "; ".join(f"{listed(names)} not run: {why}" for why, names in missing.items())
    units = UNITS if measured else {}
    return Table("", pd.DataFrame(measured), units, note).markdown() if measured else f"{note}\n"


def cells(row: Record) -> dict[str, Value | float | str | None]:
    """What stands in a row: medians with their spread."""
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
    at = sorted({row["at"] for row in rows})
    used = [start for start in starts if start["at"] in at]
    parts = [
        f"# select: selecting k of n, with error feedback\n\n![select]({name}.png)\n",
        "Time of one whole step (acc += grad, select, indices and values out, zeros in acc) against n, and "
        f"as a multiple of {FLOORS[floor_of(rows)]}. {setting(rows, used)}\n",
        *headline(rows),
    ]
    cases = sorted(
        {(row["distribution"] != NORMAL, row["distribution"], row["n"], row["density"]) for row in rows}
    )
    for _, distribution, n, density in cases:
        own = [r for r in rows if (r["n"], r["density"], r["distribution"]) == (n, density, distribution)]
        own.sort(key=lambda row: list(LOOKS).index(row["row"]))
        title = f"## n = {number(n)}, density {number(density)}, {distribution}\n"
        parts += [title, f"{own[0]['source']}; k = {number(own[0]['k'])}.\n", table(own)]
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
        "taken within repetitions. CPU ms are of all threads together. Rows that take long have fewer "
        "repetitions. Bytes are counted, not measured."
    )


def headline(rows: Sequence[Record]) -> list[str]:
    """The ratios that the page is about, in a sentence."""
    own = {
        row["row"]: row
        for row in rows
        if (row["n"], row["density"], row["distribution"]) == (LARGE_N, DENSITY, NORMAL)
        and "median_ms" in row
    }
    said, floor = [], floor_of(rows)
    for name in ("fused", "numpy"):
        if name not in own or not own[name]["eager_over"]:
            continue
        said.append(f"`{name}` is {times(own[name]['eager_over'])} times as fast as torch.topk's step")
        if own[name].get("eager_hugepages_over"):
            tuned = times(own[name]["eager_hugepages_over"])
            said[-1] += f" ({tuned} where its malloc gives huge pages)"
        if own[name].get(f"over_{floor}"):
            said[-1] += f" and takes {times(own[name][f'over_{floor}'])} times as long as the {floor}"
    return (
        [f"At n = {number(LARGE_N)}, density {number(DENSITY)}, normal: {'; '.join(said)}.\n"] if said else []
    )


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
