from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.feedback import ErrorFeedback, Feedback, LowPass, NoFeedback
from sparsify.kernels import Workspace
from sparsify.method import FeedbackMethod
from sparsify.methods._quantise import PackedCodes, split_into_blocks, message_nbytes, blocks_with_scales
from sparsify.methods._reduce_scatter import QuantisedReduceScatter
from sparsify.ranges import PositiveFraction, PositiveInt, Scope, check_arguments
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    BucketContext,
    BucketStep,
    Delivery,
    DenseSlice,
    PredictedBytes,
    StepSettings,
)


@check_arguments
def qgz(
    scope: Scope = "global",
    bits: Literal[4, 8] = 4,
    block: PositiveInt = 256,
    feedback: Literal["none", "gradient", "low_pass"] = "none",
    beta: PositiveFraction = 0.5,
) -> QuantisedAllReduce:
    """Quantised averaging as in ZeRO++ (qgZ): each worker sums one region of what all have rounded to
    few bits, and sends its average rounded as well. Wang et al. 2023, arXiv:2306.10209.

    An all-to-all of codes, the sum of a region in fp32, an all-gather of codes: 2 (P-1)/P times the codes, as
    an all-reduce of them would send, and each element is rounded twice, whatever P. Their two levels, within
    and between nodes, are one here. No host synchronisation.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or so many MB.
        bits: 4 or 8 for each element, its sign included; rounded to the nearest of 2^bits - 1 levels.
        block: elements that share a scale, which is their largest magnitude.
        feedback: `none`, as ZeRO++; `gradient`: rounding errors are kept, those of a region's average by the
            worker that made it; `low_pass`: e <- (1 - beta) e + beta (e + g - sent), as LoCo (Xie et
            al. 2024, arXiv:2407.04480), which keeps e in 8 bits, here as it is.
        beta: of `low_pass`.
    """
    kept: dict[str, Feedback] = {
        "none": NoFeedback(), "gradient": ErrorFeedback(), "low_pass": LowPass(beta),
    }  # fmt: skip
    return QuantisedAllReduce(bits, block, kept[feedback], scope)


@dataclass
class QGZState:
    """State of the feedback, and buffers: codes of each worker's region."""

    feedback: Any
    workspace: Workspace = field(metadata={"saved": False})
    codes: list[PackedCodes] = field(default_factory=list, metadata={"saved": False})
    outgoing: Tensor | None = field(default=None, metadata={"saved": False})  # all regions' messages


@dataclass(frozen=True)
class QuantisedAllReduce(FeedbackMethod):
    """Reduce-scatter and all-gather of rounded elements."""

    bits: Literal[4, 8]
    block: PositiveInt
    feedback: Feedback
    scope: Scope = "global"

    @property
    def levels(self) -> int:
        """Number of levels above 0."""
        return (1 << self.bits - 1) - 1

    def init(self, like: Tensor, context: BucketContext) -> QGZState:
        return QGZState(self.feedback.init(like), Workspace(like))

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: QGZState, comm: Comm, timer: PhaseTimer
    ) -> int:
        lengths = region_lengths(grad.numel(), comm.size, self.block)
        if len(state.codes) != comm.size:
            state.outgoing = None
            state.codes = [PackedCodes.allocate(grad[:length], self.block, self.bits) for length in lengths]
        is_kept = self.feedback.residual(state.feedback) is not None
        work = state.workspace.buffer("work")
        sent = state.workspace.buffer("sent") if is_kept else work  # as receivers read it
        mine, start = state.codes[comm.rank], sum(lengths[: comm.rank])
        with timer.phase("select"):
            acc = self.feedback.accumulate(grad, step.lr, state.feedback)
            pieces = [each.split(lengths) for each in (acc, work, sent)]
            for values, room, rounded, codes in zip(*pieces, state.codes, strict=True):
                message = self.encode(values, room, codes)
                if is_kept:
                    self.decode(message, rounded, codes)
            messages = [codes.buffer for codes in state.codes]
        with timer.phase("exchange"):
            nbytes = [message.numel() for message in messages]
            if state.outgoing is None:
                state.outgoing = torch.cat(messages)
            torch.cat(messages, out=state.outgoing)
            received = comm.all_to_all(state.outgoing, nbytes, [nbytes[comm.rank]] * comm.size)
            total, room = grad[start : start + mine.n], work[: mine.n]  # the gradient has been read
            total = total if grad.dtype == work.dtype else state.workspace.buffer("total")[: mine.n]
            total.zero_()
            for message in received:  # in the order of ranks
                total.add_(self.decode(message, room, mine))
            del received
            message = self.encode(total.div_(comm.size), room, mine)
            if (short := max(nbytes) - message.numel()) > 0:
                message = torch.cat([message, message.new_zeros(short)])
            gathered = comm.all_gather(message)
        with timer.phase("select"):
            if is_kept:
                # The owner of a region keeps what rounding its average took from the workers' sum.
                error = total.sub_(self.decode(gathered[comm.rank][: nbytes[comm.rank]], room, mine))
                sent[start : start + mine.n].sub_(error, alpha=comm.size)
                self.feedback.retain_undelivered(Delivery([], [DenseSlice(0, sent)]), state.feedback)
        with timer.phase("scatter"):
            rooms = zip(grad.split(lengths), work.split(lengths), gathered, state.codes, strict=True)
            for average, room, message, codes in rooms:
                average.copy_(self.decode(message[: codes.buffer.numel()], room, codes))
        return grad.numel()

    def encode(self, values: Tensor, work: Tensor, codes: PackedCodes) -> Tensor:
        """(m,) -> (bytes,) uint8, rounded to the nearest multiple of each block's largest magnitude / levels.

        Args:
            work: (m,), a buffer.
        """
        if not values.numel():
            return codes.buffer
        largest = [torch.linalg.vector_norm(x, torch.inf, dim=1) for x in split_into_blocks(values, self.block)]
        scales = torch.cat(largest).div_(self.levels).float()
        divisors = torch.where(scales == 0, 1, scales).to(values.dtype)  # 0 / 0 would be NaN
        for divisor, x, rounded in blocks_with_scales(divisors, self.block, values, work):
            torch.div(x, divisor, out=rounded)
        codes.codes.copy_(work.round_().clamp_(-self.levels, self.levels).add_(self.levels))
        return codes.write(scales)

    def decode(self, message: Tensor, out: Tensor, codes: PackedCodes) -> Tensor:
        """The inverse, into `out` (m,)."""
        if not out.numel():
            return out
        scales = codes.read(message)
        out.copy_(codes.codes).sub_(self.levels)
        for scale, values in blocks_with_scales(scales.to(out.dtype), self.block, out):
            values.mul_(scale)
        return out

    def custom_reduce_scatter(self) -> QuantisedReduceScatter:
        if not isinstance(self.feedback, NoFeedback):
            raise ValueError(
                "within a replica nobody keeps a residual of what is rounded; take qgz(feedback='none')"
            )
        return QuantisedReduceScatter(self)

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        nbytes = [
            message_nbytes(n, self.block, self.bits)
            for n in region_lengths(bucket_step.n, bucket_step.world_size, self.block)
        ]
        least, most = (
            cost.all_to_all(sum(nbytes) - own, bucket_step.world_size)
            + cost.all_gather(max(nbytes), bucket_step.world_size)
            for own in (max(nbytes), min(nbytes))
        )
        return PredictedBytes(int(least.sent_bytes), int(most.sent_bytes))

    def broken_laws(self) -> dict[str, str]:
        rounded = {DENSE_AT_DENSITY_1: "every element is rounded to a few bits, twice"}
        return rounded | self.feedback.broken_laws()


def region_lengths(n: int, size: int, block: int) -> list[int]:
    """Elements that each worker sums: whole blocks, as many each; the last workers' are fewer, or none."""
    each = -(-n // (size * block)) * block
    return [max(0, min(n, (rank + 1) * each) - rank * each) for rank in range(size)]
