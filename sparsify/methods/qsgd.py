from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from sparsify import feedback as feedbacks
from sparsify.methods._quantise import QuantisedAllGather, StochasticQuantiser, block_norms
from sparsify.ranges import FeedbackName, PositiveInt, Scope, check_arguments


@check_arguments
def qsgd(
    scope: Scope = "global",
    bits: Literal[2, 4, 8] = 4,
    block: PositiveInt = 512,
    norm: Literal["l2", "max"] = "l2",
    feedback: FeedbackName = "none",
) -> QuantisedAllGather:
    """QSGD: elements rounded at random to few levels. Alistarh et al. 2017 (NeurIPS), algorithm 1.

    arXiv:1610.02132. A step of a worker:

    1. Quantise: element v_i of a block v becomes |v| sign(v_i) l_i / s, where |v| is the norm of the block
       and the level l_i is s |v_i| / |v|, rounded up or down at random so that the expectation is kept.
    2. All-gather the norms and the levels.
    3. Decode the messages of all workers, and average them in the order of ranks.

    Unbiased: the expectation of a message is the gradient, so no residual is needed. Codes have a fixed
    width; the paper's Elias code is not used. No host synchronisation. Memory: one (n,) buffer besides the
    bucket, and n bytes of unpacked codes; with bits=8 the message has n bytes too.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or a size in MB.
        bits: 2, 4 or 8 for each element, its sign included: 2^(bits-1) - 1 levels (the paper's s). Lower:
            fewer bytes, more error. sands-lab/grace takes 8 bits: 127 levels.
        block: the number of elements that share a norm (the paper's bucket): 512; sands-lab/grace 128. Lower:
            more bytes, less error.
        norm: `l2`, the scheme that the paper analyses; or `max`, the largest magnitude, which sets fewer
            elements to 0 and which the paper's experiments use.
        feedback: `none`; `gradient` or `learning_rate` keep the rounding errors. With norm=l2 that is sure to
            be stable only where block < levels^2 (49 for 4 bits, 16129 for 8). With the default block and 4
            bits the rounding errors exceed the gradient, and the residual grows without bound.
    """
    return QuantisedAllGather(QSGD(bits, block, norm), feedbacks.FEEDBACKS[feedback], scope)


@dataclass(frozen=True)
class QSGD(StochasticQuantiser):
    """A quantiser that rounds stochastically to s levels of a block's norm |v|.

    Q_s(v_i) = |v| sign(v_i) xi_i, where xi_i is s |v_i| / |v|, rounded at random and divided by s.
    """

    bits: Literal[2, 4, 8] = 4
    block: PositiveInt = 512
    norm: Literal["l2", "max"] = "l2"

    def compute_scales(self, acc: Tensor) -> Tensor:
        return block_norms(acc, self.block, self.norm).float()
