from collections.abc import Sequence

from experiments.training.language import LSTM, NextWord
from experiments.training.task import Task
from sparsify.ranges import Count, MomentumFactor, NotNegative


def lstm_ptb(
    width: Count = 1500,
    layers: Count = 2,
    batch_size: Count = 20,
    lr: NotNegative = 1.0,
    momentum: MomentumFactor = 0.9,
    weight_decay: NotNegative = 0.0,
    lr_warmup_epochs: NotNegative = 0,
    lr_milestones: Sequence[NotNegative] = (),
) -> Task:
    """A language model of two LSTM layers of 1,500 on the Penn Treebank, as Shi et al. 2019 have it.

    Args:
        width: of word vectors and of each layer's state.
        layers: of LSTM, one above the other.
        batch_size: sequences of each worker in a step, of 35 words.
        lr: learning rate, which does not depend on the number of workers.
        momentum: of SGD, after aggregation.
        weight_decay: of tensors of more than one dimension; biases have none.
        lr_warmup_epochs: epochs in which the learning rate rises to lr, linearly; 0: none.
        lr_milestones: epochs after each of which the learning rate is a tenth.
    """

    def network(channels: int, length: int, classes: int) -> LSTM:
        return LSTM(classes, width, layers)

    return NextWord(
        "ptb", network, batch_size, lr, momentum, weight_decay, lr_warmup_epochs, tuple(lr_milestones), False
    )
