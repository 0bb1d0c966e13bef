from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sparsify import feedback as feedbacks
from sparsify.methods._quantise import (
    PackedCodes,
    QuantisedAllGather,
    Quantiser,
    decode_signs_and_scales,
    encode_signs,
    message_nbytes,
)
from sparsify.ranges import Scope, check_arguments
from sparsify.types import BucketContext


@check_arguments
def efsignsgd(
    scope: Scope = "layer", feedback: Literal["learning_rate", "gradient"] = "learning_rate"
) -> QuantisedAllGather:
    """EF-signSGD: signs times mean magnitude, error feedback. Karimireddy et al. 2019 (ICML), algorithm 1.

    arXiv:1901.09847. A step of each tensor of d elements, with the error e and the learning rate
    lr:

    1. p = lr g + e.
    2. sent = |p|_1 / d sign(p).
    3. x <- x - mean of sent over the workers.
    4. e <- p - sent.

    The paper has one worker; here messages are all-gathered and averaged. They have one bit for each element,
    and one fp32 scale for each tensor, as in the authors' code (epfml/error-feedback-SGD). The learning rate
    is that of SGD. The sign of 0 is 1. No host synchronisation. Memory: two (n,) buffers besides the bucket,
    the residual included, and n bytes of unpacked bits.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or a size in MB.
            It changes only the number of messages.
        feedback: `learning_rate`, as published; or `gradient`, which applies residuals at the rate of the
            step that sends them. The two differ where the rate changes.
    """
    return QuantisedAllGather(ScaledSign(), feedbacks.FEEDBACKS[feedback], scope)


@dataclass
class ScaledSignState:
    """The message buffers of a bucket, and the sizes of its tensors."""

    message: PackedCodes
    sizes: list[int] = field(metadata={"saved": False})


@dataclass(frozen=True)
class ScaledSign(Quantiser):
    """The quantiser C(p) = |p|_1 / d sign(p), of each tensor of d elements."""

    def init(self, like: Tensor, context: BucketContext) -> ScaledSignState:
        sizes = context.sizes or [like.numel()]
        return ScaledSignState(PackedCodes(like, bits=1, num_scales=len(sizes)), sizes)

    def encode(self, acc: Tensor, work: Tensor, state: ScaledSignState) -> Tensor:
        norms = torch._foreach_norm(acc.split(state.sizes), 1)
        scales = torch.stack([norm / size for norm, size in zip(norms, state.sizes, strict=True)])
        return encode_signs(acc, scales, state.message)

    def decode(self, message: Tensor, out: Tensor, state: ScaledSignState) -> Tensor:
        # Scales as they travelled: the residual is what the other workers miss.
        scales = decode_signs_and_scales(message, out, state.message)
        torch._foreach_mul_(out.split(state.sizes), scales.to(out.dtype).unbind())
        return out

    def nbytes(self, sizes: Sequence[int]) -> int:
        return message_nbytes(sum(sizes), bits=1, num_scales=len(sizes))
