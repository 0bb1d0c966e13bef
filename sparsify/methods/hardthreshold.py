from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsify.comm import Comm, gather_uneven
from sparsify.core.wire import Wire
from sparsify.exchange import AllGather, Exchange
from sparsify.feedback import ErrorFeedback
from sparsify.kernels import Workspace
from sparsify.method import Sparsifier
from sparsify.ranges import Density, IndexFormat, PositiveFloat, Scope, ValueFormat, check_arguments
from sparsify.select import SinglePassSelector
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    BucketStep,
    CollectiveCall,
    Delivery,
    Selection,
    SparseVector,
    uneven_gather_calls,
)

SIGN_BIT = -(2**31)  # the highest bit of an int32
INDEX_BITS = 2**31 - 1  # the other 31


@check_arguments
def hardthreshold(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    threshold: PositiveFloat | None = None,
    send: Literal["values", "strom"] = "values",
    index: IndexFormat = "int32",
    value: ValueFormat = "as_is",
) -> Sparsifier:
    """Hard threshold: what reaches a constant is sent. Strom 2015 (Interspeech); Sahu et al. 2021 (NeurIPS).

    A step:

    1. acc = gradient + residual.
    2. Select the elements with |acc| >= threshold, possibly none.
    3. All-gather them. The update is their mean over the workers.
    4. The residual is acc less what was sent of it.

    The number of elements that are sent follows from the gradients, and changes as they shrink. `density`
    only sets the default threshold. The threshold is compared with gradients plus residuals as they are,
    without the learning rate. With `scope=layer` each tensor has a k of its own, hence a default threshold of
    its own; Sahu et al. take one for the whole model. Two host synchronisations per step and bucket: for the
    selection, and for the lengths.

    Args:
        density: k/n, which only sets the default threshold.
        threshold: lambda of Sahu et al., tau of Strom. Higher: fewer bytes, more error. None: 1 / (2 sqrt k),
            Sahu et al.'s rule for a budget of k elements a step (4.73e-3 for ResNet-18 at density 0.001).
        send: `values`, as Sahu et al.; or `strom`: +-tau whatever the value, in one word of 32 bits (31 of
            index, one of sign), and the rest of the value stays in the residual. Then the threshold bounds
            how much of an element moves in a step: with too small a tau residuals grow without bound.
        index: how indices travel: `int32`, `int64`, or `delta16`, in 2 bytes each at the cost of sorting k;
            for `values` only.
        value: how values travel: `as_is`, in the gradient's own type, or rounded to `fp32`, `bf16` or `fp16`;
            for `values` only.

    Raises:
        ValueError: settings that would have no effect.
    """
    wire = Wire(index, value)
    if send == "strom" and wire != Wire():
        raise ValueError("send='strom' packs index and sign in one word; leave out index and value")
    if threshold is not None and density_warmup:
        raise ValueError("density_warmup has no effect with a given threshold; leave one of them out")
    select = HardThreshold(threshold)
    exchange = AllGather(wire, uneven=True) if send == "values" else SignedWordGather(threshold)
    return Sparsifier(density, select, ErrorFeedback(), exchange, scope, tuple(density_warmup))


def resolve_threshold(threshold: float | None, k: int) -> float:
    """Return the threshold that was given, or lambda = 1 / (2 sqrt k) of Sahu et al. 2021."""
    return 1 / (2 * k**0.5) if threshold is None else threshold


@dataclass(frozen=True)
class HardThreshold(SinglePassSelector):
    """A selector of the elements with |acc| >= threshold, possibly none.

    GRACE lowers the threshold to the largest *signed* element, so that something is selected: everything,
    when all are negative.
    """

    threshold: PositiveFloat | None = None
    always_broken_laws: ClassVar[dict[str, str]] = {
        DENSE_AT_DENSITY_1: "what lies below the threshold waits, whatever the density"
    }

    def accumulate_and_select(
        self, acc: Tensor, grad: Tensor | None, k: int, comm: Comm, state: Workspace
    ) -> Selection:
        return Selection(*state.kernel.above_threshold(acc, grad, resolve_threshold(self.threshold, k)))


@dataclass(frozen=True)
class SignedWordGather(Exchange):
    """An all-gather of indices and signs, in one word of 32 bits each, which stand for +-tau. Strom 2015.

    The delivery of an element is tau, so error feedback keeps the rest of it.
    """

    threshold: float | None = None

    def exchange(self, selection: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        tau = resolve_threshold(self.threshold, k)
        dtype = selection.values.dtype
        own_words = pack_indices_and_signs(selection, n)
        total = [decode_words(words, tau, dtype) for words in gather_uneven(comm, own_words)]
        return Delivery([*total], [decode_words(own_words, tau, dtype)])

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        return uneven_gather_calls(bucket_step.index_nbytes * max(bucket_step.sent_counts))


def pack_indices_and_signs(selection: SparseVector, n: int) -> Tensor:
    """Write a selection as words (k',) int32: the index, and the sign of the value in the highest bit."""
    if n > 2**31:
        raise ValueError(
            f"a bucket of {n} elements needs wider indices than Strom's 31 bits; use send='values'"
        )
    indices = selection.indices.int()
    return torch.where(selection.values < 0, indices | SIGN_BIT, indices)


def decode_words(words: Tensor, tau: float, dtype: torch.dtype) -> SparseVector:
    """Read words of `pack_indices_and_signs`: every value is +-tau."""
    return SparseVector((words & INDEX_BITS).long(), torch.where(words < 0, -1, 1).to(dtype) * tau)
