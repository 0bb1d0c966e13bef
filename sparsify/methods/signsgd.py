from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsify.feedback import NoFeedback
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
def signsgd(scope: Scope = "global") -> QuantisedAllGather:
    """signSGD with majority vote: the sign of the sum of signs. Bernstein et al. 2018 (ICML), 2019 (ICLR).

    arXiv:1802.04434, arXiv:1810.05291. A step of a worker:

    1. Take the sign of every element of the gradient.
    2. All-gather the signs, one bit each.
    3. The update is the sign of their sum, the vote of the majority.

    The update of every element is -1, 0 (a tie, of an even number of workers) or 1, whatever the size of the
    gradient: **the learning rate is the step length of every weight**, so take it a hundred to a thousand
    times smaller than for SGD. A momentum behind it multiplies that by up to 1 / (1 - momentum). There is no
    residual. In the paper a server gathers the signs and sends the vote back, one bit each way. Here all
    signs go to all workers, n / 8 bytes from each, and each worker counts. Elements are independent, so the
    scope changes only the number of messages.

    One bit has no 0: the sign of 0 is taken as 1. A weight whose gradient is 0 on all workers (a frozen or
    unused one) would therefore drift by the learning rate in every step: set its requires_grad to False.

    No host synchronisation. Memory: one (n,) buffer besides the bucket, and n bytes of unpacked bits.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or a size in MB.
    """
    return QuantisedAllGather(Sign(), NoFeedback(), scope, majority=True)


@dataclass(frozen=True)
class Sign(Quantiser):
    """A quantiser to the sign of each element, in one bit."""

    def init(self, like: Tensor, context: BucketContext) -> PackedCodes:
        return PackedCodes(like, bits=1, num_scales=0)

    def encode(self, acc: Tensor, work: Tensor, state: PackedCodes) -> Tensor:
        return encode_signs(acc, None, state)

    def decode(self, message: Tensor, out: Tensor, state: PackedCodes) -> Tensor:
        decode_signs_and_scales(message, out, state)
        return out

    def nbytes(self, sizes: Sequence[int]) -> int:
        return message_nbytes(sum(sizes), bits=1, num_scales=0)
