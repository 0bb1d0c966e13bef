from collections.abc import Sequence

from experiments.networks import small_cnn
from experiments.task import Task


def cnn_digits(
    batch_size: int = 16,
    lr: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    lr_warmup_epochs: float = 1,
    lr_milestones: Sequence[float] = (6, 9),
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
