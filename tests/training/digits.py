"""Training on the digits, the smallest task that there is, and a log of it in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.loop import LoopSettings, Trainer
from experiments.training.settings import TrainSettings
from experiments.training.step_log import MeasurementLog
from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.method import Method
from tests.sparsify import laws

CPU = torch.device("cpu")
NEVER = TrainSettings(validate="never")


class Lines:
    """A log in memory."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def add_line(self, kind: str, **values: Any) -> None:
        self.lines.append({"kind": kind, **values})

    def flush(self) -> None: ...

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]

    def seconds(self, phase: str) -> list[float]:
        """Return the seconds that each step spent in a phase."""
        return [step["phases"][phase] for step in self.of("step")]


def trainer(
    comm: Comm, timer: PhaseTimer, method: str | Method, log: MeasurementLog | None = None, *,
    name: str = "cnn_digits", data: datasets.Dataset | None = None, task: Mapping[str, Any] | None = None,
    steps: int | None = None, train: TrainSettings = NEVER, device: torch.device = CPU,
    dtype: torch.dtype = torch.float32, **settings: Any,
) -> Trainer:  # fmt: skip
    """Return the trainer of a worker.

    Args:
        method: by its name it has a density of 0.01, where it has one.
        task, settings: what is otherwise than by default, in the task and in the loop.
    """
    built = laws.build(method, 0.01, "global") if isinstance(method, str) else method
    data = data or datasets.load("digits", None, device)
    loop = LoopSettings(0, steps, train, device, dtype, **settings)
    return Trainer(TASKS.build(name, task or {}), data, built, comm, timer, log or Lines(), loop)


def weights(trained: Trainer) -> torch.Tensor:
    """Return the trainer's parameters after all steps, as one vector."""
    return torch.cat([p.detach().flatten().cpu() for p in trained.run().model.parameters()])
