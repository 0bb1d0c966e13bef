"""How fast a device's memory is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch

from experiments.bench import SIZES, Device
from experiments.bench._runner import Bench, Record, spread
from experiments.bench._timing import REPEATS, Clock, TimedCall, captured, device_of, facts, in_turn, lacking
from sparsify.ranges import PositiveInt

BYTES = {"copy": 8, "add": 12, "read": 4}  # per element
HELD = 8  # bytes per element


def roofs(
    *, n: Sequence[PositiveInt] = SIZES, repeats: PositiveInt | None = None, device: Device | None = None
) -> Bench:
    """Versions and roofs: how fast does this device's memory copy, add in place, and read?

    Args:
        n: elements, float32.
        repeats: 11 on a CPU, 50 on a GPU.
        device: cuda where there is one.
    """
    on = device_of(device)
    times = repeats or REPEATS[on.type]

    def measure(case: Record) -> Iterator[Record]:
        """GB/s of each."""
        size = case["n"]
        if why := lacking(HELD * size, on):
            yield {"why": why}
            return
        source, target = torch.full((size,), 1e-3, device=on), torch.zeros(size, device=on)
        calls: dict[str, TimedCall] = {
            "copy": lambda: target.copy_(source),
            "add": lambda: target.add_(source),
            "read": lambda: source.sum(),
        }
        if on.type == "cuda":
            calls = {name: captured(call) for name, call in calls.items()}
        taken = in_turn(calls, Clock(on), times)
        yield {
            name: spread([1e-6 * BYTES[name] * size / ms for ms in samples.values()])
            for name, samples in taken.items()
        }

    about = facts(on)
    return Bench(
        about=about,
        cases=[{"n": size} for size in n],
        setting={"repeats": times},
        measure=measure,
        heading="n | copy, GB/s | in-place add, GB/s | read, GB/s",
        row="{n:,} | {copy} | {add} | {read}",
        last=lambda rows: {
            "python": sys.version.split()[0],
            "capability": list(torch.cuda.get_device_capability(on)) if on.type == "cuda" else None,
            "cuda": torch.version.cuda,
            "provenance": about["provenance"],
            "cases": [{name: row.get(name) for name in ("n", *BYTES)} for row in rows],
        },
    )
