"""Bytes on the wire: as each method promises, as the communicator counts, and as the literature has them.

make bench BENCH=bytes [ARGS="--n 100000 --methods topk,gtopk"]

Every method sends one bucket of normal gradients, for several numbers of workers P and densities k/n.
*promised* is what the closed forms of sparsify/cost.py say, *counted* what went through the communicator in
the same step, on rank 0; they must be equal. *published* is the bandwidth term of the literature for a
nominal k, in bytes of 4 per word (`sparsify.cost.published`: Table 1 of Zhang's Stable Top-K slides, after Li
and Hoefler 2022, and a few rows more); announcements of lengths come on top of it, and thresholds select
about k.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch.nn import Parameter

import sparsify
from sparsify import cost
from sparsify.aggregate import num_selected
from sparsify.aggregator import Aggregator
from sparsify.comm import Metered, virtual
from sparsify.timer import PhaseTimer

WORKERS, DENSITIES, STEPS = (2, 4, 8, 16), (0.001, 0.01, 0.1), 3
SCHEMES = {
    "dense": "dense", "topk": "topka", "gaussiank": "gaussiank", "sparcml": "topkdsa", "gtopk": "gtopk",
    "oktopk": "oktopk", "randomk": "randomk allgather", "blockrandomk": "blockrandomk allgather",
    "scalecom": "scalecom",
}  # fmt: skip


def main() -> int:
    words = argparse.ArgumentParser(prog="make bench BENCH=bytes", description=__doc__.partition("\n")[0])
    words.add_argument("--n", type=int, default=100_000)
    words.add_argument("--methods", default=",".join(sparsify.names()), help="names, with commas")
    asked = words.parse_args()
    print(f"n = {asked.n:,}, float32\n\n| method | P | k | sent | promised | counted | equal | published |")
    print("|---|---|---|---|---|---|---|---|")
    wrong = 0
    for name in asked.methods.split(","):
        for size in WORKERS:
            for density in DENSITIES if "density" in sparsify.defaults(name) else DENSITIES[:1]:
                sent, promised, counted = measure(name, size, density, asked.n)
                wrong += promised != counted
                k = num_selected(asked.n, density)
                cells = (
                    name, size, f"{k:,}" if "density" in sparsify.defaults(name) else "", f"{sent:,}",
                    f"{promised:,}", f"{counted:,}", "yes" if promised == counted else "NO",
                    published(name, asked.n, k, size),
                )  # fmt: skip
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print(f"\n{wrong} of these promised other bytes than were counted")
    return 1 if wrong else 0


def measure(name: str, size: int, density: float, n: int) -> tuple[int, int, int]:
    """Elements sent, bytes promised and bytes counted in the last of some steps, on rank 0."""
    known = sparsify.defaults(name)
    choices = {key: value for key, value in (("density", density), ("scope", "global")) if key in known}
    method = sparsify.build(name, **choices)

    def body(comm: virtual.VirtualComm) -> tuple[int, int, int]:
        timer = PhaseTimer("production", comm.now)
        metered = Metered(comm, timer)
        aggregator = Aggregator(method, [("p", Parameter(torch.zeros(n // 100, 100)))], metered, timer)
        own = torch.Generator().manual_seed(comm.rank)
        for _ in range(STEPS):
            aggregator.gradients.flat.copy_(torch.randn(n, generator=own) * 0.01)
            before = metered.sent_bytes
            report = aggregator.aggregate()
        return report.selected, report.wire_bytes, metered.sent_bytes - before

    sent: tuple[int, int, int] = virtual.run(size, body)[0]
    return sent


def published(name: str, n: int, k: int, size: int) -> str:
    if name not in SCHEMES:
        return ""
    least, most, _ = cost.published(SCHEMES[name], n, k, size)
    return f"{float(4 * least):,.0f}" + (f" to {float(4 * most):,.0f}" if most != least else "")


if __name__ == "__main__":
    sys.exit(main())
