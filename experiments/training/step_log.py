"""What one worker records of its steps and epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments.training.task import Metrics
from sparsify.aggregator import Aggregator, Report
from sparsify.comm import Comm
from sparsify.timer import PhaseTimer

EPOCH_MEANS = ("wire_bytes", "host_syncs", "density", "update_density")  # recorded per epoch besides
STEPS_PER_WRITE = 100  # steps between two writes of the log; nothing is written inside a timed step


class Log(Protocol):
    """Where a rank's measurements go."""

    def add(self, kind: str, **values: Any) -> None: ...

    def flush(self) -> None: ...


class StepLog:
    """The steps since the last write: they wait in memory until the timer's samples are resolved, so that
    nothing is written inside a timed step."""

    def __init__(self, timer: PhaseTimer, comm: Comm, log: Log, device: torch.device) -> None:
        self.timer, self.comm, self.log, self.device = timer, comm, log, device
        self.waiting: list[dict[str, Any]] = []
        self.epoch: list[dict[str, float]] = []  # the steps since the last epoch ended
        self.timed_s = 0.0  # spent in steps since the run began

    def observe(
        self, step: int, epoch: int, loss: Tensor, lr: float, report: Report, aggregator: Aggregator
    ) -> None:
        """Note one step, counted from 0. Nothing of it makes the host wait for the device but the norm of the
        residual."""
        n = aggregator.num_elements
        self.waiting.append(
            {
                "step": step,
                "epoch": epoch + 1,
                "loss": loss,
                "lr": lr,
                "wire_bytes": report.wire_bytes,
                "host_syncs": report.host_syncs,
                "density": report.selected / n,
                "update_density": torch.count_nonzero(aggregator.gradients.flat) / n,
                "residual_norm": aggregator.residual_norm(),
            }
        )

    def write(self) -> None:
        """Write the waiting steps to the log. Collective: all ranks write together."""
        samples = self.timer.resolve(self._gather)
        for sample, values in zip(samples, self.waiting, strict=True):
            numbers = {k: float(v) if isinstance(v, Tensor) else v for k, v in values.items()}
            self.epoch.append({name: numbers[name] for name in ("loss", *EPOCH_MEANS)})
            self.timed_s += sample.step_s
            if sample.spans:
                numbers["spans"] = sample.spans
            self.log.add(
                "step", start_s=sample.start_s, step_s=sample.step_s, phases=sample.phases, **numbers
            )
        self.waiting.clear()
        self.log.flush()

    def end_epoch(self, epoch: int, step: int, metrics: Metrics | None) -> None:
        """Note the epoch's means on the worker that validated.

        Args:
            epoch: counted from 0, as `step` is.
            metrics: of the validation; None where this worker did not validate.
        """
        means = self._means()
        if metrics is not None:
            self.log.add(
                "epoch",
                epoch=epoch + 1,
                step=step + 1,
                **means,
                val_loss=metrics.loss,
                val_top1=metrics.top1,
                val_top5=metrics.top5,
                wall_s=self.timed_s,
            )

    def state(self) -> dict[str, Any]:
        """For a checkpoint; no step may be waiting."""
        return {"epoch": self.epoch, "timed_s": self.timed_s}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what was `state`."""
        self.epoch, self.timed_s = [*saved["epoch"]], saved["timed_s"]

    def _means(self) -> dict[str, float]:
        """This worker's means since the last call, which is an epoch: training loss, bytes, densities."""
        means = {
            name: math.fsum(step[name] for step in self.epoch) / len(self.epoch) for name in self.epoch[0]
        }
        self.epoch.clear()
        return {"train_loss": means.pop("loss"), **means}

    def _gather(self, mine: list[float]) -> list[list[float]]:
        gathered = self.comm.all_gather(torch.tensor(mine, dtype=torch.float64, device=self.device))
        return [numbers.tolist() for numbers in gathered]
