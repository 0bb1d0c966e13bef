"""What selections are benchmarked on: a residual, and several gradients that take turns.

Synthetic ones are named by their distribution. Real ones are kept from a few steps of training with Top-k,
and cached, for they take a minute.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

import sparsify
from analysis.records.files import write_atomic
from experiments.config import data_root
from experiments.training import datasets
from experiments.training.datasets import Dataset
from experiments.training.networks import resnet18, vgg16
from experiments.training.replicas.shared import set_learning_rate
from experiments.training.task import Task
from sparsify.comm import virtual
from sparsify.core import huge_pages
from sparsify.types import BucketContext, SparseVector
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import NonFiniteGradientError

SCALE = 1e-3  # of synthetic gradients, as in training
KEPT = 4  # gradients of a training that are kept
STEPS = {"cpu": 20, "cuda": 60}  # of that training
BATCH, RATE, MOMENTUM, WEIGHT_DECAY, DENSITY = 16, 0.01, 0.9, 1e-4, 0.001
SEGMENTS, SMALLEST, LARGEST = 64, 1e-4, 1.0  # of mixed scales
NONZERO = 0.01  # share of the elements, where most are zero


class StepInputs(NamedTuple):
    """Inputs of a benchmark's steps, one step after the other."""

    residual: Tensor  # (n,) float32, before the first step
    gradients: Tensor  # (turns, n) float32, in one piece of memory
    source: str  # what it is, in words
    is_first_step: bool = False  # is every step a training's first one? Then there is no residual


def normal(out: Tensor, generator: Generator) -> None:
    out.normal_(generator=generator).mul_(SCALE)


def laplace(out: Tensor, generator: Generator) -> None:
    out.exponential_(generator=generator)
    coins = torch.randint(2, out.shape, generator=generator, dtype=torch.int8, device=out.device)
    out.mul_(coins.mul_(2).sub_(1)).mul_(SCALE)


def mixed(out: Tensor, generator: Generator) -> None:
    """Layers of very different scale: segments of equal length, the same scales each time."""
    out.normal_(generator=generator)
    shares = torch.rand(SEGMENTS, generator=Generator().manual_seed(1)).tolist()
    for segment, share in zip(out.tensor_split(SEGMENTS), shares, strict=True):
        segment.mul_(SMALLEST * (LARGEST / SMALLEST) ** share)


def ties(out: Tensor, generator: Generator) -> None:
    """Whole multiples of one step: about nine values. Sums of them are whole multiples as well."""
    out.normal_(generator=generator).round_().mul_(2.0**-10)


def zeros(out: Tensor, generator: Generator) -> None:
    """99 % are 0, different ones each time."""
    normal(out, generator)
    out.mul_(torch.rand(out.shape, generator=generator, device=out.device) < NONZERO)


SYNTHETIC: dict[str, tuple[Callable[[Tensor, Generator], None], str]] = {
    "normal": (normal, "normal numbers"),
    "laplace": (laplace, "Laplace-distributed numbers"),
    "mixed": (mixed, f"normal numbers, {SEGMENTS} segments scaled by {SMALLEST:g} to {LARGEST:g}"),
    "ties": (ties, "normal numbers rounded to about nine values"),
    "zeros": (zeros, f"normal numbers, of which {1 - NONZERO:.0%} are set to 0"),
}
FIRST_TIED = "first_tied"  # what is hardest for a guessed bound


def synthetic(name: str, n: int, turns: int, device: torch.device) -> StepInputs:
    """Numbers of a distribution, always the same; the residual is what a gradient before them left."""
    generator = Generator(device).manual_seed(0)
    fill, words = SYNTHETIC[name]
    sizes = (n,), (turns, n)
    residual, gradients = (huge_pages.request(torch.empty(size, device=device)) for size in sizes)
    for vector in (residual, *gradients):
        fill(vector, generator)
    return StepInputs(residual, gradients, words)


def first_tied(n: int, turns: int, device: torch.device) -> StepInputs:
    """A training's first step in bfloat16, where very many elements tie; as many bytes as `synthetic`."""
    made = synthetic("ties", n, 2 * turns, device)
    source = (
        f"the first step of a training: no residual; {made.source}, in bfloat16, which torch.add adds to "
        "float32 slowly, so that here it is no floor"
    )
    return StepInputs(made.residual.zero_(), made.gradients.bfloat16(), source, is_first_step=True)


def inputs(name: str, n: int, turns: int, kept: Path, device: torch.device) -> StepInputs:
    """Inputs of a distribution, or of a network, whose gradients are kept in a folder."""
    if name in NETWORKS:
        return real(name, kept, device)
    return first_tied(n, turns, device) if name == FIRST_TIED else synthetic(name, n, turns, device)


NETWORKS: dict[str, tuple[Callable[[int, int, int], nn.Module], int]] = {
    "vgg16": (vgg16, 14_728_266),
    "resnet18": (resnet18, 11_173_962),
}
DISTRIBUTIONS = (*SYNTHETIC, FIRST_TIED, *NETWORKS)


def real(name: str, folder: Path, device: torch.device) -> StepInputs:
    """Residual and gradients of a network in training, from `folder`, or from a training now.

    CIFAR-10 where $DATA_ROOT has it, else scikit-learn's digits, enlarged to 32 x 32; `source` says which.
    """
    root = data_root.root_of(None)
    dataset = "cifar10" if data_root.has(root, "cifar10") else "digits32"
    path = folder / f"{name}-{dataset}.pt"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(trained(name, dataset, root, device), buffer)
        write_atomic(path, buffer.getvalue(), durable=False)
    kept = torch.load(path, map_location=device, weights_only=True)
    residual, gradients = (  # copied into memory as the library allocates it
        huge_pages.request(torch.empty_like(kept[part])).copy_(kept[part])
        for part in ("residual", "gradients")
    )
    return StepInputs(residual, gradients, kept["source"])


def trained(name: str, dataset: str, root: Path, device: torch.device) -> dict[str, Any]:
    """A few steps of one worker with Top-k; the gradients of the last ones, and the residual before them."""
    network, size = NETWORKS[name]
    data = datasets.load(dataset, root, device)
    task = Task(dataset, network, BATCH, RATE, MOMENTUM, WEIGHT_DECAY, 0, (), channels_last=False)
    steps, losses = STEPS[device.type], list[float]()
    residual, gradients = torch.empty(0), torch.empty(KEPT, size, device=device)

    def look(step: int, loss: Tensor, aggregator: Aggregator) -> None:
        nonlocal residual
        flat = aggregator.gradients.flat
        assert flat.numel() == size, (name, flat.numel())
        losses.append(loss.item())
        if not math.isfinite(losses[-1]) or not flat.isfinite().all():
            raise NonFiniteGradientError(0, step, name)
        if (turn := step - (steps - KEPT)) >= 0:
            if turn == 0:
                owed = aggregator.method.residual(aggregator.states[0])
                assert owed is not None, aggregator.method
                residual = owed.clone()
            gradients[turn].copy_(flat)

    train_briefly(task, data, device, 1, steps, DENSITY, look)
    source = (
        f"{name} on {data.name}, steps {steps - KEPT} to {steps} of a training by Top-k at density "
        f"{DENSITY:g}, batch {BATCH}, loss {losses[0]:.2f} -> {losses[-1]:.2f}"
    )
    return {"residual": residual.cpu(), "gradients": gradients.cpu(), "source": source}


def train_briefly(
    task: Task,
    data: Dataset,
    device: torch.device,
    size: int,
    steps: int,
    density: float,
    look: Callable[[int, Tensor, Aggregator], None] = lambda step, loss, aggregator: None,
) -> tuple[list[SparseVector], int]:
    """A few steps with Top-k over the whole model on virtual workers: what each worker selected in the last
    one, and of how many elements.

    Args:
        look: called with gradients that are not aggregated yet.
    """
    method = sparsify.build("topk", density=density)

    def body(comm: virtual.VirtualComm) -> tuple[SparseVector, int]:
        model = task.model(data, 0, device, torch.float32)
        optimiser, aggregator = task.optimiser(model), Aggregator(method, model.named_parameters(), comm)
        augmentation = BucketContext(0, comm.rank, -1).make_generator_for_rank(device)
        batches = task.batches(data, comm.rank, size, 0, augmentation, torch.float32)
        watched = list[SparseVector]()

        def watch(acc: Tensor, part: SparseVector) -> None:
            watched[:] = [SparseVector(part.indices.clone(), part.values.clone())]

        for step in range(steps):
            inputs, labels = next(batches)
            aggregator.gradients.zero_()
            loss = task.loss(model(inputs), labels)
            loss.backward()
            look(step, loss.detach(), aggregator)
            rate = task.learning_rate(step, task.steps_per_epoch(data, size))
            aggregator.aggregate(0, rate, watch)
            set_learning_rate(optimiser, rate)
            optimiser.step()
        return watched[0], aggregator.num_elements

    lived = virtual.run(size, body)
    return [part for part, _ in lived], lived[0][1]
