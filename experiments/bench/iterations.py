"""A few iterations of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from analysis.records.files import write_atomic
from analysis.tables import Table
from experiments.bench._runner import Benchmark, Record, format_table_row, summarise_median_and_range
from experiments.bench._targets import to_estimate
from experiments.bench._timing import describe_machine_and_code
from experiments.config import compose
from experiments.config.folders import ResultFolders
from experiments.config.plan import plan_distinct_runs_and_ensure_data
from experiments.training.loop import Trainer
from experiments.worker.build import RunComponents, build_run, prepare_device
from slurm.environment import WorkerPlace
from sparsify.comm import virtual
from sparsify.ranges import PositiveInt

WARM_UP_STEPS = 5
NUM_WINDOWS = 4
EPOCHS = 138  # of the paper's training
STEPS_PER_EPOCH = 49
PROFILE_ROWS = 25
COMPUTING_PHASES = ("forward", "backward", "select")  # what an iteration can't do without
RESULT_FIELDS = (
    "data", "iteration_ms", "phases_ms", "compression_percent", "simulating", "epochs_138_min"
)  # fmt: skip


def iterations(settings: Sequence[str] = (), *, iterations: PositiveInt = 20) -> Benchmark:
    """Time a few iterations of a run twice and profile one; nothing of them is recorded as a run.

    All workers are virtual, in this process. First in mode serialised, for the breakdown, and for what
    simulating costs: the time of an iteration of all workers over what they computed in it; then in mode
    production, for the time of an iteration of all workers, one after the other, on the host's clock; then
    one iteration under torch's profiler, whose table and trace stay in results/bench/iterations.

    Args:
        settings: of the run, as `run` takes them.
        iterations: number of iterations that are counted.
    """
    (planned_run,) = plan_distinct_runs_and_ensure_data(
        [compose.resolve([*settings, "cluster=virtual"])], print
    )
    config = planned_run.config
    device = prepare_device(config, WorkerPlace(0, 1, 0))
    task = config["task"]
    case = {
        "method": config["method"]["name"], "select": config["select"], "task": task["name"],
        "workers": config["workers"], "batch_size": task["batch_size"], "precision": config["precision"],
    }  # fmt: skip

    def measure(case: Record) -> list[Record]:
        run = build_run(config, planned_run.data_root, device)
        phases = measure_serialised_phases(run, iterations)
        iteration_ms = measure_production_iteration_ms(run, iterations)
        folder = ResultFolders().results / "bench" / "iterations"
        stem = f"{case['task']}-{case['method']}-{case['select']}-{device.type}-{case['precision']}"
        print(f"{profile_iteration_into_folder(run, folder, stem)}\n{folder / stem}")
        scale = EPOCHS * STEPS_PER_EPOCH / 6e4
        minutes = {name: round(iteration_ms[name] * scale, 3) for name in ("median", "low", "high")}
        minutes["n"] = iteration_ms["n"]
        row = {"data": run.data.name, "iteration_ms": iteration_ms, **phases, "epochs_138_min": minutes}
        return [row]

    def format_rows(rows: list[Record]) -> str:
        row = rows[0]
        times_ms = row["phases_ms"] | {"iteration, all workers": row["iteration_ms"]}
        cells = [{"phase": name, "time": to_estimate(spread)} for name, spread in times_ms.items()]
        sentence = (
            "an iteration of all workers took {simulating} times their FP, BP and compression (n = "
            "{simulating[n]})"
        )
        return (
            f"{Table.from_rows('', cells, {'time': 'ms'}).to_markdown()}\n{format_table_row(sentence, row)}"
        )

    return Benchmark(
        machine=describe_machine_and_code(device),
        description=", ".join(f"{name}={value}" for name, value in case.items()),
        cases=[case],
        settings={"iterations": iterations, "words": [*settings]},
        measure=measure,
        format_rows=format_rows,
        summarise=lambda rows: case | {field: rows[0][field] for field in RESULT_FIELDS},
    )


class InMemoryStepLog(list[Record]):
    """A step log of one rank: a list of its steps, without a file."""

    def add_line(self, kind: str, **values: Any) -> None:
        if kind == "step":
            self.append(values)

    def flush(self) -> None: ...


def train_in_timing_mode(
    run: RunComponents, mode: str, steps: int, on_step: Callable[[int], None]
) -> list[list[Record]]:
    """Train in this timing mode without validation, and return the steps of every rank.

    Args:
        on_step: called on rank 0 with the number of finished steps.
    """
    train_settings = run.settings.train.with_setting("validate", "never")
    settings = run.settings._replace(num_steps=steps, train=train_settings)

    def train_rank(comm: virtual.VirtualComm) -> list[Record]:
        log = InMemoryStepLog()
        trainer = Trainer(run.task, run.data, run.method, comm, run.make_timer(mode, comm), log, settings)
        trainer.run(on_step if comm.rank == 0 else (lambda step: None))
        return log

    return virtual.run(run.config.workers, train_rank, *run.virtual_run_arguments(mode))


def measure_serialised_phases(run: RunComponents, iterations: int) -> Record:
    """Measure steps in mode serialised.

    Returns milliseconds of each phase per rank and step; compression as a percentage of FP + BP; and an
    iteration of all workers as a multiple of their FP, BP and compression.
    """
    # The ends of rank 0's steps, between two of which each worker computes as much as in a step.
    ends_s = list[float]()
    ranks = train_in_timing_mode(
        run, "serialised", WARM_UP_STEPS + iterations, lambda step: ends_s.append(time.perf_counter())
    )
    phases_by_iteration = [
        [step["phases"] for step in steps] for steps in zip(*ranks, strict=True)
    ][WARM_UP_STEPS:]  # fmt: skip
    all_phases = [phases for phases_of_ranks in phases_by_iteration for phases in phases_of_ranks]
    names = dict.fromkeys(name for phases in all_phases for name in phases)
    shares = [
        100 * phases.get("select", 0.0) / (phases["forward"] + phases["backward"]) for phases in all_phases
    ]
    ratios = list[float]()
    durations_s = [end - start for start, end in pairwise(ends_s[WARM_UP_STEPS - 1 :])]
    for duration_s, phases_of_ranks in zip(durations_s, phases_by_iteration, strict=True):
        computing_s = sum(phases.get(name, 0.0) for phases in phases_of_ranks for name in COMPUTING_PHASES)
        ratios.append(duration_s / computing_s)
    return {
        "phases_ms": {
            name: summarise_median_and_range([1e3 * phases.get(name, 0.0) for phases in all_phases])
            for name in names
        },
        "compression_percent": summarise_median_and_range(shares),
        "simulating": summarise_median_and_range(ratios),
    }


def measure_production_iteration_ms(run: RunComponents, iterations: int) -> Record:
    """Measure the time of all workers, one after the other, in mode production on the host's clock.

    Samples are means of windows, at whose ends alone the host waits for the device.
    """
    window = max(1, iterations // NUM_WINDOWS)
    ends_s = list[float]()

    def on_step(step: int) -> None:
        if step >= WARM_UP_STEPS and (step - WARM_UP_STEPS) % window == 0:
            run.synchronize_device()
            ends_s.append(time.perf_counter())

    train_in_timing_mode(run, "production", WARM_UP_STEPS + iterations, on_step)
    return summarise_median_and_range([1e3 * (end - start) / window for start, end in pairwise(ends_s)])


def profile_iteration_into_folder(run: RunComponents, folder: Path, stem: str) -> str:
    """Profile one iteration of all workers, write the table and the trace, and return the table."""
    is_cuda = run.settings.device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if is_cuda:
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(activities=activities)

    def on_step(step: int) -> None:
        if step == WARM_UP_STEPS:
            run.synchronize_device()
            profiler.start()
        if step == WARM_UP_STEPS + 1:
            run.synchronize_device()
            profiler.stop()

    train_in_timing_mode(
        run, "production", WARM_UP_STEPS + 2, on_step
    )  # one more: the other ranks' steps end after rank 0's
    sort_by = "self_device_time_total" if is_cuda else "self_cpu_time_total"
    averages = profiler.key_averages()
    table: str = averages.table(sort_by=sort_by, row_limit=PROFILE_ROWS, max_name_column_width=60)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{stem}.txt", table)
    profiler.export_chrome_trace(str(folder / f"{stem}.trace.json.gz"))
    return table
