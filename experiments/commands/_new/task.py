"""EXAMPLE: a network, the data set that it is trained on, and how."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from experiments.training.task import Task
from sparsify.ranges import Count, MomentumFactor, NotNegative

DATASET = "digits"  # a file of experiments/training/datasets


# The signature is the configuration: task.lr=0.05 stands behind `run task=example`.
def example(
    batch_size: Count = 16,
    lr: NotNegative = 0.1,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 1e-4,
    lr_warmup_epochs: NotNegative = 1,
    lr_milestones: Sequence[NotNegative] = (6, 9),
    channels_last: bool = True,
) -> Task:
    """A small CNN, for images of 8 x 8 pixels or more.

    Args:
        batch_size: images of each worker in a step.
        lr: the learning rate, after its warm-up.
        momentum: of SGD, applied to the aggregated gradient.
        weight_decay: on tensors of two dimensions or more: biases and batch norm have none.
        lr_warmup_epochs: epochs in which the learning rate rises to `lr`.
        lr_milestones: epochs after which the learning rate falls to a tenth.
        channels_last: the layout of images in memory, which changes speed and not results.
    """
    return Task(
        DATASET,
        network,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        channels_last,
    )


def network(channels: int, pixels: int, classes: int) -> nn.Module:
    """(B, channels, pixels, pixels) -> (B, classes). Its initial weights follow from the run's seed."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (pixels // 2) ** 2, classes),
    )
