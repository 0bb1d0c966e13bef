"""Every kernel in a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from experiments.bench import SIZES, Device
from experiments.bench._compared_rows import SelectionCase
from experiments.bench._runner import (
    WRONG,
    Benchmark,
    Record,
    check_known_names,
    round_to_significant_digits,
    summarise_turn_ratios,
    summarise_turn_times,
)
from experiments.bench._select_comparison import (
    RowSamples,
    SelectionComparison,
    cache_flush_bytes,
    has_same_magnitudes,
)
from experiments.bench._timing import (
    DEFAULT_REPEATS,
    Call,
    CallTimer,
    HostWaitError,
    MsByTurn,
    capture_cuda_graph,
    choose_device_and_set_threads,
    describe_machine_and_code,
    explain_lack_of_memory,
    time_calls_in_turns,
)
from sparsify.kernels import TorchKernel
from sparsify.ranges import PositiveInt

DENSITY = 0.001
HELD_FLOATS = 24  # per element, that all rows together hold or allocate
NUM_PROFILED_REPLAYS = 10
STEPS = ("add", "fused", "fallback", "threshold", "eager")
EXACT_STEPS = ("fused", "fallback")  # these find what torch.topk finds
RATIOS = {
    "fused_over_add": ("fused", "add"), "fallback_over_fused": ("fallback", "fused"),
    "eager_over_fused": ("eager", "fused"),
}  # fmt: skip


def kernels(
    *,
    n: Sequence[PositiveInt] = SIZES,
    rows: Sequence[str] = (),
    repeats: PositiveInt | None = None,
    device: Device | None = None,
    check: bool = False,
) -> Benchmark:
    """Time every kernel in a CUDA graph: the device's time of a step, the host's, and that of each kernel.

    The device's time is that of a graph's replay, between events: no launch of the host's is in it. The
    host's is that of an ordinary call on an idle device, until it returns. Rows take turns; before each call
    the residual is restored and the caches are emptied. `fused` is followed by the kernels within it, as
    torch's profiler sees them in a replay. First what each row selects is compared with torch.topk's; --check
    ends there, for compute-sanitizer. A CPU has no graph: there both columns are the host's clock.

    Args:
        n: numbers of elements, float32.
        rows: some of add, fused, fallback, threshold, eager; all by default.
        repeats: repetitions; by default 11 on a CPU, 50 on a GPU.
        device: cpu or cuda; by default cuda where there is a GPU.
        check: compare what is selected, and time nothing.
    """
    check_known_names("row", rows, STEPS)
    torch_device = choose_device_and_set_threads(device)
    repeats = repeats or DEFAULT_REPEATS[torch_device.type]
    device_column = (
        "device, us, in a graph" if torch_device.type == "cuda" else "host, us (a CPU has no graph)"
    )

    def summarise(all_rows: list[Record]) -> Record:
        cases = []
        for size in n:
            ratios = {
                name: row[name]
                for row in all_rows if row["n"] == size for name in RATIOS if row.get(name)
            }  # fmt: skip
            cases.append({"n": size, **ratios})
        return {"checked": not any(row.get(WRONG) for row in all_rows), "cases": cases}

    return Benchmark(
        machine=describe_machine_and_code(torch_device),
        description=f"{repeats} repetitions; medians with their spread",
        cases=[{"n": size, "density": DENSITY} for size in n],
        settings={"rows": [*(rows or STEPS)], "repeats": repeats, "check": check},
        measure=lambda case: check_and_time_rows(
            case["n"], rows or STEPS, 0 if check else repeats, torch_device
        ),
        case_title=lambda case: f"n = {case['n']:,}, density {DENSITY:g}",
        header=f"row | {device_column} | host, us, of a call",
        row_format="{row} | {device_us}{no_graph} | {host_us}",
        summarise=summarise,
    )


def check_and_time_rows(n: int, rows: Sequence[str], repeats: int, device: torch.device) -> list[Record]:
    """Check what each row selects; with repetitions, time the rows and the kernels in `fused`."""
    why = explain_lack_of_memory(4 * HELD_FLOATS * n, device)
    if why:
        return [{"row": "all", "why": why}]
    samples_by_row = {name: RowSamples() for name in rows}
    comparison = SelectionComparison(
        SelectionCase(n, DENSITY, "normal"), samples_by_row, set(), cache_flush_bytes(device), Path(), device
    )
    comparison.guide = TorchKernel(comparison.acc)
    comparison.begin_turn(0)
    faults = {name: find_selection_fault(comparison, name) for name in comparison.steps}
    calls: dict[str, Call] = {
        name: partial(ready.take, comparison.acc, comparison.grad) for name, ready in comparison.steps.items()
    }
    times = dict[str, dict[str, MsByTurn]]()
    uncaptured = dict[str, str]()

    def time_calls(clock: CallTimer) -> dict[str, MsByTurn]:
        return time_calls_in_turns(
            calls, clock, repeats, prepare=lambda name: comparison.restore_acc_and_flush_caches()
        ).wall_ms_by_call

    uses_graphs = device.type == "cuda" and repeats > 0
    if repeats:
        times["host_us"] = time_calls(CallTimer(device, "call"))
        for name in [*calls] if uses_graphs else ():
            try:
                calls[name] = capture_cuda_graph(calls[name])
            except HostWaitError as error:
                uncaptured[name] = f" (no graph: {error})"
        times["device_us"] = time_calls(CallTimer(device))
    records = list[Record]()
    for name in calls:
        device_times = times.get("device_us", {})
        records.append({
            "row": name,
            WRONG: faults[name],
            "in_graph": uses_graphs and name not in uncaptured,
            "no_graph": uncaptured.get(name),
            **{
                field: summarise_turn_times(ms_by_call[name], 1e3)
                for field, ms_by_call in times.items()
            },
            **{
                field: summarise_turn_ratios(device_times.get(numerator), device_times.get(denominator))
                for field, (numerator, denominator) in RATIOS.items() if numerator == name
            },
        })  # fmt: skip
        if name == "fused" and uses_graphs:
            records += profile_kernels(calls[name])
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for name, row_samples in samples_by_row.items():
        if row_samples.why_not_run:
            records.append({"row": name, "why": f"not run: {row_samples.why_not_run}"})
    return records


def find_selection_fault(comparison: SelectionComparison, name: str) -> str:
    """Return a sentence where a row selects other magnitudes than torch.topk, or did not fall back."""
    if name not in EXACT_STEPS:
        return ""
    comparison.restore_acc_and_flush_caches()
    step, kernel, _ = comparison.steps[name]
    if not has_same_magnitudes(step(comparison.acc, comparison.grad), comparison.best):
        return f"n = {comparison.case.n:,}: {name} selects other magnitudes than torch.topk"
    if name == "fallback" and kernel is not None and not kernel.stats().fallbacks:
        return f"n = {comparison.case.n:,}: {name} did not fall back"
    return ""


def profile_kernels(replay: Call) -> list[Record]:
    """Return name, launches and microseconds of each kernel in a replay."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_PROFILED_REPLAYS):
            replay()
        torch.cuda.synchronize()
    return [
        {
            "row": f"- {event.key}, {event.count / NUM_PROFILED_REPLAYS:g} x",
            "device_us": round_to_significant_digits(event.self_device_time_total / NUM_PROFILED_REPLAYS),
        }
        for event in profiler.key_averages()
        if event.self_device_time_total
    ]
