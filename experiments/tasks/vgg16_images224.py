from collections.abc import Sequence

from experiments.training.networks import imagenet_vgg16
from experiments.training.task import LargeImages, Task
from sparsify.ranges import Count, MomentumFactor, NotNegative


def vgg16_images224(
    batch_size: Count = 32,
    lr: NotNegative = 0.01,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 5e-4,
    lr_warmup_epochs: NotNegative = 0,
    lr_milestones: Sequence[NotNegative] = (30, 60, 80),
    channels_last: bool = False,
) -> Task:
    """VGG-16 (138,357,544 parameters) as for ImageNet, for timing only: images are synthetic.

    Args:
        batch_size: images of each worker in a step.
        lr: learning rate, which does not depend on the number of workers.
        momentum: of SGD, after aggregation.
        weight_decay: of tensors of more than one dimension; biases and batch norm have none.
        lr_warmup_epochs: epochs in which the learning rate rises to lr, linearly; 0: none.
        lr_milestones: epochs after each of which the learning rate is a tenth.
        channels_last: how images lie in memory; a matter of speed.
    """
    return LargeImages(
        "images224",
        imagenet_vgg16,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        channels_last,
    )
