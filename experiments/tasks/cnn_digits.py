from collections.abc import Sequence

from experiments.training.networks import small_cnn
from experiments.training.task import Task
from sparsify.ranges import Count, MomentumFactor, NotNegative


def cnn_digits(
    batch_size: Count = 16,
    lr: NotNegative = 0.1,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 1e-4,
    lr_warmup_epochs: NotNegative = 1,
    lr_milestones: Sequence[NotNegative] = (6, 9),
    channels_last: bool = True,
) -> Task:
    """The same CNN on scikit-learn's bundled digits (8 x 8): for machines without network or data."""
    return Task(
        "digits",
        small_cnn,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        channels_last,
    )
