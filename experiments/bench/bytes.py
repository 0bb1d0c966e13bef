"""Bytes on the wire: as each method promises, as the communicator counts, and as the literature has them.

make bench BENCH=bytes [ARGS="--n 100000 --methods topk,gtopk"]

Every method sends one bucket of normal gradients, for several numbers of workers P and densities k/n.
*promised* is what closed forms say, given how many elements each worker sent (promises.py, by the forms of
sparsify/cost.py); *counted* is what went through the communicator in the same step, on rank 0. They must be
equal, or counted must lie in the promised range. *published* is the bandwidth term of the literature for a
nominal k, in bytes of 4 per word (`sparsify.cost.published`: Table 1 of Zhang's Stable Top-K slides, after Li
and Hoefler 2022, and a few rows more); announcements of lengths come on top of it, and thresholds select
about k.
"""

from __future__ import annotations

import os.path
import sys

# Run by its path, Python would look into this folder first, whose `select` is not Python's.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse

import torch
from torch.nn import Parameter

import sparsify
from experiments.bench._promises import Range, Seen, promised
from sparsify import cost
from sparsify.aggregator import Aggregator, Report
from sparsify.comm import virtual
from sparsify.method import num_selected
from sparsify.ranges import shown, unknown

WORKERS, DENSITIES, STEPS = (2, 4, 8, 16), (0.001, 0.01, 0.1), 3
ROW = 100  # gradients are a matrix, as PowerSGD needs
SCHEMES = {
    "dense": "dense", "topk": "topka", "gaussiank": "gaussiank", "sparcml": "topkdsa", "gtopk": "gtopk",
    "oktopk": "oktopk", "randomk": "randomk allgather", "blockrandomk": "blockrandomk allgather",
    "scalecom": "scalecom",
}  # fmt: skip


def main() -> int:
    words = argparse.ArgumentParser(prog="make bench BENCH=bytes", description=__doc__.partition("\n")[0])
    words.add_argument("--n", type=elements, default=100_000, help=f"elements, in rows of {ROW}")
    words.add_argument("--methods", default=",".join(sparsify.names()), help="names, with commas")
    asked = words.parse_args()
    for name in asked.methods.split(","):
        if name not in sparsify.names():
            words.error(unknown("method", name, sparsify.names()))
    print(f"n = {asked.n:,}, float32\n\n| method | P | k | sent | promised | counted | kept | published |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = 0
    for name in asked.methods.split(","):
        for size in WORKERS:
            for density in DENSITIES if "density" in sparsify.defaults(name) else DENSITIES[:1]:
                sent, promise, counted = measure(name, size, density, asked.n)
                is_kept = promise is not None and promise.least <= counted <= promise.most
                wrong += not is_kept
                k = num_selected(asked.n, density)
                cells = (
                    name, size, f"{k:,}" if "density" in sparsify.defaults(name) else "", f"{sent:,}",
                    in_words(promise), f"{counted:,}", "yes" if is_kept else "NO",
                    published(name, asked.n, k, size),
                )  # fmt: skip
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print(f"\n{wrong} of these promised other bytes than were counted")
    return 1 if wrong else 0


def elements(text: str) -> int:
    """A number of elements that can be put into rows."""
    if not text.isdigit() or int(text) == 0 or int(text) % ROW:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no multiple of {ROW}, the length of a row")
    return int(text)


def in_words(promise: Range | None) -> str:
    if promise is None:
        return ""
    return f"{promise.least:,}" + (f" to {promise.most:,}" if promise.most != promise.least else "")


def measure(name: str, size: int, density: float, n: int) -> tuple[int, Range | None, int]:
    """Elements sent, bytes promised and bytes counted in the last of some steps, on rank 0."""
    known = sparsify.defaults(name)
    choices = {key: value for key, value in (("density", density), ("scope", "global")) if key in known}
    method = sparsify.build(name, **choices)

    shape = (n // ROW, ROW)

    def body(comm: virtual.VirtualComm) -> Report:
        aggregator = Aggregator(method, [("p", Parameter(torch.zeros(shape)))], comm)
        own = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            aggregator.gradients.flat.copy_(torch.randn(n, generator=own) * 0.01)
            report = aggregator.aggregate()
        return report

    reports = virtual.run(size, body)
    selected = [report.selected for report in reports]
    k = num_selected(n, method.density_at(0))
    promise = promised(method, Seen((shape,), k, torch.float32, size, STEPS - 1, selected))
    return selected[0], promise, reports[0].wire_bytes


def published(name: str, n: int, k: int, size: int) -> str:
    if name not in SCHEMES:
        return ""
    least, most, _ = cost.published(SCHEMES[name], n, k, size)
    return f"{float(4 * least):,.0f}" + (f" to {float(4 * most):,.0f}" if most != least else "")


if __name__ == "__main__":
    sys.exit(main())
