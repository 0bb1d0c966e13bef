"""The cost of timing itself."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from experiments.bench._runner import Bench, Record, spread
from experiments.bench._timing import device_of, facts
from sparsify.core.timer import PhaseTimer

PHASES_PER_STEP = 10
WORK_S = 0.020
REPEATS = 200


def timer() -> Bench:
    """The cost of timing: ten phases a step, against the work of a 20 ms step, side by side."""
    device = device_of("cpu", threads=1)
    return Bench(
        about=facts(device),
        cases=[{"phases": PHASES_PER_STEP, "work_s": WORK_S}],
        setting={"repeats": REPEATS},
        measure=measure,
        heading="phases | work of a step, ms | phases of a step, ms | phases / work, %",
        row="{phases} | {work_ms} | {phases_ms} | {percent}",
        last=lambda rows: {"phases_over_work": rows[0]["phases_over_work"]},
    )


def measure(case: Record) -> Iterator[Record]:
    """Work, and the phases after it, in each repetition."""
    matrix, phases = work_of(WORK_S), PhaseTimer("serialised")
    works, costs = list[float](), list[float]()
    for _ in range(REPEATS):
        began = time.perf_counter()
        matrix @ matrix
        worked = time.perf_counter()
        with phases.step():
            for number in range(PHASES_PER_STEP):
                with phases.phase(f"phase {number}"):
                    pass
        works.append(worked - began)
        costs.append(time.perf_counter() - worked)
    ratios = [cost / work for cost, work in zip(costs, works, strict=True)]
    yield {
        "work_ms": spread([1e3 * seconds for seconds in works]),
        "phases_ms": spread([1e3 * seconds for seconds in costs]),
        "percent": spread([100 * ratio for ratio in ratios]),
        "phases_over_work": spread(ratios),
    }


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
