"""The times of the parts of every method."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import Parameter

from experiments.bench import Device
from experiments.bench._runner import Benchmark, Record, summarise_median_and_range
from experiments.bench._timing import (
    CallTimer,
    choose_device_and_set_threads,
    describe_machine_and_code,
    synchronise_if_cuda,
)
from experiments.bench.bytes import build_global_method, parse_per_step_methods_or_all
from sparsify.comm import InstrumentedComm, virtual
from sparsify.core.timer import PhaseTimer
from sparsify.ranges import PositiveInt
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import StepReport

SIZES = (270_000, 14_700_000, 25_600_000)  # ResNet-20, VGG-16, ResNet-50
WORKERS = 2
SETTLING_STEPS = 3
DENSITY = 0.001
ROW_LENGTH = 500  # gradients are a matrix, as PowerSGD needs
PARTS = ("select", "exchange", "retain", "scatter")
SCALE = 1e-3  # of the gradients, as in training


def methods(
    *,
    n: Sequence[PositiveInt] = SIZES,
    methods: str = "",
    repeats: PositiveInt = 5,
    device: Device | None = None,
) -> Benchmark:
    """Time each method apart from the network: select, exchange (packing, merging), retain, scatter.

    Two virtual workers hold one tensor of n elements each; communication itself takes no time here. Beside
    every step of a method, torch.topk on the same gradient is timed: `/ topk` is the median ratio of the
    pairs of the whole step to that, with the smallest and largest. The first steps, in which thresholds
    settle, are not counted.

    Args:
        n: numbers of elements.
        methods: names of methods, with commas; by default all.
        repeats: number of timed pairs.
        device: cpu or cuda; by default cuda where there is a GPU.
    """
    torch_device = choose_device_and_set_threads(device)
    names = parse_per_step_methods_or_all(methods)
    return Benchmark(
        machine=describe_machine_and_code(torch_device),
        description=f"density {DENSITY}, {WORKERS} virtual workers, {repeats} pairs; milliseconds, medians",
        cases=[{"n": size, "method": name} for size in n for name in names],
        settings={"density": DENSITY, "workers": WORKERS, "repeats": repeats},
        measure=lambda case: [time_method_parts(case["method"], case["n"], repeats, torch_device)],
        header=f"method | n | {' | '.join(PARTS)} | torch.topk | / topk | sent / k | bytes | host syncs",
        row_format="{method} | {n:,} | {select_ms:.2f} | {exchange_ms:.2f} | {retain_ms:.2f} | "
        "{scatter_ms:.2f} | {topk_ms:.2f} | {over_topk:.2f} | {sent_per_k:.2f} | {wire_bytes:,} | "
        "{host_syncs}",
    )


def time_method_parts(name: str, n: int, repeats: int, device: torch.device) -> Record:
    """Return medians of rank 0's steps after the first ones, and their ratios to torch.topk."""
    method = build_global_method(name, DENSITY)
    topk_clock = CallTimer(device, "wall")

    def run_steps(comm: virtual.VirtualComm) -> list[tuple[dict[str, float], StepReport]]:
        wait = partial(synchronise_if_cuda, device)
        timer = PhaseTimer("serialised", time.perf_counter, wait, keep_spans=lambda step: True)
        parameter = Parameter(torch.empty(n // ROW_LENGTH, ROW_LENGTH, device=device))
        aggregator = Aggregator(method, [("p", parameter)], InstrumentedComm(comm, timer), timer)
        rng = torch.Generator(device).manual_seed(comm.rank)
        gradient = torch.randn(parameter.numel(), generator=rng, device=device).mul_(SCALE)
        magnitudes = torch.empty_like(gradient)
        steps = []
        for _ in range(SETTLING_STEPS + repeats):
            aggregator.gradients.flat.copy_(gradient)
            if comm.rank == 0:
                with topk_clock.time_block("topk"):
                    k = max(1, int(DENSITY * len(gradient)))
                    torch.abs(gradient, out=magnitudes).topk(k, sorted=False)
            comm.barrier()
            with timer.step():
                report = aggregator.aggregate()
            (sample,) = timer.finish_window_and_split_waits(lambda samples: [samples])
            steps.append((sum_seconds_by_part(sample.spans), report))
            gradient = gradient.roll(1)  # so that other elements are the largest each time
        return steps[SETTLING_STEPS:]

    parts, reports = zip(*virtual.run(WORKERS, run_steps)[0], strict=True)
    topk_ms = [call.wall_ms for call in topk_clock.read_and_clear()[SETTLING_STEPS:]]
    ratios = [1e3 * sum(step.values()) / ms for step, ms in zip(parts, topk_ms, strict=True)]
    gc.collect()
    return {
        **{f"{part}_ms": 1e3 * statistics.median(step[part] for step in parts) for part in PARTS},
        "topk_ms": statistics.median(topk_ms),
        "over_topk": summarise_median_and_range(ratios),
        "sent_per_k": reports[-1].selected / int(DENSITY * n),
        "wire_bytes": reports[-1].wire_bytes,
        "host_syncs": reports[-1].host_syncs,
        "pairs": len(parts),
    }


def sum_seconds_by_part(spans: list[tuple[str, float, float]]) -> dict[str, float]:
    """Return the seconds of each part.

    Selecting after the exchange is retaining. Waits and transfers belong to the network, and are left out.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    is_exchanged = False
    for phase, _, duration_s in spans:
        is_exchanged |= phase == "exchange"
        part = "retain" if phase == "select" and is_exchanged else phase
        if part in PARTS:
            seconds[part] += duration_s
    return seconds
