from collections.abc import Sequence

from experiments.training.networks import imagenet_resnet50
from experiments.training.task import LargeImages, Task
from sparsify.ranges import Count, MomentumFactor, NotNegative


def resnet50_imagenet(
    batch_size: Count = 32,
    lr: NotNegative = 0.1,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 1e-4,
    lr_warmup_epochs: NotNegative = 5,
    lr_milestones: Sequence[NotNegative] = (30, 60, 80),
    channels_last: bool = False,
) -> Task:
    """ResNet-50 on ImageNet (25,557,032 parameters), as He et al. 2016 and Goyal et al. 2017 train it.

    For 90 epochs. lr is for 256 images a step in all, as 8 workers x 32 are; else multiply it by workers x
    batch_size / 256 (arXiv:1706.02677).

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
        "imagenet",
        imagenet_resnet50,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        channels_last,
    )
