"""Inputs of selections: a residual and several gradients that take turns, synthetic or of a real training.

Real gradients come from a few steps of training with Top-k. They are kept in a file, for they take a minute.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

import sparsify
from analysis.records.files import write_atomic
from experiments.config import dataset_files
from experiments.tasks import REGISTRY as TASKS
from experiments.training import datasets
from experiments.training.networks import resnet18, vgg16
from experiments.training.replicas.shared import set_learning_rate
from experiments.training.task import Task
from sparsify.comm import virtual
from sparsify.core import huge_pages
from sparsify.types import BucketContext
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import NonFiniteGradientError

SCALE = 1e-3  # of synthetic gradients, as in training
NUM_KEPT_GRADIENTS = 4  # of a training: those of its last steps
TRAINING_STEPS = {"cpu": 20, "cuda": 60}
BATCH = 16
LEARNING_RATE = 0.01
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
DENSITY = 0.001
NUM_SEGMENTS = 64  # of mixed scales
SMALLEST_SCALE = 1e-4
LARGEST_SCALE = 1.0
NONZERO_SHARE = 0.01  # of the elements, where most are zero


class StepSequenceInputs(NamedTuple):
    """The inputs of a benchmark's steps, one step after the other."""

    initial_residual: Tensor  # (n,) float32, before the first step
    gradients_by_turn: Tensor  # (turns, n), in one piece of memory
    source: str  # in words
    is_always_first_step: bool = False  # every step is a training's first one, and has no residual


def fill_normal(out: Tensor, rng: Generator) -> None:
    out.normal_(generator=rng).mul_(SCALE)


def fill_laplace(out: Tensor, rng: Generator) -> None:
    out.exponential_(generator=rng)
    coins = torch.randint(2, out.shape, generator=rng, dtype=torch.int8, device=out.device)
    out.mul_(coins.mul_(2).sub_(1)).mul_(SCALE)


def fill_mixed_scales(out: Tensor, rng: Generator) -> None:
    """Fill with layers of very different scale: segments of equal length, the same scales each time."""
    out.normal_(generator=rng)
    shares = torch.rand(NUM_SEGMENTS, generator=Generator().manual_seed(1)).tolist()
    for segment, share in zip(out.tensor_split(NUM_SEGMENTS), shares, strict=True):
        segment.mul_(SMALLEST_SCALE * (LARGEST_SCALE / SMALLEST_SCALE) ** share)


def fill_with_ties(out: Tensor, rng: Generator) -> None:
    """Fill with whole multiples of one number, about nine values. Their sums are whole multiples as well."""
    out.normal_(generator=rng).round_().mul_(2.0**-10)


def fill_mostly_zeros(out: Tensor, rng: Generator) -> None:
    """Fill with 99 % zeros, at other places each time."""
    fill_normal(out, rng)
    out.mul_(torch.rand(out.shape, generator=rng, device=out.device) < NONZERO_SHARE)


SYNTHETIC: dict[str, tuple[Callable[[Tensor, Generator], None], str]] = {
    "normal": (fill_normal, "normal numbers"),
    "laplace": (fill_laplace, "Laplace-distributed numbers"),
    "mixed": (
        fill_mixed_scales,
        f"normal numbers, {NUM_SEGMENTS} segments scaled by {SMALLEST_SCALE:g} to {LARGEST_SCALE:g}",
    ),
    "ties": (fill_with_ties, "normal numbers rounded to about nine values"),
    "zeros": (fill_mostly_zeros, f"normal numbers, of which {1 - NONZERO_SHARE:.0%} are set to 0"),
}
FIRST_TIED = "first_tied"  # the hardest for a guessed bound


class TrainedNetwork(NamedTuple):
    """A network that is trained for its gradients: its task on a data set, its size, and its data sets."""

    make_task: Callable[[str], Task]
    num_parameters: int
    datasets: tuple[str, ...]  # the first one of which the files are there is taken, or else the last one


def make_image_task(make_network: Callable[[int, int, int], nn.Module], dataset: str) -> Task:
    return Task(dataset, make_network, BATCH, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, 0, (), False)


def make_decoder_task(dataset: str) -> Task:
    """Return the task of the decoder of figure `utilisation`, without a warm-up of its learning rate."""
    sizes = {"width": 256, "layers": 9, "heads": 8}
    task: Task = TASKS.build(f"gpt_{dataset}", {**sizes, "batch_size": BATCH, "lr_warmup_epochs": 0.0})
    return task


DECODER = "decoder"
IMAGE_DATASETS = ("cifar10", "digits32")
NETWORKS = {
    "vgg16": TrainedNetwork(partial(make_image_task, vgg16), 14_728_266, IMAGE_DATASETS),
    "resnet18": TrainedNetwork(partial(make_image_task, resnet18), 11_173_962, IMAGE_DATASETS),
    DECODER: TrainedNetwork(make_decoder_task, 9_677_312, ("ptb",)),
}
DISTRIBUTIONS = (*SYNTHETIC, FIRST_TIED, *NETWORKS)


def make_or_load_inputs(
    distribution: str, n: int, turns: int, gradients_folder: Path, device: torch.device
) -> StepSequenceInputs:
    """Return inputs of a distribution, or of a network whose gradients are kept in a folder."""
    if distribution in NETWORKS:
        return load_or_train_inputs(distribution, gradients_folder, device)
    if distribution == FIRST_TIED:
        return make_tied_first_step_inputs(n, turns, device)
    return make_synthetic_inputs(distribution, n, turns, device)


def make_synthetic_inputs(distribution: str, n: int, turns: int, device: torch.device) -> StepSequenceInputs:
    """Return the same numbers at each call; the residual is what a gradient before them left."""
    rng = Generator(device).manual_seed(0)
    fill, source = SYNTHETIC[distribution]
    residual = huge_pages.request(torch.empty(n, device=device))
    gradients = huge_pages.request(torch.empty(turns, n, device=device))
    for vector in (residual, *gradients):
        fill(vector, rng)
    return StepSequenceInputs(residual, gradients, source)


def make_tied_first_step_inputs(n: int, turns: int, device: torch.device) -> StepSequenceInputs:
    """Return a training's first step in bfloat16, where very many elements tie; as many bytes as float32."""
    inputs = make_synthetic_inputs("ties", n, 2 * turns, device)
    source = (
        f"the first step of a training: no residual; {inputs.source}, in bfloat16, which torch.add adds to "
        "float32 slowly, so that here it is no floor"
    )
    return StepSequenceInputs(
        inputs.initial_residual.zero_(),
        inputs.gradients_by_turn.bfloat16(),
        source,
        is_always_first_step=True,
    )


def load_or_train_inputs(network: str, gradients_folder: Path, device: torch.device) -> StepSequenceInputs:
    """Return stored inputs of a network in training; where there are none, train it and store them.

    Images are CIFAR-10 where $DATA_ROOT has it, else scikit-learn's digits, enlarged to 32 x 32; `source`
    says which. The decoder reads the Penn Treebank.

    Raises:
        ValueError: $DATA_ROOT does not have the Penn Treebank.
    """
    root = dataset_files.resolve_data_root(None)
    names = NETWORKS[network].datasets
    dataset = next((name for name in names if dataset_files.has_files(root, name)), names[-1])
    path = gradients_folder / f"{network}-{dataset}.pt"
    if not path.exists():
        gradients_folder.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        torch.save(record_training_gradients(network, dataset, root, device), buffer)
        write_atomic(path, buffer.getvalue(), durable=False)
    stored_inputs = torch.load(path, map_location=device, weights_only=True)
    residual, gradients = (  # copied into memory as the library allocates it
        huge_pages.request(torch.empty_like(stored_inputs[part])).copy_(stored_inputs[part])
        for part in ("residual", "gradients")
    )
    return StepSequenceInputs(residual, gradients, stored_inputs["source"])


def record_training_gradients(
    network: str, dataset: str, data_root: Path, device: torch.device
) -> dict[str, Any]:
    """Train one worker with Top-k; return the gradients of the last steps, and the residual before them."""
    make_task, num_parameters, _ = NETWORKS[network]
    data = datasets.load(dataset, data_root, device)
    task = make_task(dataset)
    steps = TRAINING_STEPS[device.type]
    gradients = list[Tensor]()
    losses = list[float]()

    def train_worker(comm: virtual.VirtualComm) -> Tensor:
        model = task.make_model(data, 0, device, torch.float32)
        optimizer = task.make_optimizer(model)
        method = sparsify.build("topk", density=DENSITY)
        aggregator = Aggregator(method, model.named_parameters(), comm)
        augmentation = BucketContext(0, comm.rank, -1).make_generator_for_rank(device)
        batches = task.batches(data, comm.rank, 1, 0, augmentation, torch.float32)
        residual = torch.empty(0)
        for step in range(steps):
            samples, labels = next(batches)
            aggregator.gradients.zero_()
            loss = task.loss(model(samples), labels)
            loss.backward()
            losses.append(loss.item())
            gradient = aggregator.gradients.flat
            assert gradient.numel() == num_parameters, (network, gradient.numel())
            if not math.isfinite(losses[-1]) or not gradient.isfinite().all():
                raise NonFiniteGradientError(0, step, network)
            if step >= steps - NUM_KEPT_GRADIENTS:
                if not gradients:
                    state_residual = aggregator.method.residual(aggregator.states[0])
                    assert state_residual is not None, method
                    residual = state_residual.clone()
                gradients.append(gradient.clone())
            learning_rate = task.learning_rate(step, task.steps_per_epoch(data, 1))
            aggregator.aggregate(0, learning_rate)
            set_learning_rate(optimizer, learning_rate)
            optimizer.step()
        return residual

    (residual,) = virtual.run(1, train_worker)
    source = (
        f"{network} on {data.name}, steps {steps - NUM_KEPT_GRADIENTS} to {steps} of a training by Top-k at "
        f"density {DENSITY:g}, batch {BATCH}, loss {losses[0]:.2f} -> {losses[-1]:.2f}"
    )
    return {"residual": residual.cpu(), "gradients": torch.stack(gradients).cpu(), "source": source}
