"""Execution of one run: its orders in, one rank's records (or all virtual ranks' records) out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from analysis.records.files import write_atomic
from analysis.records.log import LOCK_TIMEOUT_S, RankLog
from analysis.records.store import Attempt
from experiments.config.config import Config
from experiments.config.machines import VirtualCluster
from experiments.training.alternation import VariantLog, VariantTraining, train_alternately
from experiments.training.checkpoint import Checkpointer
from experiments.training.loop import TrainedModel, Trainer
from experiments.training.stop_signal import Preempted, StopSignal
from experiments.worker import hardware, memory
from experiments.worker.build import RunComponents, build_run, effective_precision, prepare_device
from experiments.worker.connect import join_group_or_preempt
from experiments.worker.hardware_claims import LABEL_ADVICE
from experiments.worker.link_probe import (
    TrafficMeter,
    choose_comm_for_collectives,
    fitted_link_by_kind,
    read_relay_statistics,
)
from experiments.worker.orders import RunOrders
from experiments.worker.provenance import collect_provenance, machine_state
from slurm.emulated import counters
from slurm.environment import WorkerPlace
from sparsify.comm import Comm, gather_json, virtual
from sparsify.comm.torch import TorchComm
from sparsify.wrappers.engine import NonFiniteGradientError

if TYPE_CHECKING:  # it names Horovod's communicator, which may not be installed
    from experiments.worker.connect import AnyComm

PROGRESS_S = 0.5  # between two notes of how far the run is


class RunOutcome(NamedTuple):
    """The outcome of a training, as fields of the manifest; of several variants, of the first."""

    steps: int  # of each variant
    steps_per_epoch: int
    parameters: int
    tensors: int
    weights: str  # SHA-256 of rank 0's final parameters
    agreed: bool  # do all ranks hold these very weights?
    searching: dict[str, Any]  # of rank 0, see `loop.summarize_search`; kernel: of all ranks
    graph: str | None  # of rank 0, see `loop.TrainedModel`
    alternated: dict[str, Any] | None = None  # how the turns ended, and what became of each variant
    diverged: dict[str, Any] | None = None  # a `schema.Divergence`
    interface: dict[str, float] | None = None  # bytes over an emulated link, see `link_probe.TrafficMeter`

    def manifest_fields(self) -> dict[str, Any]:
        """Return the fields for the manifest by name, without what did not happen."""
        special = ("alternated", "diverged", "interface")
        return {name: value for name, value in self._asdict().items() if name not in special or value}


class RunContext(NamedTuple):
    """The context in which this process carries out a run: its components, record and stop signal."""

    run: RunComponents
    attempt: Attempt
    stop: StopSignal
    progress: ProgressFile
    facts: dict[str, Any]  # provenance; what is found out about the machine is added
    network_facts: Mapping[str, Any] | None  # about the emulated network
    exit_stack: contextlib.ExitStack  # logs, which are this process's until the manifest is written


def execute_run(
    orders: RunOrders, place: WorkerPlace, start_folder: Path, stop: StopSignal, comm: AnyComm | None = None
) -> None:
    """Carry out the run that the orders are for, as the worker at `place`, and finish it on rank 0.

    Where an earlier start left a checkpoint, go on from it.

    Args:
        start_folder: for what concerns this start only: the meeting point of the workers, notes of progress.
        comm: the group, where this process has joined it already; closed at the end.

    Raises:
        Preempted: on all workers, after `stop` told one of them.
    """
    config = Config.from_record(orders.config)
    attempt = Attempt(Path(orders.attempt_folder))
    device = prepare_device(config, place)
    hardware.pin_if_emulated_and_set_nccl_defaults(config, place, device, orders.network_facts)
    run = build_run(config, Path(orders.data_root) if orders.data_root else None, device)
    is_virtual = isinstance(config.cluster, VirtualCluster)
    if is_virtual:
        memory.check_memory_for_virtual_ranks([*run.variants.values()] or [run], config.workers)
    facts = {**collect_provenance(run.data.name, run.data.digest, device), "image": orders.image_facts}
    facts["precision"] = effective_precision(config.precision, device)
    facts["forked"] = multiprocessing.parent_process() is not None  # from a process that had loaded torch
    progress = ProgressFile(start_folder / "progress.json", run.num_steps)
    with contextlib.ExitStack() as exit_stack:
        context = RunContext(run, attempt, stop, progress, facts, orders.network_facts, exit_stack)
        try:
            if is_virtual:
                network = run.virtual_run_arguments(config.timing.mode)
                outcome, *_ = virtual.run(config.workers, partial(train_and_record, context), *network)
            else:
                if comm is None:
                    comm = join_group_or_preempt(config, orders, place, start_folder, device, stop)
                outcome = train_and_record(context, comm)
                comm.barrier()  # every rank's log is on the disk before rank 0 declares them whole
                comm.close()
        except Preempted as preempted:
            if place.rank == 0:
                attempt.mark_preempted(preempted.step)
            if comm is not None:
                comm.close()
            raise
        if place.rank == 0:
            after = machine_state(device)
            peak = memory.peak_memory_gib(device)
            facts = {**outcome.manifest_fields(), **read_relay_statistics(orders.relay_statistics_file)}
            attempt.check_logs_and_mark_whole(
                config.workers, simulated=is_virtual, after=after, memory=peak, **facts
            )


def train_and_record(context: RunContext, comm: Comm) -> RunOutcome:
    """Check the machine and train as one rank of the group, and write its log into the attempt."""
    run = context.run
    attempt = context.attempt
    stop = context.stop
    facts = context.facts
    config = run.config
    settings = run.settings
    path = attempt.rank_log_path(comm.rank)
    report_progress = ignore_progress
    log = context.exit_stack.enter_context(RankLog(path, LOCK_TIMEOUT_S, lambda: stop.is_set))
    if comm.rank == 0:
        attempt.check_not_closed()
        context.progress.newest = log.progress
        report_progress = context.progress
    facts["machine"] = hardware.verify_machine_and_collect_facts(
        config, settings.device, comm, context.network_facts
    )
    if not isinstance(config.cluster, VirtualCluster):
        facts["machine"] |= hardware.report_core_shortages(config.threads, comm, settings.device)
    link = facts["machine"].get("link")
    meter = None
    if isinstance(comm, TorchComm) and link:
        comm.links = fitted_link_by_kind(link, "kinds")
        comm = meter = TrafficMeter(comm)
    checkpointer = Checkpointer(attempt, comm, log, stop, config.launch.checkpoint_min, settings.device)
    num_done_steps = checkpointer.load_newest_and_cut_log()
    if comm.rank == 0:
        attempt.mark_running(num_done_steps, facts["host"], steps=run.num_steps, provenance=facts)
    try:
        if run.variants:
            outcome = train_variants_in_turns(run, comm, link, log, report_progress, stop)
        else:
            outcome = train_and_summarize(run, comm, link, log, report_progress, checkpointer, num_done_steps)
    finally:
        log.flush(durable=True)
    # Workers of one node reach each other past its interface.
    return (
        outcome._replace(interface=verify_sent_bytes_were_counted(meter, config))
        if meter and config.workers_per_node == 1
        else outcome
    )


def verify_sent_bytes_were_counted(meter: TrafficMeter, config: Config) -> dict[str, float] | None:
    """Verify that all bytes that interfaces sent were counted, and return both numbers. Collective.

    Raises:
        MachineMismatch: on all workers alike, if they differ by more than headers; unless
            launch.on_mismatch=label.
    """
    traffic = meter.gather_traffic_totals()
    why = counters.explain_uncounted_bytes(traffic, meter.size) if traffic else ""
    if why:
        if config.launch.on_mismatch == "stop":
            raise hardware.MachineMismatch(f"{why}: please report it, {LABEL_ADVICE}")
        if meter.rank == 0:
            print(why, file=sys.stderr)
    return traffic


def train_and_summarize(
    run: RunComponents,
    comm: Comm,
    link: Mapping[str, Any] | None,
    log: RankLog,
    report_progress: Callable[[int], None],
    checkpointer: Checkpointer,
    num_done_steps: int,
) -> RunOutcome:
    """Train a run without variants, and compare the final weights over the ranks. Collective.

    Args:
        link: the probe's facts about an emulated link.
        num_done_steps: steps before this start.
    """
    config = run.config
    timer = run.make_timer(config.timing.mode, comm, num_done_steps)
    used_comm = choose_comm_for_collectives(comm, config.collectives, link)
    training = Trainer(run.task, run.data, run.method, used_comm, timer, log, run.settings, checkpointer)
    try:
        trained = training.run(report_progress)
        diverged = None
    except NonFiniteGradientError as error:
        # Made for its learning curve, it has shown one; not all workers may know of what one saw alone.
        if error.noticed_after is None or not training.validates:
            raise
        trained = training.finish_diverged()
        diverged = {"step": error.step, "made": training.done, "why": error.where}
    outcome = summarize_training(trained, comm, run.num_steps, run.steps_per_epoch)
    return outcome._replace(diverged=diverged)


def ignore_progress(step: int) -> None:
    """Do nothing; rank 0 reports progress."""


def train_variants_in_turns(
    run: RunComponents,
    comm: Comm,
    link: Mapping[str, Any] | None,
    log: RankLog,
    report_progress: Callable[[int], None],
    stop: StopSignal,
) -> RunOutcome:
    """Train the variants in turns, and compare the final weights of each over the ranks. Collective.

    Args:
        link: the probe's facts about an emulated link.
    """

    def make_training(name: str, run: RunComponents) -> VariantTraining:
        variant_log = VariantLog(log, name)
        timer = run.make_timer(run.config.timing.mode, comm)
        used_comm = choose_comm_for_collectives(comm, run.config.collectives, link)
        training = Trainer(run.task, run.data, run.method, used_comm, timer, variant_log, run.settings)
        return VariantTraining(training, variant_log)

    def after_block(steps: int) -> bool:
        report_progress(steps)
        return stop.is_set

    variants = {name: make_training(name, variant) for name, variant in run.variants.items()}
    turns_comm = choose_comm_for_collectives(comm, run.config.collectives, link)  # for words between turns
    result = train_alternately(
        variants, turns_comm, run.alternation_schedule, run.settings.device, after_block
    )
    steps = run.alternation_schedule.count_steps_per_variant(result.blocks)
    outcomes = {
        name: summarize_training(training.finish(), turns_comm, steps, run.steps_per_epoch)
        for name, (training, _) in variants.items()
    }
    alternated = result._asdict()
    alternated["variants"] = {name: outcome.manifest_fields() for name, outcome in outcomes.items()}
    return next(iter(outcomes.values()))._replace(alternated=alternated)


def summarize_training(trained: TrainedModel, comm: Comm, steps: int, steps_per_epoch: int) -> RunOutcome:
    """Return a training's outcome, with the final weights compared bit for bit over ranks. Collective."""
    parameters = [p.detach() for p in trained.model.parameters()]
    digest = hashlib.sha256()
    device = parameters[0].device
    for p in parameters:
        digest.update(p.cpu().contiguous().numpy().tobytes())
    weights = digest.hexdigest()
    size = sum(p.numel() for p in parameters)
    agreed = trained.has_seen_no_disagreement and len({*gather_json(comm, weights, device)}) == 1
    kernels = gather_distinct_names(trained.search_summary["kernel"] or "", comm, device)
    searching = {**trained.search_summary, "kernel": " and ".join(kernels) or None}
    return RunOutcome(
        steps, steps_per_epoch, size, len(parameters), weights, agreed, searching, trained.graph_outcome
    )


def gather_distinct_names(name: str, comm: Comm, device: torch.device) -> list[str]:
    """Return the names of all ranks, each once and without empty ones, in the order of ranks. Collective."""
    return [name for name in dict.fromkeys(gather_json(comm, name, device)) if name]


class ProgressFile:
    """A file of the run's progress, for the process that started it; calls write it now and then."""

    def __init__(self, path: Path, num_steps: int) -> None:
        self.path = path
        self.num_steps = num_steps
        self.written_at_s = 0.0
        self.newest: Mapping[str, float] = {}  # loss and accuracy

    def __call__(self, step: int) -> None:
        now_s = time.monotonic()
        if now_s - self.written_at_s >= PROGRESS_S or step == self.num_steps:
            self.written_at_s = now_s
            metrics = {name: value for name, value in self.newest.items() if math.isfinite(value)}
            note = {"step": step, "steps": self.num_steps, **metrics}
            write_atomic(self.path, json.dumps(note), durable=False)
