from sparsify.local.strategy import LocalSteps, Nesterov
from sparsify.method import Dense
from sparsify.ranges import MomentumFactor, PositiveFloat, PositiveInt, check_arguments


@check_arguments
def diloco(every: PositiveInt = 30, lr: PositiveFloat = 0.7, momentum: MomentumFactor = 0.9) -> LocalSteps:
    """DiLoCo: AdamW inside, Nesterov outside every H steps. Douillard et al. 2023 (arXiv), algorithm 1.

    arXiv:2311.08105. A round, from the anchor theta:

    1. Worker i takes H steps of the inner optimizer, from theta to theta_i.
    2. Delta = mean over the workers of theta - theta_i, the drift.
    3. theta <- theta - lr x Nesterov's momentum of Delta; all workers continue from theta.

    The inner optimizer is the user's own (AdamW in the
    paper). Each worker keeps the state of its inner optimizer from round to round; it is never averaged.

    Args:
        every: H, steps from one exchange to the next. More steps: fewer bytes, more drift. The paper's main
            result has 500, its scaling laws (arXiv:2503.09799) 30.
        lr: learning rate of the outer step. Lower: anchors move less far by each drift.
        momentum: of the outer step; 0 is local SGD with an outer learning rate.
    """
    return LocalSteps(every, Dense("layer"), Nesterov(lr, momentum))
