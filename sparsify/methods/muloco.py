from typing import Literal

from sparsify.feedback import ErrorFeedback
from sparsify.local.strategy import LocalSteps, Nesterov
from sparsify.method import Dense, Method
from sparsify.methods.qgz import QuantisedAllReduce
from sparsify.ranges import MomentumFactor, PositiveFloat, PositiveInt, check_arguments


@check_arguments
def muloco(
    every: PositiveInt = 30,
    lr: PositiveFloat = 0.9,
    momentum: MomentumFactor = 0.8,
    bits: Literal[4, 8, 32] = 32,
) -> LocalSteps:
    """MuLoCo: DiLoCo with Muon as the inner optimizer of matrices. Therien et al. 2025 (arXiv).

    arXiv:2505.23725. The steps are numbered as in `diloco`. The user gives the inner optimizer:
    `torch.optim.Muon` for matrices, AdamW for the rest; in the harness task.optimiser=muon. This method is
    the outer step, with the rates of the paper's configurations.

    Args:
        every: H, the steps that each worker takes alone between two averages. Higher: fewer bytes, and
            workers drift further apart.
        lr: the learning rate of the outer step. Lower: anchors move less far by each drift. The paper's
            DiLoCo with AdamW has 0.8.
        momentum: Nesterov momentum of the outer step. The paper's DiLoCo has 0.9.
        bits: 32 sends the drift as it is; 8 or 4 round it as `qgz` does, and a residual keeps the rounding
            errors. Fewer bits: fewer bytes, more error. The paper uses another quantiser, in 4 or 2 bits.
    """
    method: Method = Dense("layer")
    if bits != 32:
        method = QuantisedAllReduce(bits, 256, ErrorFeedback(), "layer")
    return LocalSteps(every, method, Nesterov(lr, momentum))
