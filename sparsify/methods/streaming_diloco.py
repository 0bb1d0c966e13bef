from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from sparsify import feedback as feedbacks
from sparsify.core.codes import E3M0, POWERS
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

BITS = 4
SIGN_BIT = 8


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
    """Streaming DiLoCo: fragments in turns, sent in four bits, applied later. Douillard et al. 2025 (COLM).

    arXiv:2501.18512. Every fragment of the model has its own time in a round:

    1. Each worker takes H steps of the inner optimizer.
    2. It sends the drift of the fragment, rounded to four bits. All drifts are averaged.
    3. tau steps later, Nesterov's outer step moves the fragment's anchor by the average.
    4. Each worker mixes the new anchor with its own parameters: alpha own + (1 - alpha) anchor.

    The peak bandwidth falls by the number of fragments. With `sparsify.distribute(..., overlap=True)` the
    exchange runs during the steps of the delay.

    Args:
        every: H; the paper has 30 and 100. Higher: fewer bytes, and workers drift further apart.
        fragments: the number of fragments. Blocks of the model are dealt to them in turns, so that each
            fragment has early and late ones. The paper's fragments have three layers each, however many that
            makes.
        delay: tau, the number of steps between sending and applying. Higher: more time for the exchange, and
            staler averages.
        mix: alpha, the share of its own parameters that a worker keeps. Higher: workers stay further apart.
        lr: learning rate of the outer step.
        momentum: Nesterov momentum of the outer step.
        code: `e3m0`: a sign and three bits of exponent, relative to the largest magnitude of a tensor; summed
            in fp32. `fp32`: not rounded.
        feedback: `gradient` keeps the rounding errors; `none` as published.

    Raises:
        ValueError: feedback where nothing is rounded; see `LocalSteps` for the rest.
    """
    if code == "fp32" and feedback != "none":
        raise ValueError("code=fp32 rounds nothing that a residual could keep; leave feedback=none")
    method: Method = Dense("layer")
    if code == "e3m0":
        method = QuantisedAllGather(E3M0Quantiser(), feedbacks.FEEDBACKS[feedback], "layer")
    return LocalSteps(every, method, Nesterov(lr, momentum), fragments, delay, mix)


@dataclass(frozen=True)
class E3M0Quantiser(Quantiser):
    """A quantiser to a sign and the nearest of 0 and 7 powers of two, up to the largest magnitude (E3M0)."""

    def init(self, like: Tensor, context: BucketContext) -> PackedCodes:
        return PackedCodes(like, BITS, num_scales=1)

    def encode(self, acc: Tensor, work: Tensor, state: PackedCodes) -> Tensor:
        scale = torch.linalg.vector_norm(acc, torch.inf).float().reshape(1)
        divisor = torch.where(scale == 0, 1, scale).to(acc.dtype)  # 0 / 0 would be NaN
        torch.div(acc, divisor, out=work)
        halfway = [(low + high) / 2 for low, high in pairwise([0.0, *POWERS])]
        borders = torch.tensor(halfway, dtype=work.dtype, device=work.device)
        state.codes.copy_(torch.bucketize(work.abs(), borders, out_int32=True, right=True))
        state.codes.add_((work < 0).to(torch.uint8), alpha=SIGN_BIT)
        return state.write(scale)

    def decode(self, message: Tensor, out: Tensor, state: PackedCodes) -> Tensor:
        scale = state.unpack_and_return_scales(message)
        return torch.index_select(E3M0().levels(scale).to(out.dtype), 0, state.codes.int(), out=out)

    def nbytes(self, sizes: Sequence[int]) -> int:
        return message_nbytes(sum(sizes), BITS, num_scales=1)
