"""A few iterations of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from analysis.records.files import write_atomic
from experiments.bench._runner import Bench, Record, formatted, heading, spread
from experiments.bench._timing import facts
from experiments.config import compose
from experiments.config.folders import Folders
from experiments.config.plan import plan_runs
from experiments.training.loop import Trainer
from experiments.worker.build import Built, build, prepare_device
from slurm.environment import WorkerPlace
from sparsify.comm import virtual
from sparsify.ranges import PositiveInt

WARM_UP = 5  # iterations that are not counted
WINDOWS = 4
EPOCHS, STEPS_PER_EPOCH = 138, 49  # of the paper's training
ROWS = 25  # of the profile's table
COMPUTING = ("forward", "backward", "select")  # what an iteration can't do without


def iterations(settings: Sequence[str] = (), *, iterations: PositiveInt = 20) -> Bench:
    """A few iterations of a run, timed twice and profiled once; nothing of them is recorded as a run.

    All workers are virtual, in this process. First in mode serialised, for the breakdown, and for what
    simulating costs: the time of an iteration of all workers over what they computed in it; then in mode
    production, for the time of an iteration of all workers, one after the other, on the host's clock; then
    one iteration under torch's profiler, whose table and trace stay in results/bench/iterations.

    Args:
        settings: of the run, as `run` takes them.
        iterations: that are counted.
    """
    (planned,) = plan_runs([compose.resolve([*settings, "cluster=virtual"])], print)
    config = planned.config
    device = prepare_device(config, WorkerPlace(0, 1, 0))
    task = config["task"]
    what = {
        "method": config["method"]["name"], "select": config["select"], "task": task["name"],
        "workers": config["workers"], "batch_size": task["batch_size"], "precision": config["precision"],
    }  # fmt: skip

    def measure(case: Record) -> list[Record]:
        run = build(config, planned.data_root, device)
        found, one = breakdown(run, iterations), iteration_ms(run, iterations)
        folder = Folders().results / "bench" / "iterations"
        name = f"{what['task']}-{what['method']}-{what['select']}-{device.type}-{config['precision']}"
        print(f"{profiled(run, folder, name)}\n{folder / name}")
        scale = EPOCHS * STEPS_PER_EPOCH / 6e4
        minutes = {key: round(one[key] * scale, 3) for key in ("median", "low", "high")} | {"n": one["n"]}
        return [{"data": run.data.name, "iteration_ms": one, **found, "epochs_138_min": minutes}]

    def text(rows: list[Record]) -> str:
        phases = rows[0]["phases_ms"] | {"iteration, all workers": rows[0]["iteration_ms"]}
        table = (formatted(f"| {phase} | {{value}} |", {"value": value}) for phase, value in phases.items())
        said = (
            "an iteration of all workers took {simulating} times their FP, BP and compression (n = "
            "{simulating[n]})"
        )
        return "\n".join([heading("ms | median [spread]"), *table, formatted(said, rows[0])])

    shown = ("data", "iteration_ms", "phases_ms", "compression_percent", "simulating", "epochs_138_min")
    return Bench(
        about=facts(device),
        head=", ".join(f"{name}={value}" for name, value in what.items()),
        cases=[what],
        setting={"iterations": iterations, "words": [*settings]},
        measure=measure,
        text=text,
        last=lambda rows: what | {name: rows[0][name] for name in shown},
    )


class StepsInMemory(list[Record]):
    """A log of one rank."""

    def add(self, kind: str, **values: Any) -> None:
        if kind == "step":
            self.append(values)

    def flush(self) -> None: ...


def trained(run: Built, mode: str, steps: int, progress: Callable[[int], None]) -> list[list[Record]]:
    """The steps of every rank.

    Args:
        progress: told by rank 0 how many steps are done.
    """
    train_settings = run.settings.train.having("validate", "never")
    settings = run.settings._replace(num_steps=steps, train=train_settings)

    def body(comm: virtual.VirtualComm) -> list[Record]:
        timer, log = run.timer(mode, comm), StepsInMemory()
        told = progress if comm.rank == 0 else (lambda step: None)
        Trainer(run.task, run.data, run.method, comm, timer, log, settings).run(told)
        return log

    return virtual.run(run.config.workers, body, *run.simulated(mode))


def breakdown(run: Built, iterations: int) -> dict[str, Any]:
    """Milliseconds of each phase per rank and step; what compression takes of FP + BP, in %; and an
    iteration of all workers as a multiple of their FP, BP and compression.
    """
    ends = list[float]()  # rank 0's, between two of which each worker computes as much as in a step
    ranks = trained(run, "serialised", WARM_UP + iterations, lambda step: ends.append(time.perf_counter()))
    steps = [step for rank in ranks for step in rank[WARM_UP:]]
    of_steps = [step["phases"] for step in steps]
    shares = [100 * each.get("select", 0.0) / (each["forward"] + each["backward"]) for each in of_steps]
    names = dict.fromkeys(name for each in of_steps for name in each)
    phases = {name: spread([1e3 * each.get(name, 0.0) for each in of_steps]) for name in names}
    took = (after - before for before, after in pairwise(ends[WARM_UP - 1 :]))
    computed = (
        sum(rank["phases"].get(name, 0.0) for rank in of_ranks for name in COMPUTING)
        for of_ranks in zip(*(rank[WARM_UP:] for rank in ranks), strict=True)
    )
    ratios = [whole / part for whole, part in zip(took, computed, strict=True)]
    return {"phases_ms": phases, "compression_percent": spread(shares), "simulating": spread(ratios)}


def iteration_ms(run: Built, iterations: int) -> dict[str, Any]:
    """Time of all workers, one after the other, on the host's clock: means of windows, at whose ends alone
    the host waits for the device.
    """
    window, ends = max(1, iterations // WINDOWS), list[float]()

    def told(step: int) -> None:
        if step >= WARM_UP and (step - WARM_UP) % window == 0:
            run.synchronise()
            ends.append(time.perf_counter())

    trained(run, "production", WARM_UP + iterations, told)
    return spread([1e3 * (after - before) / window for before, after in pairwise(ends)])


def profiled(run: Built, folder: Path, name: str) -> str:
    """One iteration of all workers under torch's profiler: its table; table and trace stay in `folder`."""
    cuda = run.settings.device.type == "cuda"
    seen = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])

    def told(step: int) -> None:
        if step == WARM_UP:
            run.synchronise()
            seen.start()
        if step == WARM_UP + 1:
            run.synchronise()
            seen.stop()

    trained(run, "production", WARM_UP + 2, told)  # ranks work in turn: rank 0's end of a step is not theirs
    by = "self_device_time_total" if cuda else "self_cpu_time_total"
    table: str = seen.key_averages().table(sort_by=by, row_limit=ROWS, max_name_column_width=60)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.txt", table)
    seen.export_chrome_trace(str(folder / f"{name}.trace.json.gz"))
    return table
