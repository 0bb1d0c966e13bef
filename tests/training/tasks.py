"""Tasks trained by one worker, and a text to train them on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from experiments.training.datasets import Dataset, _presets
from experiments.training.replicas.shared import step_at_rate
from experiments.training.task import Metrics, Task

CPU = torch.device("cpu")


def model_of(task: Task, data: Dataset) -> nn.Module:
    return task.make_model(data, 0, CPU, torch.float32)


def evaluate(task: Task, model: nn.Module, data: Dataset) -> Metrics:
    return task.evaluate(model, data, torch.float32)


def batches_of(task: Task, data: Dataset, seed: int = 0, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the batches of the only worker, whose augmentation is drawn from this seed."""
    return task.batches(data, 0, 1, 0, Generator().manual_seed(seed), torch.float32, first)


def backward(task: Task, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    model.zero_grad()
    task.loss(model(batch[0]), batch[1]).backward()


def learn(task: Task, data: Dataset, steps: int) -> tuple[Metrics, Metrics]:
    """Train a fresh model at a constant rate; return its metrics before and after."""
    model = model_of(task, data)
    optimiser = task.make_optimizer(model)
    batches = batches_of(task, data)
    before = evaluate(task, model, data)
    for _ in range(steps):
        backward(task, model, next(batches))
        step_at_rate(optimiser, task.lr)
    return before, evaluate(task, model, data)


def rhyme(folder: Path, masked: bool = False) -> Dataset:
    """Return a text in which each word follows from the one before."""
    (folder / "train.txt").write_text("one two three four five six\n" * 100)
    (folder / "test.txt").write_text("one two three four five six\n" * 20)
    return _presets.load_text_dataset("rhyme", folder, ("train.txt", "test.txt"), 7, CPU, masked)
