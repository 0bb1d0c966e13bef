from collections.abc import Sequence

from experiments.networks import vgg16
from experiments.task import Task


def vgg16_digits(
    batch_size: int = 128,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    lr_warmup_epochs: float = 5,
    lr_milestones: Sequence[float] = (81, 122, 155),
    channels_last: bool = False,
) -> Task:
    """VGG-16 on scikit-learn's digits enlarged to 32 x 32: the paper's model size where CIFAR-10 can't be
    had.
    """
    return Task(
        "digits32",
        vgg16,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        channels_last,
    )
