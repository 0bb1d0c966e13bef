"""Selecting k of n, whole steps side by side: acc += grad, select, indices and values out, zeros in acc.

make bench BENCH=select [ARGS="--n 25600000 --density 0.001 0.01 --rows copy fused eager"]

Without words: every n at density 0.001, every density at 25.6 million, every distribution at 14.7 million
(real gradients: at their own size). In each case residual and gradients are the same for all rows; every
repetition goes through all rows in turn, each with cold caches, so that ratios are of neighbours in time. The
residual evolves as in training, by exact Top-k. Each row's first step is not counted, but checked: those that
are exact must select the same magnitudes. Residual and gradients lie in huge pages where the system has them,
as `sparsify` allocates them, so all rows gain from these; what torch.topk allocates itself does not.

The last lines say which targets are met. The very last is one JSON object, for n = 25.6 million, density
0.001, normal numbers.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from analysis.files import write_atomic
from analysis.records import now
from experiments.bench._case import Case, Timed
from experiments.bench._memory import flush_bytes, leave_out
from experiments.bench._side_by_side import measure
from experiments.bench._steps import ROWS
from experiments.bench.select import figure as select_figure
from experiments.bench.select import page as select_page
from experiments.bench.select.cases import DISTRIBUTIONS, REAL, cases, rows_of
from experiments.bench.select.records import SCHEMA, append, read, stem, text_of
from experiments.bench.select.results import record, summary, verdicts
from experiments.config import code_version
from experiments.config.folders import Folders
from experiments.worker.provenance import cpu_model, provenance

REPEATS = {"cpu": 11, "cuda": 50}
SECONDS = 6.0  # a row that has spent so long in a case has had its repetitions
NOT_MADE = "Not run"
PUBLIC = (
    "cpu", "cores", "memory_gib", "huge_pages", "gpu", "before", "platform", "versions", "commit", "dirty",
)  # fmt: skip


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
    store = folders.results / "bench" / f"{stem(about)}.jsonl"
    kept = asked.gradients or store.parent / "gradients"
    public = {name: value for name, value in provenance("", "", device).items() if name in PUBLIC}
    flush = flush_bytes(device) if asked.flush is None else asked.flush * 2**20
    print(f"{about['name']}, torch {about['torch']}; {repeats} repetitions, fewer of rows that take long; "
          f"before each step {flush >> 20} MiB are read")  # fmt: skip
    start = {"kind": "invocation", "at": about["at"], "flush_bytes": flush, "provenance": public}
    append(store, [{"schema": SCHEMA, **start}])
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
        records = [record(case, timed, lines, source, about) for timed in lines.values()]
        append(store, records)
        wrong += [f"{case}: {name} selects other magnitudes than {by}" for name, by in differ]
        print(f"\n### {case}\n\n{source}\n\n{select_page.table(records)}")
        print(f"{time.perf_counter() - began:.0f} s", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    drawn = select_figure.draw_one(store, folders.figures)
    print(f"\n{store}\n{drawn}")
    if asked.ship:
        print(*(f"shipped {path.name}" for path in ship(store, folders)), sep="\n")
    for line in wrong:
        print(f"WRONG: {line}")
    last = summary(found, about)
    print(*verdicts(last, device.type), json.dumps(last), sep="\n")
    return 1 if wrong else 0


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
        **code_version.origin(),
    }


def ship(store: Path, folders: Folders) -> list[Path]:
    """The newest row of each case, their provenance, and the figure, into what the repository carries."""
    target = folders.shipped / "bench" / store.name
    target.parent.mkdir(parents=True, exist_ok=True)
    rows, starts = read(store)
    used = {row["at"] for row in rows}
    kept = [*(start for start in starts if start["at"] in used), *rows]
    write_atomic(target, text_of(kept))
    return [target, select_figure.draw_one(target, folders.shipped / "figures")]


if __name__ == "__main__":
    sys.exit(main())
