"""Selecting k of n, whole steps side by side: acc += grad, select, indices and values out, zeros in acc.

make bench BENCH=select [ARGS="--n 25600000 --density 0.001 0.01 --rows copy fused eager"]

Without words: every n at density 0.001, every density at 25.6 million, every distribution at 14.7 million
(real gradients: at their own size). In each case residual and gradients are the same for all rows; every
repetition goes through all rows in turn, each with cold caches, so that ratios are of neighbours in time. The
residual evolves as in training, by exact Top-k. Each row's first step is not counted, but checked: those that
are exact must select the same magnitudes.

The last line is one JSON object, for n = 25.6 million, density 0.001, normal numbers.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from analysis.records import now, write_atomic
from experiments import snapshot
from experiments.bench import gradients
from experiments.bench.sidebyside import (
    Case,
    Timed,
    flush_bytes,
    leave_out,
    measure,
    ratio,
    rounded,
    spread,
)
from experiments.bench.steps import ROWS, Seen
from experiments.figures import select as picture
from experiments.planning import Folders
from experiments.provenance import cpu_model, provenance
from sparsify.aggregate import num_selected
from sparsify.registry import did_you_mean

SIZES = (270_000, 11_200_000, 14_700_000, 25_600_000, 138_000_000, 345_000_000)
DENSITIES = (0.0001, 0.001, 0.01, 0.1)
NORMAL = "normal"
REAL = "real"  # all of these
DISTRIBUTIONS = (*gradients.SYNTHETIC, *gradients.NETWORKS)
OTHERS_AT = 14_700_000  # elements, for the other distributions
STANDARD = (25_600_000, 0.001, NORMAL)  # of the last line
REPEATS = {"cpu": 11, "cuda": 50}
SECONDS = 6.0  # a row that has spent so long in a case has had its repetitions
NOT_MADE = "Not run"
PUBLIC = ("cpu", "cores", "memory_gib", "gpu", "before", "platform", "versions", "commit", "dirty")
RATIOS = (("eager", "fused"), ("eager", "numpy"), ("fused", "copy"), ("numpy", "copy"), ("threshold", "copy"))


def main() -> int:
    words = argparse.ArgumentParser(prog="make bench BENCH=select", description=__doc__.partition("\n")[0])
    words.add_argument("--n", type=int, nargs="+", help="elements")
    words.add_argument("--density", type=float, nargs="+", help="k/n")
    words.add_argument("--distribution", nargs="+", help=f"{', '.join(DISTRIBUTIONS)}; {REAL}: the networks")
    words.add_argument("--rows", nargs="+", help=f"some of: {', '.join(ROWS)}")
    words.add_argument("--repeats", type=int, help=f"repetitions; default {REPEATS}")
    words.add_argument("--seconds", type=float, default=SECONDS, help="after which a row stops repeating")
    words.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    words.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    words.add_argument("--flush", type=int, metavar="MIB", help="default: more than the last cache holds")
    words.add_argument("--gradients", type=Path, metavar="FOLDER", help="where real ones are kept")
    words.add_argument("--ship", action="store_true", help="copy records and figure into results/shipped")
    asked = words.parse_args()
    try:
        return bench(asked)
    except ValueError as error:
        print(f"select: {error}", file=sys.stderr)
        return 2


def bench(asked: argparse.Namespace) -> int:
    folders = Folders()
    rows, plan = rows_of(asked), cases(asked)
    device = device_of(asked)
    if asked.threads is not None:
        if asked.threads < 1:
            raise ValueError(f"--threads {asked.threads}: must be 1 or more")
        torch.set_num_threads(asked.threads)
    repeats = REPEATS[device.type] if asked.repeats is None else asked.repeats
    if repeats < 1:
        raise ValueError(f"--repeats {repeats}: must be 1 or more")
    if asked.flush is not None and asked.flush < 0:
        raise ValueError(f"--flush {asked.flush}: must be 0 or more")
    about = facts(device)
    store = folders.results / "bench" / f"{picture.stem(about)}.jsonl"
    kept = asked.gradients or store.parent / "gradients"
    public = {name: value for name, value in provenance("", "", device).items() if name in PUBLIC}
    flush = flush_bytes(device) if asked.flush is None else asked.flush * 2**20
    print(f"{about['name']}, torch {about['torch']}; {repeats} repetitions, fewer of rows that take long; "
          f"before each step {flush >> 20} MiB are read")  # fmt: skip
    start = {"kind": "invocation", "at": about["at"], "flush_bytes": flush, "provenance": public}
    append(store, [{"schema": picture.SCHEMA, **start}])
    found: dict[Case, dict[str, Timed]] = {}
    wrong: list[str] = []
    for case in plan:
        began = time.perf_counter()
        lines = {name: Timed(ROWS[name]) for name in rows}
        source, differ = NOT_MADE, list[tuple[str, str]]()
        if leave_out(case, lines, device, flush):
            named = set(asked.rows or ())
            source, differ = measure(case, lines, named, repeats, asked.seconds, flush, kept, device)
        found[case] = lines
        records = [record(case, one, lines, source, about) for one in lines.values()]
        append(store, records)
        wrong += [f"{case}: {name} selects other magnitudes than {by}" for name, by in differ]
        print(f"\n### {case}\n\n{source}\n\n{picture.table(records)}")
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    drawn = picture.draw_one(store, folders.figures)
    print(f"\n{store}\n{drawn}")
    if asked.ship:
        print(*(f"shipped {path.name}" for path in ship(store, folders)), sep="\n")
    for line in wrong:
        print(f"WRONG: {line}")
    print(json.dumps(summary(found, about)))
    return 1 if wrong else 0


def rows_of(asked: argparse.Namespace) -> list[str]:
    for name in asked.rows or ():
        if name not in ROWS:
            raise ValueError(f"no row {name!r}{did_you_mean(name, list(ROWS))}; there are: {', '.join(ROWS)}")
    return [name for name in ROWS if name in (asked.rows or ROWS)]


def cases(asked: argparse.Namespace) -> list[Case]:
    """What is to be measured; every combination of the words, or the default plan without any."""
    for n in asked.n or ():
        if n < 1:
            raise ValueError(f"--n {n}: must be 1 or more")
    for density in asked.density or ():
        if not 0 < density <= 1:
            raise ValueError(f"--density {density}: must lie in (0, 1]")
    names = [
        one for name in asked.distribution or () for one in (gradients.NETWORKS if name == REAL else [name])
    ]
    for name in names:
        if name not in DISTRIBUTIONS:
            known = [*DISTRIBUTIONS, REAL]
            raise ValueError(
                f"no distribution {name!r}{did_you_mean(name, known)}; there are: {', '.join(known)}"
            )
    if not (asked.n or asked.density or names):
        n, density, name = STANDARD
        others = [one for one in DISTRIBUTIONS if one != NORMAL]
        return unique([
            *(Case(one, density, name) for one in SIZES),
            *(Case(n, one, name) for one in DENSITIES),
            *(Case(own_size(one, OTHERS_AT), density, one) for one in others),
        ])  # fmt: skip
    n, density, name = STANDARD
    return unique(
        Case(own_size(c, a), b, c)
        for a in asked.n or (n,)
        for b in asked.density or (density,)
        for c in names or (name,)
    )


def unique(plan: Iterable[Case]) -> list[Case]:
    return list(dict.fromkeys(plan))


def own_size(distribution: str, n: int) -> int:
    """Real gradients have a size of their own."""
    return gradients.NETWORKS[distribution][1] if distribution in gradients.NETWORKS else n


def device_of(asked: argparse.Namespace) -> torch.device:
    there = torch.cuda.is_available()
    if asked.device == "cuda" and not there:
        raise ValueError(f"--device cuda: torch {torch.__version__} finds no GPU here; say --device cpu")
    return torch.device(asked.device or ("cuda" if there else "cpu"))


def facts(device: torch.device) -> dict[str, Any]:
    """What every record says of the machine and the code."""
    cuda, threads = device.type == "cuda", torch.get_num_threads()
    return {
        "at": now(),
        "device": device.type,
        "name": torch.cuda.get_device_name(device) if cuda else f"{cpu_model()}, {threads} threads",
        "cpu": cpu_model(),
        "threads": threads,
        "torch": torch.__version__,
        **snapshot.origin(),
    }


def record(
    case: Case, one: Timed, lines: dict[str, Timed], source: str, about: dict[str, Any]
) -> dict[str, Any]:
    """One line of the store."""
    n, k = case.n, num_selected(case.n, case.density)
    found = {
        "schema": picture.SCHEMA,
        "kind": "row",
        **about,
        **case._asdict(),
        "k": k,
        "source": source,
        "row": one.row.name,
        "what": one.row.words,
        "exact": one.row.exact,
    }
    if not one.samples:
        return found | {"why": one.why}
    repeats = len(one.samples)
    selected = statistics.mean(one.selected) if one.selected else None
    steps = max(1, one.steps)
    seen = Seen(about["device"], (selected or 0) / n, one.waits / repeats, one.candidates / steps / n)
    traffic = one.row.traffic(seen)
    time_ms = spread(list(one.samples.values()))
    return found | {
        "kernel": one.kernel,
        "repeats": repeats,
        **{f"{name}_ms": time_ms[name] for name in ("median", "low", "high")},
        "spread": time_ms["spread"],
        "over_copy": ratio(one, lines.get("copy")),
        "eager_over": ratio(lines.get("eager"), one),
        "bytes_per_element": None if traffic.total is None else round(traffic.total, 3),
        "bytes_words": traffic.words,
        "fallback_rate": one.fallbacks / one.steps if one.steps else None,
        "candidates_over_k": round(one.candidates / one.steps / k, 4) if one.steps else None,
        "host_syncs": one.waits / repeats,
        "selected_over_k": None if selected is None else round(selected / k, 4),
        "samples_ms": [rounded(ms) for ms in one.samples.values()],
    }


def append(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """More lines at the end of a file, which is replaced whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    write_atomic(path, before + "".join(json.dumps(one) + "\n" for one in records))


def ship(store: Path, folders: Folders) -> list[Path]:
    """The newest row of each case, their provenance, and the figure, into what the repository carries."""
    target = folders.shipped / "bench" / store.name
    target.parent.mkdir(parents=True, exist_ok=True)
    rows, starts = picture.read(store)
    used = {row["at"] for row in rows}
    kept = [*(start for start in starts if start["at"] in used), *rows]
    write_atomic(target, "".join(json.dumps(one) + "\n" for one in kept))
    return [target, picture.draw_one(target, folders.shipped / "figures")]


def summary(found: dict[Case, dict[str, Timed]], about: dict[str, Any]) -> dict[str, Any]:
    """The last line: the standard case, or the first where the words left that out."""
    standard = Case(*STANDARD)
    case = standard if standard in found else next(iter(found))
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


if __name__ == "__main__":
    sys.exit(main())
