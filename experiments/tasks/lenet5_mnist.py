from collections.abc import Sequence

from experiments.training.networks import lenet5
from experiments.training.task import Task
from sparsify.ranges import Count, MomentumFactor, NotNegative


def lenet5_mnist(
    batch_size: Count = 128,
    lr: NotNegative = 0.01,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 1e-4,
    lr_warmup_epochs: NotNegative = 0,
    lr_milestones: Sequence[NotNegative] = (),
    channels_last: bool = False,
) -> Task:
    """LeNet-5 on MNIST, one of the networks of Shi et al. 2019.

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
        "mnist",
        lenet5,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        channels_last,
    )
