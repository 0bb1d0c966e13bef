from collections.abc import Sequence

from experiments.training.networks import small_cnn
from experiments.training.task import Task
from sparsify.ranges import Count, MomentumFactor, NotNegative


def cnn_cifar10(
    batch_size: Count = 16,
    lr: NotNegative = 0.1,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 1e-4,
    lr_warmup_epochs: NotNegative = 1,
    lr_milestones: Sequence[NotNegative] = (6, 9),
    channels_last: bool = True,
) -> Task:
    """A CNN of 34,058 parameters on CIFAR-10, for laptops; the paper's schedule scaled to 10 epochs."""
    return Task(
        "cifar10",
        small_cnn,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        channels_last,
    )
