from sparsify.local.strategy import Local, Plain
from sparsify.method import Dense
from sparsify.ranges import PositiveFloat, PositiveInt, check_arguments


@check_arguments
def localsgd(every: PositiveInt = 30, lr: PositiveFloat = 1.0) -> Local:
    """Local SGD: average the models every H steps. McMahan et al. 2017 (FedAvg); Stich 2019 (1805.09767).

    The inner optimizer is the user's own; its state is each worker's, kept from round to round, never
    averaged.

    Args:
        every: H, steps of each worker's own from one average to the next.
        lr: of the outer step; at 1, as published, the parameters themselves are averaged.
    """
    return Local(every, Dense("layer"), Plain(lr))
