"""The benchmark of selections as a page: how it was measured, and a table for each case."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from analysis.captions import listed
from analysis.numbers import number
from experiments.bench.select.records import DENSITY, LARGE_N, LOOKS, NORMAL, Record, floor_of

FLOORS = {
    "add": "the in-place add of the gradient, which no step can do without",
    "copy": "a copy that moves 12n bytes",
}
HEAD = (
    "row", "ms: median [spread]", "CPU ms", "repetitions", "/ add", "/ copy", "eager / it",
    "eager in huge pages / it", "bytes per element", "GB/s", "fallbacks", "host syncs", "sent / k",
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
    speed = "" if per_element is None else number(1e-6 * per_element * row["n"] / row["median_ms"])
    name = row["row"] + (f" ({row['kernel']})" if row.get("kernel") else "")
    return [
        name,
        f"{number(row['median_ms'])} [{number(row['low_ms'])}, {number(row['high_ms'])}]",
        times(row.get("cpu_ms")),
        str(row["repeats"]),
        times(row.get("over_add")),
        times(row["over_copy"]),
        times(row["eager_over"]),
        times(row.get("eager_hugepages_over")),
        "" if per_element is None else f"{per_element:.3g}",
        speed,
        "" if row["fallback_rate"] is None else f"{row['fallback_rate']:.1%}",
        f"{row['host_syncs']:.3g}",
        "" if row["selected_over_k"] is None else f"{row['selected_over_k']:.3g}",
    ]


def times(ratio: Record | None) -> str:
    if not ratio:
        return ""
    return f"{number(ratio['median'])} [{number(ratio['low'])}, {number(ratio['high'])}]"


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
