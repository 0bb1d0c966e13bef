"""Is `select=auto` ever slower than `select=torch`? Searches of tiny to very large buckets, side by side.

make bench BENCH=auto [ARGS="--n 64 345000000 --layers --density 0.001 --device cpu"]

In every case torch, auto and fused search the same sums, in random order, and ratios are taken within each
repetition. A time is the wall clock's, from an idle device until it is idle again: so a launch costs what it
costs a host that waits for it. Caches are as the search before has left them. Last come the layers of VGG-16,
which a GPU's auto searches all at once, and the others one by one.

Below some size `auto` is torch. The last line, one JSON object, says below which; and from which size on
fused was faster than torch at every density that was measured, which it should be.
"""

from __future__ import annotations

import os.path
import sys

# Run by its path, Python would look into this folder first, whose `select` is not Python's.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import gc
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from analysis.files import write_atomic
from experiments.bench._case import rounded, spread
from experiments.bench._memory import SHARE, turns
from experiments.bench._side_by_side import no_collection
from experiments.bench.select.__main__ import PUBLIC, device_of, facts
from experiments.bench.select.records import append
from experiments.config.folders import Folders
from experiments.training import networks
from experiments.worker.memory import free_bytes
from experiments.worker.provenance import provenance
from sparsify.kernels import Kernel, joint_kernel_for, kernel_for, pays_from
from sparsify.method import num_selected

SCHEMA = 1  # of the records
SIZES = (64, 1024, 4096, 8192, 16_384, 32_768, 131_072, 1_048_576, 4_194_304, 25_600_000)
DENSITIES = (0.001, 0.01, 0.1)
ROWS = ("torch", "auto", "fused")
LEAST, MOST = 5, 200  # repetitions
SECONDS = 2.5  # after which a case stops repeating
SETTLING = 2  # untimed repetitions: buffers are made, kernels compiled
HELD = 11  # floats per element: residual, gradients, sum; magnitudes and what torch.topk allocates


Search = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[int]], object]  # of sums, gradients, ks


class Case(NamedTuple):
    sizes: tuple[int, ...]  # of buckets that are searched in turn
    density: float

    @property
    def n(self) -> int:
        return sum(self.sizes)


def main() -> int:
    words = argparse.ArgumentParser(prog="make bench BENCH=auto", description=__doc__.partition("\n")[0])
    words.add_argument(
        "--n", type=int, nargs="+", default=(), help=f"elements; default: {SIZES}, and --layers"
    )
    words.add_argument("--layers", action="store_true", help="those of VGG-16")
    words.add_argument("--density", type=float, nargs="+", default=DENSITIES, help="k/n")
    words.add_argument("--seconds", type=float, default=SECONDS, help="after which a case stops repeating")
    words.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    words.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    words.add_argument("--ship", action="store_true", help="copy all records into results/shipped")
    asked = words.parse_args()
    try:
        return bench(asked)
    except ValueError as error:
        print(f"auto: {error}", file=sys.stderr)
        return 2


def bench(asked: argparse.Namespace) -> int:
    check(asked)
    device = device_of(asked)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    about = facts(device)
    folders = Folders()
    store = folders.results / "bench" / f"auto-{re.sub('[^a-z0-9]+', '-', about['name'].lower())}.jsonl"
    public = {name: value for name, value in provenance("", "", device).items() if name in PUBLIC}
    append(store, [{"schema": SCHEMA, "kind": "invocation", "at": about["at"], "provenance": public}])
    print(f"{about['name']}, torch {about['torch']}; medians [spread]; repetitions in the last column\n")
    print("| n | density | auto is | torch, ms | auto, ms | fused, ms | torch / auto | torch / fused | |")
    print("|---:|---:|---|---:|---:|---:|---:|---:|---:|")
    found = []
    for case in cases(asked):
        if (needed := 4 * HELD * case.n) > (free := SHARE * free_bytes(device)):
            room = f"needs {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
            print(f"| {case.n:,} | {case.density:g} | {room} ||||||", flush=True)
            continue
        record = {"schema": SCHEMA, "kind": "row", **about, **measure(case, device, asked.seconds)}
        append(store, [record])
        found.append(record)
        print(line(record), flush=True)
        gc.collect()
    print(f"\n{store}")
    if asked.ship:
        shipped = folders.shipped / "bench" / store.name
        shipped.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(shipped, store.read_text())
    print(json.dumps(summary(found, about, pays_from(torch.empty(0, device=device)))))
    return 0


def check(asked: argparse.Namespace) -> None:
    for n in asked.n:
        if n < 1:
            raise ValueError(f"--n {n}: must be 1 or more")
    for density in asked.density:
        if not 0 < density <= 1:
            raise ValueError(f"--density {density}: must lie in (0, 1]")
    if asked.threads is not None and asked.threads < 1:
        raise ValueError(f"--threads {asked.threads}: must be 1 or more")


def cases(asked: argparse.Namespace) -> list[Case]:
    sizes: list[tuple[int, ...]] = [(n,) for n in asked.n or (() if asked.layers else SIZES)]
    if asked.layers or not asked.n:
        with torch.device("meta"):
            sizes.append(tuple(p.numel() for p in networks.vgg16(3, 32, 10).parameters()))
    return [Case(*both) for both in product(sizes, asked.density)]


def measure(case: Case, device: torch.device, seconds: float) -> dict[str, Any]:
    """The samples of one case, their medians, and ratios within repetitions."""
    generator = torch.Generator(device).manual_seed(0)
    # Several gradients take turns: a processor that meets the same one again has learnt where it branches.
    residual, *grads = (
        [torch.randn(n, generator=generator, device=device) for n in case.sizes]
        for _ in range(1 + turns(case.n))
    )
    accs = list(map(torch.empty_like, residual))
    ks = [num_selected(n, case.density) for n in case.sizes]
    searches, names, why = ready(residual)
    samples: dict[str, list[float]] = {row: [] for row in searches}
    order = random.Random(0)
    synchronise: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    began, turn = time.perf_counter(), -SETTLING
    with no_collection():
        while turn < LEAST or (turn < MOST and time.perf_counter() - began < seconds):
            for row in order.sample(list(searches), len(searches)):
                for acc, owed in zip(accs, residual, strict=True):
                    acc.copy_(owed)
                synchronise()
                start = time.perf_counter()
                searches[row](accs, grads[turn % len(grads)], ks)
                synchronise()
                if turn >= 0:
                    samples[row].append(1e3 * (time.perf_counter() - start))
            turn += 1
    return {
        "n": case.n,
        "buckets": len(case.sizes),
        "density": case.density,
        "k": sum(ks),
        "kernels": names,
        **{f"{row}_ms": spread(samples[row]) if row in samples else None for row in ROWS},
        **{f"torch_over_{row}": over(samples["torch"], samples.get(row)) for row in ("auto", "fused")},
        "why": why,
        "samples_ms": {row: [rounded(ms) for ms in taken] for row, taken in samples.items()},
    }


def ready(likes: list[Tensor]) -> tuple[dict[str, Search], dict[str, str], str | None]:
    """The search of each row, and its kernels by name; and why there is none for `fused`, if so."""
    alone = {
        "torch": [kernel_for(like, "torch") for like in likes],
        "auto": [kernel_for(like) for like in likes],
    }
    why = None
    try:
        alone["fused"] = [kernel_for(like, "fused") for like in likes]
    except ValueError as error:
        why = str(error)
    searches = {row: one_by_one(kernels) for row, kernels in alone.items()}
    names = {row: " and ".join(sorted({kernel.name for kernel in kernels})) for row, kernels in alone.items()}
    if together := joint_kernel_for(likes):
        searches["auto"], names["auto"] = together.topk, together.name
    return searches, names, why


def one_by_one(kernels: Sequence[Kernel]) -> Search:
    def search(accs: Sequence[Tensor], grads: Sequence[Tensor], ks: Sequence[int]) -> None:
        for kernel, acc, grad, k in zip(kernels, accs, grads, ks, strict=True):
            kernel.topk(acc, grad, k)

    return search


def over(above: list[float], below: list[float] | None) -> dict[str, Any] | None:
    return None if below is None else spread([one / other for one, other in zip(above, below, strict=True)])


def line(record: dict[str, Any]) -> str:
    size = f"{record['n']:,}" + (f" in {record['buckets']} buckets" if record["buckets"] > 1 else "")
    cells = [size, f"{record['density']:g}", record["kernels"]["auto"]]
    cells += [f"{ms['median']:.3g}" if (ms := record[f"{row}_ms"]) else "" for row in ROWS]
    for row in ("auto", "fused"):
        ratio = record[f"torch_over_{row}"]
        cells.append(f"{ratio['median']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" if ratio else "")
    return "| " + " | ".join([*cells, str(record["torch_ms"]["n"])]) + " |"


def summary(found: list[dict[str, Any]], about: dict[str, Any], pays_from: int) -> dict[str, Any]:
    """The last line."""
    names = ("n", "buckets", "density", "kernels", "torch_over_auto", "torch_over_fused")
    return {
        "bench": "auto",
        "device": about["name"],
        "torch": about["torch"],
        "fused_from": pays_from,
        "fused_pays_from": crossing(found),
        "least_torch_over_auto": min((record["torch_over_auto"]["median"] for record in found), default=None),
        "cases": [{name: record[name] for name in names} for record in found],
    }


def crossing(found: list[dict[str, Any]]) -> int | None:
    """The least n from which on fused was faster than torch in every case; None where it was not at the
    largest, or is not to be had.
    """
    alone = [record for record in found if record["buckets"] == 1]
    slower = max((record["n"] for record in alone if not is_faster(record["torch_over_fused"])), default=0)
    return min((record["n"] for record in alone if record["n"] > slower), default=None)


def is_faster(torch_over: dict[str, Any] | None) -> bool:
    return torch_over is not None and torch_over["median"] > 1


if __name__ == "__main__":
    sys.exit(main())
