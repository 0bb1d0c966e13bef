"""What the benchmark of selections found: a record for each row of a case, and the line printed last."""

from __future__ import annotations

import statistics
from typing import Any

from experiments.bench._case import Case, Timed, ratio, rounded, spread
from experiments.bench._gradients import FIRST_TIED
from experiments.bench._traffic import Seen
from experiments.bench.select.cases import STANDARD
from experiments.bench.select.records import SCHEMA
from sparsify.method import num_selected

RATIOS = (
    ("eager", "fused"), ("eager_hugepages", "fused"), ("eager", "numpy"), ("fused", "add"), ("fused", "copy"),
    ("numpy", "add"), ("threshold", "add"),
)  # fmt: skip
CPU_ONLY = ("numpy", "eager_hugepages")
# What the standard case shall reach: device -> ratio -> (is it a lower bound?, number).
TARGETS = {
    "cpu": {
        "eager_over_fused": (True, 30.0),
        "eager_hugepages_over_fused": (True, 15.0),
        "fused_over_add": (False, 1.2),
    },
    "cuda": {"eager_over_fused": (True, 6.0), "fused_over_add": (False, 1.35)},
}


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
    seen = Seen(
        about["device"], (selected or 0) / n, timed.waits / repeats, timed.candidates / steps / n,
        2 if case.distribution == FIRST_TIED else 4,
    )  # fmt: skip
    traffic = timed.row.traffic(seen)
    time_ms = spread(list(timed.samples.values()))
    return found | {
        "kernel": timed.kernel,
        "repeats": repeats,
        **{f"{name}_ms": time_ms[name] for name in ("median", "low", "high")},
        "spread": time_ms["spread"],
        "cpu_ms": spread(list(timed.cpu.values())) if timed.cpu else None,
        "over_add": ratio(timed, lines.get("add")),
        "over_copy": ratio(timed, lines.get("copy")),
        "eager_over": ratio(lines.get("eager"), timed),
        "eager_hugepages_over": ratio(lines.get("eager_hugepages"), timed),
        "cpu_over_add": ratio(timed, lines.get("add"), cpu=True),
        "cpu_eager_over": ratio(lines.get("eager"), timed, cpu=True),
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
    why, cpu_time = {}, {}
    for above, below in RATIOS:
        if about["device"] == "cuda" and set(CPU_ONLY) & {above, below}:
            continue
        name = f"{above}_over_{below}"
        line[name] = ratio(lines.get(above), lines.get(below))
        cpu_time[name] = ratio(lines.get(above), lines.get(below), cpu=True)
        if line[name] is None:
            why[name] = "; ".join(missing(row, lines) for row in (above, below) if missing(row, lines))
    if about["device"] == "cpu":
        line["cpu_time"] = cpu_time  # the same ratios; of all threads together
    return line | ({"why": why} if why else {})


def verdicts(line: dict[str, Any], kind: str) -> list[str]:
    """A sentence for each target of a device of this kind, by the medians; of the standard case only."""
    if (line["n"], line["density"], line["distribution"]) != STANDARD:
        return []
    said = []
    for name, (is_least, target) in TARGETS[kind].items():
        words = f"{name}: {'at least' if is_least else 'at most'} {target:g} wanted"
        if (found := line.get(name)) is None:
            said.append(f"{words}, not measured")
            continue
        met = found["median"] >= target if is_least else found["median"] <= target
        range_ = f"[{found['low']:.4g}, {found['high']:.4g}], n = {found['n']}"
        said.append(f"{words}, {found['median']:.4g} {range_} measured: {'met' if met else 'MISSED'}")
    return said


def missing(row: str, lines: dict[str, Timed]) -> str:
    """Why a row has no times; nothing where it has."""
    if row not in lines:
        return f"{row} was not asked for"
    return "" if lines[row].samples else f"{row} not run: {lines[row].why}"
