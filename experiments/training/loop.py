"""The training loop: the same for processes and for virtual ranks, plain enough to print."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.training.captured import CapturedEnergy
from experiments.training.checkpoint import Checkpointer, TrainingState
from experiments.training.datasets import Dataset
from experiments.training.graph import Recorded, Recorder
from experiments.training.step_log import STEPS_PER_WRITE, Log, StepLog
from experiments.training.task import Metrics, Task
from sparsify.aggregator import Aggregator, NonFinite
from sparsify.comm import Comm, InstrumentedComm
from sparsify.kernels import SearchStats
from sparsify.method import Method
from sparsify.overlap import Overlap
from sparsify.timer import PhaseTimer
from sparsify.types import BucketContext
from sparsify.wrapping import check_momentum


class Trained(NamedTuple):
    model: nn.Module
    searching: dict[str, Any]  # see `searched`
    graph: str | None  # see `graph.Recorded.outcome`; None too where it was not to be tried


class Settings(NamedTuple):
    """What the loop needs besides task and method."""

    seed: int
    num_steps: int
    validate: bool  # after every `validate_every` epochs and at the end
    device: torch.device
    dtype: torch.dtype
    select: str = "auto"  # see sparsify.kernels
    overlap: bool = False  # buckets are aggregated while backpropagation goes on
    recorder: Recorder | None = None  # of forward and backward, to repeat them where nothing looks in
    epoch_steps: int | None = None  # of the clock of learning rate, density and validation; None: the task's
    validate_every: int = 1


def train(
    task: Task,
    data: Dataset,
    method: Method,
    comm: Comm,
    timer: PhaseTimer,
    log: Log,
    settings: Settings,
    progress: Callable[[int], None] = lambda step: None,
    checkpointer: Checkpointer | None = None,
) -> Trained:
    """Train one worker's model together with the others.

    Args:
        progress: told the number of steps done, after each step.
        checkpointer: saves now and then, and knows where to go on from.
    """
    seed, device, dtype = settings.seed, settings.device, settings.dtype
    model = task.model(data, seed, device, dtype)
    for tensor in model.state_dict().values():
        comm.broadcast(tensor)
    optimiser = task.optimiser(model)
    check_momentum(optimiser, method)
    instrumented, named = InstrumentedComm(comm, timer), model.named_parameters()
    aggregator = Aggregator(method, named, instrumented, timer, seed, select=settings.select)
    overlap = Overlap(aggregator) if settings.overlap else None
    gradients = aggregator.gradients
    augmentation = BucketContext(seed, comm.rank, -1).generator(device)  # -1: no bucket has this number
    steps_per_epoch = settings.epoch_steps or task.steps_per_epoch(data, comm.size)
    steps = StepLog(timer, comm, log, device)
    state = TrainingState(model, optimiser, aggregator, augmentation, steps)
    timer.num_steps = done = checkpointer.restore(state) if checkpointer else 0
    batches = task.batches(data, comm.rank, comm.size, seed, augmentation, dtype, first=done)

    def forward_and_backward(inputs: Tensor, labels: Tensor) -> Tensor:
        with timer.phase("forward"):
            loss = task.loss(model(inputs), labels)
        with timer.phase("backward"):
            gradients.zero_()
            loss.backward()
            if timer.mode == "as_published":
                loss.item()  # the published code reads the loss here, its first wait for the device
        return loss.detach()

    def say(line: str) -> None:
        if comm.rank == 0:
            print(line, file=sys.stderr)

    recorded = None
    if settings.recorder and timer.mode == "production" and not overlap:
        recorded = Recorded(forward_and_backward, model, gradients, settings.recorder, say)

    def validation() -> Metrics | None:
        return task.evaluate(model, data, dtype) if comm.rank == 0 else None

    for step in range(done, settings.num_steps):
        epoch = step // steps_per_epoch
        ends_epoch = (step + 1) % steps_per_epoch == 0 or step + 1 == settings.num_steps
        is_due = (epoch + 1) % settings.validate_every == 0 or step + 1 == settings.num_steps
        validates, metrics = ends_epoch and is_due and settings.validate, None
        watch = CapturedEnergy() if validates else None
        if timer.mode == "serialised":
            comm.barrier()  # what a rank did since its last step, records and such, is not this step's wait
        with timer.step():
            with timer.phase("io"):
                inputs, labels = next(batches)
            rate = task.learning_rate(step, steps_per_epoch)
            if overlap:
                overlap.begin(epoch, rate)
            loss = (recorded or forward_and_backward)(inputs, labels)
            if overlap:
                report = overlap.finish()
            with timer.phase("check"):
                finite = gradients.finite()  # of the average, where they overlap
                if timer.mode != "production" and (layer := gradients.nonfinite(finite)):
                    raise NonFinite(comm.rank, step, layer)
            if not overlap:
                report = aggregator.aggregate(epoch, rate, watch)
            with timer.phase("update"):
                set_learning_rate(optimiser, rate)
                optimiser.step()
            if validates and timer.mode == "as_published":
                with timer.phase("validate"):  # inside the timed step, while the others wait: as published
                    metrics = validation()

        # In production nobody has looked at `finite`, which would make the host wait: the log will.
        steps.observe(step, epoch, loss, rate, report, aggregator, finite)
        if validates and timer.mode != "as_published":
            metrics = validation()
        if ends_epoch or (step + 1) % STEPS_PER_WRITE == 0:
            steps.write()
        if ends_epoch and is_due:
            tested = None
            if metrics and data.unseen and step + 1 == settings.num_steps:
                tested = task.evaluate(model, data, dtype, data.unseen)
            steps.end_epoch(epoch, step, metrics, watch.share() if watch else None, tested)
        if validates:
            comm.barrier()  # the others did not validate; that is not part of their next step's wait
        progress(step + 1)
        if checkpointer and step + 1 < settings.num_steps:
            checkpointer.end_step(step + 1, state)
    log.flush()
    if overlap:
        overlap.close()
    return Trained(model, searched(aggregator), recorded.outcome if recorded else None)


def searched(aggregator: Aggregator) -> dict[str, Any]:
    """Who searched this worker's buckets for what to send, and how often the guess of a bound was wrong."""
    found = aggregator.searching()
    total = sum(found.values(), SearchStats())
    return {"kernel": " and ".join(found) or None, **asdict(total)}


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate
