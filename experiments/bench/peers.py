"""Our Top-k, PowerSGD and DiLoCo beside those of torch and torchft: time, bytes and loss."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from torch.multiprocessing.spawn import ProcessException

from experiments.bench._compared_rows import DDP, PEER_ROWS
from experiments.bench._launches import (
    CLOCKS,
    CPU,
    LaunchPlan,
    MakePlan,
    TimedVariant,
    compare_variants_with_base,
    run_launches,
)
from experiments.bench._loopback import read_loopback_sent_bytes, try_enter_common_loopback
from experiments.bench._peer_packages import TORCHFT, PeerPackages, ensure_peer_packages, installed_versions
from experiments.bench._peer_pages import PEERS_PAGE, peer_case_title, summarise_losses
from experiments.bench._peer_variants import STARTERS, PeerSetup, PeerTraining
from experiments.bench._runner import (
    WRONG,
    Benchmark,
    Record,
    check_known_names,
    round_to_significant_digits,
)
from experiments.bench._timing import describe_single_thread_cpu_machine
from experiments.config import compose
from experiments.config.dataset_files import ensure_dataset
from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from sparsify.comm import Comm
from sparsify.comm.torch import TorchComm
from sparsify.ranges import MomentumFactor, PositiveFloat, PositiveFraction, PositiveInt
from sparsify.wrappers.engine import NonFiniteGradientError

Part: TypeAlias = Literal["time", "bytes", "loss"]
DEFAULT_STEPS = 400
DEFAULT_STEPS_BY_TASK = {"gpt_ptbchars": 150}  # whose steps take ten times as long
METHOD_OPTIONS = ("every", "density", "rank", "outer_lr", "outer_momentum")
SETTLING_ROUNDS = 2  # before bytes are counted: DDP rebuilds its buckets, PowerSGD begins
COUNTED_ROUNDS = 4
VALIDATION_EXAMPLES = 1000


def peers(
    *,
    parts: Sequence[Part] = ("time", "bytes", "loss"),
    tasks: Sequence[str] = ("cnn_cifar10", "gpt_ptbchars"),
    variants: Sequence[str] = (),
    workers: Sequence[PositiveInt] = (2, 4),
    launches: PositiveInt = 5,
    turns: PositiveInt = 5,
    every: PositiveInt = 10,
    density: PositiveFraction = 0.01,
    rank: PositiveInt = 2,
    outer_lr: PositiveFloat = 0.7,
    outer_momentum: MomentumFactor = 0.9,
    steps: PositiveInt | None = None,
    seeds: PositiveInt = 5,
) -> Benchmark:
    """Compare our Top-k, PowerSGD and DiLoCo with torch's hooks and torchft's DiLoCo on whole trainings.

    *time*: whole steps of worker processes of one thread each. All variants take rounds of `--every` steps in
    turns, in random order; the time of a step is the mean of a round's. A launch is a fresh set of processes,
    and its ratio to plain DDP is the median of those within a turn. What is reported is the median over
    launches, with the smallest and the largest.

    *bytes*: what a worker sends in a step, by the counter of a loopback interface of the workers' own. This
    part needs root, or `unshare --map-root-user --net`.

    *loss*: the validation loss after as many steps of each variant, from the same parameters and on the same
    batches. Each seed is a case.

    torchft is installed for this benchmark alone, into the user's cache. A variant that can't run gets a row
    that says why.

    Args:
        parts: time, bytes, loss.
        tasks: tasks to train.
        variants: variants to compare; by default all. `ddp` is always among them.
        workers: numbers of workers.
        launches: number of launches.
        turns: rounds of each variant in a launch.
        every: steps of a round: H of DiLoCo and of post-local SGD.
        density: k/n of topk.
        rank: columns of PowerSGD's factors.
        outer_lr, outer_momentum: of both DiLoCos' outer steps, by default as published for AdamW inside.
        steps: steps of a training, in whole rounds; by default 400, of gpt_ptbchars 150.
        seeds: number of trainings of each variant.
    """
    check_known_names("variant", variants, STARTERS)
    names = [name for name in PEER_ROWS if name == DDP or name in (variants or STARTERS)]
    options_by_task = {task: find_task_and_data(task) for task in tasks}
    for size in workers:
        if size < 2:
            raise ValueError(f"--workers {size}: one worker alone sends nothing; take 2 or more")
    needs_torchft = any(map(is_of_torchft, names))
    packages = ensure_peer_packages() if needs_torchft else PeerPackages("", installed_versions())
    methods = dict(zip(METHOD_OPTIONS, (every, density, rank, outer_lr, outer_momentum), strict=True))
    cases = list[Record]()
    for part in parts:
        for task in tasks:
            for size in workers:
                case = {"part": part, "task": task, "workers": size, **methods}
                if part == "loss":
                    num_steps = steps or DEFAULT_STEPS_BY_TASK.get(task, DEFAULT_STEPS)
                    check_whole_rounds(num_steps, every)
                    cases += [{**case, "steps": num_steps, "seed": seed} for seed in range(seeds)]
                else:
                    cases.append({**case, "turns": turns} if part == "time" else case)

    def measure(case: Record) -> Iterator[Record]:
        options = {**options_by_task[case["task"]], **case, "peer_folder": packages.folder}
        return measure_case(options, names, packages, launches)

    return Benchmark(
        machine=describe_single_thread_cpu_machine("1 thread a process"),
        description=f"{launches} launches; ratios are medians over launches [smallest, largest]",
        cases=cases,
        settings={
            "variants": names, "launches": launches, "why": packages.why,
            "versions": packages.version_by_package,
        },
        measure=measure,
        case_title=peer_case_title,
        format_rows=PEERS_PAGE.format_case_table,
        summarise=summarise_by_task,
        draw=PEERS_PAGE.draw_device,
    )  # fmt: skip


def find_task_and_data(task: str) -> Record:
    """Return the arguments of a task, and the folder of its data.

    Weights lie in torch's usual order, since torch's model averaging would change another one.

    Raises:
        ValueError: there is no such task, or its data are neither there nor to be downloaded.
    """
    config = compose.resolve([f"task={task}", "data.fallback=refuse"])
    config, root = ensure_dataset(config, partial(print, file=sys.stderr))
    arguments = dict(config.task.arguments)
    if "channels_last" in arguments:
        arguments["channels_last"] = False
    return {"arguments": arguments, "data_root": None if root is None else str(root)}


def check_whole_rounds(num_steps: int, every: int) -> None:
    """Refuse a training that ends within a round, where workers' parameters differ."""
    if num_steps % every:
        raise ValueError(
            f"--steps {num_steps} ends within a round of --every {every}, where each worker has parameters "
            f"of its own; take a multiple, such as {-(-num_steps // every) * every}"
        )


def measure_case(
    options: Record, names: Sequence[str], packages: PeerPackages, launches: int
) -> Iterator[Record]:
    """Yield the row of each variant, with its package and, where it has no number, the reason."""
    part = options["part"]
    make_plan = {"time": plan_timed_rounds, "bytes": plan_byte_count, "loss": plan_trainings}[part]
    num_launches = launches if part == "time" else 1
    why_by_name = {name: packages.why for name in names if packages.why and is_of_torchft(name)}
    runnable = [name for name in names if name not in why_by_name]
    try:
        reports = run_peer_launches(make_plan, num_launches, options, runnable)
    except ProcessException as error:
        if TORCHFT not in str(error) or not any(map(is_of_torchft, runnable)):
            raise
        why = f"could not run: {str(error).strip().splitlines()[-1].replace(packages.folder, TORCHFT)}"
        print(error, file=sys.stderr)
        why_by_name |= {name: why for name in runnable if is_of_torchft(name)}
        runnable = [name for name in runnable if name not in why_by_name]
        reports = run_peer_launches(make_plan, num_launches, options, runnable)
    make_rows = {"time": step_time_rows, "bytes": sent_bytes_rows, "loss": loss_rows}[part]
    rows = {row["row"]: row for row in make_rows(reports, options)}
    differing = {name for report in reports for name in report["differing"]}
    for name in names:
        row = rows.get(name) or {"row": name, "why": why_by_name.get(name) or reports[0]["why"]}
        package = PEER_ROWS[name]["package"]
        fault = f"{name}: the workers' parameters differ after a round" if name in differing else ""
        version = packages.version_by_package.get(package, "(not installed)")
        yield row | {"package": f"{package} {version}", WRONG: fault}


def is_of_torchft(name: str) -> bool:
    return bool(PEER_ROWS[name]["package"] == TORCHFT)


def run_peer_launches(
    make_plan: MakePlan, num_launches: int, options: Record, names: Sequence[str]
) -> list[Record]:
    """Run launches of these variants with the options of a case."""
    given = {name: value for name, value in options.items() if name not in ("part", "workers", "turns")}
    turns = options.get("turns", 0)
    return run_launches(make_plan, num_launches, options["workers"], turns, **given, variants=[*names])


def make_peer_setup(comm: Comm, options: Any, num_steps: int | None = None, seed: int = 0) -> PeerSetup:
    """Build the task and load its data, as trainings of the harness do."""
    task = TASKS.build(options.task, options.arguments)
    root = options.data_root and Path(options.data_root)
    data = datasets.load(task.dataset, root, CPU).limit_validation(VALIDATION_EXAMPLES)
    assert isinstance(comm, TorchComm)
    methods = {name: getattr(options, name) for name in METHOD_OPTIONS}
    return PeerSetup(task, data, comm, seed, options.peer_folder, num_steps, **methods)


def plan_timed_rounds(comm: Comm, options: Any) -> LaunchPlan:
    """Plan to time rounds of all variants, and to compare the workers' parameters at the end."""
    setup = make_peer_setup(comm, options)
    trainings = {name: STARTERS[name](setup) for name in options.variants}
    return LaunchPlan(
        {name: TimedVariant(training.run_round) for name, training in trainings.items()},
        lambda: {"differing": [name for name in trainings if is_ended_with_differences(trainings[name])]},
    )


def is_ended_with_differences(training: PeerTraining) -> bool:
    """End a training after a whole round, and tell whether its workers' parameters differ. Collective."""
    differs = not training.have_workers_same_parameters()
    training.close()
    return differs


def plan_byte_count(comm: Comm, options: Any) -> LaunchPlan:
    """Count the bytes of some rounds of each variant, one after the other, without timing them.

    The group that the variants use lies in the workers' own namespace, the group that waits between them does
    not.
    """
    why = try_enter_common_loopback(comm)
    if why:
        return LaunchPlan(make_report=lambda: {"why": f"could not be counted: {why}", "differing": []})
    setup = make_peer_setup(TorchComm.with_new_group(), options)
    num_steps = COUNTED_ROUNDS * options.every
    counts = dict[str, Record]()
    differing = list[str]()
    for name in options.variants:
        training = STARTERS[name](setup)
        for _ in range(SETTLING_ROUNDS):
            training.run_round()
        comm.barrier()
        before = read_loopback_sent_bytes()
        comm.barrier()
        reported = torch.tensor([float(sum(training.run_round() for _ in range(COUNTED_ROUNDS)))])
        comm.barrier()
        sent = read_loopback_sent_bytes() - before
        comm.all_reduce(reported)
        per_worker_step = [total / (comm.size * num_steps) for total in (sent, reported.item())]
        counts[name] = {
            "sent_bytes": round(per_worker_step[0]),
            "reported_bytes": None if training.reporter is None else round(per_worker_step[1]),
        }
        if is_ended_with_differences(training):
            differing.append(name)
    return LaunchPlan(make_report=lambda: {"counts": counts, "differing": differing})


def plan_trainings(comm: Comm, options: Any) -> LaunchPlan:
    """Train with each variant, one after the other, and validate on rank 0."""
    setup = make_peer_setup(comm, options, options.steps, options.seed)
    loss_by_name = dict[str, float]()
    differing = list[str]()
    for name in options.variants:
        training = STARTERS[name](setup)
        try:
            for _ in range(options.steps // options.every):
                training.run_round()
        except NonFiniteGradientError:  # on all workers
            loss_by_name[name] = math.nan
            continue
        if comm.rank == 0:
            loss_by_name[name] = setup.task.evaluate(training.model, setup.data, torch.float32).loss
        comm.barrier()
        if is_ended_with_differences(training):
            differing.append(name)
    losses = {name: loss if math.isfinite(loss) else None for name, loss in loss_by_name.items()}
    return LaunchPlan(make_report=lambda: {"losses": losses, "differing": differing})


def step_time_rows(reports: Sequence[Record], options: Record) -> Iterator[Record]:
    """Yield the row of each variant with the time of a step, the mean of a round's."""
    every = options["every"]
    for report in reports:
        for samples in report["samples_ms"].values():
            for clock in CLOCKS:
                samples[clock] = [round_to_significant_digits(ms / every) for ms in samples[clock]]
    return compare_variants_with_base(reports, DDP)


def sent_bytes_rows(reports: Sequence[Record], options: Record) -> Iterator[Record]:
    """Yield the row of each variant with the bytes of a worker's step."""
    (report,) = reports
    counts: Mapping[str, Record] = report.get("counts", {})
    for name, count in counts.items():
        ratio = round_to_significant_digits(count["sent_bytes"] / counts[DDP]["sent_bytes"])
        yield {"row": name, **count, "sent_over_ddp": ratio}


def loss_rows(reports: Sequence[Record], options: Record) -> Iterator[Record]:
    """Yield the row of each variant with its loss at the end, and the difference to plain DDP's."""
    (report,) = reports
    base = report["losses"][DDP]
    for name, loss in report["losses"].items():
        if loss is None:
            yield {"row": name, "why": f"its loss is not finite after {options['steps']} steps"}
        else:
            yield {"row": name, "loss": loss, "loss_minus_ddp": None if base is None else loss - base}


def summarise_by_task(rows: list[Record]) -> Record:
    """Return ratios to plain DDP and differences of losses, by task, workers and variant."""
    result: Record = {"torch": rows[0]["torch"]}
    for field in (*(f"{clock}_over_ddp" for clock in CLOCKS), "sent_over_ddp"):
        for row in rows:
            if row.get(field) is not None and row["row"] != DDP:
                place = f"{row['task']}, {row['workers']} workers"
                result.setdefault(field, {}).setdefault(place, {})[row["row"]] = row[field]
    cases = {(row["task"], row["workers"]) for row in rows if row["part"] == "loss"}
    for task, size in sorted(cases):
        of_case = [row for row in rows if (row["part"], row["task"], row["workers"]) == ("loss", task, size)]
        differences = {
            summary["variant"]: dict(zip(("value", "low", "high", "n"), summary["loss - ddp"], strict=False))
            for summary in summarise_losses(of_case)
            if summary["loss - ddp"] is not None
        }
        result.setdefault("loss_minus_ddp", {})[f"{task}, {size} workers"] = differences
    return result
