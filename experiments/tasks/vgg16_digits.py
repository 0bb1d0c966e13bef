from collections.abc import Sequence

from experiments.training.networks import vgg16
from experiments.training.task import Task
from sparsify.ranges import Count, MomentumFactor, NotNegative


def vgg16_digits(
    batch_size: Count = 128,
    lr: NotNegative = 0.1,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 1e-4,
    lr_warmup_epochs: NotNegative = 5,
    lr_milestones: Sequence[NotNegative] = (81, 122, 155),
    channels_last: bool = False,
) -> Task:
    """VGG-16 on scikit-learn's digits enlarged to 32 x 32: the paper's model where there is no CIFAR-10."""
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
