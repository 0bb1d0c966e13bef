from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsify import feedback as feedbacks
from sparsify.methods._quantise import (
    PackedCodes,
    QuantisedAllGather,
    Quantiser,
    message_nbytes,
    read_signs,
    write_signs,
)
from sparsify.ranges import Scope, checked
from sparsify.types import BucketContext


@checked
def efsignsgd(
    scope: Scope = "layer", feedback: Literal["learning_rate", "gradient"] = "learning_rate"
) -> QuantisedAllGather:
    """EF-signSGD: signs times their mean magnitude, and error feedback. Karimireddy et al. 2019 (ICML),
    arXiv:1901.09847, algorithm 1.

    p = lr g + e; sent = |p|_1 / d sign(p); e <- p - sent. The paper has one worker; here the messages of all
    workers go to all and are averaged. One bit for each element and one fp32 scale for each bucket: with
    scope=layer each tensor has its own, as in the authors' code (epfml/error-feedback-SGD). The learning rate
    is that of SGD. The sign of 0 is 1. No host synchronisation. Two (n,) buffers besides the bucket, the
    residual included, and n bytes of unpacked bits.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or so many MB. Each
            message has one scale.
        feedback: `learning_rate`, as published; or `gradient`, which replays residuals at the rate of the
            step that sends them: the two differ where the rate changes.
    """
    return QuantisedAllGather(ScaledSign(), feedbacks.named(feedback), scope)


@dataclass(frozen=True)
class ScaledSign(Quantiser):
    """C(p) = |p|_1 / d sign(p)."""

    def init(self, like: Tensor, context: BucketContext) -> PackedCodes:
        return PackedCodes.like(like, block=like.numel(), bits=1)

    def encode(self, acc: Tensor, work: Tensor, state: PackedCodes) -> Tensor:
        scale = torch.linalg.vector_norm(acc, 1) / acc.numel()
        return write_signs(acc, scale.view(1), state)

    def decode(self, message: Tensor, out: Tensor, state: PackedCodes) -> Tensor:
        scale = read_signs(message, out, state)  # as it travelled: the residual is what the others miss
        return out.mul_(scale.to(out.dtype))

    def nbytes(self, n: int) -> int:
        return message_nbytes(n, n, 1)
