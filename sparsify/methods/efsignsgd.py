from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsify import feedback as feedbacks
from sparsify.aggregate import Coarse
from sparsify.parts import Part, Place, check_choice
from sparsify.quantise import Message, read_signs, write_signs


def efsignsgd(scope: str | float = "layer", feedback: str = "learning_rate") -> Coarse:
    """EF-signSGD: signs times their mean magnitude, and error feedback. Karimireddy et al. 2019 (ICML),
    arXiv:1901.09847, algorithm 1.

    p = lr g + e; sent = |p|_1 / d sign(p); e <- p - sent. The paper has one worker; here the messages of all
    workers go to all and are averaged. One bit for each element and one fp32 scale for each bucket: with
    scope=layer each tensor has its own, as in the authors' code (epfml/error-feedback-SGD). The learning rate
    is that of SGD. The sign of 0 is 1. No host synchronisation. Three (n,) buffers besides the bucket, the
    residual included, and n bytes of unpacked bits.

    Args:
        feedback: `learning_rate`, as published; or `gradient`, which replays residuals at the rate of the
            step that sends them: the two differ where the rate changes.
    """
    check_choice("feedback", feedback, ("learning_rate", "gradient"))
    return Coarse(ScaledSign(), feedbacks.named(feedback), scope)


@dataclass(frozen=True)
class ScaledSign(Part):
    """C(p) = |p|_1 / d sign(p)."""

    def init(self, like: Tensor, place: Place) -> Message:
        return Message.like(like, block=like.numel(), bits=1)

    def encode(self, acc: Tensor, state: Message) -> Tensor:
        scale = torch.linalg.vector_norm(acc, 1) / acc.numel()
        return write_signs(acc, scale.view(1), state)

    def decode(self, message: Tensor, out: Tensor, state: Message) -> Tensor:
        scale = read_signs(message, out, state)  # as it travelled: the residual is what the others miss
        return out.mul_(scale.to(out.dtype))
