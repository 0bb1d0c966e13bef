from collections.abc import Sequence

from experiments.training.masked_images import BASE, MaskedImages
from experiments.training.task import Task
from sparsify.ranges import Count, MomentumFactor, NotNegative


def maebase_imagenet(
    batch_size: Count = 32,
    lr: NotNegative = 0.1,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 0.0,
    lr_warmup_epochs: NotNegative = 1,
    lr_milestones: Sequence[NotNegative] = (),
) -> Task:
    """The masked autoencoder of He et al. 2022 with ViT-B/16 on ImageNet.

    111,655,680 parameters; trained by SGD, where they have AdamW.

    Args:
        batch_size: images of each worker in a step.
        lr: learning rate, which does not depend on the number of workers.
        momentum: of SGD, after aggregation.
        weight_decay: of tensors of more than one dimension; biases and layer norm have none.
        lr_warmup_epochs: epochs in which the learning rate rises to lr, linearly; 0: none.
        lr_milestones: epochs after each of which the learning rate is a tenth.
    """
    return MaskedImages(
        "imagenet",
        BASE.network,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        False,
        BASE.patch,
    )
