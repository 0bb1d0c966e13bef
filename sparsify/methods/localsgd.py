from sparsify.local.strategy import LocalSteps, PlainStep
from sparsify.method import Dense
from sparsify.ranges import PositiveFloat, PositiveInt, check_arguments


@check_arguments
def localsgd(every: PositiveInt = 30, lr: PositiveFloat = 1.0) -> LocalSteps:
    """Local SGD: average the models every H steps. McMahan et al. 2017 (AISTATS); Stich 2019 (ICLR).

    FedAvg, arXiv:1602.05629; arXiv:1805.09767. A round, from the anchor theta:

    1. Worker i takes H steps of the inner optimizer, from theta to theta_i.
    2. theta <- theta - lr mean over the workers of (theta - theta_i); all workers continue from theta.

    The user gives the inner optimizer. Each worker keeps its state from round to round; it is never averaged.

    Args:
        every: H, the steps that each worker takes alone between two averages. Higher: fewer bytes, and
            workers drift further apart.
        lr: the learning rate of the outer step. At 1, as published, the parameters themselves are averaged.
    """
    return LocalSteps(every, Dense("layer"), PlainStep(lr))
