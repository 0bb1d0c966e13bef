from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from sparsify import cost
from sparsify import feedback as feedbacks
from sparsify.comm import Comm, CountingComm
from sparsify.comm.torch import ProcessGroup, ReduceOp, TorchComm
from sparsify.core.timer import PhaseTimer
from sparsify.exchange import differences
from sparsify.feedback import Feedback, LowPass, NoFeedback
from sparsify.kernels import Workspace
from sparsify.method import FeedbackMethod
from sparsify.methods._quantise import (
    PackedCodes,
    block_norms,
    message_nbytes,
    num_blocks,
    scale_blocks_in_place,
    zip_scales_with_blocks,
)
from sparsify.ranges import PositiveFraction, PositiveInt, Scope, check_arguments
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    BucketContext,
    BucketStep,
    Delivery,
    DenseSlice,
    PredictedBytes,
    StepSettings,
    bytes_between,
)


@check_arguments
def qgz(
    scope: Scope = "global",
    bits: Literal[4, 8] = 4,
    block: PositiveInt = 256,
    feedback: Literal["none", "gradient", "low_pass"] = "none",
    beta: PositiveFraction = 0.5,
) -> QuantisedAllReduce:
    """Quantised averaging: all-to-all and all-gather of gradients in few bits. Wang et al. 2023 (arXiv), qgZ.

    ZeRO++, arXiv:2306.10209. The bucket is divided into a region for each worker:

    1. Each worker rounds its gradient (plus residual) to few bits and sends each region to its owner, by an
       all-to-all.
    2. The owner averages the region in fp32, in the order of ranks.
    3. It rounds the average to few bits, and an all-gather sends it to all workers.

    The messages have as many bytes as those of an all-reduce of the codes, 2 (P-1)/P times the codes, and
    each element is rounded twice, whatever P. The paper's two levels, within and between nodes, are one here.
    No host synchronisation.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or a size in MB.
        bits: 4 or 8 for each element, its sign included; rounded to the nearest of 2^bits - 1 levels. Lower:
            fewer bytes, more error.
        block: the number of elements that share a scale, which is their largest magnitude. Lower: more bytes,
            less error.
        feedback: `none`, as ZeRO++; `gradient`: rounding errors are kept, those of a region's average by its
            owner; `low_pass`: e <- (1 - beta) e + beta (e + g - sent), as LoCo (Xie et al. 2024,
            arXiv:2407.04480), which keeps e in 8 bits, here as it is.
        beta: weight of the new errors with `low_pass`. Lower: errors are averaged over more steps.
    """
    kept = LowPass(beta) if feedback == "low_pass" else feedbacks.FEEDBACKS[feedback]
    return QuantisedAllReduce(bits, block, kept, scope)


@dataclass
class QGZState:
    """The state of the feedback, and buffers for the messages to the owners of regions."""

    feedback: Any
    workspace: Workspace = field(metadata={"saved": False})
    codes: list[PackedCodes] = field(default_factory=list, metadata={"saved": False})  # by region
    outgoing: Tensor | None = field(default=None, metadata={"saved": False})  # the messages to all regions


@dataclass(frozen=True)
class QuantisedAllReduce(FeedbackMethod):
    """A method that averages rounded gradients by a reduce-scatter and an all-gather."""

    bits: Literal[4, 8]
    block: PositiveInt
    feedback: Feedback
    scope: Scope = "global"

    def init(self, like: Tensor, context: BucketContext) -> QGZState:
        return QGZState(self.feedback.init(like), Workspace(like))

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: QGZState, comm: Comm, timer: PhaseTimer
    ) -> int:
        lengths = region_lengths(grad.numel(), comm.size, self.block)
        if not state.codes:
            state.codes = [self.make_codes(grad[:length]) for length in lengths]
            state.outgoing = torch.cat([codes.buffer for codes in state.codes])
        has_residual = self.feedback.residual(state.feedback) is not None
        work = state.workspace.buffer("work")
        sent = state.workspace.buffer("sent") if has_residual else work  # the values that receivers decode
        own_codes = state.codes[comm.rank]
        start = sum(lengths[: comm.rank])
        own_region = slice(start, start + own_codes.n)
        own_work = work[: own_codes.n]
        with timer.phase("select"):  # 1.
            acc = self.feedback.accumulate_in_gradient_units(grad, step.lr, state.feedback)
            splits = [tensor.split(lengths) for tensor in (acc, work, sent)]
            for values, buffer, rounded, codes in zip(*splits, state.codes, strict=True):
                message = self.encode(values, buffer, codes)
                if has_residual:
                    self.decode(message, rounded, codes)
            messages = [codes.buffer for codes in state.codes]
        with timer.phase("exchange"):
            nbytes = [len(message) for message in messages]
            outgoing = torch.cat(messages, out=state.outgoing)
            received = comm.all_to_all(outgoing, nbytes, [nbytes[comm.rank]] * comm.size)
            # 2. The gradient has been read, so its buffer can hold the average.
            average = grad[own_region]
            if grad.dtype != work.dtype:
                average = state.workspace.buffer("total")[: own_codes.n]
            average.zero_()
            for message in received:
                average.add_(self.decode(message, own_work, own_codes))
            del received
            average.div_(comm.size)
            # 3. Messages are padded to the longest.
            message = self.encode(average, own_work, own_codes)
            padding = message.new_zeros(max(nbytes) - len(message))
            gathered = comm.all_gather(torch.cat([message, padding]) if len(padding) else message)
        with timer.phase("select"):
            if has_residual:
                # The owner of a region keeps the rounding error of its average, on behalf of all workers.
                error = average.sub_(self.decode(gathered[comm.rank][: len(message)], own_work, own_codes))
                sent[own_region].sub_(error, alpha=comm.size)
                self.feedback.retain_undelivered(Delivery([], [DenseSlice(0, sent)]), state.feedback)
        with timer.phase("scatter"):
            for values, message, codes in zip(grad.split(lengths), gathered, state.codes, strict=True):
                values.copy_(self.decode(message[: len(codes.buffer)], work[: codes.n], codes))
        return grad.numel()

    def make_codes(self, like: Tensor) -> PackedCodes:
        """Allocate the buffers of a message of as many elements as `like` (m,) has."""
        return PackedCodes(like, self.bits, num_blocks(like.numel(), self.block))

    def encode(self, values: Tensor, work: Tensor, codes: PackedCodes) -> Tensor:
        """Return values (m,) as (bytes,) uint8, in the buffer of `codes`.

        Elements are rounded to the nearest multiple of their block's largest magnitude / levels.

        Args:
            work: (m,), a buffer.
        """
        if not values.numel():
            return codes.buffer
        scales = block_norms(values, self.block, "max").div_(codes.levels).float()
        divisors = torch.where(scales == 0, 1, scales).to(values.dtype)  # 0 / 0 would be NaN
        for divisor, x, rounded in zip_scales_with_blocks(divisors, self.block, values, work):
            torch.div(x, divisor, out=rounded)
        return codes.write_clipped_integers(work.round_(), scales)

    def decode(self, message: Tensor, out: Tensor, codes: PackedCodes) -> Tensor:
        """Read a message of `encode` into `out` (m,), and return `out`."""
        scales = codes.read_levels(message, out)
        return scale_blocks_in_place(out, scales.to(out.dtype), self.block)

    def make_fsdp_reduce_scatter(self) -> QuantisedReduceScatter:
        if not isinstance(self.feedback, NoFeedback):
            raise ValueError(
                "within a replica nobody keeps a residual of what is rounded; take qgz(feedback='none')"
            )
        return QuantisedReduceScatter(self)

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        size = bucket_step.world_size
        lengths = region_lengths(bucket_step.n, size, self.block)
        nbytes = [message_nbytes(length, self.bits, num_blocks(length, self.block)) for length in lengths]
        # A worker sends its own region to nobody, and regions differ in length.
        gather = cost.all_gather(max(nbytes), size)
        least = cost.all_to_all(sum(nbytes) - max(nbytes), size)
        most = cost.all_to_all(sum(nbytes) - min(nbytes), size)
        return bytes_between([least, gather], [most, gather])

    def broken_laws(self) -> dict[str, str]:
        rounded = {DENSE_AT_DENSITY_1: "every element is rounded to a few bits, twice"}
        return rounded | self.feedback.broken_laws()


class QuantisedReduceScatter:
    """The first half of `sparsify.qgz`, with the interface of torch.distributed.fsdp's ReduceScatter.

    Every worker rounds the shards that the others sum, sends them there by an all-to-all, and sums its own
    shard in single precision. Wang et al. 2023 (ZeRO++, arXiv:2306.10209).

    Attributes:
        sent_bytes: bytes that this worker has sent so far.
    """

    def __init__(self, method: QuantisedAllReduce) -> None:
        self.method = method
        self._comms = dict[ProcessGroup, CountingComm]()
        self._codes = dict[tuple[int, torch.device], PackedCodes]()

    @property
    def sent_bytes(self) -> int:
        return sum(comm.sent_bytes for comm in self._comms.values())

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for an input or an output, as FSDP2 asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write the sum or mean over the workers of this worker's shard (n,), given all shards (P n,)."""
        if op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ValueError(
                "set_gradient_divide_factor scales in torch's own reduce-scatter, which within= replaces; "
                "leave one of them out"
            )
        method = self.method
        n = output_tensor.numel()
        comm = self._comms.setdefault(group, CountingComm(TorchComm(group)))
        work = output_tensor.new_empty(n, dtype=torch.float32)
        codes = self._codes.setdefault((n, work.device), method.make_codes(work))
        messages = [method.encode(shard.float(), work, codes).clone() for shard in input_tensor.split(n)]
        lengths = [len(message) for message in messages]
        received = comm.all_to_all(torch.cat(messages), lengths, lengths)
        total = torch.zeros_like(work)
        for message in received:  # in the order of ranks
            total.add_(method.decode(message, work, codes))
        output_tensor.copy_(total.div_(comm.size) if op == ReduceOp.AVG else total)


def region_lengths(n: int, size: int, block: int) -> list[int]:
    """Return the number of elements of each region: equal numbers of whole blocks, fewer in the last ones."""
    length = -(-n // (size * block)) * block
    starts = [min(n, rank * length) for rank in range(size + 1)]
    return differences(starts)
