from collections.abc import Sequence

from experiments.training.language import BERT, HiddenWords
from experiments.training.task import Task
from sparsify.ranges import Count, MomentumFactor, NotNegative


def berttiny_text64(
    width: Count = 128,
    layers: Count = 2,
    heads: Count = 2,
    batch_size: Count = 16,
    lr: NotNegative = 0.1,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 0.0,
    lr_warmup_epochs: NotNegative = 1,
    lr_milestones: Sequence[NotNegative] = (),
) -> Task:
    """BERT-Tiny guesses hidden words of text of your own, in DATA_ROOT/text, as Zhang's slides pre-train it.

    Args:
        width: of word vectors and of each layer.
        layers: of attention.
        heads: of each layer; they divide its width.
        batch_size: sequences of each worker in a step, of 64 words.
        lr: learning rate, which does not depend on the number of workers.
        momentum: of SGD, after aggregation.
        weight_decay: of tensors of more than one dimension; biases have none.
        lr_warmup_epochs: epochs in which the learning rate rises to lr, linearly; 0: none.
        lr_milestones: epochs after each of which the learning rate is a tenth.
    """
    if width % heads:
        raise ValueError(f"width={width} can't be divided among heads={heads}; take a multiple of it")

    def network(channels: int, length: int, classes: int) -> BERT:
        return BERT(classes, length, width, layers, heads)

    return HiddenWords(
        "text64",
        network,
        batch_size,
        lr,
        momentum,
        weight_decay,
        lr_warmup_epochs,
        tuple(lr_milestones),
        False,
    )
