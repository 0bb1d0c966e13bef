"""The families of the tasks in conf/task: what their files give values to, and what is built from them.

Positional-only parameters are what a task is about, its data set first; a run can't set them. The others are
its settings. torch is imported where a task is built: listing and completing tasks needs none.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from sparsify.ranges import MomentumFactor, NonNegativeFloat, NonNegativeFraction, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from experiments.training.task import Task
else:
    Task = object  # signatures are evaluated without torch


def image_classifier(
    dataset: str,
    network: str,
    /,
    batch_size: PositiveInt,
    lr: NonNegativeFloat,
    momentum: MomentumFactor,
    weight_decay: NonNegativeFloat,
    lr_warmup_epochs: NonNegativeFloat,
    lr_milestones: Sequence[NonNegativeFloat],
    channels_last: bool,
) -> Task:
    """Classify images by a network of `experiments.training.networks`.

    Args:
        batch_size: images of each worker in a step.
        lr: learning rate, which does not depend on the number of workers.
        momentum: of SGD, after aggregation.
        weight_decay: of tensors of more than one dimension; biases and batch norm have none.
        lr_warmup_epochs: epochs in which the learning rate rises to lr, linearly; 0: none.
        lr_milestones: epochs after each of which the learning rate is a tenth.
        channels_last: how images lie in memory; a matter of speed.
    """
    from experiments.training import networks, task

    kind = task.LargeImageTask if network.startswith("imagenet_") else task.Task
    return kind(
        dataset,
        networks.find_network(network),
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        channels_last,
    )


def fast_image_classifier(
    dataset: str,
    network: str,
    /,
    lr_zero_epoch: PositiveFloat,
    smoothing: NonNegativeFraction,
    batch_size: PositiveInt,
    lr: NonNegativeFloat,
    momentum: MomentumFactor,
    weight_decay: NonNegativeFloat,
    lr_warmup_epochs: NonNegativeFloat,
    lr_milestones: Sequence[NonNegativeFloat],
    channels_last: bool,
) -> Task:
    """Classify images in few steps by a network of `experiments.training.networks`.

    Args:
        lr_zero_epoch: the learning rate falls linearly to 0 by the end of it, from the end of its warm-up.
        smoothing: the share of each label that is spread evenly over all classes, in training.
        batch_size: images of each worker in a step.
        weight_decay: of tensors of more than one dimension; biases and batch norm have none.
        channels_last: how images lie in memory; a matter of speed.

    Raises:
        ValueError: the learning rate would be 0 before it has risen.
    """
    from experiments.training import networks, task

    return task.FastImageTask(
        dataset,
        networks.find_network(network),
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        channels_last,
        lr_zero_epoch,
        smoothing,
    )


def masked_autoencoder(
    dataset: str,
    size: str,
    /,
    batch_size: PositiveInt,
    lr: NonNegativeFloat,
    momentum: MomentumFactor,
    weight_decay: NonNegativeFloat,
    lr_warmup_epochs: NonNegativeFloat,
    lr_milestones: Sequence[NonNegativeFloat],
) -> Task:
    """Train a masked autoencoder of a size that `experiments.training.masked_images` has.

    Args:
        batch_size: images of each worker in a step.
        weight_decay: of tensors of more than one dimension; biases and layer norm have none.
    """
    from experiments.training import masked_images

    sizes = masked_images.SIZES[size]
    milestones = tuple(lr_milestones)
    return masked_images.MaskedImageTask(
        dataset,
        sizes.make_network,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        milestones,
        False,
        sizes.patch,
    )


def lstm(
    dataset: str,
    /,
    width: PositiveInt,
    layers: PositiveInt,
    batch_size: PositiveInt,
    lr: NonNegativeFloat,
    momentum: MomentumFactor,
    weight_decay: NonNegativeFloat,
    lr_warmup_epochs: NonNegativeFloat,
    lr_milestones: Sequence[NonNegativeFloat],
) -> Task:
    """Train a language model of LSTM layers.

    Args:
        width: of word vectors and of each layer's state.
        layers: of LSTM, one above the other.
        batch_size: sequences of each worker in a step, of 35 words.
        weight_decay: of tensors of more than one dimension; biases have none.
    """
    from experiments.training.language.networks import LSTM
    from experiments.training.language.tasks import NextWordTask

    def network(channels: int, length: int, classes: int) -> LSTM:
        return LSTM(classes, width, layers)

    milestones = tuple(lr_milestones)
    return NextWordTask(
        dataset, network, batch_size, lr, momentum, weight_decay, lr_warmup_epochs, milestones, False
    )


def bert(
    dataset: str,
    /,
    width: PositiveInt,
    layers: PositiveInt,
    heads: PositiveInt,
    batch_size: PositiveInt,
    lr: NonNegativeFloat,
    momentum: MomentumFactor,
    weight_decay: NonNegativeFloat,
    lr_warmup_epochs: NonNegativeFloat,
    lr_milestones: Sequence[NonNegativeFloat],
) -> Task:
    """Train BERT to guess hidden words.

    Args:
        width: of word vectors and of each layer.
        layers: of attention.
        heads: of each layer; they divide its width.
        batch_size: sequences of each worker in a step, of 64 words.
        weight_decay: of tensors of more than one dimension; biases have none.

    Raises:
        ValueError: the heads do not divide the width.
    """
    from experiments.training.language.networks import BERT
    from experiments.training.language.tasks import HiddenWordTask

    _check_heads(width, heads)

    def network(channels: int, length: int, classes: int) -> BERT:
        return BERT(classes, length, width, layers, heads)

    milestones = tuple(lr_milestones)
    return HiddenWordTask(
        dataset, network, batch_size, lr, momentum, weight_decay, lr_warmup_epochs, milestones, False
    )


def gpt(
    dataset: str,
    /,
    width: PositiveInt,
    layers: PositiveInt,
    heads: PositiveInt,
    batch_size: PositiveInt,
    optimiser: Literal["adamw", "muon", "sgd"],
    lr: NonNegativeFloat,
    momentum: MomentumFactor,
    muon_factor: PositiveFloat,
    beta1: MomentumFactor,
    beta2: MomentumFactor,
    weight_decay: NonNegativeFloat,
    lr_warmup_epochs: NonNegativeFloat,
    lr_cosine_epochs: PositiveFloat,
    lr_end: NonNegativeFraction,
) -> Task:
    """Train GPT to guess the next word, or character, after each in a text.

    Args:
        width: of word vectors and of each layer.
        layers: of attention.
        heads: of each layer; they divide its width.
        batch_size: sequences of each worker in a step, of 35 words or 64 characters.
        optimiser: after aggregation; muon is for the matrices of the layers, with adamw for all else.
        lr: learning rate, which does not depend on the number of workers.
        momentum: of sgd, and of muon's matrices.
        muon_factor: learning rate of muon's matrices, in times of lr.
        beta1: of adamw, and of what muon leaves to it: for how long it remembers gradients.
        beta2: as beta1, of the squares of gradients.
        weight_decay: of tensors of more than one dimension; biases have none. sgd takes less, as its lr is
            larger.
        lr_warmup_epochs: epochs in which the learning rate rises to lr, linearly; 0: none.
        lr_cosine_epochs: the learning rate falls along a cosine by the end of it, from the end of its
            warm-up; for a whole schedule as many as train.epochs.
        lr_end: the share of lr to which it falls, and at which it stays.

    Raises:
        ValueError: the heads do not divide the width; a number of which the optimiser makes no use; the
            learning rate would have fallen before it has risen.
    """
    from experiments.training.language.networks import GPT
    from experiments.training.language.optimizers import OptimizerRecipe
    from experiments.training.language.tasks import AnnealedNextWordTask

    _check_heads(width, heads)
    recipe = OptimizerRecipe(optimiser, momentum, muon_factor, beta1, beta2)
    trained = (batch_size, lr, momentum, weight_decay, lr_warmup_epochs, (), False)

    def network(channels: int, length: int, classes: int) -> GPT:
        return GPT(classes, length, width, layers, heads)

    return AnnealedNextWordTask(dataset, network, *trained, recipe, lr_cosine_epochs, lr_end)


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ValueError(f"width={width} can't be divided among heads={heads}; take a multiple of it")


def vector(
    dataset: str,
    /,
    elements: PositiveInt,
    tensors: PositiveInt,
    overlap: NonNegativeFraction,
    lr: NonNegativeFloat,
    momentum: MomentumFactor,
) -> Task:
    """Draw gradients without a network.

    Args:
        elements: of the gradient, n.
        tensors: of one shape, as square as that can be, in which they lie.
        overlap: of the elements the share that is alike on all workers, so that they select the same there.
        lr: learning rate.
        momentum: of SGD, after aggregation.
    """
    from experiments.training.vector import VectorModel, VectorTask

    if elements % tensors:
        raise ValueError(
            f"elements={elements} can't be put into tensors={tensors} of one size; take a multiple of it"
        )

    def network(channels: int, pixels: int, classes: int) -> VectorModel:
        return VectorModel(elements, tensors)

    return VectorTask(dataset, network, 1, lr, momentum, 0.0, 0, (), False, elements, overlap)


FAMILIES = {
    family.__name__: family
    for family in (image_classifier, fast_image_classifier, masked_autoencoder, lstm, bert, gpt, vector)
}
