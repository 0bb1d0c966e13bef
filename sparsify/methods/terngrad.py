from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from sparsify import feedback as feedbacks
from sparsify.methods._quantise import (
    PackedCodes,
    QuantisedAllGather,
    Quantiser,
    StochasticRoundingState,
    message_nbytes,
    decode_stochastic,
    encode_stochastic,
)
from sparsify.ranges import Constraint, FeedbackName, Scope, check_arguments
from sparsify.types import BucketContext

Clip = Annotated[float, Constraint(gt=0)]  # infinite: no clipping
Sigma = Literal["about_zero", "about_mean"]
BITS = 2  # for -1, 0 and 1


@check_arguments
def terngrad(
    scope: Scope = "layer", clip: Clip = 2.5, sigma: Sigma = "about_zero", feedback: FeedbackName = "none"
) -> QuantisedAllGather:
    """TernGrad: every element becomes -1, 0 or 1 times the largest magnitude. Wen et al. 2017 (NeurIPS),
    arXiv:1705.07878.

    2 bits for each element, four to a byte, and one fp32 scale for each bucket: the paper ternarises layer by
    layer, hence the scope. The paper shares the largest scale of all workers, so that a server can add up
    small integers; here messages are all-gathered, so each worker keeps its own scale, which is never larger
    and errs less. Without clipping unbiased. No host synchronisation. One (n,) buffer besides the bucket,
    and n bytes of unpacked codes.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or so many MB. Each
            message has one scale.
        clip: beforehand, clip to so many sigma: 2.5, as published. `inf` for no clipping.
        sigma: of the elements `about_zero`, their root mean square; or `about_mean`, their standard
            deviation, as published. Gradients have means near 0, so the two hardly differ, except that
            elements which are all alike, or a tensor of one element, have no deviation: as published they are
            clipped to 0 and never learn.
        feedback: `none`; `gradient` or `learning_rate` keep the errors of clipping and rounding. StochasticRoundingState to
            three values mostly errs by more than it sends: the residual can grow without bound.
    """
    return QuantisedAllGather(TernGrad(clip, sigma), feedbacks.build_feedback(feedback), scope)


@dataclass(frozen=True)
class TernGrad(Quantiser):
    """ternarize(g) = s sign(g) b, where s = max |g| and b is 1 with probability |g| / s, of the clipped g."""

    clip: Clip = 2.5
    sigma: Sigma = "about_zero"

    def init(self, like: Tensor, context: BucketContext) -> StochasticRoundingState:
        message = PackedCodes.allocate(like, block=like.numel(), bits=BITS)
        return StochasticRoundingState(message, context.make_generator(like.device))

    def encode(self, acc: Tensor, work: Tensor, state: StochasticRoundingState) -> Tensor:
        scale = torch.linalg.vector_norm(acc, float("inf"))
        if self.clip < float("inf"):
            # The largest of the clipped; the clipping itself happens while rounding.
            scale = torch.minimum(scale, self.clip * self.deviation(acc))
        return encode_stochastic(acc, work, scale.float().view(1), 1, state)

    def deviation(self, acc: Tensor) -> Tensor:
        """Standard deviation of the elements, as `sigma` says."""
        if self.sigma == "about_mean":
            return acc.std(correction=0)
        root_mean_square: Tensor = torch.linalg.vector_norm(acc) / math.sqrt(acc.numel())
        return root_mean_square

    def decode(self, message: Tensor, out: Tensor, state: StochasticRoundingState) -> Tensor:
        return decode_stochastic(message, 1, out, state)

    def nbytes(self, sizes: Sequence[int]) -> int:
        return message_nbytes(sum(sizes), sum(sizes), BITS)
