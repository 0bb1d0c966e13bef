"""The families of the tasks that come with the repository; _presets.yaml has what differs in them.

A family says what its presets have in common, and which settings each has. Positional-only parameters are
what a preset is about, its data set first; the others are its settings, among them those of `Sgd`, where
`sgd` stands. torch is imported where a task is built: listing and completing tasks needs none.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from msgspec import yaml

from sparsify.ranges import MomentumFactor, NonNegativeFloat, NonNegativeFraction, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from experiments.training.task import Task


class Sgd(NamedTuple):
    """How a network is trained.

    What an example is and which tensors have no weight decay, the family says.

    Args:
        lr: learning rate, which does not depend on the number of workers.
        momentum: of SGD, after aggregation.
        lr_warmup_epochs: epochs in which the learning rate rises to lr, linearly; 0: none.
        lr_milestones: epochs after each of which the learning rate is a tenth.
    """

    batch_size: PositiveInt
    lr: NonNegativeFloat = 0.1
    momentum: MomentumFactor = 0.9
    weight_decay: NonNegativeFloat = 0.0
    lr_warmup_epochs: NonNegativeFloat = 0
    lr_milestones: Sequence[NonNegativeFloat] = ()


def images(
    dataset: str, network: str, /, sgd: Sgd = Sgd(128, weight_decay=1e-4), channels_last: bool = False
) -> "Task":
    """Classification of images by a network of `experiments.training.networks`.

    Args:
        batch_size: images of each worker in a step.
        weight_decay: of tensors of more than one dimension; biases and batch norm have none.
        channels_last: how images lie in memory; a matter of speed.
    """
    from experiments.training import networks, task

    kind = task.LargeImages if network.startswith("imagenet_") else task.Task
    return kind(dataset, getattr(networks, network), *sgd, channels_last)


def fast_images(
    dataset: str,
    network: str,
    /,
    lr_zero_epoch: PositiveFloat,
    smoothing: NonNegativeFraction = 0.1,
    sgd: Sgd = Sgd(8, weight_decay=5e-4),
    channels_last: bool = True,
) -> "Task":
    """Classification of images in few steps by a network of `experiments.training.networks`.

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

    return task.FastImages(dataset, getattr(networks, network), *sgd, channels_last, lr_zero_epoch, smoothing)


def masked_images(dataset: str, size: str, /, sgd: Sgd = Sgd(32, lr_warmup_epochs=1)) -> "Task":
    """A masked autoencoder of a size that `experiments.training.masked_images` has.

    Args:
        batch_size: images of each worker in a step.
        weight_decay: of tensors of more than one dimension; biases and layer norm have none.
    """
    from experiments.training import masked_images

    sizes: masked_images.Size = getattr(masked_images, size)
    return masked_images.MaskedImages(dataset, sizes.network, *sgd, False, sizes.patch)


def next_word(
    dataset: str, /, width: PositiveInt, layers: PositiveInt = 2, sgd: Sgd = Sgd(20, lr=1.0)
) -> "Task":
    """A language model of LSTM layers.

    Args:
        width: of word vectors and of each layer's state.
        layers: of LSTM, one above the other.
        batch_size: sequences of each worker in a step, of 35 words.
        weight_decay: of tensors of more than one dimension; biases have none.
    """
    from experiments.training.language.networks import LSTM
    from experiments.training.language.tasks import NextWord

    def network(channels: int, length: int, classes: int) -> LSTM:
        return LSTM(classes, width, layers)

    return NextWord(dataset, network, *sgd, False)


def hidden_words(
    dataset: str,
    /,
    width: PositiveInt,
    layers: PositiveInt,
    heads: PositiveInt,
    sgd: Sgd = Sgd(8, lr_warmup_epochs=1),
) -> "Task":
    """BERT guesses hidden words.

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
    from experiments.training.language.tasks import HiddenWords

    _check_heads(width, heads)

    def network(channels: int, length: int, classes: int) -> BERT:
        return BERT(classes, length, width, layers, heads)

    return HiddenWords(dataset, network, *sgd, False)


def gpt(
    dataset: str,
    /,
    width: PositiveInt,
    layers: PositiveInt,
    heads: PositiveInt,
    batch_size: PositiveInt = 16,
    optimiser: Literal["adamw", "muon", "sgd"] = "adamw",
    lr: NonNegativeFloat = 0.001,
    momentum: MomentumFactor = 0.9,
    muon_factor: PositiveFloat = 1.0,
    beta1: MomentumFactor = 0.9,
    beta2: MomentumFactor = 0.99,
    weight_decay: NonNegativeFloat = 0.1,
    lr_warmup_epochs: NonNegativeFloat = 0.1,
    lr_cosine_epochs: PositiveFloat = 10,
    lr_end: NonNegativeFraction = 0.1,
) -> "Task":
    """GPT guesses the next word, or character, of each in a text.

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
        beta2: the same of their squares.
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
    from experiments.training.language.optimisers import Recipe
    from experiments.training.language.tasks import AnnealedWords

    _check_heads(width, heads)
    recipe = Recipe(optimiser, momentum, muon_factor, beta1, beta2)
    trained = (batch_size, lr, momentum, weight_decay, lr_warmup_epochs, (), False)

    def network(channels: int, length: int, classes: int) -> GPT:
        return GPT(classes, length, width, layers, heads)

    return AnnealedWords(dataset, network, *trained, recipe, lr_cosine_epochs, lr_end)


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ValueError(f"width={width} can't be divided among heads={heads}; take a multiple of it")


def vector(
    dataset: str,
    /,
    elements: PositiveInt = 1_000_000,
    tensors: PositiveInt = 10,
    overlap: NonNegativeFraction = 0.5,
    lr: NonNegativeFloat = 0.01,
    momentum: MomentumFactor = 0.0,
) -> "Task":
    """Gradients without a network.

    Args:
        elements: of the gradient, n.
        tensors: of one shape, as square as that can be, in which they lie.
        overlap: of the elements the share that is alike on all workers, so that they select the same there.
        lr: learning rate.
        momentum: of SGD, after aggregation.
    """
    from experiments.training.vector import Vector, VectorTask

    if elements % tensors:
        raise ValueError(
            f"elements={elements} can't be put into tensors={tensors} of one size; take a multiple of it"
        )

    def network(channels: int, pixels: int, classes: int) -> Vector:
        return Vector(elements, tensors)

    return VectorTask(dataset, network, 1, lr, momentum, 0.0, 0, (), False, elements, overlap)


def _preset(
    family: Sequence[str], about: str, own: Mapping[str, Any] | None = None, more: str = ""
) -> "Callable[..., Task]":
    """The function that one file would hold, from a row of the table."""
    name, *fixed = family
    made: Callable[..., Task] = globals()[name]
    parameters = inspect.signature(made).parameters
    sgd: Sgd | None = parameters["sgd"].default if "sgd" in parameters else None
    usual = {**(sgd._asdict() if sgd else {}), **(own or {})}

    def build(**values: Any) -> "Task":
        given = {**usual, **values}
        if sgd:
            trained = {key: given.pop(key) for key in Sgd._fields}
            given["sgd"] = Sgd(**trained)._replace(lr_milestones=tuple(trained["lr_milestones"]))
        return made(*fixed, **given)

    settings = list[inspect.Parameter]()
    for one in parameters.values():
        if one.name == "sgd":
            settings += inspect.signature(Sgd).parameters.values()
        elif one.kind is not one.POSITIONAL_ONLY:
            settings.append(one)
    vars(build)["__signature__"] = inspect.Signature(
        [one.replace(default=usual.get(one.name, one.default)) for one in settings]
    )
    meanings = [inspect.cleandoc(each.__doc__ or "").partition("Args:")[2] for each in (Sgd, made)]
    build.__doc__ = "\n\n".join(filter(None, (about, more, "Args:" + "".join(meanings[not sgd :]))))
    return build


_DATA = yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes())
ROWS, _CHANCE = _DATA["tasks"], _DATA["chance"]
PRESETS: dict[str, "Callable[..., Task]"] = {name: _preset(**row) for name, row in ROWS.items()}


def chance(task: str) -> float | None:
    """Percent top-1 of guessing on what a task is validated on; None where it has no classes or nobody knows.

    A task of your own has that of its data set, which its name ends with.
    """
    dataset = ROWS[task]["family"][1] if task in ROWS else task.rpartition("_")[2]
    return _CHANCE.get(dataset) if has_accuracy(task) else None


def has_accuracy(task: str) -> bool:
    """Tell whether a task has classes to be right about; one of your own may have."""
    return task not in ROWS or ROWS[task]["family"][0] not in (masked_images.__name__, vector.__name__)
