from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm, gather_uneven
from sparsify.core import host_sync, huge_pages
from sparsify.core.timer import PhaseTimer
from sparsify.core.wire import concat_bytes, split_bytes
from sparsify.exchange import scatter_sum
from sparsify.feedback import ErrorFeedback
from sparsify.method import Method
from sparsify.ranges import Constraint, Scope, check_arguments
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    BucketContext,
    BucketStep,
    Delivery,
    PredictedBytes,
    SparseVector,
    StepSettings,
    accumulation_dtype,
    exact_bytes,
)

MATRIX = 2  # dimensions: tensors of more are convolutions
Bin = Annotated[int, Constraint(ge=1, le=16383)]  # what an offset of 14 bits reaches


@check_arguments
def adacomp(scope: Scope = "layer", conv_bin: Bin = 50, other_bin: Bin = 500) -> AdaComp:
    """AdaComp: of each bin what would soon be its maximum, as one sign and a scale. Chen et al., AAAI 2018,
    arXiv:1712.02679.

    It has no density: the gradients decide. Of every bin about one element is sent at least, so that below
    1 / bin it can't get. Two host synchronisations per step and bucket.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or so many MB. Bins
            and scales are of each tensor, whatever a bucket spans.
        conv_bin: elements of a bin (L_T) in tensors of more than two dimensions.
        other_bin: elements of a bin in all others: fully connected and recurrent layers, vectors.
    """
    return AdaComp(scope, conv_bin, other_bin)


class Code(NamedTuple):
    """Form of one written element: its place in the bin, its sign, and whether it is the bin's last."""

    dtype: torch.dtype
    offset_bits: int

    @property
    def nothing(self) -> int:
        """The offset that says that a bin is empty; so no bin may be so long."""
        return (1 << self.offset_bits) - 1


CODES = Code(torch.uint8, 6), Code(torch.int16, 14)  # the paper's 8 and 16 bits


def code_for(lengths: Sequence[int]) -> Code:
    """The narrowest one that reaches the end of every bin."""
    return next(code for code in CODES if max(lengths) <= code.nothing)


class Block(NamedTuple):
    """Consecutive bins of one length."""

    start: int
    bins: int
    length: int

    def rows(self, bucket: Tensor) -> Tensor:
        """(n,) -> (bins, length), a view."""
        return bucket[self.start : self.start + self.bins * self.length].view(self.bins, self.length)


@dataclass
class Bins:
    """The residual, and how the bucket is divided."""

    residual: Tensor  # (n,) e
    blocks: list[Block] = field(metadata={"saved": False})  # in order, without gaps
    starts: Tensor = field(metadata={"saved": False})  # (number of bins,)
    tensors: Tensor = field(metadata={"saved": False})  # (number of bins,) which tensor each belongs to
    counts: list[int] = field(metadata={"saved": False})  # bins of each tensor
    code: Code = field(metadata={"saved": False})
    wide: Tensor | None = field(metadata={"saved": False})  # (n,) half-precision gradients are summed in it


@dataclass(frozen=True)
class AdaComp(Method):
    """Send |H| >= max |G| of the bin, G = e + g, H = G + g; keep G - Q(G).

    Where a bin's G is all zero, nothing of it is sent (the paper's rule, 0 >= 0, would send all of it).
    """

    scope: Scope = "layer"
    conv_bin: Bin = 50
    other_bin: Bin = 500

    def init(self, like: Tensor, context: BucketContext) -> Bins:
        shapes = [shape for shape in context.shapes or ((like.numel(),),) if torch.Size(shape).numel()]
        sizes, lengths = [torch.Size(shape).numel() for shape in shapes], self.lengths(shapes)
        blocks = list(divided(sizes, lengths))
        counts = [-(-size // length) for size, length in zip(sizes, lengths, strict=True)]
        starts = [block.start + at * block.length for block in blocks for at in range(block.bins)]
        owners = [tensor for tensor, count in enumerate(counts) for _ in range(count)]
        residual = huge_pages.zeros_like(like, accumulation_dtype(like.dtype))
        return Bins(
            residual,
            blocks,
            torch.tensor(starts, device=like.device),
            torch.tensor(owners, device=like.device),
            counts,
            code_for(lengths),
            None if residual.dtype == like.dtype else torch.empty_like(residual),
        )

    def lengths(self, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """The length of a bin of each tensor."""
        bins = [self.conv_bin if len(shape) > MATRIX else self.other_bin for shape in shapes]
        return [min(torch.Size(shape).numel(), length) for shape, length in zip(shapes, bins, strict=True)]

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        """The longest message: a scale for each tensor, and a code for each element."""
        lengths = self.lengths([shape for shape in bucket_step.shapes if torch.Size(shape).numel()])
        codes = code_for(lengths).dtype.itemsize * max(bucket_step.sent_counts)
        return exact_bytes(
            cost.gather_uneven(torch.float32.itemsize * len(lengths) + codes, bucket_step.world_size)
        )

    def aggregate(self, grad: Tensor, step: StepSettings, state: Bins, comm: Comm, timer: PhaseTimer) -> int:
        feedback = ErrorFeedback()
        with timer.phase("select"):
            acc = feedback.accumulate(grad, step.lr, state.residual)
            scales, marks = self.select(acc, grad, state)
            message = write(scales, marks, acc, state)
        with timer.phase("exchange"):
            total = [read(theirs, acc.dtype, state) for theirs in gather_uneven(comm, message)]
        with timer.phase("select"):
            feedback.retain_undelivered(Delivery([*total], [read(message, acc.dtype, state)]), state.residual)
        with timer.phase("scatter"):
            scatter_sum([*total], 1 / comm.size, grad, state.wide)
        return num_codes(message, state)  # the marks of empty bins too: they take as many bytes

    def select(self, acc: Tensor, grad: Tensor, state: Bins) -> tuple[Tensor, Tensor]:
        """(n,) -> (number of tensors,) scales, and marks (n,): 1 to be sent, 2 an empty bin's. The marks are
        written over the gradient, which is read for the last time here, but for half types.

        A bin can be empty, too, because its largest G is about to shrink: |H| < |G| there.
        """
        work, maxima = grad if state.wide is None else state.wide, acc.new_empty(sum(state.counts))
        per_block = [block.bins for block in state.blocks]
        for block, most in zip(state.blocks, maxima.split(per_block), strict=True):
            # Magnitudes would take a buffer of n; the norm of order infinity takes four times as long.
            torch.maximum(torch.amax(block.rows(acc), 1), torch.amin(block.rows(acc), 1).neg_(), out=most)
        scales = torch.stack([most.mean() for most in maxima.split(state.counts)])
        thresholds, found = maxima.masked_fill(maxima == 0, torch.inf), torch.empty_like(maxima)
        torch.add(acc, grad, out=work).abs_()
        for block, least, any_ in zip(
            state.blocks, thresholds.split(per_block), found.split(per_block), strict=True
        ):
            torch.amax(block.rows(work).ge_(least[:, None]), 1, out=any_)
        work.index_add_(0, state.starts, found, alpha=-2).index_add_(
            0, state.starts, torch.full_like(found, 2)
        )
        return scales.float(), work  # as they are sent, so that all workers subtract and add the same

    def residual(self, state: Bins) -> Tensor:
        return state.residual

    def broken_laws(self) -> dict[str, str]:
        return {DENSE_AT_DENSITY_1: "it has no density, and sends signs"}


def divided(sizes: list[int], lengths: list[int]) -> Iterator[Block]:
    """Bins of `length` elements of each tensor, and a shorter one for its rest."""
    start = 0
    for size, length in zip(sizes, lengths, strict=True):
        yield Block(start, size // length, length)
        if rest := size % length:
            yield Block(start + size - rest, 1, rest)
        start += size


def write(scales: Tensor, marks: Tensor, acc: Tensor, state: Bins) -> Tensor:
    """The elements that have a mark -> (bytes,) uint8: a scale of each tensor, a code of each element."""
    places, bits = host_sync.nonzero(marks), state.code.offset_bits
    bins = torch.searchsorted(state.starts, places, right=True) - 1
    offsets = (places - state.starts[bins]).masked_fill_(marks[places] == 2, state.code.nothing)
    is_last = torch.ones_like(bins, dtype=torch.bool)
    torch.ne(bins[1:], bins[:-1], out=is_last[:-1])
    codes = offsets | (acc[places] < 0).long() << bits | is_last.long() << bits + 1
    return concat_bytes(scales, codes.to(state.code.dtype))


def read(message: Tensor, dtype: torch.dtype, state: Bins) -> SparseVector:
    """The inverse of `write`. Empty bins become zeros, so that nothing depends on how many there are."""
    scales, codes = split_bytes(
        message, (torch.float32, len(state.counts)), (state.code.dtype, num_codes(message, state))
    )
    bits, codes = state.code.offset_bits, codes.long()
    offsets, is_negative, is_last = codes & state.code.nothing, codes >> bits & 1, codes >> bits + 1 & 1
    bins = is_last.cumsum(0) - is_last
    is_empty = offsets == state.code.nothing
    values = scales.to(dtype)[state.tensors[bins]] * (1 - 2 * is_negative)
    return SparseVector(
        state.starts[bins] + offsets.masked_fill_(is_empty, 0), values.to(dtype).masked_fill_(is_empty, 0)
    )


def num_codes(message: Tensor, state: Bins) -> int:
    """Number of codes in a message."""
    return (len(message) - torch.float32.itemsize * len(state.counts)) // state.code.dtype.itemsize
