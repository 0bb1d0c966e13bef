"""What every task does: the order of its batches, and how few they may be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets


def test_batches_begin_anywhere() -> None:
    task = TASKS.build("cnn_digits", {"batch_size": 100})  # 7 batches a pass of 2 workers

    data = datasets.load("digits", None, torch.device("cpu"))

    def batches(first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        found: Iterator[tuple[torch.Tensor, torch.Tensor]] = task.batches(
            data, 1, 2, 3, torch.Generator(), torch.float32, first
        )
        return found

    everything = batches(0)
    for number in range(20):
        inputs, labels = next(everything)
        there, those = next(batches(number))
        assert torch.equal(inputs, there)
        assert torch.equal(labels, those)


def test_more_workers_than_batches_are_refused() -> None:
    data = datasets.load("digits", None, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"workers=100.*1437 training images.*fewer workers"):
        TASKS.build("cnn_digits", {}).steps_per_epoch(data, 100)
