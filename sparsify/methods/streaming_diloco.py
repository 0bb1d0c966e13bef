from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsify import feedback as feedbacks
from sparsify.core.codes import POWERS
from sparsify.local.strategy import LocalSteps, Nesterov
from sparsify.method import Dense, Method
from sparsify.methods._quantise import PackedCodes, QuantisedAllGather, Quantiser, message_nbytes
from sparsify.ranges import (
    KeptFraction,
    MomentumFactor,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    check_arguments,
)
from sparsify.types import BucketContext

BITS, SIGN = 4, 8


@check_arguments
def streaming_diloco(
    every: PositiveInt = 30,
    fragments: PositiveInt = 3,
    delay: NonNegativeInt = 1,
    mix: KeptFraction = 0.5,
    lr: PositiveFloat = 0.7,
    momentum: MomentumFactor = 0.9,
    code: Literal["e3m0", "fp32"] = "e3m0",
    feedback: Literal["none", "gradient"] = "none",
) -> LocalSteps:
    """Streaming DiLoCo: fragments of the model in turns, sent in four bits, applied some steps later and
    mixed in. Douillard et al. 2025 (COLM), arXiv:2501.18512.

    The peak of what is sent falls by the number of fragments. With `sparsify.distribute(..., overlap=True)`
    the exchange runs while the steps of the delay go on.

    Args:
        every: H; the paper has 30 and 100.
        fragments: blocks of the model take turns, so that each fragment has early and late ones. The paper's
            have three layers each, however many that makes.
        delay: tau, steps between sending and applying.
        mix: alpha, the share of its own parameters that a worker keeps.
        lr: of the outer step.
        momentum: Nesterov's.
        code: `e3m0`: a sign and three bits of exponent, relative to the largest magnitude of a tensor; summed
            in fp32. `fp32`: as it is.
        feedback: of the rounding; `none` as published.

    Raises:
        ValueError: a residual of nothing that is rounded; see `LocalSteps` for the rest.
    """
    if code == "fp32" and feedback != "none":
        raise ValueError("code=fp32 rounds nothing that a residual could keep; leave feedback=none")
    rounded = QuantisedAllGather(E3M0Quantiser(), feedbacks.build_feedback(feedback), "layer")
    method: Method = rounded if code == "e3m0" else Dense("layer")
    return LocalSteps(every, method, Nesterov(lr, momentum), fragments, delay, mix)


@dataclass(frozen=True)
class E3M0Quantiser(Quantiser):
    """E3M0: the nearest of 0 and 7 powers of two up to the largest magnitude, with a sign."""

    def init(self, like: Tensor, context: BucketContext) -> PackedCodes:
        return PackedCodes.allocate(like, max(1, like.numel()), BITS)

    def encode(self, acc: Tensor, work: Tensor, state: PackedCodes) -> Tensor:
        scale = torch.linalg.vector_norm(acc, torch.inf).float().reshape(1)
        divisor = torch.where(scale == 0, 1, scale).to(acc.dtype)  # 0 / 0 would be NaN
        torch.div(acc, divisor, out=work)
        pairs = zip((0.0, *POWERS[:-1]), POWERS, strict=True)
        halfway = [(low + high) / 2 for low, high in pairs]
        borders = torch.tensor(halfway, dtype=work.dtype, device=work.device)
        state.codes.copy_(torch.bucketize(work.abs(), borders, out_int32=True, right=True))
        state.codes.add_((work < 0).to(torch.uint8), alpha=SIGN)
        return state.write(scale)

    def decode(self, message: Tensor, out: Tensor, state: PackedCodes) -> Tensor:
        scale = state.read(message)
        levels = [0.0, *POWERS]
        both = torch.tensor([*levels, *(-level for level in levels)], dtype=out.dtype, device=out.device)
        return torch.index_select(both * scale.to(out.dtype), 0, state.codes.int(), out=out)

    def nbytes(self, sizes: Sequence[int]) -> int:
        return message_nbytes(sum(sizes), max(1, sum(sizes)), BITS)
