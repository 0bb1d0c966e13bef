from collections.abc import Sequence

from experiments.networks import small_cnn
from experiments.task import Task


def cnn_cifar10(
    batch_size: int = 16,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    lr_warmup_epochs: float = 1,
    lr_milestones: Sequence[float] = (6, 9),
    channels_last: bool = True,
) -> Task:
    """A CNN of 34,058 parameters on CIFAR-10, for laptops; the schedule is the paper's, scaled to 10
    epochs.
    """
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
