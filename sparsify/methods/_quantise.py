"""Base classes of quantised methods: codes of a few bits packed into bytes, and stochastic rounding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from sparsify import cost
from sparsify.comm import Comm
from sparsify.core.packing import pack, packed_nbytes, unpack
from sparsify.core.timer import PhaseTimer
from sparsify.core.wire import split_bytes
from sparsify.feedback import Feedback
from sparsify.kernels import Workspace
from sparsify.method import FeedbackMethod
from sparsify.ranges import Scope
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    BucketContext,
    BucketStep,
    Delivery,
    DenseSlice,
    MethodPart,
    PredictedBytes,
    StepSettings,
    exact_bytes,
)

SCALE = torch.float32  # the type that scales travel as
NORM_ORDERS = {"l1": 1, "l2": 2, "max": torch.inf}


@dataclass(init=False)
class PackedCodes:
    """A message of n codes of few bits each behind fp32 scales, and the buffers to write and read it.

    The buffers are allocated once: packed codes, and a byte for each of n codes unpacked. No checkpoint saves
    them: none is a field.

    Args:
        like: (n,), a tensor on the same device.
        bits: 1, 2, 4 or 8.
        num_scales: how many scales go before the codes.
    """

    def __init__(self, like: Tensor, bits: int, num_scales: int) -> None:
        self.n = like.numel()
        self.bits = bits
        self.num_scales = num_scales
        nbytes = message_nbytes(self.n, bits, num_scales)
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=like.device)
        packed = self._fields(self.buffer)[1]
        self.lanes = torch.zeros(8 // bits, len(packed), dtype=torch.uint8, device=like.device)

    @property
    def codes(self) -> Tensor:
        """(n,) uint8: the unpacked codes. Fill them before `write`; `read` fills them, too."""
        return self.lanes.view(-1)[: self.n]

    @property
    def levels(self) -> int:
        """The number of levels above 0, where codes stand for whole numbers from -levels to levels."""
        return (1 << self.bits - 1) - 1

    def write(self, scales: Tensor | None = None) -> Tensor:
        """Pack the codes behind the scales (num_scales,) float32; return `buffer` (bytes,) uint8."""
        scale_field, packed = self._fields(self.buffer)
        if scales is not None:
            scale_field.copy_(scales)
        pack(self.lanes, self.bits, packed)
        return self.buffer

    def unpack_and_return_scales(self, message: Tensor) -> Tensor:
        """Unpack a message that `write` wrote into `codes`; return its scales."""
        scales, packed = self._fields(message)
        unpack(packed, self.bits, self.lanes)
        return scales

    def write_clipped_integers(self, levels: Tensor, scales: Tensor) -> Tensor:
        """Write whole numbers (n,), clipped in place to -levels to levels, as `write` does."""
        self.codes.copy_(levels.clamp_(-self.levels, self.levels).add_(self.levels))
        return self.write(scales)

    def read_levels(self, message: Tensor, out: Tensor) -> Tensor:
        """Read a message of `write_clipped_integers` into `out` (n,); return its scales."""
        scales = self.unpack_and_return_scales(message)
        out.copy_(self.codes).sub_(self.levels)
        return scales

    def _fields(self, message: Tensor) -> list[Tensor]:
        """Return views of the scales and the packed codes of a message."""
        return split_bytes(message, (SCALE, self.num_scales), (torch.uint8, packed_nbytes(self.n, self.bits)))


def message_nbytes(n: int, bits: int, num_scales: int) -> int:
    """Return the number of bytes of the message of `PackedCodes`."""
    return packed_nbytes(n, bits) + SCALE.itemsize * num_scales


def num_blocks(n: int, block: int) -> int:
    """Return the number of blocks of n elements, the last of which may be shorter."""
    return -(-n // block)


def split_into_block_matrices(tensor: Tensor, block: int) -> list[Tensor]:
    """Return views of the blocks of a tensor (n,): all whole ones (rows, block), and the rest (1, rest)."""
    whole = tensor.numel() // block * block
    views = tensor[:whole].view(-1, block), tensor[whole:].view(1, -1)
    return [view for view in views if view.numel()]


def block_norms(tensor: Tensor, block: int, norm: Literal["l1", "l2", "max"]) -> Tensor:
    """Return the norm (blocks,) of each block of a tensor (n,), n above 0."""
    order = NORM_ORDERS[norm]
    return torch.cat(
        [torch.linalg.vector_norm(rows, order, dim=1) for rows in split_into_block_matrices(tensor, block)]
    )


def zip_scales_with_blocks(scales: Tensor, block: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield scales (rows, 1) beside their blocks: a view (rows, elements) of every tensor."""
    start = 0
    for views in zip(*(split_into_block_matrices(tensor, block) for tensor in tensors), strict=True):
        end = start + len(views[0])
        yield scales[start:end, None], *views
        start = end


def scale_blocks_in_place(tensor: Tensor, scales: Tensor, block: int) -> Tensor:
    """Multiply each block of a tensor (n,) by its scale (blocks,), in place, and return the tensor."""
    for scale, values in zip_scales_with_blocks(scales, block, tensor):
        values.mul_(scale)
    return tensor


def encode_signs(acc: Tensor, scales: Tensor | None, packed: PackedCodes) -> Tensor:
    """Write acc (n,) as (bytes,): a bit for each element, 1 where it is 0 or above."""
    torch.ge(acc, 0, out=packed.codes.view(torch.bool))  # into uint8 it would go through n floats
    return packed.write(scales)


def decode_signs_and_scales(message: Tensor, out: Tensor, packed: PackedCodes) -> Tensor:
    """Read a message of `encode_signs` into `out` (n,), as -1 and 1; return the scales."""
    scales = packed.unpack_and_return_scales(message)
    out.copy_(packed.codes).mul_(2).sub_(1)
    return scales


class Quantiser(MethodPart, ABC):
    """Base of quantisers, the parts of methods that write every element of a bucket in few bits."""

    @abstractmethod
    def init(self, like: Tensor, context: BucketContext) -> Any:
        """Return the state for a bucket like this tensor."""

    @abstractmethod
    def encode(self, acc: Tensor, work: Tensor, state: Any) -> Tensor:
        """Write acc (n,) as (bytes,) uint8, whose length depends on sizes alone.

        Args:
            acc: must not be written to.
            work: (n,), a buffer.
        """

    @abstractmethod
    def decode(self, message: Tensor, out: Tensor, state: Any) -> Tensor:
        """Read a message of `encode` (bytes,) into `out` (n,), and return `out`."""

    @abstractmethod
    def nbytes(self, sizes: Sequence[int]) -> int:
        """Return the number of bytes of a message, given the number of elements of each tensor."""


class StochasticRoundingState(NamedTuple):
    """The state of a quantiser that rounds stochastically."""

    message: PackedCodes
    generator: Generator


class StochasticQuantiser(Quantiser):
    """Base of quantisers that round every element stochastically to a multiple of its block's scale / levels.

    Rounding goes up or down at random, so that the expectation is kept. Elements that exceed their scale are
    clipped to it; a block of scale 0 is read as zeros.
    """

    @property
    @abstractmethod
    def bits(self) -> int:
        """The bits of each element, its sign included."""

    @property
    @abstractmethod
    def block(self) -> int:
        """The number of elements that share a scale."""

    @abstractmethod
    def compute_scales(self, acc: Tensor) -> Tensor:
        """Return the scale of each block of acc (n,), in float32 as it travels, so that none is rounded."""

    def init(self, like: Tensor, context: BucketContext) -> StochasticRoundingState:
        message = PackedCodes(like, self.bits, num_blocks(like.numel(), self.block))
        return StochasticRoundingState(message, context.make_generator_for_rank(like.device))

    def encode(self, acc: Tensor, work: Tensor, state: StochasticRoundingState) -> Tensor:
        scales = self.compute_scales(acc)
        work.uniform_(generator=state.generator)
        divisors = torch.where(scales > 0, scales, 1).to(acc.dtype)  # 0 / 0 would be NaN
        for divisor, x, rounded in zip_scales_with_blocks(divisors, self.block, acc, work):
            # floor(x + u), u uniform below 1, is above x as often as x is above its floor; for x < 0 too.
            rounded.addcdiv_(x, divisor, value=state.message.levels)
        return state.message.write_clipped_integers(work.floor_(), scales)

    def decode(self, message: Tensor, out: Tensor, state: StochasticRoundingState) -> Tensor:
        scales = state.message.read_levels(message, out)
        return scale_blocks_in_place(out, scales.to(out.dtype) / state.message.levels, self.block)

    def nbytes(self, sizes: Sequence[int]) -> int:
        n = sum(sizes)
        return message_nbytes(n, self.bits, num_blocks(n, self.block))


class QuantisedState(NamedTuple):
    """The state of each part of a quantised method, and buffers."""

    quantise: Any
    feedback: Any
    workspace: Workspace


@dataclass(frozen=True)
class QuantisedAllGather(FeedbackMethod):
    """A method that sends every element in few bits, by an all-gather of messages.

    Messages are decoded and summed in the order of ranks.

    Args:
        majority: the update is the sign of the sum, not the average.
    """

    quantise: Quantiser
    feedback: Feedback
    scope: Scope = "layer"
    majority: bool = False

    def init(self, like: Tensor, context: BucketContext) -> QuantisedState:
        return QuantisedState(self.quantise.init(like, context), self.feedback.init(like), Workspace(like))

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: QuantisedState, comm: Comm, timer: PhaseTimer
    ) -> int:
        return self.aggregate_in_one_message([grad], step, [state], comm, timer)

    def aggregate_in_one_message(
        self,
        grads: Sequence[Tensor],
        step: StepSettings,
        states: Sequence[QuantisedState],
        comm: Comm,
        timer: PhaseTimer,
    ) -> int:
        """Do as `aggregate` for several buckets, in one message."""
        own_messages = list[Tensor]()
        with timer.phase("select"):
            for grad, state in zip(grads, states, strict=True):
                # 1. Accumulate.
                acc = self.feedback.accumulate_in_gradient_units(grad, step.lr, state.feedback)
                # 2. Quantise.
                work = state.workspace.buffer("work")
                own_messages.append(self.quantise.encode(acc, work, state.quantise))
            joint_message = own_messages[0] if len(own_messages) == 1 else torch.cat(own_messages)
        with timer.phase("exchange"):
            received = comm.all_gather(joint_message)
        lengths = [len(message) for message in own_messages]
        by_bucket = zip(*(message.split(lengths) for message in received), strict=True)
        for messages, grad, state in zip(by_bucket, grads, states, strict=True):
            work = state.workspace.buffer("work")
            with timer.phase("exchange"):
                # 3. Sum. The gradient has been read, so its buffer holds the sum, except of half types.
                total = grad if grad.dtype == work.dtype else state.workspace.buffer("total")
                total.zero_()
                for message in messages:
                    total.add_(self.quantise.decode(message, work, state.quantise))
            with timer.phase("select"):
                # 4. Keep the rounding errors.
                if self.feedback.residual(state.feedback) is not None:
                    delivered = DenseSlice(0, self.quantise.decode(messages[comm.rank], work, state.quantise))
                    self.feedback.retain_undelivered(Delivery([], [delivered]), state.feedback)
            with timer.phase("scatter"):
                # 5. Average, or vote.
                total = total.sign_() if self.majority else total.div_(comm.size)
                if total is not grad:
                    grad.copy_(total)
        return sum(grad.numel() for grad in grads)

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        return exact_bytes(cost.all_gather(self.quantise.nbytes(bucket_step.sizes), bucket_step.world_size))

    def broken_laws(self) -> dict[str, str]:
        rounded = {DENSE_AT_DENSITY_1: "every element is rounded to a few bits"}
        return rounded | self.quantise.broken_laws() | self.feedback.broken_laws()
