from typing import Literal

from sparsify.feedback import ErrorFeedback
from sparsify.local.strategy import Local, Nesterov
from sparsify.method import Dense, Method
from sparsify.methods.qgz import QuantisedReduce
from sparsify.ranges import MomentumFactor, PositiveFloat, PositiveInt, check_arguments


@check_arguments
def muloco(
    every: PositiveInt = 30,
    lr: PositiveFloat = 0.9,
    momentum: MomentumFactor = 0.8,
    bits: Literal[4, 8, 32] = 32,
) -> Local:
    """MuLoCo: DiLoCo with Muon as the inner optimizer of matrices. Therien et al. 2025, arXiv:2505.23725.

    Muon is the user's to give: `torch.optim.Muon` for matrices, AdamW for the rest; in the harness
    task.optimiser=muon. This is the outer side, with the rates of the paper's configurations.

    Args:
        every: H, steps of each worker's own from one average to the next.
        lr: of the outer step; their DiLoCo with AdamW has 0.8.
        momentum: Nesterov's; their DiLoCo has 0.9.
        bits: 32, as the parameters are; 8 or 4: the drift is rounded, see `qgz`, with a residual. Theirs
            rounds by another quantiser, in 4 or 2 bits.
    """
    rounded = QuantisedReduce(bits, 256, ErrorFeedback(), "layer") if bits != 32 else None
    method: Method = rounded or Dense("layer")
    return Local(every, method, Nesterov(lr, momentum))
