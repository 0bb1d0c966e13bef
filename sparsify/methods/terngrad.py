from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from sparsify import feedback as feedbacks
from sparsify.methods._quantise import QuantisedAllGather, StochasticQuantiser
from sparsify.ranges import Constraint, FeedbackName, Scope, check_arguments

Clip = Annotated[float, Constraint(gt=0)]  # infinite: no clipping
Sigma = Literal["about_zero", "about_mean"]


@check_arguments
def terngrad(
    scope: Scope = "layer", clip: Clip = 2.5, sigma: Sigma = "about_zero", feedback: FeedbackName = "none"
) -> QuantisedAllGather:
    """TernGrad: -1, 0 or 1 times the largest magnitude. Wen et al. 2017 (NeurIPS), algorithm 1.

    arXiv:1705.07878. A step of a worker:

    1. Clip the elements of the gradient g to `clip` sigma.
    2. Ternarise: s = max |g|; each element becomes s sign(g) with probability |g| / s, else 0.
    3. All-gather s and the signs, decode the messages of all workers, and average them in the order of ranks.

    The message has 2 bits per element, four elements to a byte, and one fp32 scale per bucket: the paper
    ternarises layer by layer, hence the default scope. In the paper all workers share the largest scale, so
    that a server can add up small integers. Here messages are all-gathered, so each worker has its own scale,
    which is never larger and gives less error. Unbiased without clipping. No host synchronisation. Memory:
    one (n,) buffer besides the bucket, and n bytes of unpacked codes.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or a size in MB.
            Each message has one scale.
        clip: the number of sigma to clip to: 2.5, as published. `inf` for no clipping. Lower: less noise,
            more bias.
        sigma: `about_zero`, the root mean square of the elements; or `about_mean`, their standard deviation,
            as published. Gradients have means near 0, so the two hardly differ, except that equal elements,
            or a tensor of one element, have no deviation: as published they are clipped to 0 and never learn.
        feedback: `none`; `gradient` or `learning_rate` keep the errors of clipping and rounding. Rounding to
            three values mostly errs by more than it sends: the residual can grow without bound.
    """
    return QuantisedAllGather(TernGrad(clip, sigma), feedbacks.FEEDBACKS[feedback], scope)


@dataclass(frozen=True)
class TernGrad(StochasticQuantiser):
    """A quantiser to -s, 0 and s: s sign(g) b, where s = max |g|, and b is 1 with probability |g| / s.

    g is clipped beforehand.
    """

    clip: Clip = 2.5
    sigma: Sigma = "about_zero"
    bits: ClassVar[int] = 2  # for -1, 0 and 1
    block: ClassVar[int] = 2**63 - 1  # a bucket has one scale

    def compute_scales(self, acc: Tensor) -> Tensor:
        scale: Tensor = torch.linalg.vector_norm(acc, float("inf"))
        if self.clip < float("inf"):
            # The largest magnitude after clipping. The clipping itself happens while rounding.
            scale = torch.minimum(scale, self.clip * self.compute_sigma(acc))
        return scale.float().view(1)

    def compute_sigma(self, acc: Tensor) -> Tensor:
        """Return sigma of the elements of acc (n,), 0-d."""
        if self.sigma == "about_mean":
            return acc.std(correction=0)
        root_mean_square: Tensor = torch.linalg.vector_norm(acc) / math.sqrt(acc.numel())
        return root_mean_square
