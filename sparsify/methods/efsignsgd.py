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
    return QuantisedAllGather(ScaledSign(), feedbacks.named(feedback), scope)


@dataclass
class Signs:
    """The state of `ScaledSign`."""

    of_tensors: list[PackedCodes] = field(metadata={"saved": False})

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """(n,) -> a view of each tensor."""
        found: tuple[Tensor, ...] = whole.split([codes.n for codes in self.of_tensors])
        return found


@dataclass(frozen=True)
class ScaledSign(Quantiser):
    """C(p) = |p|_1 / d sign(p), of each tensor."""

    def init(self, like: Tensor, context: BucketContext) -> Signs:
        tensors = like.split(context.sizes or [like.numel()])
        return Signs([PackedCodes.like(tensor, block=tensor.numel(), bits=1) for tensor in tensors])

    def encode(self, acc: Tensor, work: Tensor, state: Signs) -> Tensor:
        messages = list[Tensor]()
        for p, codes in zip(state.split(acc), state.of_tensors, strict=True):
            scale = torch.linalg.vector_norm(p, 1) / p.numel()
            messages.append(write_signs(p, scale.view(1), codes))
        return torch.cat(messages)

    def decode(self, message: Tensor, out: Tensor, state: Signs) -> Tensor:
        messages = message.split([len(codes.buffer) for codes in state.of_tensors])
        for into, written, codes in zip(state.split(out), messages, state.of_tensors, strict=True):
            scale = read_signs(written, into, codes)  # as it travelled: the residual is what the others miss
            into.mul_(scale.to(into.dtype))
        return out

    def nbytes(self, sizes: Sequence[int]) -> int:
        return sum(message_nbytes(d, d, 1) for d in sizes)
