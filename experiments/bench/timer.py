"""What does timing cost? Ten phases a step, against the work of a 20 ms step, side by side."""

from __future__ import annotations

import os.path
import sys

# Run by its path, Python would look into this folder first, whose `select` is not Python's.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import json
import statistics
import time

import torch

from experiments.worker.provenance import cpu_model
from sparsify.timer import PhaseTimer

PHASES_PER_STEP = 10
WORK_S = 0.020
REPEATS = 200


def work_of(seconds: float) -> torch.Tensor:
    """A square matrix whose product with itself takes about `seconds`."""
    size = 64
    while True:
        matrix = torch.rand(size, size)
        matrix @ matrix
        began = time.perf_counter()
        matrix @ matrix
        took = time.perf_counter() - began
        if took >= 0.9 * seconds:
            return matrix
        size = int(size * max(1.05, min(2.0, (seconds / max(took, 1e-6)) ** (1 / 3))))


def main() -> None:
    torch.set_num_threads(1)
    matrix = work_of(WORK_S)
    timer = PhaseTimer("serialised")
    ratios, works, costs = [], [], []
    for _ in range(REPEATS):
        began = time.perf_counter()
        matrix @ matrix
        worked = time.perf_counter()
        with timer.step():
            for number in range(PHASES_PER_STEP):
                with timer.phase(f"phase {number}"):
                    pass
        timed = time.perf_counter()
        works.append(worked - began)
        costs.append(timed - worked)
        ratios.append((timed - worked) / (worked - began))
    low, median, high = (
        statistics.quantiles(ratios, n=20)[0],
        statistics.median(ratios),
        statistics.quantiles(ratios, n=20)[-1],
    )
    print(f"{cpu_model()}, torch {torch.__version__}, 1 thread, n = {REPEATS}")
    print(f"work of a step      {1e3 * statistics.median(works):8.3f} ms (median)")
    print(f"{PHASES_PER_STEP} phases           {1e3 * statistics.median(costs):8.3f} ms (median)")
    print(f"phases over work    {100 * median:8.3f} % (5 to 95 %: {100 * low:.3f} to {100 * high:.3f} %)")
    print(json.dumps({"bench": "timer", "phases_over_work": median, "low": low, "high": high, "n": REPEATS}))


if __name__ == "__main__":
    main()
