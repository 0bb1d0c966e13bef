"""The tasks that come with the repository: families, and a table of what differs in them.

A family says what its presets have in common, and which settings each has. Positional-only parameters are
what a preset is about, its data set first; the others are its settings, among them those of `Sgd`, where
`sgd` stands. torch is imported where a task is built: listing and completing tasks needs none.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsify.ranges import Count, MomentumFactor, NotNegative, Portion

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

    batch_size: Count
    lr: NotNegative = 0.1
    momentum: MomentumFactor = 0.9
    weight_decay: NotNegative = 0.0
    lr_warmup_epochs: NotNegative = 0
    lr_milestones: Sequence[NotNegative] = ()


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


def masked_images(dataset: str, size: str, /, sgd: Sgd = Sgd(32, lr_warmup_epochs=1)) -> "Task":
    """A masked autoencoder of a size that `experiments.training.masked_images` has.

    Args:
        batch_size: images of each worker in a step.
        weight_decay: of tensors of more than one dimension; biases and layer norm have none.
    """
    from experiments.training import masked_images

    sizes: masked_images.Size = getattr(masked_images, size)
    return masked_images.MaskedImages(dataset, sizes.network, *sgd, False, sizes.patch)


def next_word(dataset: str, /, width: Count, layers: Count = 2, sgd: Sgd = Sgd(20, lr=1.0)) -> "Task":
    """A language model of LSTM layers.

    Args:
        width: of word vectors and of each layer's state.
        layers: of LSTM, one above the other.
        batch_size: sequences of each worker in a step, of 35 words.
        weight_decay: of tensors of more than one dimension; biases have none.
    """
    from experiments.training.language import LSTM, NextWord

    def network(channels: int, length: int, classes: int) -> LSTM:
        return LSTM(classes, width, layers)

    return NextWord(dataset, network, *sgd, False)


def hidden_words(
    dataset: str, /, width: Count, layers: Count, heads: Count, sgd: Sgd = Sgd(8, lr_warmup_epochs=1)
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
    from experiments.training.language import BERT, HiddenWords

    if width % heads:
        raise ValueError(f"width={width} can't be divided among heads={heads}; take a multiple of it")

    def network(channels: int, length: int, classes: int) -> BERT:
        return BERT(classes, length, width, layers, heads)

    return HiddenWords(dataset, network, *sgd, False)


def vector(
    dataset: str,
    /,
    elements: Count = 1_000_000,
    tensors: Count = 10,
    overlap: Portion = 0.5,
    lr: NotNegative = 0.01,
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


def _of(
    family: "Callable[..., Task]", fixed: tuple[str, ...], own: Mapping[str, Any], about: str
) -> "Callable[..., Task]":
    """The function that one file would hold.

    Args:
        fixed: what the family is told once.
        own: defaults that are not the family's.
        about: what the task is; the meanings of its settings are the family's.
    """

    usual = inspect.signature(family).parameters
    settings = list[inspect.Parameter]()
    for parameter in usual.values():
        if parameter.name == "sgd":
            settings += (
                one.replace(default=getattr(parameter.default, name))
                for name, one in inspect.signature(Sgd).parameters.items()
            )
        elif parameter.kind is not parameter.POSITIONAL_ONLY:
            settings.append(parameter)

    def build(**values: Any) -> "Task":
        given = {**own, **values}
        if "sgd" in usual:
            of_sgd = {name: given.pop(name) for name in Sgd._fields if name in given}
            sgd = usual["sgd"].default._replace(**of_sgd)
            given["sgd"] = sgd._replace(lr_milestones=tuple(sgd.lr_milestones))
        return family(*fixed, **given)

    _, heading, meanings = inspect.cleandoc(family.__doc__ or "").partition("Args:")
    common = inspect.cleandoc(Sgd.__doc__ or "").partition("Args:")[2] if "sgd" in usual else ""
    vars(build)["__signature__"] = inspect.Signature(
        [one.replace(default=own.get(one.name, one.default)) for one in settings]
    )
    build.__doc__ = f"{about}\n\n{heading}{common}{meanings}"
    return build


# What networks have in common, by whose schedule it is.
LAPTOP = {"batch_size": 16, "lr_warmup_epochs": 1, "lr_milestones": (6, 9), "channels_last": True}
YOON = {"lr_warmup_epochs": 5, "lr_milestones": (81, 122, 155)}  # and Oh's, in hclhkbu/GaussianK-SGD
EGHLIDI = {"lr_milestones": (150, 250)}
GOYAL = {"batch_size": 32, "lr_warmup_epochs": 5, "lr_milestones": (30, 60, 80)}
SIMONYAN = {"batch_size": 32, "lr": 0.01, "weight_decay": 5e-4, "lr_milestones": (30, 60, 80)}
TINY = {"width": 128, "layers": 2, "heads": 2, "batch_size": 16}  # of BERT
BASE = {"width": 768, "layers": 12, "heads": 12}
LARGE = {"width": 1024, "layers": 24, "heads": 16}
OWN_TEXT = "guesses hidden words of text of your own, in DATA_ROOT/text, as Zhang's slides pre-train it."

PRESETS: dict[str, "Callable[..., Task]"] = {
    "bertbase_text64": _of(hidden_words, ("text64",), BASE, f"BERT-Base {OWN_TEXT}"),
    "bertlarge_text64": _of(hidden_words, ("text64",), LARGE, f"BERT-Large {OWN_TEXT}"),
    "berttiny_ptb64": _of(hidden_words, ("ptb64",), TINY,
        "BERT-Tiny guesses hidden words of the Penn Treebank, as Zhang's slides pre-train it."),
    "berttiny_text64": _of(hidden_words, ("text64",), TINY, f"BERT-Tiny {OWN_TEXT}"),
    "cnn_cifar10": _of(images, ("cifar10", "small_cnn"), LAPTOP,
        "A CNN of 34,058 parameters on CIFAR-10, for laptops; the paper's schedule scaled to 10 epochs."),
    "cnn_digits": _of(images, ("digits", "small_cnn"), LAPTOP,
        "The same CNN on scikit-learn's bundled digits (8 x 8): for machines without network or data."),
    "fnn3_mnist": _of(images, ("mnist", "fnn3"), {"lr": 0.01},
        "A network of three linear layers on MNIST, the FNN-3 of Shi et al. 2019."),
    "lenet5_mnist": _of(images, ("mnist", "lenet5"), {"lr": 0.01},
        "LeNet-5 on MNIST, one of the networks of Shi et al. 2019."),
    "lstm_ptb": _of(next_word, ("ptb",), {"width": 1500},
        "A language model of two LSTM layers of 1,500 on the Penn Treebank, as Shi et al. 2019 have it."),
    "maebase_imagenet": _of(masked_images, ("imagenet", "BASE"), {},
        "The masked autoencoder of He et al. 2022 with ViT-B/16 on ImageNet.\n\n"
        "111,655,680 parameters; trained by SGD, where they have AdamW."),
    "maebase_images224": _of(masked_images, ("images224", "BASE"), {},
        "The masked autoencoder with ViT-B/16, for timing only: images are synthetic.\n\n"
        "111,655,680 parameters, as for ImageNet."),
    "maelarge_imagenet": _of(masked_images, ("imagenet", "LARGE"), {},
        "The masked autoencoder of He et al. 2022 with ViT-L/16 on ImageNet.\n\n"
        "329,239,296 parameters; trained by SGD, where they have AdamW."),
    "maelarge_images224": _of(masked_images, ("images224", "LARGE"), {},
        "The masked autoencoder with ViT-L/16, for timing only: images are synthetic.\n\n"
        "329,239,296 parameters, as for ImageNet."),
    "maetiny_cifar10": _of(masked_images, ("cifar10", "TINY"), {"lr": 0.2},
        "A masked autoencoder of CIFAR-10 that two cores can train: 265,424 parameters, patches of 4 x 4 "
        "pixels.\n\nIts encoder has 4 layers of width 64, its decoder 2 of width 48."),
    "resnet18_cifar10": _of(images, ("cifar10", "resnet18"), EGHLIDI,
        "ResNet-18 on CIFAR-10 as Eghlidi and Jaggi 2020 train it; multiply lr by the workers, as they do."),
    "resnet20_cifar10": _of(
        images, ("cifar10", "resnet20"), {"batch_size": 32, "lr_milestones": (81, 122, 155)},
        "ResNet-20 on CIFAR-10, one of the networks of Shi et al. 2019."),
    "resnet50_imagenet": _of(images, ("imagenet", "imagenet_resnet50"), GOYAL,
        "ResNet-50 on ImageNet (25,557,032 parameters), as He et al. 2016 and Goyal et al. 2017 train it.\n\n"
        "For 90 epochs. lr is for 256 images a step in all, as 8 workers x 32 are; else multiply it by "
        "workers x\nbatch_size / 256 (arXiv:1706.02677)."),
    "resnet50_images224": _of(images, ("images224", "imagenet_resnet50"), GOYAL,
        "ResNet-50 (25,557,032 parameters) as for ImageNet, for timing only: images are synthetic."),
    "slimresnet18_cifar10": _of(images, ("cifar10", "slim_resnet18"), EGHLIDI | {"channels_last": True},
        "ResNet-18 with an eighth of its channels on CIFAR-10, for CPUs: Eghlidi and Jaggi's schedule."),
    "slimvgg_cifar10": _of(
        images, ("cifar10", "slim_vgg16"), YOON | {"batch_size": 16, "channels_last": True},
        "VGG-16 with a quarter of its channels on CIFAR-10, for CPUs: the paper's schedule, small batches."),
    "smalllstm_ptb": _of(next_word, ("ptb",), {"width": 128}, "The same with layers of 128, for CPUs."),
    "vector": _of(vector, ("vector",), {},
        "No network and no data: heavy-tailed gradients of any size, to measure exchanges for themselves.\n\n"
        "Computing and backpropagation cost next to nothing; nothing is learnt, so it needs "
        "train.validate=never."),
    "vgg16_cifar10": _of(images, ("cifar10", "vgg16"), YOON,
        "VGG-16 with batch norm on CIFAR-10, trained as by the code that Yoon and Oh 2022 ran.\n\n"
        "That is hclhkbu/GaussianK-SGD."),
    "vgg16_digits": _of(images, ("digits32", "vgg16"), YOON,
        "VGG-16 on scikit-learn's digits enlarged to 32 x 32: the paper's model where there is no CIFAR-10."),
    "vgg16_imagenet": _of(images, ("imagenet", "imagenet_vgg16"), SIMONYAN,
        "VGG-16 on ImageNet (138,357,544 parameters), as Simonyan and Zisserman 2015 train it, without "
        "dropout.\n\nlr is for 256 images a step in all, as 8 workers x 32 are. They divide it when accuracy "
        "no longer rises;\nhere that is at the milestones."),
    "vgg16_images224": _of(images, ("images224", "imagenet_vgg16"), SIMONYAN,
        "VGG-16 (138,357,544 parameters) as for ImageNet, for timing only: images are synthetic."),
}  # fmt: skip
