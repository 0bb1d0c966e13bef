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
    """The same CNN on scikit-learn's bundled digits (8 x 8): for machines without network or data.

    Args:
        batch_size: images of each worker in a step.
        lr: learning rate, which does not depend on the number of workers.
        momentum: of SGD, after aggregation.
        weight_decay: of tensors of more than one dimension; biases and batch norm have none.
        lr_warmup_epochs: epochs in which the learning rate rises to lr, linearly; 0: none.
        lr_milestones: epochs after each of which the learning rate is a tenth.
        channels_last: how images lie in memory; a matter of speed.
    """
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
