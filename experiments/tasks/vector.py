from experiments.training.task import Task
from experiments.training.vector import Vector, VectorTask
from sparsify.ranges import Count, MomentumFactor, NotNegative, Part


def vector(
    elements: Count = 1_000_000,
    tensors: Count = 10,
    overlap: Part = 0.5,
    lr: NotNegative = 0.01,
    momentum: MomentumFactor = 0.0,
) -> Task:
    """No network and no data: heavy-tailed gradients of any size, to measure exchanges for themselves.

    Computing and backpropagation cost next to nothing; nothing is learnt, so it needs train.validate=never.

    Args:
        elements: of the gradient, n.
        tensors: of one shape, as square as that can be, in which they lie.
        overlap: of the elements the share that is alike on all workers, so that they select the same there.
        lr: learning rate.
        momentum: of SGD, after aggregation.
    """
    if elements % tensors:
        raise ValueError(
            f"elements={elements} can't be put into tensors={tensors} of one size; take a multiple of it"
        )

    def network(channels: int, pixels: int, classes: int) -> Vector:
        return Vector(elements, tensors)

    return VectorTask("vector", network, 1, lr, momentum, 0.0, 0, (), False, elements, overlap)
