"""What each method costs apart from the network: select, exchange (packing, merging), retain, scatter.

make bench BENCH=methods [ARGS="--n 270000 --methods topk,dgc --repeats 5"]

Two virtual workers hold one tensor of n elements each; communication itself takes no time here. Beside every
step of a method, torch.topk on the same gradient is timed: `/ topk` is the median ratio of the pairs of the
whole step to that, with the smallest and largest. The first steps, in which thresholds settle, are not
counted.
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
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import sparsify
from experiments.config.folders import Folders
from sparsify.aggregator import Aggregator, Report
from sparsify.comm import InstrumentedComm, virtual
from sparsify.timer import PhaseTimer

SIZES = (270_000, 14_700_000, 25_600_000)  # ResNet-20, VGG-16, ResNet-50
WORKERS, SETTLING, DENSITY, WIDTH = 2, 3, 0.001, 500
PARTS = ("select", "exchange", "retain", "scatter")
SCALE = 1e-3  # of the gradients, as in training


class Timed(NamedTuple):
    """One step of one worker beside torch.topk."""

    parts: dict[str, float]  # seconds
    topk_s: float
    report: Report


def main() -> None:
    words = argparse.ArgumentParser(prog="make bench BENCH=methods", description=__doc__.partition("\n")[0])
    words.add_argument("--n", type=int, nargs="*", default=SIZES, help="elements")
    words.add_argument("--methods", default=",".join(sparsify.names()), help="names, with commas")
    words.add_argument("--repeats", type=int, default=5)
    words.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = words.parse_args()
    device = torch.device(asked.device)
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )
    rows: list[dict[str, Any]] = []
    for n in asked.n:
        print(f"\nn = {n:,}, density {DENSITY}, {WORKERS} virtual workers, {asked.repeats} pairs, {name}, "
              f"torch {torch.__version__}; milliseconds, medians\n")  # fmt: skip
        head = ("method", *PARTS, "torch.topk", "/ topk", "sent / k", "bytes", "host syncs")
        print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
        for method in asked.methods.split(","):
            timed = measure(method, n, asked.repeats, device)
            rows.append({"method": method, "n": n, "device": name, **summary(timed, n)})
            print(line(rows[-1]), flush=True)
    folder = Folders().results / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "methods.json").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(name: str, n: int, repeats: int, device: torch.device) -> list[Timed]:
    """Rank 0's steps after the first ones."""
    density = {"density": DENSITY} if "density" in sparsify.defaults(name) else {}
    scope = {"scope": "global"} if "scope" in sparsify.defaults(name) else {}
    method = sparsify.build(name, **density, **scope)
    synchronise = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)

    def body(comm: virtual.VirtualComm) -> list[Timed]:
        timer = PhaseTimer("serialised", time.perf_counter, synchronise, keep_spans=lambda step: True)
        parameter = Parameter(torch.empty(n // WIDTH, WIDTH, device=device))
        aggregator = Aggregator(method, [("p", parameter)], InstrumentedComm(comm, timer), timer)
        own = torch.Generator(device).manual_seed(comm.rank)
        gradient = torch.randn(n // WIDTH * WIDTH, generator=own, device=device).mul_(SCALE)
        work, found = torch.empty_like(gradient), list[Timed]()
        for _ in range(SETTLING + repeats):
            aggregator.gradients.flat.copy_(gradient)
            topk_s = time_topk(gradient, work, synchronise) if comm.rank == 0 else 0.0
            comm.barrier()
            with timer.step():
                report = aggregator.aggregate()
            (sample,) = timer.resolve(lambda mine: [mine])
            found.append(Timed(parts_of(sample.spans), topk_s, report))
            gradient = gradient.roll(1)  # so that other elements are the largest each time
        return found[SETTLING:]

    timed: list[Timed] = virtual.run(WORKERS, body)[0]
    gc.collect()
    return timed


def time_topk(gradient: Tensor, work: Tensor, synchronise: Any) -> float:
    synchronise()
    start = time.perf_counter()
    torch.abs(gradient, out=work).topk(max(1, int(DENSITY * len(gradient))), sorted=False)
    synchronise()
    return time.perf_counter() - start


def parts_of(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """Selecting after the exchange is retaining. Waits and transfers belong to the network: left out."""
    parts, exchanged = dict.fromkeys(PARTS, 0.0), False
    for phase, _, took in spans:
        exchanged |= phase == "exchange"
        if phase in PARTS:
            parts["retain" if phase == "select" and exchanged else phase] += took
    return parts


def summary(timed: list[Timed], n: int) -> dict[str, Any]:
    ratios = [sum(step.parts.values()) / step.topk_s for step in timed]
    last = timed[-1].report
    return {
        **{part: statistics.median(step.parts[part] for step in timed) for part in PARTS},
        "topk": statistics.median(step.topk_s for step in timed),
        "ratio": [statistics.median(ratios), min(ratios), max(ratios)],
        "sent_per_k": last.selected / int(DENSITY * n),
        "wire_bytes": last.wire_bytes,
        "host_syncs": last.host_syncs,
        "pairs": len(timed),
    }


def line(row: dict[str, Any]) -> str:
    middle, low, high = row["ratio"]
    cells = [
        row["method"], *(f"{1e3 * row[part]:.2f}" for part in PARTS), f"{1e3 * row['topk']:.2f}",
        f"{middle:.2f} [{low:.2f}, {high:.2f}]", f"{row['sent_per_k']:.2f}", f"{row['wire_bytes']:,}",
        str(row["host_syncs"]),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
