"""Every kernel in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from experiments.bench import SIZES, Device
from experiments.bench._runner import WRONG, Bench, Record, ratio, rounded, spread
from experiments.bench._side_by_side import SelectCase, SideBySide, StepTimes, flush_bytes, same_magnitudes
from experiments.bench._timing import REPEATS, Clock, Waits, captured, device_of, facts, in_turn, lacking
from sparsify.kernels import TorchKernel
from sparsify.ranges import PositiveInt, describe_unknown

DENSITY = 0.001
HELD = 24  # floats per element that all rows together hold, or pass
PROFILED = 10  # replays whose kernels are looked at
STEPS = ("add", "fused", "fallback", "threshold", "eager")
SELECT_K = ("fused", "fallback")  # these find what torch.topk finds
RATIOS = {"fused_over_add": ("fused", "add"), "fallback_over_fused": ("fallback", "fused"),
          "eager_over_fused": ("eager", "fused")}  # fmt: skip


def kernels(
    *,
    n: Sequence[PositiveInt] = SIZES,
    rows: Sequence[str] = (),
    repeats: PositiveInt | None = None,
    device: Device | None = None,
    check: bool = False,
) -> Bench:
    """Every kernel in a CUDA graph: the device's time of a step beside the host's, and of each kernel in it.

    The device's time is that of a graph's replay, between events: no launch of the host's is in it. The
    host's is that of an ordinary call on an idle device, until it returns. Rows take turns; before each call
    the residual is restored and the caches are emptied. `fused` is followed by the kernels within it, as
    torch's profiler sees them in a replay. First what each row selects is compared with torch.topk's; --check
    ends there, for compute-sanitizer. A CPU has no graph: there both columns are the host's clock.

    Args:
        n: elements, float32.
        rows: some of add, fused, fallback, threshold, eager; all by default.
        repeats: 11 on a CPU, 50 on a GPU.
        device: cuda where there is one.
        check: compare what is selected, and time nothing.
    """
    for name in rows:
        if name not in STEPS:
            raise ValueError(describe_unknown("row", name, STEPS))
    on = device_of(device)
    cuda, times = on.type == "cuda", repeats or REPEATS[on.type]
    return Bench(
        about=facts(on),
        head=f"{times} repetitions; medians with their spread",
        cases=[{"n": size, "density": DENSITY} for size in n],
        setting={"rows": [*(rows or STEPS)], "repeats": times, "check": check},
        measure=lambda case: measure(case["n"], rows or STEPS, 0 if check else times, on),
        title=lambda case: f"n = {case['n']:,}, density {DENSITY:g}",
        heading=f"row | {'device, us, in a graph' if cuda else 'host, us (a CPU has no graph)'} | "
        "host, us, of a call",
        row="{row} | {device_us}{no_graph} | {host_us}",
        last=lambda found: {
            "checked": not any(row.get(WRONG) for row in found),
            "cases": [
                {"n": size}
                | {name: row[name] for row in found if row["n"] == size for name in RATIOS if row.get(name)}
                for size in n
            ],
        },
    )


def measure(n: int, rows: Sequence[str], repeats: int, device: torch.device) -> list[Record]:
    """Look at what each row selects; with repetitions, take its times and those of the kernels in `fused`."""
    if why := lacking(4 * HELD * n, device):
        return [{"row": "all", "why": why}]
    lines, cuda = {name: StepTimes() for name in rows}, device.type == "cuda"
    beside = SideBySide(SelectCase(n, DENSITY, "normal"), lines, set(), flush_bytes(device), Path(), device)
    beside.guide = TorchKernel(beside.work)
    beside.begin(0)
    wrong = {name: fault(beside, name) for name in beside.made}
    calls: dict[str, Callable[[], object]] = {
        name: partial(made.step, beside.work, beside.grad) for name, made in beside.made.items()
    }
    took, not_captured = dict[str, dict[str, dict[int, float]]](), dict[str, str]()
    if repeats:
        took["host_us"] = in_turn(calls, Clock(device, "call"), repeats, before=beside.restore)
        for name in beside.made if cuda else ():
            try:
                calls[name] = captured(calls[name])
            except Waits as why_not:
                not_captured[name] = f" (no graph: {why_not})"
        took["device_us"] = in_turn(calls, Clock(device), repeats, before=beside.restore)
    found: list[Record] = []
    for name in beside.made:
        of_device = took.get("device_us", {})
        found.append({
            "row": name,
            WRONG: wrong[name],
            "in_graph": cuda and bool(repeats) and name not in not_captured,
            "no_graph": not_captured.get(name),
            **{key: spread([1e3 * ms for ms in rows[name].values()]) for key, rows in took.items()},
            **{key: ratio(of_device.get(above), of_device.get(below))
               for key, (above, below) in RATIOS.items() if above == name},
        })  # fmt: skip
        if name == "fused" and cuda and repeats:
            found += kernels_within(calls[name])
    if cuda:
        torch.cuda.empty_cache()
    return found + [{"row": name, "why": f"not run: {line.why}"} for name, line in lines.items() if line.why]


def fault(beside: SideBySide, name: str) -> str:
    """A sentence where the row selects other magnitudes than torch.topk, or does not do what it is for."""
    if name not in SELECT_K:
        return ""
    beside.restore()
    step, kernel, _ = beside.made[name]
    if not same_magnitudes(step(beside.work, beside.grad), beside.best):
        return f"n = {beside.case.n:,}: {name} selects other magnitudes than torch.topk"
    if name == "fallback" and kernel is not None and not kernel.stats().fallbacks:
        return f"n = {beside.case.n:,}: {name} did not fall back"
    return ""


def kernels_within(replay: Callable[[], object]) -> list[Record]:
    """The device's work in a replay: name, launches, microseconds of each kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            replay()
        torch.cuda.synchronize()
    return [
        {
            "row": f"- {event.key}, {event.count / PROFILED:g} x",
            "device_us": rounded(event.self_device_time_total / PROFILED),
        }
        for event in seen.key_averages()
        if event.self_device_time_total
    ]
