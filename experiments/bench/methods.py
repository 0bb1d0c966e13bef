"""The parts of every method."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import Parameter

from experiments.bench import Device
from experiments.bench._runner import Bench, Record, spread
from experiments.bench._timing import Clock, device_of, facts, synchronise
from experiments.bench.bytes import built, named
from sparsify.comm import InstrumentedComm, virtual
from sparsify.core.timer import PhaseTimer
from sparsify.ranges import PositiveInt
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import StepReport

SIZES = (270_000, 14_700_000, 25_600_000)  # ResNet-20, VGG-16, ResNet-50
WORKERS, SETTLING, DENSITY, WIDTH = 2, 3, 0.001, 500
PARTS = ("select", "exchange", "retain", "scatter")
SCALE = 1e-3  # of the gradients, as in training


def methods(
    *,
    n: Sequence[PositiveInt] = SIZES,
    methods: str = "",
    repeats: PositiveInt = 5,
    device: Device | None = None,
) -> Bench:
    """Costs of each method apart from the network: select, exchange (packing, merging), retain, scatter.

    Two virtual workers hold one tensor of n elements each; communication itself takes no time here. Beside
    every step of a method, torch.topk on the same gradient is timed: `/ topk` is the median ratio of the
    pairs of the whole step to that, with the smallest and largest. The first steps, in which thresholds
    settle, are not counted.

    Args:
        n: elements.
        methods: names, with commas; all by default.
        repeats: pairs that are timed.
        device: cuda where there is one.
    """
    on, names = device_of(device), named(methods)
    return Bench(
        about=facts(on),
        head=f"density {DENSITY}, {WORKERS} virtual workers, {repeats} pairs; milliseconds, medians",
        cases=[{"n": size, "method": name} for size in n for name in names],
        setting={"density": DENSITY, "workers": WORKERS, "repeats": repeats},
        measure=lambda case: [measure(case["method"], case["n"], repeats, on)],
        heading=f"method | n | {' | '.join(PARTS)} | torch.topk | / topk | sent / k | bytes | host syncs",
        row="{method} | {n:,} | {select_ms:.2f} | {exchange_ms:.2f} | {retain_ms:.2f} | {scatter_ms:.2f} | "
        "{topk_ms:.2f} | {over_topk:.2f} | {sent_per_k:.2f} | {wire_bytes:,} | {host_syncs}",
    )


def measure(name: str, n: int, repeats: int, device: torch.device) -> Record:
    """Rank 0's steps after the first ones: medians, and the ratios within the pairs."""
    method = built(name, DENSITY)
    wait, alone = partial(synchronise, device), Clock(device, "wall")

    def body(comm: virtual.VirtualComm) -> list[tuple[dict[str, float], StepReport]]:
        timer = PhaseTimer("serialised", time.perf_counter, wait, keep_spans=lambda step: True)
        parameter = Parameter(torch.empty(n // WIDTH, WIDTH, device=device))
        aggregator = Aggregator(method, [("p", parameter)], InstrumentedComm(comm, timer), timer)
        own = torch.Generator(device).manual_seed(comm.rank)
        gradient = torch.randn(n // WIDTH * WIDTH, generator=own, device=device).mul_(SCALE)
        work, found = torch.empty_like(gradient), []
        for _ in range(SETTLING + repeats):
            aggregator.gradients.flat.copy_(gradient)
            if comm.rank == 0:
                with alone.timing("topk"):
                    torch.abs(gradient, out=work).topk(max(1, int(DENSITY * len(gradient))), sorted=False)
            comm.barrier()
            with timer.step():
                report = aggregator.aggregate()
            (sample,) = timer.finish_window(lambda mine: [mine])
            found.append((parts_of(sample.spans), report))
            gradient = gradient.roll(1)  # so that other elements are the largest each time
        return found[SETTLING:]

    parts, reports = zip(*virtual.run(WORKERS, body)[0], strict=True)
    topk_ms = [ms for _, ms, _ in alone.read()[SETTLING:]]
    gc.collect()
    return {
        **{f"{part}_ms": 1e3 * statistics.median(step[part] for step in parts) for part in PARTS},
        "topk_ms": statistics.median(topk_ms),
        "over_topk": spread([1e3 * sum(step.values()) / ms for step, ms in zip(parts, topk_ms, strict=True)]),
        "sent_per_k": reports[-1].selected / int(DENSITY * n),
        "wire_bytes": reports[-1].wire_bytes,
        "host_syncs": reports[-1].host_syncs,
        "pairs": len(parts),
    }


def parts_of(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """Selecting after the exchange is retaining. Waits and transfers belong to the network: left out."""
    parts, exchanged = dict.fromkeys(PARTS, 0.0), False
    for phase, _, took in spans:
        exchanged |= phase == "exchange"
        if phase in PARTS:
            parts["retain" if phase == "select" and exchanged else phase] += took
    return parts
