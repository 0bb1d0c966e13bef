from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm, gather_uneven
from sparsify.core import host_sync, huge_pages
from sparsify.core.timer import PhaseTimer
from sparsify.core.wire import concat_bytes, split_bytes
from sparsify.exchange import write_scaled_sum
from sparsify.feedback import ErrorFeedback
from sparsify.method import Method
from sparsify.methods._quantise import num_blocks, split_into_block_matrices
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
    tensor_sizes,
)

MATRIX_DIMS = 2  # tensors of more dimensions are convolutions
BinLength = Annotated[int, Constraint(ge=1, le=16383)]  # the longest that an offset of 14 bits reaches


@check_arguments
def adacomp(scope: Scope = "layer", conv_bin: BinLength = 50, other_bin: BinLength = 500) -> AdaComp:
    """AdaComp: of each bin, elements that would soon be its maximum. Chen et al. 2018 (AAAI).

    arXiv:1712.02679; class `AdaComp` numbers its steps. Elements travel as signs, with a scale. There is no
    density: the gradients decide how many elements are sent, about one of every bin at least. Two host
    synchronisations per step and bucket.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or a size in MB.
            Bins and scales are of each tensor, whatever a bucket spans.
        conv_bin: elements of a bin (L_T) in tensors of more than two dimensions. Longer bins: fewer bytes,
            more error.
        other_bin: elements of a bin in all other tensors: fully connected and recurrent layers, vectors.
            Longer bins: fewer bytes, more error.
    """
    return AdaComp(scope, conv_bin, other_bin)


class ElementCode(NamedTuple):
    """The form of one sent element: its offset in the bin, its sign, and whether it is the bin's last."""

    dtype: torch.dtype
    offset_bits: int

    @property
    def empty_bin(self) -> int:
        """The offset that says that a bin is empty; so no bin may be so long."""
        return (1 << self.offset_bits) - 1


ELEMENT_CODES = ElementCode(torch.uint8, 6), ElementCode(torch.int16, 14)  # the paper's 8 and 16 bits


class BinnedTensor(NamedTuple):
    """The numbers of elements of a tensor and of each of its bins, the last of which may be shorter."""

    size: int
    length: int


def narrowest_code(tensors: Sequence[BinnedTensor]) -> ElementCode:
    """Return the narrowest code that reaches the end of every bin."""
    longest = max(tensor.length for tensor in tensors)
    return next(code for code in ELEMENT_CODES if longest <= code.empty_bin)


class BinRun(NamedTuple):
    """Consecutive bins of one length."""

    start: int
    num_bins: int
    length: int

    def view_bins(self, bucket: Tensor) -> Tensor:
        """View the bins of a bucket (n,) as (num_bins, length)."""
        return bucket[self.start : self.start + self.num_bins * self.length].view(self.num_bins, self.length)


class BinLayout(NamedTuple):
    """The division of a bucket into bins, and the code of the elements that are sent of them."""

    runs: list[BinRun]  # in order, without gaps
    starts: Tensor  # (number of bins,)
    tensors: Tensor  # (number of bins,) the tensor that each belongs to
    counts: list[int]  # bins of each tensor
    code: ElementCode


def lay_out_bins(tensors: Sequence[BinnedTensor], like: Tensor) -> BinLayout:
    """Divide a bucket like this tensor (n,) into the bins of these tensors, which follow each other."""
    runs = list[BinRun]()
    start = 0
    for size, length in tensors:
        for bins in split_into_block_matrices(like[start : start + size], length):
            runs.append(BinRun(start, *bins.shape))
            start += bins.numel()
    starts = [torch.arange(run.num_bins, device=like.device) * run.length + run.start for run in runs]
    counts = [num_blocks(*tensor) for tensor in tensors]
    owners = torch.arange(len(counts), device=like.device)
    owners = owners.repeat_interleave(torch.tensor(counts, device=like.device))
    return BinLayout(runs, torch.cat(starts), owners, counts, narrowest_code(tensors))


@dataclass
class AdaCompState:
    """The residual, and the division of the bucket into bins."""

    residual: Tensor  # (n,) e
    layout: BinLayout = field(metadata={"saved": False})
    wide: Tensor | None = field(metadata={"saved": False})  # (n,) half-precision gradients are summed in it


class MarkedElements(NamedTuple):
    """The scale of each tensor, and marks of the elements to be sent."""

    scales: Tensor  # (number of tensors,) float32
    marks: Tensor  # (n,): 1 of an element to send, 2 at the start of an empty bin, else 0


@dataclass(frozen=True)
class AdaComp(Method):
    """A method that sends the elements which would soon be the largest of their bin.

    A step, with the paper's symbols:

    1. G <- e + g;  H <- G + g.
    2. The scale of each tensor is the mean over its bins of max |G|.
    3. Q(G) is the sign of G times the scale where |H| >= max |G| of the bin, 0 elsewhere. It is sent.
    4. The update is the mean of Q(G) over the workers.
    5. e <- G - Q(G).

    Where a bin's G is all zero, nothing of it is sent (the paper's rule, 0 >= 0, would send all of it).
    """

    scope: Scope = "layer"
    conv_bin: BinLength = 50
    other_bin: BinLength = 500

    def init(self, like: Tensor, context: BucketContext) -> AdaCompState:
        residual = huge_pages.zeros_like(like, accumulation_dtype(like.dtype))
        wide = None if residual.dtype == like.dtype else torch.empty_like(residual)
        tensors = self.bin_tensors(context.shapes or ((like.numel(),),))
        return AdaCompState(residual, lay_out_bins(tensors, like), wide)

    def bin_tensors(self, shapes: Sequence[tuple[int, ...]]) -> list[BinnedTensor]:
        """Return the size and the length of the bins of each tensor that is not empty."""
        return [
            BinnedTensor(size, min(size, self.conv_bin if len(shape) > MATRIX_DIMS else self.other_bin))
            for shape, size in zip(shapes, tensor_sizes(shapes), strict=True)
            if size
        ]

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        # The longest message: a scale for each tensor, and a code for each element.
        binned_tensors = self.bin_tensors(bucket_step.shapes)
        code_nbytes = narrowest_code(binned_tensors).dtype.itemsize
        nbytes = torch.float32.itemsize * len(binned_tensors) + code_nbytes * max(bucket_step.sent_counts)
        return exact_bytes(cost.gather_uneven(nbytes, bucket_step.world_size))

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: AdaCompState, comm: Comm, timer: PhaseTimer
    ) -> int:
        feedback = ErrorFeedback()
        with timer.phase("select"):
            # 1. to 3. Accumulate, select and quantise.
            acc = feedback.accumulate_in_gradient_units(grad, step.lr, state.residual)
            scales, marks = self.select_overwriting_grad(acc, grad, state)
            message = encode(scales, marks, acc, state.layout)
        with timer.phase("exchange"):
            # 4. Exchange.
            messages = gather_uneven(comm, message)
            total = [decode(message, acc.dtype, state.layout) for message in messages]
        with timer.phase("select"):
            # 5. Keep the rest.
            delivered = decode(message, acc.dtype, state.layout)
            feedback.retain_undelivered(Delivery([*total], [delivered]), state.residual)
        with timer.phase("scatter"):
            write_scaled_sum([*total], 1 / comm.size, grad, state.wide)
        return num_codes(message, state.layout)  # the marks of empty bins too: they take as many bytes

    def select_overwriting_grad(self, acc: Tensor, grad: Tensor, state: AdaCompState) -> MarkedElements:
        """Compute the scales, and mark what is to be sent of acc (n,).

        The marks are written over the gradient, which is read for the last time here, but for half types. A
        bin can be empty, too, because its largest G is about to shrink: |H| < |G| there.
        """
        layout = state.layout
        work = grad if state.wide is None else state.wide
        maxima = acc.new_empty(len(layout.starts))
        bins_per_run = [run.num_bins for run in layout.runs]
        for run, run_maxima in zip(layout.runs, maxima.split(bins_per_run), strict=True):
            # Magnitudes would take a buffer of n; the norm of order infinity takes four times as long.
            bins = run.view_bins(acc)
            torch.maximum(torch.amax(bins, 1), torch.amin(bins, 1).neg_(), out=run_maxima)
        scales = torch.stack([tensor_maxima.mean() for tensor_maxima in maxima.split(layout.counts)])
        thresholds = maxima.masked_fill(maxima == 0, torch.inf).split(bins_per_run)
        has_sent = torch.empty_like(maxima)
        torch.add(acc, grad, out=work).abs_()  # |H|
        for run, threshold, run_has_sent in zip(
            layout.runs, thresholds, has_sent.split(bins_per_run), strict=True
        ):
            torch.amax(run.view_bins(work).ge_(threshold[:, None]), 1, out=run_has_sent)
        # Add 2 at the start of each empty bin.
        work.index_add_(0, layout.starts, has_sent, alpha=-2)
        work.index_add_(0, layout.starts, torch.full_like(has_sent, 2))
        # Scales are as they are sent, so that all workers subtract and add the same.
        return MarkedElements(scales.float(), work)

    def residual(self, state: AdaCompState) -> Tensor:
        return state.residual

    def broken_laws(self) -> dict[str, str]:
        return {DENSE_AT_DENSITY_1: "it has no density, and sends signs"}


def encode(scales: Tensor, marks: Tensor, acc: Tensor, layout: BinLayout) -> Tensor:
    """Write a scale of each tensor, and a code of each element that has a mark, as (bytes,) uint8."""
    places = host_sync.nonzero(marks)
    bits = layout.code.offset_bits
    bins = torch.searchsorted(layout.starts, places, right=True) - 1
    offsets = (places - layout.starts[bins]).masked_fill_(marks[places] == 2, layout.code.empty_bin)
    is_last = torch.ones_like(bins, dtype=torch.bool)
    torch.ne(bins[1:], bins[:-1], out=is_last[:-1])
    codes = offsets | (acc[places] < 0).long() << bits | is_last.long() << bits + 1
    return concat_bytes(scales, codes.to(layout.code.dtype))


def decode(message: Tensor, dtype: torch.dtype, layout: BinLayout) -> SparseVector:
    """Read a message of `encode`. Empty bins become zeros, so that nothing depends on how many there are."""
    scale_field = torch.float32, len(layout.counts)
    code_field = layout.code.dtype, num_codes(message, layout)
    scales, codes = split_bytes(message, scale_field, code_field)
    codes = codes.long()
    bits = layout.code.offset_bits
    offsets = codes & layout.code.empty_bin
    is_negative = codes >> bits & 1
    is_last = codes >> bits + 1 & 1
    bins = is_last.cumsum(0) - is_last
    is_empty = offsets == layout.code.empty_bin
    values = scales.to(dtype)[layout.tensors[bins]] * (1 - 2 * is_negative)
    indices = layout.starts[bins] + offsets.masked_fill_(is_empty, 0)
    return SparseVector(indices, values.to(dtype).masked_fill_(is_empty, 0))


def num_codes(message: Tensor, layout: BinLayout) -> int:
    """Return the number of codes in a message."""
    return (len(message) - torch.float32.itemsize * len(layout.counts)) // layout.code.dtype.itemsize
