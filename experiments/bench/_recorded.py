"""What workers selected in a short training on virtual ranks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import sparsify
from experiments.tasks import REGISTRY
from experiments.training import datasets
from experiments.training.replica import set_learning_rate
from experiments.training.task import Task
from sparsify.aggregator import Aggregator
from sparsify.comm import virtual
from sparsify.types import BucketContext, Sparse


class Recorded(NamedTuple):
    """The selections of one step."""

    parts: list[Sparse]  # of each worker
    n: int
    source: str  # what it is, in words


def recorded(name: str, density: float, size: int, steps: int, root: Path) -> Recorded:
    """The last of some steps of a task with Top-k over the whole model.

    Args:
        root: the folder of the data sets' files.
    """
    task: Task = REGISTRY.build(name, {})
    device = torch.device("cpu")
    data = datasets.load(task.dataset, root, device)
    method = sparsify.build("topk", density=density)

    def body(comm: virtual.VirtualComm) -> tuple[int, Sparse]:
        model = task.model(data, 0, device, torch.float32)
        optimiser, aggregator = task.optimiser(model), Aggregator(method, model.named_parameters(), comm)
        augmentation = BucketContext(0, comm.rank, -1).generator(device)
        batches = task.batches(data, comm.rank, size, 0, augmentation, torch.float32)
        watched = list[Sparse]()

        def watch(acc: Tensor, part: Sparse) -> None:
            watched[:] = [Sparse(part.indices.clone(), part.values.clone())]

        for step in range(steps):
            inputs, labels = next(batches)
            aggregator.gradients.zero_()
            task.loss(model(inputs), labels).backward()
            rate = task.learning_rate(step, task.steps_per_epoch(data, size))
            aggregator.aggregate(0, rate, watch)
            set_learning_rate(optimiser, rate)
            optimiser.step()
        return aggregator.num_elements, watched[0]

    lived = virtual.run(size, body)
    source = f"step {steps} of {name}, Top-k at density {density:g} on {size} virtual workers"
    return Recorded([part for _, part in lived], lived[0][0], source)
