"""A worker's records of its steps and epochs.

Numbers of a step stay on the device until its window closes and it is written: within a window nothing makes
the host wait.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from analysis.records.schema import StepOrEpochLine, field_descriptions_by_name
from experiments.training.replicas.local import LocalReplica
from experiments.training.replicas.shared import make_once_for_virtual_ranks
from experiments.training.task import Metrics
from sparsify.comm import Comm
from sparsify.core import host_sync
from sparsify.core.timer import PhaseTimer
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import NonFiniteGradientError, StepReport

EPOCH_MEANS = tuple(field_descriptions_by_name(StepOrEpochLine))  # recorded per epoch besides
STEPS_PER_WRITE = 100  # steps between two writes of the log; nothing is written inside a timed step


class MeasurementLog(Protocol):
    """The place where a rank's measurements go."""

    def add_line(self, kind: str, **values: Any) -> None:
        """Note a line of this kind."""

    def flush(self) -> None:
        """Let readers see what was noted."""


class StepLog:
    """The steps since the last write.

    They wait in memory until the timer's samples are resolved, so that nothing is written inside a timed
    step.
    """

    def __init__(self, timer: PhaseTimer, comm: Comm, log: MeasurementLog, device: torch.device) -> None:
        self.timer = timer
        self.comm = comm
        self.log = log
        self.device = device
        self.waiting: list[dict[str, Any]] = []
        self.finite: list[Tensor] = []  # (tensors,) bool of each waiting step, until somebody looks
        self.names: list[str] = []  # of these tensors
        # The steps since the last validation, or epoch where none validates.
        self.epoch: list[dict[str, float]] = []
        self.timed_s = 0.0  # spent in steps since the run began, but for those in which a worker was stopped

    def add_step(
        self,
        step: int,
        epoch: int,
        loss: Tensor,
        lr: float,
        report: StepReport,
        aggregator: Aggregator | LocalReplica,
        finite: Tensor,
    ) -> None:
        """Note one step, counted from 0. Nothing of it makes the host wait for the device.

        Args:
            finite: as `FlatGradients.are_finite` said; nobody has looked at it but in mode serialised.
        """
        n = aggregator.num_elements
        if self.timer.mode != "serialised":
            self.finite.append(finite)
            self.names = [name for name, _ in aggregator.gradients.named_parameters]
        self.waiting.append(
            {
                "step": step,
                "epoch": epoch + 1,
                "loss": loss,
                "lr": lr,
                "wire_bytes": report.wire_bytes,
                "messages": report.messages,
                "predicted_s": report.predicted_s,
                "host_syncs": report.host_syncs,
                "sent_density": report.sent_density,
                # Of the average, which is alike on all workers.
                "update_density": aggregator.moved
                if isinstance(aggregator, LocalReplica)
                else make_once_for_virtual_ranks(
                    self.comm, lambda: torch.count_nonzero(aggregator.gradients.flat) / n
                ),
                "residual_norm": aggregator.residual_norm(),
            }
        )

    def write_waiting_steps(self) -> None:
        """Close the window: write the waiting steps to the log. Collective: all ranks write together.

        Raises:
            NonFiniteGradientError: on all ranks, once they are written: a gradient had a NaN or Inf that
                nobody has looked for.
        """
        samples = self.timer.finish_window_and_split_waits(self._gather)
        trouble = self._find_nonfinite_gradient()
        # A step is as long on the workers that waited for one that was suspended.
        stops_of_ranks = self._gather([float(sample.stops) for sample in samples])
        stops_of_steps = [int(max(stops_by_rank)) for stops_by_rank in zip(*stops_of_ranks, strict=True)]
        for sample, stops, numbers in zip(
            samples, stops_of_steps, tensors_to_numbers(self.waiting), strict=True
        ):
            self.epoch.append({name: numbers[name] for name in ("loss", *EPOCH_MEANS)})
            numbers["stops"] = stops
            self.timed_s += 0.0 if stops else sample.step_s
            if sample.spans:
                numbers["spans"] = sample.spans
            self.log.add_line(
                "step", start_s=sample.start_s, step_s=sample.step_s, phases=sample.phases, **numbers
            )
        self.waiting.clear()
        self.log.flush()
        if trouble:
            raise trouble

    def add_epoch(
        self,
        epoch: int,
        step: int,
        metrics: Metrics | None,
        captured_energy: float | None = None,
        tested: Metrics | None = None,
    ) -> None:
        """Note the means since the last call, on the worker that validated.

        Args:
            epoch: counted from 0, as `step` is.
            metrics: of the validation; None where this worker did not validate.
            captured_energy: in this step; None where nothing is selected.
            tested: of the test set at the end, where training images stood in for it until then.
        """
        names = {name: "train_loss" if name == "loss" else name for name in self.epoch[0]}
        means = {
            recorded: math.fsum(step_values[name] for step_values in self.epoch) / len(self.epoch)
            for name, recorded in names.items()
        }
        self.epoch.clear()
        if metrics is not None:
            self.log.add_line(
                "epoch",
                epoch=epoch + 1,
                step=step + 1,
                **means,
                val_loss=metrics.loss,
                val_top1=metrics.top1_percent,
                val_top5=metrics.top5_percent,
                wall_s=self.timed_s,
                captured_energy=captured_energy,
                **({} if tested is None else {"test_loss": tested.loss, "test_top1": tested.top1_percent}),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return this log's part of a checkpoint; no step may be waiting."""
        return {"epoch": self.epoch, "timed_s": self.timed_s}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        name_by_old_name = {
            field.former_name: name
            for name, field in field_descriptions_by_name(StepOrEpochLine).items()
            if field.former_name
        }
        self.epoch = [
            {name_by_old_name.get(name, name): value for name, value in step.items()}
            for step in saved["epoch"]
        ]
        self.timed_s = saved["timed_s"]

    def _find_nonfinite_gradient(self) -> NonFiniteGradientError | None:
        """Return an error for the first gradient of any rank's waiting steps that was not finite.

        All ranks return the same.
        """
        if not self.finite:
            return None
        flags = host_sync.to_host(torch.stack(self.finite))
        self.finite = []
        first = next((index for index, fine in enumerate(flags) if not all(fine)), len(flags))
        tensor = flags[first].index(False) if first < len(flags) else 0
        first_by_rank = self._gather([first, tensor])
        rank = min(range(len(first_by_rank)), key=lambda rank: first_by_rank[rank][0])
        bad_step, bad_tensor = map(int, first_by_rank[rank])
        if bad_step >= len(flags):
            return None
        steps = [values["step"] for values in self.waiting]
        return NonFiniteGradientError(rank, steps[bad_step], self.names[bad_tensor], noticed_after=steps[-1])

    def _gather(self, numbers: list[float]) -> list[list[float]]:
        gathered = self.comm.all_gather(torch.tensor(numbers, dtype=torch.float64, device=self.device))
        rows: list[list[float]] = host_sync.to_host(torch.stack(gathered))
        return rows


def tensors_to_numbers(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the steps with numbers instead of tensors.

    One host synchronisation, if there are any tensors.
    """
    tensors = [value.double() for step in steps for value in step.values() if isinstance(value, Tensor)]
    numbers = iter(host_sync.to_host(torch.stack(tensors)) if tensors else [])
    return [
        {name: next(numbers) if isinstance(value, Tensor) else value for name, value in step.items()}
        for step in steps
    ]
