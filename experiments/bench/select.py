"""Selecting k of n, with error feedback."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

from experiments.bench import Device
from experiments.bench._gradients import DISTRIBUTIONS, FIRST_TIED, NETWORKS
from experiments.bench._runner import WRONG, Bench, Record, ratio, rounded, spread
from experiments.bench._select_page import ABOUT, DENSITY, FLOORS, LARGE_N, NORMAL, PAGE, TERMS, table
from experiments.bench._side_by_side import SelectCase, SideBySide, StepTimes, flush_bytes, leave_out
from experiments.bench._steps import ROWS
from experiments.bench._timing import REPEATS, device_of, facts
from experiments.config.folders import Folders
from sparsify.ranges import NonNegativeFloat, NonNegativeInt, PositiveFraction, PositiveInt, describe_unknown
from sparsify.types import num_selected

SIZES = (270_000, 11_200_000, 14_700_000, 25_600_000, 138_000_000, 345_000_000)
DENSITIES = (0.0001, 0.001, 0.01, 0.1)
REAL = "real"  # all networks
OTHERS_AT = 14_700_000  # elements, for the other distributions
STANDARD = SelectCase(LARGE_N, DENSITY, NORMAL)  # of the last line
NOT_MADE = "Not run"
RATIOS = (
    ("eager", "fused"), ("eager_hugepages", "fused"), ("fused", "add"), ("fused", "copy"),
    ("threshold", "add"),
)  # fmt: skip
FLOAT = 4
CPU_ONLY = "eager_hugepages"
EAGER = ("eager", CPU_ONLY)
CLOCKS = {"": "samples", "cpu_": "cpu"}  # prefix of a ratio's name -> where its times are
# What the standard case shall reach: device -> ratio -> (is it a lower bound?, number).
TARGETS = {
    "cpu": {
        "eager_over_fused": (True, 30.0),
        "eager_hugepages_over_fused": (True, 15.0),
        "fused_over_add": (False, 1.2),
    },
    "cuda": {"eager_over_fused": (True, 6.0), "fused_over_add": (False, 1.35)},
}


def select(
    *,
    n: Sequence[PositiveInt] = (),
    density: Sequence[PositiveFraction] = (),
    distribution: Sequence[str] = (),
    rows: Sequence[str] = (),
    repeats: PositiveInt | None = None,
    seconds: NonNegativeFloat = 6.0,
    device: Device | None = None,
    threads: PositiveInt | None = None,
    flush: NonNegativeInt | None = None,
    gradients: str | None = None,
) -> Bench:
    """Selecting k of n, whole steps side by side: acc += grad, select, indices and values out, zeros in acc.

    Without options: every n at density 0.001, every density at 25.6 million, every distribution at 14.7
    million (real gradients: at their own size). In each case residual and gradients are the same for all
    rows; every repetition goes through all rows in turn, each with cold caches, so that ratios are of
    neighbours in time. The residual evolves as in training, by exact Top-k. Each row's first step is not
    counted, but checked: those that are exact must select the same magnitudes. Residual and gradients lie in
    huge pages where the system has them, as `sparsify` allocates them, so all rows gain from these; what
    torch.topk allocates itself does not.

    The last lines say which targets are met. The very last is one JSON object, for n = 25.6 million, density
    0.001, normal numbers.

    Args:
        n: elements.
        density: k/n.
        distribution: normal, laplace, mixed, ties, zeros, first_tied, vgg16, resnet18; real: the networks.
        rows: some of add, copy, fused, eager, eager_hugepages, fallback, threshold, dgc, gaussiank,
            compile, sort, paper_kernel; all by default.
        repeats: repetitions; 11 on a CPU, 50 on a GPU by default.
        seconds: after which a row stops repeating.
        device: cuda where there is one.
        threads: CPU threads; torch's by default.
        flush: MiB that are read before each step; more than the last cache holds by default.
        gradients: folder where real ones are kept.
    """
    for name in rows:
        if name not in ROWS:
            raise ValueError(describe_unknown("row", name, list(ROWS)))
    plan, names = cases(n, density, distribution), [name for name in ROWS if name in (rows or ROWS)]
    on = device_of(device, threads)
    kept = Path(gradients) if gradients else Folders().results / "bench" / "gradients"
    nbytes, times = flush_bytes(on) if flush is None else flush * 2**20, repeats or REPEATS[on.type]

    def measure(case: Record) -> Iterator[Record]:
        chosen, lines = SelectCase(**case), {name: StepTimes() for name in names}
        source, differ = NOT_MADE, dict[str, str]()
        if leave_out(chosen, lines, on, nbytes):
            source, differ = SideBySide(chosen, lines, set(rows), nbytes, kept, on).measured(times, seconds)
        for name in lines:
            yield record(chosen, name, lines, source, on.type) | {WRONG: differ.get(name)}
        if on.type == "cuda":
            torch.cuda.empty_cache()

    return Bench(
        about=facts(on),
        head=f"{times} repetitions, fewer of rows that take long; before each step "
        f"{nbytes >> 20} MiB are read",
        cases=[case._asdict() for case in plan],
        setting={"rows": names, "repeats": times, "seconds": seconds, "flush_bytes": nbytes},
        measure=measure,
        title=lambda case: str(SelectCase(**case)),
        text=lambda found: f"{found[0]['source']}\n\n{table(found)}",
        last=summary,
        end=lambda line: verdicts(line, on.type),
        draw=PAGE.draw_one,
    )


def cases(n: Sequence[int], density: Sequence[float], distribution: Sequence[str]) -> list[SelectCase]:
    """Cases to be measured; every combination of the options, or the default plan without any.

    Raises:
        ValueError: there is no such distribution.
    """
    names = [name for each in distribution for name in (NETWORKS if each == REAL else [each])]
    for name in names:
        if name not in DISTRIBUTIONS:
            raise ValueError(describe_unknown("distribution", name, [*DISTRIBUTIONS, REAL]))
    plan = [*product(n or (LARGE_N,), density or (DENSITY,), names or (NORMAL,))]
    if not (n or density or names):
        others = (name for name in DISTRIBUTIONS if name != NORMAL)
        plan = [
            *product(SIZES, (DENSITY,), (NORMAL,)),
            *product((LARGE_N,), DENSITIES, (NORMAL,)),
            *product((OTHERS_AT,), (DENSITY,), others),
        ]
    # Real gradients have a size of their own.
    own = {name: size for name, (_, size) in NETWORKS.items()}
    return list(dict.fromkeys(SelectCase(own.get(name, size), share, name) for size, share, name in plan))


def record(case: SelectCase, name: str, lines: dict[str, StepTimes], source: str, device: str) -> Record:
    """The record of a row."""
    n, timed, kind = case.n, lines[name], ROWS[name]
    k = num_selected(n, case.density)
    found = {"k": k, "source": source, "row": name, "what": ABOUT[name]["what"], "exact": kind.exact}
    if not timed.samples:
        return found | {"why": timed.why}
    repeats, steps, stats = len(timed.samples), max(1, timed.stats.steps), timed.stats
    selected = statistics.mean(timed.selected) if timed.selected else None
    moved, words = traffic(
        name, device, 2 if case.distribution == FIRST_TIED else FLOAT, selected=(selected or 0) / n,
        candidates=stats.candidates / steps / n, thresholds=timed.waits / repeats,
    )  # fmt: skip
    time_ms = spread(list(timed.samples.values()))

    def times(row: str, clock: str) -> dict[int, float] | None:
        return getattr(lines[row], CLOCKS[clock]) if row in lines else None

    return found | {
        "kernel": timed.kernel,
        "repeats": repeats,
        **{f"{key}_ms": time_ms[key] for key in ("median", "low", "high")},
        "spread": time_ms["spread"],
        "cpu_ms": spread(list(timed.cpu.values())) if timed.cpu else None,
        **{
            f"{of}over_{floor}": ratio(times(name, of), times(floor, of)) for of in CLOCKS for floor in FLOORS
        },
        **{f"{of}{above}_over": ratio(times(above, of), times(name, of)) for of in CLOCKS for above in EAGER},
        "bytes_per_element": None if moved is None else round(moved, 3),
        "bytes_words": words,
        "fallback_rate": stats.fallbacks / stats.steps if stats.steps else None,
        "candidates_over_k": round(stats.candidates / stats.steps / k, 4) if stats.steps else None,
        "host_syncs": timed.waits / repeats,
        "selected_over_k": None if selected is None else round(selected / k, 4),
        "samples_ms": [rounded(ms) for ms in timed.samples.values()],
    }


def traffic(row: str, device: str, gradient: int, **counts: float) -> tuple[float | None, str]:
    """Bytes of memory traffic per element, counted from what a row's algorithm reads and writes; None where
    they are not counted; and in words. The terms are in select_rows.yaml.

    Args:
        gradient: bytes of an element of the gradient.
        counts: selected, candidates and thresholds, per element.
    """
    if row == "sort" and device == "cpu":
        return None, "not counted: merges, as deep as log n"
    of = {"element": 1, "adding": 2 * FLOAT + gradient, **counts}
    terms = [(TERMS["any"] | TERMS[device])[name] for name in ABOUT[row]["bytes"]]
    moved = sum(each * of[what] for each, what, _ in terms)
    return moved, " + ".join(words.format(**of) for _, _, words in terms)


def summary(rows: list[Record]) -> Record:
    """The last line: the standard case, or the first where the words left that out."""
    of_rows = [SelectCase(row["n"], row["density"], row["distribution"]) for row in rows]
    case, first = STANDARD if STANDARD in of_rows else of_rows[0], rows[0]
    lines = {row["row"]: row for row, own in zip(rows, of_rows, strict=True) if own == case}
    line: Record = {"torch": first["torch"], **case._asdict()}
    why, cpu_time = {}, {}
    for above, below in RATIOS:
        if first["device"] == "cuda" and CPU_ONLY in (above, below):
            continue
        name = f"{above}_over_{below}"
        # A row knows how it compares with the floors, and with torch.topk.
        at, field = (above, f"over_{below}") if below in FLOORS else (below, f"{above}_over")
        line[name] = lines.get(at, {}).get(field)
        cpu_time[name] = lines.get(at, {}).get(f"cpu_{field}")
        if line[name] is None:
            why[name] = "; ".join(filter(None, (missing(row, lines) for row in (above, below))))
    if first["device"] == "cpu":
        line["cpu_time"] = cpu_time  # the same ratios; of all threads together
    return line | ({"why": why} if why else {})


def verdicts(line: Record, kind: str) -> list[str]:
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


def missing(row: str, lines: dict[str, Record]) -> str:
    """The reason why a row has no times; nothing where it has."""
    if row not in lines:
        return f"{row} was not asked for"
    return "" if "median_ms" in lines[row] else f"{row} not run: {lines[row]['why']}"
