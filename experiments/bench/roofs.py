"""The bandwidth of a device's memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch

from experiments.bench import SIZES, Device
from experiments.bench._runner import Benchmark, Record, summarise_median_and_range
from experiments.bench._timing import (
    DEFAULT_REPEATS,
    Call,
    CallTimer,
    capture_cuda_graph,
    choose_device_and_set_threads,
    describe_machine_and_code,
    explain_lack_of_memory,
    time_calls_in_turns,
)
from sparsify.ranges import PositiveInt

TRAFFIC_BYTES = {"copy": 8, "add": 12, "read": 4}  # per element
HELD_BYTES = 8  # per element


def roofs(
    *, n: Sequence[PositiveInt] = SIZES, repeats: PositiveInt | None = None, device: Device | None = None
) -> Benchmark:
    """Measure how fast this device's memory copies, adds in place, and reads; and list versions.

    Args:
        n: numbers of elements, float32.
        repeats: repetitions; by default 11 on a CPU, 50 on a GPU.
        device: cpu or cuda; by default cuda where there is a GPU.
    """
    torch_device = choose_device_and_set_threads(device)
    repeats = repeats or DEFAULT_REPEATS[torch_device.type]

    def measure(case: Record) -> Iterator[Record]:
        size = case["n"]
        why = explain_lack_of_memory(HELD_BYTES * size, torch_device)
        if why:
            yield {"why": why}
            return
        source = torch.full((size,), 1e-3, device=torch_device)
        target = torch.zeros(size, device=torch_device)
        calls: dict[str, Call] = {
            "copy": lambda: target.copy_(source),
            "add": lambda: target.add_(source),
            "read": lambda: source.sum(),
        }
        if torch_device.type == "cuda":
            calls = {name: capture_cuda_graph(call) for name, call in calls.items()}
        times = time_calls_in_turns(calls, CallTimer(torch_device), repeats).wall_ms_by_call
        yield {
            name: summarise_median_and_range(
                [1e-6 * TRAFFIC_BYTES[name] * size / ms for ms in by_turn.values()]
            )
            for name, by_turn in times.items()
        }

    machine = describe_machine_and_code(torch_device)
    return Benchmark(
        machine=machine,
        cases=[{"n": size} for size in n],
        settings={"repeats": repeats},
        measure=measure,
        header="n | copy, GB/s | in-place add, GB/s | read, GB/s",
        row_format="{n:,} | {copy} | {add} | {read}",
        summarise=lambda rows: {
            "python": sys.version.split()[0],
            "capability": list(torch.cuda.get_device_capability(torch_device))
            if torch_device.type == "cuda"
            else None,
            "cuda": torch.version.cuda,
            "provenance": machine["provenance"],
            "cases": [{name: row.get(name) for name in ("n", *TRAFFIC_BYTES)} for row in rows],
        },
    )
