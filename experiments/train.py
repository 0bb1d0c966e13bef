"""The training loop: the same for processes and for virtual ranks, plain enough to print."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from experiments.checkpoints import Keeper, Parts
from experiments.data import Dataset
from experiments.task import Task
from sparsify.aggregate import Method
from sparsify.aggregator import Aggregator, NonFinite
from sparsify.comm import Comm, Metered
from sparsify.kernels import Tally
from sparsify.optimiser import check_momentum
from sparsify.overlap import Overlap
from sparsify.parts import Place
from sparsify.timer import PhaseTimer

EPOCH_MEANS = ("wire_bytes", "host_syncs", "density", "update_density")  # recorded per epoch besides
WINDOW = 100  # steps between two writes of the log; nothing is written inside a timed step


class Log(Protocol):
    """Where a rank's measurements go."""

    def add(self, kind: str, **values: Any) -> None: ...

    def flush(self) -> None: ...


class Trained(NamedTuple):
    model: nn.Module
    searching: dict[str, Any]  # see `searched`


class Setting(NamedTuple):
    """What the loop needs besides task and method."""

    seed: int
    num_steps: int
    validate: bool  # after every epoch and at the end
    device: torch.device
    dtype: torch.dtype
    select: str = "auto"  # see sparsify.kernels
    overlap: bool = False  # buckets are aggregated while backpropagation goes on


def train(
    task: Task,
    data: Dataset,
    method: Method,
    comm: Comm,
    timer: PhaseTimer,
    log: Log,
    setting: Setting,
    progress: Callable[[int], None] = lambda step: None,
    keeper: Keeper | None = None,
) -> Trained:
    """Train one worker's model together with the others.

    Args:
        keeper: saves now and then, and knows where to go on from.
    """
    seed, device, dtype = setting.seed, setting.device, setting.dtype
    model = task.model(data, seed, device, dtype)
    for tensor in model.state_dict().values():
        comm.broadcast(tensor)
    optimiser = task.optimiser(model)
    check_momentum(optimiser, method)
    metered, named = Metered(comm, timer), model.named_parameters()
    aggregator = Aggregator(method, named, metered, timer, seed, select=setting.select)
    overlap = Overlap(aggregator) if setting.overlap else None
    gradients = aggregator.gradients
    augmentation = Place(seed, comm.rank, -1).generator(device)  # -1: no bucket has this number
    steps_per_epoch = task.steps_per_epoch(data, comm.size)
    window = Window(timer, comm, log, device)
    parts = Parts(model, optimiser, aggregator, augmentation, window)
    timer.num_steps = done = keeper.restore(parts) if keeper else 0
    batches = task.batches(data, comm.rank, comm.size, seed, augmentation, dtype, first=done)

    for step in range(done, setting.num_steps):
        epoch = step // steps_per_epoch
        ends_epoch = (step + 1) % steps_per_epoch == 0 or step + 1 == setting.num_steps
        if timer.mode == "serialised":
            comm.barrier()  # what a rank did since its last step, records and such, is not this step's wait
        with timer.step():
            with timer.phase("io"):
                inputs, labels = next(batches)
            with timer.phase("forward"):
                loss = task.loss(model(inputs), labels)
            with timer.phase("backward"):
                gradients.zero_()
                rate = task.learning_rate(step, steps_per_epoch)
                if overlap:
                    overlap.begin(epoch, rate)
                loss.backward()
                if timer.mode == "as_published":
                    loss.item()  # the published code reads the loss here, its first wait for the device
            if overlap:
                report = overlap.finish()
            with timer.phase("check"):
                finite = gradients.finite()  # of the average, where they overlap
                if timer.mode != "production" and (layer := gradients.nonfinite(finite)):
                    raise NonFinite(comm.rank, step, layer)
            if not overlap:
                report = aggregator.aggregate(epoch, rate)
            with timer.phase("update"):
                set_learning_rate(optimiser, rate)
                optimiser.step()
            if ends_epoch and setting.validate and timer.mode == "as_published":
                with timer.phase("validate"):  # inside the timed step, while the others wait: as published
                    metrics = task.evaluate(model, data, dtype) if comm.rank == 0 else None

        if timer.mode == "production" and (layer := gradients.nonfinite(finite, intact=False)):
            raise NonFinite(comm.rank, step, layer)  # only now: within the step it would make the host wait
        window.observe(
            step=step,
            epoch=epoch + 1,
            loss=loss.detach(),
            lr=rate,
            wire_bytes=report.wire_bytes,
            host_syncs=report.host_syncs,
            density=report.selected / aggregator.num_elements,
            update_density=torch.count_nonzero(gradients.flat) / aggregator.num_elements,
            residual_norm=aggregator.residual_norm(),
        )
        validates = ends_epoch and setting.validate
        if validates and timer.mode != "as_published":
            metrics = task.evaluate(model, data, dtype) if comm.rank == 0 else None
        if ends_epoch or (step + 1) % WINDOW == 0:
            window.close()
        if ends_epoch:
            means = window.means()
        if validates:
            if metrics:
                log.add(
                    "epoch",
                    epoch=epoch + 1,
                    step=step + 1,
                    **means,
                    val_loss=metrics.loss,
                    val_top1=metrics.top1,
                    val_top5=metrics.top5,
                    wall_s=window.timed_s,
                )
            comm.barrier()  # the others did not validate; that is not part of their next step's wait
        progress(step + 1)
        if keeper and step + 1 < setting.num_steps:
            keeper.end_step(step + 1, parts)
    log.flush()
    if overlap:
        overlap.close()
    return Trained(model, searched(aggregator))


def searched(aggregator: Aggregator) -> dict[str, Any]:
    """Who searched this worker's buckets for what to send, and how often the guess of a bound was wrong."""
    found = aggregator.searching()
    total = sum(found.values(), Tally())
    return {"kernel": " and ".join(found) or None, **asdict(total)}


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate


class Window:
    """The steps since the last write: their observations wait here until the timer's samples are resolved."""

    def __init__(self, timer: PhaseTimer, comm: Comm, log: Log, device: torch.device) -> None:
        self.timer, self.comm, self.log, self.device = timer, comm, log, device
        self.observations: list[dict[str, Any]] = []
        self.epoch: list[dict[str, float]] = []  # the steps since the last call of `means`
        self.timed_s = 0.0  # spent in steps since the run began

    def observe(self, **values: Any) -> None:
        self.observations.append(values)

    def close(self) -> None:
        """Write the window's steps to the log. Collective: all ranks close together."""
        samples = self.timer.resolve(self._gather)
        for sample, values in zip(samples, self.observations, strict=True):
            numbers = {k: float(v) if isinstance(v, Tensor) else v for k, v in values.items()}
            self.epoch.append({name: numbers[name] for name in ("loss", *EPOCH_MEANS)})
            self.timed_s += sample.step_s
            if sample.spans:
                numbers["spans"] = sample.spans
            self.log.add(
                "step", start_s=sample.start_s, step_s=sample.step_s, phases=sample.phases, **numbers
            )
        self.observations.clear()
        self.log.flush()

    def means(self) -> dict[str, float]:
        """This worker's means since the last call, which is an epoch: training loss, bytes, densities."""
        means = {name: math.fsum(one[name] for one in self.epoch) / len(self.epoch) for name in self.epoch[0]}
        self.epoch.clear()
        return {"train_loss": means.pop("loss"), **means}

    def state(self) -> dict[str, Any]:
        """For a checkpoint; the window must be closed."""
        return {"epoch": self.epoch, "timed_s": self.timed_s}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.epoch, self.timed_s = [*saved["epoch"]], saved["timed_s"]

    def _gather(self, mine: list[float]) -> list[list[float]]:
        everybody = self.comm.all_gather(torch.tensor(mine, dtype=torch.float64, device=self.device))
        return [one.tolist() for one in everybody]
