"""Every kernel in a CUDA graph: the device's time of a step beside the host's, and of each kernel within it.

make bench BENCH=kernels [ARGS="--n 25600000 --rows add fused eager"]

The device's time is that of a graph's replay, between events: no launch of the host's is in it. The host's
is that of an ordinary call on an idle device, until it returns. Rows take turns; before each call the
residual is restored and the caches are emptied. `fused` is followed by the kernels within it, as torch's
profiler sees them in a replay. First what each row selects is compared with torch.topk's; --check ends there,
for compute-sanitizer. A CPU has no graph: there both columns are the host's clock.
"""

from __future__ import annotations

import os.path
import sys

# Run by its path, Python would look into this folder first, whose `select` is not Python's.
if not __package__:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.bench import _gradients as gradients
from experiments.bench._case import rounded, spread
from experiments.bench._in_turn import Samples, Waits, captured, device_ms, host_us
from experiments.bench._memory import flush_bytes
from experiments.bench._side_by_side import same_magnitudes
from experiments.bench._steps import ROWS, Made, NotRun, Setup
from experiments.bench.roofs import SIZES, checked_device, facts
from experiments.worker.memory import free_bytes
from sparsify.kernels.eager import Eager
from sparsify.method import num_selected
from sparsify.ranges import unknown

REPEATS = {"cpu": 11, "cuda": 50}
DENSITY = 0.001
HELD = 20  # floats per element that all rows together hold, or pass
PROFILED = 10  # replays whose kernels are looked at


STEPS = {name: ROWS[name].make for name in ("add", "fused", "fallback", "threshold", "eager")}
SELECT_K = ("fused", "fallback")  # these find what torch.topk finds


class Case(NamedTuple):
    """All rows at one n."""

    n: int
    residual: Tensor  # before each step
    acc: Tensor
    grad: Tensor
    cold: Tensor  # as large as the caches
    steps: dict[str, Made]
    why: dict[str, str]  # of rows that were not made

    def restore(self) -> None:
        self.acc.copy_(self.residual)
        self.cold.sum()

    def calls(self) -> dict[str, Callable[[], object]]:
        return {name: bound(made, self.acc, self.grad) for name, made in self.steps.items()}


def bound(made: Made, acc: Tensor, grad: Tensor) -> Callable[[], object]:
    return lambda: made.step(acc, grad)


def case_of(n: int, rows: list[str], device: torch.device) -> Case:
    inputs = gradients.synthetic("normal", n, 1, device)
    setup = Setup(inputs.residual, num_selected(n, DENSITY), inputs.gradients)
    setup.threshold.copy_(Eager(setup.like).topk(inputs.residual.clone(), None, setup.k).values.abs().min())
    steps, why = dict[str, Made](), dict[str, str]()
    for name in rows:
        try:
            steps[name] = STEPS[name](setup)
        except NotRun as reason:
            why[name] = str(reason)
    cold = torch.ones(flush_bytes(device) // 4, device=device)
    return Case(n, inputs.residual, inputs.residual.clone(), inputs.gradients[0], cold, steps, why)


def wrong(case: Case) -> list[str]:
    """The rows that select other magnitudes than torch.topk, or that do not do what they are there for."""
    found, k = [], num_selected(case.n, DENSITY)
    best = Eager(case.acc).topk(case.residual.clone(), case.grad, k)
    for name in SELECT_K:
        if name in case.steps:
            case.restore()
            made = case.steps[name]
            if not same_magnitudes(made.step(case.acc, case.grad), best):
                found.append(f"n = {case.n:,}: {name} selects other magnitudes than torch.topk")
            if name == "fallback" and made.kernel is not None and not made.kernel.stats().fallbacks:
                found.append(f"n = {case.n:,}: {name} did not fall back")
    return found


class Times(NamedTuple):
    """Of all rows of a case, by repetition."""

    device: Samples  # ms
    host: Samples  # us
    not_captured: dict[str, str]
    within: list[dict[str, Any]]  # the kernels within `fused`


def timed(case: Case, repeats: int, device: torch.device) -> Times:
    calls = case.calls()
    host = host_us(calls, 1 + repeats, device, case.restore)
    graphs, not_captured = dict(calls), dict[str, str]()
    if device.type == "cuda":
        for name, call in calls.items():
            try:
                graphs[name] = captured(call)
            except Waits as why:
                not_captured[name] = str(why)
    taken = device_ms(graphs, 1 + repeats, device, case.restore)
    within = kernels_within(graphs["fused"]) if device.type == "cuda" and "fused" in graphs else []
    return Times(taken, host, not_captured, within)


def kernels_within(replay: Callable[[], object]) -> list[dict[str, Any]]:
    """What the device did in a replay: name, launches, microseconds of each kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            replay()
        torch.cuda.synchronize()
    return [
        {
            "kernel": event.key,
            "launches": event.count / PROFILED,
            "device_us": rounded(event.self_device_time_total / PROFILED),
        }
        for event in seen.key_averages()
        if event.self_device_time_total
    ]


def of_pairs(above: dict[int, float] | None, below: dict[int, float] | None) -> dict[str, Any] | None:
    """Their ratio within each repetition but the first."""
    if above is None or below is None:
        return None
    return spread([above[turn] / below[turn] for turn in above if turn and turn in below])


def record(case: Case, times: Times, cuda: bool) -> dict[str, Any]:
    taken = times.device
    return {
        "n": case.n,
        "k": num_selected(case.n, DENSITY),
        "rows": {
            name: {
                "device_us": spread([1e3 * ms for turn, ms in taken[name].items() if turn]),
                "host_us": spread([us for turn, us in times.host[name].items() if turn]),
                "in_graph": cuda and name not in times.not_captured,
            }
            for name in case.steps
        },
        "within_fused": times.within,
        "fused_over_add": of_pairs(taken.get("fused"), taken.get("add")),
        "fallback_over_fused": of_pairs(taken.get("fallback"), taken.get("fused")),
        "eager_over_fused": of_pairs(taken.get("eager"), taken.get("fused")),
    }


def table(found: dict[str, Any], case: Case, times: Times, cuda: bool) -> str:
    head = "device, us, in a graph" if cuda else "host, us (a CPU has no graph)"
    lines = [f"\n### n = {case.n:,}, density {DENSITY:g}\n"]
    lines += [f"| row | {head} | host, us, of a call |", "|---|---:|---:|"]
    for name, row in found["rows"].items():
        alone = f" (no graph: {times.not_captured[name]})" if name in times.not_captured else ""
        lines.append(f"| {name} | {cell(row['device_us'])}{alone} | {cell(row['host_us'])} |")
        if name == "fused":
            lines += [
                f"| - {part['kernel']}, {part['launches']:g} x | {part['device_us']} | |"
                for part in found["within_fused"]
            ]
    lines += [f"\n{name} not run: {why}" for name, why in case.why.items()]
    return "\n".join(lines)


def cell(times: dict[str, Any]) -> str:
    return f"{times['median']} [{times['low']}, {times['high']}]"


def main() -> int:
    words = argparse.ArgumentParser(prog="make bench BENCH=kernels", description=__doc__.partition("\n")[0])
    words.add_argument("--n", type=int, nargs="+", default=SIZES, help="elements, float32")
    words.add_argument("--rows", nargs="+", help=f"some of: {', '.join(STEPS)}")
    words.add_argument("--repeats", type=int, help=f"default {REPEATS}")
    words.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    words.add_argument("--check", action="store_true", help="compare what is selected, and time nothing")
    asked = words.parse_args()
    for n in asked.n:
        if num_selected(max(n, 0), DENSITY) < 1:
            words.error(f"--n {n}: at density {DENSITY:g} there is nothing to select; take 1000 or more")
    for name in asked.rows or ():
        if name not in STEPS:
            words.error(unknown("row", name, list(STEPS)))
    device = checked_device(words, asked)
    return bench(asked, device)


def bench(asked: argparse.Namespace, device: torch.device) -> int:
    about, cuda = facts(device), device.type == "cuda"
    repeats = asked.repeats or REPEATS[device.type]
    print(f"{about['device']}, torch {torch.__version__}; {repeats} repetitions; medians with their spread")
    cases, errors = [], list[str]()
    for n in asked.n:
        if 4 * HELD * n > free_bytes(device):
            print(f"\nn = {n:,} does not fit into memory")
            cases.append({"n": n, "rows": {}})
            continue
        case = case_of(n, asked.rows or list(STEPS), device)
        errors += wrong(case)
        if not asked.check:
            times = timed(case, repeats, device)
            cases.append(record(case, times, cuda))
            print(table(cases[-1], case, times, cuda), flush=True)
        del case
        if cuda:
            torch.cuda.empty_cache()
    for line in errors:
        print(f"WRONG: {line}")
    print(json.dumps({"bench": "kernels", **about, "checked": not errors, "cases": cases}))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
