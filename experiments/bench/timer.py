"""The cost of timing itself."""

from __future__ import annotations

import time

import torch

from experiments.bench._runner import Bench, Record, ratio, spread
from experiments.bench._timing import Clock, device_of, facts, in_turn
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
        measure=lambda case: [measure(case, device)],
        heading="phases | work of a step, ms | phases of a step, ms | phases / work, %",
        row="{phases} | {work_ms} | {phases_ms} | {percent}",
        last=lambda rows: {"phases_over_work": rows[0]["phases_over_work"]},
    )


def measure(case: Record, device: torch.device) -> Record:
    """Work and phases, in turn."""
    matrix, timer = work_of(WORK_S), PhaseTimer("serialised")

    def phases() -> None:
        with timer.step():
            for number in range(PHASES_PER_STEP):
                with timer.phase(f"phase {number}"):
                    pass

    took = in_turn({"work": lambda: matrix @ matrix, "phases": phases}, Clock(device), REPEATS)
    work, cost = took["work"], took["phases"]
    return {
        "work_ms": spread([*work.values()]),
        "phases_ms": spread([*cost.values()]),
        "percent": spread([100 * cost[turn] / work[turn] for turn in cost]),
        "phases_over_work": ratio(cost, work),
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
