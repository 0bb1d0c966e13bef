from collections.abc import Sequence

from experiments.training.masked_images import TINY, MaskedImages
from experiments.training.task import Task
from sparsify.ranges import Count, MomentumFactor, NotNegative


def maetiny_cifar10(
    batch_size: Count = 32,
    lr: NotNegative = 0.2,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 0.0,
    lr_warmup_epochs: NotNegative = 1,
    lr_milestones: Sequence[NotNegative] = (),
) -> Task:
    """A masked autoencoder of CIFAR-10 that two cores can train: 265,424 parameters, patches of 4 x 4 pixels.

    Its encoder has 4 layers of width 64, its decoder 2 of width 48.

    Args:
        batch_size: images of each worker in a step.
        lr: learning rate, which does not depend on the number of workers.
        momentum: of SGD, after aggregation.
        weight_decay: of tensors of more than one dimension; biases and layer norm have none.
        lr_warmup_epochs: epochs in which the learning rate rises to lr, linearly; 0: none.
        lr_milestones: epochs after each of which the learning rate is a tenth.
    """
    return MaskedImages(
        "cifar10",
        TINY.network,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        False,
        TINY.patch,
    )
