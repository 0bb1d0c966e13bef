from sparsify.local.strategy import LocalSteps, PlainStep
from sparsify.method import Dense
from sparsify.ranges import PositiveFloat, PositiveInt, check_arguments


@check_arguments
def localsgd(every: PositiveInt = 30, lr: PositiveFloat = 1.0) -> LocalSteps:
    """Local SGD: average the models every H steps. McMahan et al. 2017 (FedAvg); Stich 2019 (1805.09767).

    The user gives the inner optimizer. Each worker keeps its state from round to round; it is never averaged.

    Args:
        every: H, the steps that each worker takes alone between two averages. Higher: fewer bytes, and
            workers drift further apart.
        lr: the learning rate of the outer step. At 1, as published, the parameters themselves are averaged.
    """
    return LocalSteps(every, Dense("layer"), PlainStep(lr))
