"""Launches: fresh worker processes in which the variants of a benchmark take turns.

A launch is one independent sample. Within a launch memory stays where it was allocated, so all steps share
the effects of its layout.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import truediv
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.spawn import spawn

from experiments.bench._runner import Record, round_to_significant_digits, summarise_median_and_range
from experiments.bench._timing import Call, CallTimer, time_calls_in_turns
from sparsify.comm import Comm, virtual
from sparsify.comm.torch import TorchComm

WARM_UP_TURNS = 3  # DDP rebuilds its buckets, PowerSGD begins, memory is allocated
CLOCKS = ("cpu", "wall")
CPU = torch.device("cpu")
MsByVariantAndClock = Mapping[str, Mapping[str, Sequence[float]]]  # variant -> clock -> ms of each turn


class TimedVariant(NamedTuple):
    """A call that is timed in each turn, and an untimed preparation before the call."""

    call: Call
    prepare: Call = lambda: None


class LaunchPlan(NamedTuple):
    """The variants that the workers of a launch time, and further numbers that they report."""

    variants: Mapping[str, TimedVariant] = {}
    make_report: Callable[[], Record] = dict  # called after the last turn
    adjacent_groups: Sequence[Sequence[str]] | None = (
        None  # variants that follow each other directly in a turn
    )


MakePlan = Callable[[Comm, Any], LaunchPlan]


def run_launches(
    make_plan: MakePlan,
    num_launches: int,
    workers: int,
    turns: int = 0,
    *,
    uses_virtual_comm: bool = False,
    **options: Any,
) -> list[Record]:
    """Return what rank 0 of each launch reports, with the times of all variants as `samples_ms`.

    Args:
        make_plan: called in each worker with its communicator and the options, among them `launch`, the
            number of the launch.
        uses_virtual_comm: give the only worker a communicator without a process group.
        options: passed on to `make_plan`.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    reports = list[Record]()
    for launch in range(num_launches):
        launch_options = SimpleNamespace(**options, turns=turns, launch=launch)
        with tempfile.TemporaryDirectory() as folder:
            arguments = (make_plan, launch_options, folder, 0 if uses_virtual_comm else workers)
            spawn(_run_worker, arguments, nprocs=workers)
            reports.append(json.loads((Path(folder) / "report.json").read_text()))
    return reports


def _run_worker(rank: int, make_plan: MakePlan, options: Any, folder: str, group_size: int) -> None:
    torch.set_num_threads(1)
    if not group_size:
        virtual.run(1, lambda comm: _write_report(comm, make_plan, options, folder))
        return
    comm = TorchComm.join(f"file://{folder}/rendezvous", rank, group_size, CPU)
    _write_report(comm, make_plan, options, folder)
    comm.barrier()
    comm.close()


def _write_report(comm: Comm, make_plan: MakePlan, options: Any, folder: str) -> None:
    plan = make_plan(comm, options)
    samples = time_variants(comm, plan, options.turns, options.launch) if plan.variants else {}
    report = {"samples_ms": samples, **plan.make_report()}
    if comm.rank == 0:
        (Path(folder) / "report.json").write_text(json.dumps(report))


def time_variants(comm: Comm, plan: LaunchPlan, turns: int, seed: int) -> MsByVariantAndClock:
    """Time all variants in turns, whose random order is the same on all workers.

    CPU time is that of all workers together, wall time that of the slowest worker.
    """

    def prepare(name: str) -> None:
        plan.variants[name].prepare()
        comm.barrier()

    calls = {name: variant.call for name, variant in plan.variants.items()}
    times = time_calls_in_turns(
        calls, CallTimer(CPU), turns, prepare=prepare, groups=plan.adjacent_groups, start_turn=gc.collect,
        warm_up=WARM_UP_TURNS, seed=seed,
    )  # fmt: skip
    samples = dict[str, dict[str, list[float]]]()
    for name in calls:
        times_ms = [[*times.cpu_ms_by_call[name].values()], [*times.wall_ms_by_call[name].values()]]
        cpu_ms, wall_ms = torch.stack(comm.all_gather(torch.tensor(times_ms, dtype=torch.float64))).unbind(1)
        columns = zip(CLOCKS, (cpu_ms.sum(0), wall_ms.amax(0)), strict=True)
        samples[name] = {
            clock: [round_to_significant_digits(ms) for ms in column.tolist()] for clock, column in columns
        }
    return samples


def compare_variants_with_base(reports: Sequence[Record], base: str) -> Iterator[Record]:
    """Yield the row of each variant: its times in these launches, and their ratios to those of `base`."""
    launches = [report["samples_ms"] for report in reports]
    for name in launches[0]:
        row: Record = {"row": name}
        for clock in CLOCKS:
            row[f"{clock}_ms"] = summarise_launch_medians(launches, name, clock)
            row[f"{clock}_over_{base}"] = summarise_launch_median_ratios(launches, name, base, clock)
        yield row | {"samples_ms": [samples[name] for samples in launches]}


def summarise_launch_medians(
    launches: Sequence[MsByVariantAndClock], variant: str, clock: str = "cpu"
) -> Record:
    """Return the spread over the launches of a variant's median time."""
    return summarise_median_and_range([statistics.median(samples[variant][clock]) for samples in launches])


def summarise_launch_median_ratios(
    launches: Sequence[MsByVariantAndClock], variant: str, base: str, clock: str = "cpu"
) -> Record:
    """Return the spread over the launches of the median ratio of two variants' times within a turn."""
    return summarise_median_and_range([
        statistics.median(map(truediv, samples[variant][clock], samples[base][clock])) for samples in launches
    ])  # fmt: skip
