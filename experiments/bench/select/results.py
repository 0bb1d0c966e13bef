"""What the benchmark of selections found: a record for each row of a case, and the line printed last."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.bench._case import Case, Timed, ratio, rounded, spread
from experiments.bench._traffic import Seen
from experiments.bench.select.cases import STANDARD
from experiments.bench.select.records import SCHEMA
from sparsify.method import num_selected

RATIOS = (("eager", "fused"), ("eager", "numpy"), ("fused", "copy"), ("numpy", "copy"), ("threshold", "copy"))


def record(
    case: Case, timed: Timed, lines: dict[str, Timed], source: str, about: dict[str, Any]
) -> dict[str, Any]:
    """One line of the store."""
    n, k = case.n, num_selected(case.n, case.density)
    found = {
        "schema": SCHEMA,
        "kind": "row",
        **about,
        **case._asdict(),
        "k": k,
        "source": source,
        "row": timed.row.name,
        "what": timed.row.words,
        "exact": timed.row.exact,
    }
    if not timed.samples:
        return found | {"why": timed.why}
    repeats = len(timed.samples)
    selected = statistics.mean(timed.selected) if timed.selected else None
    steps = max(1, timed.steps)
    seen = Seen(about["device"], (selected or 0) / n, timed.waits / repeats, timed.candidates / steps / n)
    traffic = timed.row.traffic(seen)
    time_ms = spread(list(timed.samples.values()))
    return found | {
        "kernel": timed.kernel,
        "repeats": repeats,
        **{f"{name}_ms": time_ms[name] for name in ("median", "low", "high")},
        "spread": time_ms["spread"],
        "over_copy": ratio(timed, lines.get("copy")),
        "eager_over": ratio(lines.get("eager"), timed),
        "bytes_per_element": None if traffic.total is None else round(traffic.total, 3),
        "bytes_words": traffic.words,
        "fallback_rate": timed.fallbacks / timed.steps if timed.steps else None,
        "candidates_over_k": round(timed.candidates / timed.steps / k, 4) if timed.steps else None,
        "host_syncs": timed.waits / repeats,
        "selected_over_k": None if selected is None else round(selected / k, 4),
        "samples_ms": [rounded(ms) for ms in timed.samples.values()],
    }


def summary(found: dict[Case, dict[str, Timed]], about: dict[str, Any]) -> dict[str, Any]:
    """The last line: the standard case, or the first where the words left that out."""
    case = STANDARD if STANDARD in found else next(iter(found))
    lines = found[case]
    line: dict[str, Any] = {
        "bench": "select",
        "device": about["name"],
        "torch": about["torch"],
        **case._asdict(),
    }
    why = {}
    for above, below in RATIOS:
        if about["device"] == "cuda" and "numpy" in (above, below):
            continue
        name = f"{above}_over_{below}"
        line[name] = ratio(lines.get(above), lines.get(below))
        if line[name] is None:
            why[name] = "; ".join(missing(row, lines) for row in (above, below) if missing(row, lines))
    return line | ({"why": why} if why else {})


def missing(row: str, lines: dict[str, Timed]) -> str:
    """Why a row has no times; nothing where it has."""
    if row not in lines:
        return f"{row} was not asked for"
    return "" if lines[row].samples else f"{row} not run: {lines[row].why}"
