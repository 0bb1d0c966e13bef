"""The training loop: the same for processes and for virtual ranks, plain enough to print."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from experiments.training.checkpoint import Checkpointer, TrainingState
from experiments.training.datasets import Dataset, Split
from experiments.training.graph import CudaGraphRecorder, GraphedStep
from experiments.training.replicas.local import LocalReplica
from experiments.training.replicas.shared import make_replica
from experiments.training.selection_observers import CapturedEnergyMeter, SelectionObserver, combine_hooks
from experiments.training.settings import LatenessSettings, TrainSettings
from experiments.training.step_log import STEPS_PER_WRITE, MeasurementLog, StepLog
from experiments.training.task import Metrics, Task
from sparsify.comm import Comm, InstrumentedComm
from sparsify.comm.virtual import VirtualComm
from sparsify.core.timer import PhaseTimer
from sparsify.local.strategy import LocalSteps
from sparsify.method import Method
from sparsify.types import BucketContext, SearchStats
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.checks import check_momentum_applied_once
from sparsify.wrappers.engine import NonFiniteGradientError
from sparsify.wrappers.overlap import BackwardOverlap

LATENESS_STREAM = 0x1A7E  # of lateness, apart from whatever else is drawn by the run's seed
WORKERS_PER_ITERATION = 8  # workers in a published iteration


class TrainedModel(NamedTuple):
    """A model at the end of its training, and what is known of how it went."""

    model: nn.Module
    search_summary: dict[str, Any]  # see `summarize_search`
    graph_outcome: str | None  # see `graph.GraphedStep.outcome`; None too where it was not to be tried
    has_seen_no_disagreement: bool  # see `Replica.has_seen_no_disagreement`


class LoopSettings(NamedTuple):
    """The values that the loop needs besides task and method."""

    seed: int
    num_steps: int | None  # None: until `Trainer.finish`
    train: TrainSettings
    device: torch.device
    dtype: torch.dtype
    select: str = "auto"  # see sparsify.kernels
    overlap: bool = False  # buckets are aggregated while backpropagation goes on
    graph_recorder: CudaGraphRecorder | None = (
        None  # of forward and backward, to repeat them where nothing looks in
    )
    late: LatenessSettings = LatenessSettings()
    has_bf16_products: bool = False  # see `with_bf16_products`


class Trainer:
    """Trainer of a worker's model, together with the others', a step at a time.

    Args:
        checkpointer: knows where to go on from; `run` lets it save now and then.
    """

    def __init__(
        self,
        task: Task,
        data: Dataset,
        method: Method | LocalSteps,
        comm: Comm,
        timer: PhaseTimer,
        log: MeasurementLog,
        settings: LoopSettings,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        seed = settings.seed
        device = settings.device
        dtype = settings.dtype
        self.task = task
        self.data = data
        self.comm = comm
        self.timer = timer
        self.settings = settings
        self.checkpointer = checkpointer
        self.model = task.make_model(data, seed, device, dtype)
        if settings.has_bf16_products:
            self.model.forward = with_bf16_products(self.model.forward, device)
        instrumented = InstrumentedComm(comm, timer, self.wait_for_loss)
        named = self.model.named_parameters()
        self.local = None
        self.overlap = None
        self.aggregator: Aggregator | LocalReplica
        if isinstance(method, LocalSteps):
            make = task.make_optimizer
            select = settings.select
            self.aggregator = self.local = LocalReplica(
                method, self.model, make, instrumented, timer, seed, select
            )
            optimiser = self.local.inner
        else:
            self.replica = make_replica(comm, self.model, task.make_optimizer)
            optimiser = self.replica.optimiser
            check_momentum_applied_once(optimiser, method)
            # The published systems sent each bucket by itself, and so it is timed where they are reproduced.
            together = timer.mode != "as_published"
            self.aggregator = aggregator = Aggregator(
                method, named, instrumented, timer, seed, select=settings.select, group_buckets=together
            )
            self.overlap = BackwardOverlap(aggregator) if settings.overlap else None
        # -1: no bucket has this number.
        augmentation = BucketContext(seed, comm.rank, -1).make_generator_for_rank(device)
        self.validates = settings.train.validate == "epoch"
        self.steps_per_epoch = settings.train.epoch_steps or task.steps_per_epoch(data, comm.size)
        self.log = StepLog(timer, comm, log, device)
        self.looks = None
        every = settings.train.look_every
        if every and comm.rank == 0:
            self.looks = SelectionObserver(self.aggregator.gradients.buckets, log, every, seed)
        self.state = TrainingState(self.model, optimiser, self.aggregator, augmentation, self.log)
        timer.num_steps = self.done = checkpointer.restore_loaded(self.state) if checkpointer else 0
        self.batches = task.batches(
            data, comm.rank, comm.size, seed, augmentation, dtype, first_batch=self.done
        )
        self.unread: Tensor | None = None  # as published, the loss that nobody has read
        self.recorded = None
        if settings.graph_recorder and timer.mode == "production" and not self.overlap:
            work = self.forward_and_backward
            gradients = self.aggregator.gradients
            self.recorded = GraphedStep(
                work, self.model, gradients, settings.graph_recorder, self.print_on_rank_0
            )

    def run(self, progress: Callable[[int], None] = lambda step: None) -> TrainedModel:
        """Train to the end.

        Args:
            progress: told the number of steps done, after each step.
        """
        while self.done != self.settings.num_steps:
            self.step()
            progress(self.done)
            if self.checkpointer and self.done != self.settings.num_steps:
                self.checkpointer.save_if_agreed(self.done, self.state)
        return self.finish()

    def step(self) -> None:
        """Take a step, together with all workers."""
        step = self.done
        epoch = self.done // self.steps_per_epoch
        timer = self.timer
        aggregator = self.aggregator
        overlap = self.overlap
        published = timer.mode == "as_published"
        metrics = None
        validates = self.is_validation_due_after(step) and not published
        owes = published and step > 0 and self.is_validation_due_after(step - 1)
        watch = CapturedEnergyMeter() if validates and not self.local else None
        look = self.looks.hook_for_step(step) if self.looks else None
        if timer.mode == "serialised":
            self.comm.barrier()  # what a rank did since its last step, records and such, is no wait of this
        with timer.step():
            if owes and self.comm.rank == 0:
                with timer.phase("validate"):  # while the others go on to their final wait
                    metrics = self.validate_on_rank_0()
            with timer.phase("io"):
                inputs, labels = next(self.batches)
            rate = self.task.learning_rate(step, self.steps_per_epoch)
            rate *= self.settings.train.lr_decay_factor(step, self.steps_per_epoch)
            if overlap:
                overlap.begin_step(epoch, rate)
            loss = (self.recorded or self.forward_and_backward)(inputs, labels)
            if self.settings.late.draw != "none":
                with timer.phase("late"):
                    self.simulate_lateness(step)
            if overlap:
                report = overlap.finish_step()
            with timer.phase("check"):
                gradients = aggregator.gradients
                finite = gradients.are_finite()  # of the average, where they overlap
                layer = gradients.find_nonfinite_parameter(finite) if timer.mode == "serialised" else None
                if layer:
                    raise NonFiniteGradientError(self.comm.rank, step, layer)
            if isinstance(aggregator, LocalReplica):
                with timer.phase("update"):
                    aggregator.step(rate)
                report = aggregator.exchange_if_due(epoch)
            else:
                if not overlap:
                    report = aggregator.aggregate(epoch, rate, combine_hooks(watch, look))
                with timer.phase("update"):
                    self.replica.update(rate, aggregator.gradients.flat)

        self.done += 1
        if owes:
            self.log.add_epoch((step - 1) // self.steps_per_epoch, step - 1, metrics)
        # In other modes nobody has looked at `finite`, which would make the host wait: the log will.
        self.log.add_step(step, epoch, loss, rate, report, aggregator, finite)
        if validates:
            metrics = self.validate_on_rank_0()
        if self.is_epoch_end(step) or self.done % STEPS_PER_WRITE == 0:
            self.log.write_waiting_steps()
        if self.is_validation_period_end(step) and not (published and self.validates):
            captured = watch.captured_share() if watch else None
            self.log.add_epoch(epoch, step, metrics, captured, self.evaluate_test_set_at_end(metrics))
        if validates:
            self.comm.barrier()  # the others did not validate; that is not part of their next step's wait

    def forward_and_backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Fill the gradients; returns the loss."""
        with self.timer.phase("forward"):
            loss = self.task.loss(self.model(inputs), labels)
        with self.timer.phase("backward"):
            self.aggregator.gradients.zero_()
            loss.backward()
        self.unread = loss = loss.detach()
        return loss

    def simulate_lateness(self, step: int) -> None:
        """Idle for as long as this worker is late in a step, after the device has finished its work."""
        comm = self.comm
        late_s = seconds_late(self.settings.late, self.settings.seed, step, comm.rank, comm.size)
        if isinstance(comm, VirtualComm):
            comm.idle(late_s)
        elif late_s:
            self.timer.synchronise()
            time.sleep(late_s)

    def wait_for_loss(self) -> None:
        """Wait for the device where the published code first does.

        Its backward hook has compressed and begun to send by then, and its final wait is yet to come.
        """
        loss = self.unread
        self.unread = None
        if loss is not None:
            with self.timer.phase("backward"):
                loss.item()

    def is_epoch_end(self, step: int) -> bool:
        """Tell whether this step is an epoch's last one, or the run's."""
        return (step + 1) % self.steps_per_epoch == 0 or step + 1 == self.settings.num_steps

    def is_validation_period_end(self, step: int) -> bool:
        """Tell whether this step ends `validate_every` epochs."""
        is_last = step + 1 == self.settings.num_steps
        whole = (step // self.steps_per_epoch + 1) % self.settings.train.validate_every == 0
        return self.is_epoch_end(step) and (whole or is_last)

    def is_validation_due_after(self, step: int) -> bool:
        """Tell whether validation is due after this step; as published, it is in the one that follows."""
        return self.validates and self.is_validation_period_end(step)

    def validate_on_rank_0(self) -> Metrics | None:
        """Metrics of the validation, on rank 0."""
        return self.evaluate() if self.comm.rank == 0 else None

    def evaluate_test_set_at_end(self, validation_metrics: Metrics | None) -> Metrics | None:
        """Metrics of the test set after the last step, where training images stood in for it until then."""
        if validation_metrics is None or self.data.unseen is None or self.done != self.settings.num_steps:
            return None
        return self.evaluate(self.data.unseen)

    def evaluate(self, split: Split | None = None) -> Metrics:
        """Metrics of this worker's model; within local steps as a rule of what all have in common."""
        local = self.local if self.settings.train.evaluate == "anchor" else None
        with local.at_anchor() if local else nullcontext():
            return self.task.evaluate(self.model, self.data, self.settings.dtype, split)

    def print_on_rank_0(self, line: str) -> None:
        """Tell people a line, once for all ranks."""
        if self.comm.rank == 0:
            print(line, file=sys.stderr)

    def finish_diverged(self) -> TrainedModel:
        """End a training that diverged, with a last epoch of NaN.

        Collective, after `step` told of it on all ranks.
        """
        epoch = (self.done - 1) // self.steps_per_epoch
        nothing = Metrics(math.nan)
        self.log.add_epoch(epoch, self.done - 1, nothing if self.comm.rank == 0 else None)
        return self._end()

    def finish(self) -> TrainedModel:
        """End the training after its last step."""
        self.log.write_waiting_steps()
        if self.timer.mode == "as_published" and self.is_validation_due_after(self.done - 1):
            epoch = (self.done - 1) // self.steps_per_epoch  # no step follows in which to validate
            metrics = self.validate_on_rank_0()
            self.log.add_epoch(epoch, self.done - 1, metrics, tested=self.evaluate_test_set_at_end(metrics))
        return self._end()

    def _end(self) -> TrainedModel:
        self.log.log.flush()
        graph = self.recorded.outcome if self.recorded else None
        if self.local:
            self.local.move_to_anchor()
        agreed = self.local is not None or self.replica.has_seen_no_disagreement()
        return TrainedModel(self.model, summarize_search(self.aggregator), graph, agreed)


def with_bf16_products(
    forward: Callable[[Tensor], Tensor], device: torch.device
) -> Callable[[Tensor], Tensor]:
    """Return a model's forward with products in bfloat16, backward included.

    Parameters, gradients and outputs stay in single precision.
    """

    def computed(inputs: Tensor) -> Tensor:
        # Without its cache of casts: parameters move between two calls, and a recorded graph keeps none.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            outputs = forward(inputs)
        return outputs.float()

    return computed


def summarize_search(aggregator: Aggregator | LocalReplica) -> dict[str, Any]:
    """Kernels that searched this worker's buckets, and how often the guess of a bound was wrong."""
    stats_by_kernel = aggregator.search_stats()
    total = sum(stats_by_kernel.values(), SearchStats())
    return {"kernel": " and ".join(stats_by_kernel) or None, **asdict(total)}


def seconds_late(late: LatenessSettings, seed: int, step: int, rank: int, size: int) -> float:
    """Seconds by which a worker is late in a step: the same whoever asks, and in whatever order.

    constant: `s`. uniform: between 0 and `s`. lognormal: with median `s`, `spread` being the standard
    deviation of its logarithm. published: as late as the eight workers of one iteration of Top-k's published
    job on A100 were in compression, which took 212 ms, behind the first of them; every eight workers have an
    iteration of their own.
    """
    if late.rank not in (None, rank):
        return 0.0
    return float(_draw_lateness(late, np.random.default_rng([LATENESS_STREAM, seed, step]), size)[rank])


def _draw_lateness(late: LatenessSettings, draws: np.random.Generator, size: int) -> np.ndarray:
    """(size,) seconds."""
    if late.draw == "constant":
        return np.full(size, late.s)
    if late.draw == "uniform":
        return late.s * draws.random(size)
    if late.draw == "lognormal":
        return late.s * np.exp(late.spread * draws.standard_normal(size))
    table = published_lateness_s()
    rows = table[draws.integers(len(table), size=-(-size // WORKERS_PER_ITERATION))]
    return draws.permuted(rows, axis=1).ravel()[:size]


@cache
def published_lateness_s() -> np.ndarray:
    """Return (iterations, 8) seconds behind the first worker, of the published job's settled iterations.

    The logs' table has the least, the mean and the greatest time of each iteration: one worker has the least,
    one the greatest, and the other six share what the mean leaves.

    Raises:
        analysis.records.files.DamagedFileError: the table is not there, as in a copy of the code alone.
    """
    from analysis.published import rederived  # pandas comes with it

    table = rederived.settled_iterations(rederived.JOB_BY_GPU_AND_METHOD["A100", "topk"])
    least, mean, greatest = (table[f"comp_{which}_ms"].to_numpy() for which in ("min", "mean", "max"))
    others = (WORKERS_PER_ITERATION * mean - least - greatest) / (WORKERS_PER_ITERATION - 2)
    seconds: np.ndarray = (
        np.stack([least, greatest, *[others] * (WORKERS_PER_ITERATION - 2)], axis=1) - least[:, None]
    )
    return seconds / 1e3
