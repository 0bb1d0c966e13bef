from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sparsify import feedback as feedbacks
from sparsify.methods._quantise import (
    SCALE,
    PackedCodes,
    QuantisedAllGather,
    Quantiser,
    message_nbytes,
    decode_signs,
    encode_signs,
)
from sparsify.ranges import Scope, check_arguments
from sparsify.types import BucketContext


@check_arguments
def efsignsgd(
    scope: Scope = "layer", feedback: Literal["learning_rate", "gradient"] = "learning_rate"
) -> QuantisedAllGather:
    """EF-signSGD: signs times their mean magnitude, and error feedback. Karimireddy et al. 2019 (ICML),
    arXiv:1901.09847, algorithm 1.

    p = lr g + e; sent = |p|_1 / d sign(p); e <- p - sent. The paper has one worker; here the messages of all
    workers go to all and are averaged. One bit for each element, and one fp32 scale for each tensor, as in
    the authors' code (epfml/error-feedback-SGD). The learning rate is that of SGD. The sign of 0 is 1. No
    host synchronisation. Two (n,) buffers besides the bucket, the residual included, and n bytes of unpacked
    bits.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or so many MB.
            It changes only how many messages there are.
        feedback: `learning_rate`, as published; or `gradient`, which replays residuals at the rate of the
            step that sends them: the two differ where the rate changes.
    """
    return QuantisedAllGather(ScaledSign(), feedbacks.build_feedback(feedback), scope)


@dataclass
class Signs:
    """The state of `ScaledSign`."""

    message: PackedCodes
    sizes: list[int] = field(metadata={"saved": False})  # of the tensors


@dataclass(frozen=True)
class ScaledSign(Quantiser):
    """C(p) = |p|_1 / d sign(p), of each tensor."""

    def init(self, like: Tensor, context: BucketContext) -> Signs:
        sizes = context.sizes or [like.numel()]
        return Signs(PackedCodes.allocate(like, block=0, bits=1, scales=len(sizes)), sizes)

    def encode(self, acc: Tensor, work: Tensor, state: Signs) -> Tensor:
        norms = torch._foreach_norm(acc.split(state.sizes), 1)
        scales = torch.stack([norm / d for norm, d in zip(norms, state.sizes, strict=True)])
        return encode_signs(acc, scales, state.message)

    def decode(self, message: Tensor, out: Tensor, state: Signs) -> Tensor:
        scales = decode_signs(
            message, out, state.message
        )  # as they travelled: the residual is what others miss
        torch._foreach_mul_(out.split(state.sizes), scales.to(out.dtype).unbind())
        return out

    def nbytes(self, sizes: Sequence[int]) -> int:
        return message_nbytes(sum(sizes), 0, 1) + SCALE.itemsize * len(sizes)
