"""A task: a model, a data set, and how the one is trained on the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.utils.data import DistributedSampler, TensorDataset

from experiments.training.datasets import REGISTRY, Dataset, Split
from experiments.training.networks import WhiteningConvolution
from sparsify.core import host_sync

IGNORED_LABEL = -100  # instead of a label: torch's cross-entropy leaves it out


class Metrics(NamedTuple):
    loss: float  # mean cross-entropy per label, or what else the task minimises
    top1_percent: float | None = None  # None where there are no classes to be right about
    top5_percent: float | None = None


@dataclass(frozen=True)
class Task:
    """A training task: image classification by SGD with momentum, and the base of other tasks.

    Two epoch clocks tick in the published code. Each worker's loader gives floor(images / workers / batch)
    full batches a pass (48 for the paper), but learning rate, density schedule and validation count
    ceil(images / (workers x batch)) steps an epoch (49). We take the second one, `steps_per_epoch`: it is the
    one on the paper's horizontal axes. Passes over the data follow each other regardless of it, each shuffled
    anew; in the published code the second pass repeats the order of the first.

    Raises:
        ValueError: an unknown data set; the message lists what there is.
    """

    has_metric: ClassVar[bool] = True  # is there anything to validate?
    # Examples of a batch that is evaluated; changes no result: evaluation uses running statistics, and the
    # metrics are sums.
    eval_batch: ClassVar[int] = 500
    dataset: str
    network: Callable[[int, int, int], nn.Module]
    batch_size: int  # per worker
    lr: float
    momentum: float
    weight_decay: float  # on tensors with more than one dimension; biases and batch norm have none
    lr_warmup_epochs: float
    lr_milestones: Sequence[float]
    channels_last: bool

    def __post_init__(self) -> None:
        REGISTRY.check_name(self.dataset)

    def make_model(self, data: Dataset, seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Make the model, with the same initial weights for the same seed, whatever else drew random numbers.

        They are drawn by torch's default rules.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make_network(data)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return model.to(device, dtype).to(memory_format=layout)

    def make_network(self, data: Dataset) -> nn.Module:
        """Make the network for the data's shapes."""
        return self.network(data.channels, data.pixels, data.classes)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Momentum after aggregation, no Nesterov, as published."""
        groups = group_by_weight_decay(model.parameters(), self.weight_decay)
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, fused=True)

    def steps_per_epoch(self, data: Dataset, workers: int) -> int:
        """ceil(images / (workers x batch)).

        Raises:
            ValueError: more workers than full batches.
        """
        images = len(data.train.labels)
        if images // workers < self.batch_size:
            raise ValueError(
                f"workers={workers} x task.batch_size={self.batch_size} is more than the {images} training "
                f"{data.noun} of {data.name}: each worker needs at least one full batch; take fewer "
                "workers or a "
                "smaller batch"
            )
        return math.ceil(images / (workers * self.batch_size))

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Linear from lr / W over the first W warm-up steps, then a tenth after each milestone.

        It is not scaled by the number of workers. With the paper's numbers: 0.0203 in the first step of epoch
        2, 0.1 from epoch 6. The first step after a milestone still has the old rate, because the published
        code sets the rate before it counts the epoch.

        Args:
            step: counted from 0.
        """
        warmup = self.lr_warmup_epochs * steps_per_epoch
        if step < warmup:
            return self.lr / warmup + (self.lr - self.lr / warmup) / warmup * step
        passed = sum(step > milestone * steps_per_epoch for milestone in self.lr_milestones)
        return float(self.lr * 0.1**passed)

    def batches(
        self,
        data: Dataset,
        rank: int,
        size: int,
        seed: int,
        generator: Generator,
        dtype: torch.dtype,
        first_batch: int = 0,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this worker's batches, without end: (B, C, H, W) inputs and (B,) labels, on one device.

        The order is DistributedSampler's; a last batch that is not full is skipped, as published. The first
        batch is number `first_batch`; those before it cost nothing, and draw nothing from the generator.
        """
        sampler = DistributedSampler[tuple[Tensor, ...]](
            TensorDataset(data.train.labels), size, rank, seed=seed
        )
        per_pass = len(sampler) // self.batch_size
        data_pass, skipped = divmod(first_batch, per_pass)
        while True:
            sampler.set_epoch(data_pass)
            order = host_sync.to_device(list(sampler), data.train.labels)
            for batch in range(skipped, per_pass):
                start = batch * self.batch_size
                indices = order[start : start + self.batch_size]
                yield self.draw_batch(data, indices, generator, dtype)
            data_pass = data_pass + 1
            skipped = 0

    def draw_batch(
        self, data: Dataset, indices: Tensor, generator: Generator, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of training examples, (B,) indices, with all that is drawn for them."""
        inputs = data.augment(indices, generator).to(dtype)
        return self.to_model_layout(data.normalize(inputs)), data.train.labels[indices]

    def evaluation_batch(self, data: Dataset, split: Split, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of examples to be evaluated, always the same."""
        return self.to_model_layout(
            data.normalize(data.load_uint8_images(split.images).to(dtype))
        ), split.labels

    def to_model_layout(self, inputs: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, C, H, W), in the memory layout of the model."""
        inputs = inputs.permute(0, 3, 1, 2)  # as memory, this is channels-last already
        return inputs if self.channels_last else inputs.contiguous()

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), labels.flatten())

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, data: Dataset, dtype: torch.dtype, split: Split | None = None
    ) -> Metrics:
        """Loss and accuracy over all of `data.test`, or `split`, with this worker's batch-norm statistics.

        The code of Yoon and Oh 2022 averages percentages batch by batch, the last batch of 16 as heavy as the
        others; this is the exact mean over labels.
        """
        model.eval()
        tested = split or data.test
        sums = []
        for start in range(0, len(tested.labels), self.eval_batch):
            batch = Split(*(part[start : start + self.eval_batch] for part in tested))
            inputs, labels = self.evaluation_batch(data, batch, dtype)
            sums.append(self.metric_sums(model(inputs), labels))
        model.train()
        count, loss, *hits = map(math.fsum, zip(*host_sync.to_host(torch.stack(sums)), strict=True))
        return Metrics(loss / count, *(100 * number / count for number in hits))

    def metric_sums(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return a batch's number of labels, the sum of their loss, hits, and hits among five."""
        outputs = outputs.flatten(0, -2)
        labels = labels.flatten()
        loss = functional.cross_entropy(outputs, labels, reduction="sum")
        hits = outputs.topk(min(5, outputs.shape[1]), dim=1).indices == labels[:, None]
        counted = (labels != IGNORED_LABEL).sum()
        return torch.stack([counted, loss.double(), hits[:, 0].sum(), hits.sum()])


def group_by_weight_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return an optimizer's groups: decayed tensors of more than one dimension, and the others."""
    all_parameters = [*parameters]
    return [
        {"params": [p for p in all_parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in all_parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def patch_optimizers_to_skip_compiler() -> None:
    """Let optimizers step without loading torch's compiler.

    They would load its 2,000 files only to tell it that it has nothing to do here: a second of each process,
    and more where many load them from one disk.

    A torch that names its parts otherwise loads it as before.
    """
    for function in vars(torch.optim.Optimizer).values():
        plain = getattr(function, "__wrapped__", None)
        if plain is not None:  # see torch._compile
            plain.__dynamo_disable = plain
    for kind in vars(torch.optim).values():
        plain = getattr(vars(kind).get("step") if isinstance(kind, type) else None, "__wrapped__", None)
        if plain is not None:  # see torch.optim.optimizer: nobody differentiates a step here
            kind.step = torch.no_grad()(plain)


@dataclass(frozen=True)
class LargeImageTask(Task):
    """Classification of images of 224 x 224 pixels, of which fewer are evaluated at a time."""

    eval_batch: ClassVar[int] = 50


@dataclass(frozen=True)
class FastImageTask(Task):
    """Classification of images in few steps.

    The network is fitted to images before it is trained, labels are smoothed, and the learning rate falls to
    nothing.

    Raises:
        ValueError: the learning rate would be nothing before it has risen.
    """

    num_fitted_images: ClassVar[int] = 2000  # training images
    lr_zero_epoch: float  # the learning rate falls to 0 by then, linearly, from the end of its warm-up
    smoothing: float  # the share of each label that is spread evenly over all classes, in training

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_zero_epoch <= self.lr_warmup_epochs:
            raise ValueError(
                f"lr_zero_epoch={self.lr_zero_epoch:g} is not after "
                f"lr_warmup_epochs={self.lr_warmup_epochs:g}, in which the rate rises; take a later epoch"
            )

    def make_network(self, data: Dataset) -> nn.Module:
        model = super().make_network(data)
        images = data.normalize(data.load_uint8_images(data.train.images[: self.num_fitted_images]).float())
        for layer in model.modules():
            if isinstance(layer, WhiteningConvolution):
                layer.fit(images.permute(0, 3, 1, 2).cpu())
        return model

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        rate = super().learning_rate(step, steps_per_epoch)
        epochs_left = self.lr_zero_epoch - step / steps_per_epoch
        return rate * min(1.0, max(0.0, epochs_left / (self.lr_zero_epoch - self.lr_warmup_epochs)))

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, labels, label_smoothing=self.smoothing)
