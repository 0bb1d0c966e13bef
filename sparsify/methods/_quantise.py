"""What quantisers share: codes of a few bits packed into bytes, and rounding at random."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from sparsify import cost
from sparsify.comm import Comm
from sparsify.core.packing import pack, unpack
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

SCALE = torch.float32  # what scales travel as


@dataclass
class PackedCodes:
    """n codes of `bits` bits each behind fp32 scales, one for every block of elements or as many as asked.
    Its buffers are allocated once: packed codes, and a byte for each of n codes unpacked.
    """

    n: int = field(metadata={"saved": False})
    block: int = field(metadata={"saved": False})  # elements that share a scale; 0: there are no blocks
    scales: int = field(metadata={"saved": False})
    bits: int = field(metadata={"saved": False})  # 1, 2, 4 or 8
    buffer: Tensor = field(metadata={"saved": False})  # (bytes,) uint8
    lanes: Tensor = field(metadata={"saved": False})  # (8 / bits, bytes of codes) uint8: the codes unpacked

    @classmethod
    def like(cls, like: Tensor, block: int, bits: int, scales: int | None = None) -> PackedCodes:
        n, in_a_byte = like.numel(), 8 // bits
        packed = -(-n // in_a_byte)
        scales = num_blocks(n, block) if scales is None else scales
        buffer = torch.zeros(SCALE.itemsize * scales + packed, dtype=torch.uint8, device=like.device)
        lanes = torch.zeros(in_a_byte, packed, dtype=torch.uint8, device=like.device)
        return cls(n, block, scales, bits, buffer, lanes)

    @property
    def codes(self) -> Tensor:
        """(n,) uint8: filled before `write`, and by `read`."""
        return self.lanes.view(-1)[: self.n]

    def write(self, scales: Tensor | None = None) -> Tensor:
        """(blocks,) float32 and the codes -> (bytes,) uint8, in this object's own buffer."""
        into, packed = self._fields(self.buffer)
        if scales is not None:
            into.copy_(scales)
        pack(self.lanes, self.bits, packed)
        return self.buffer

    def read(self, message: Tensor) -> Tensor:
        """The inverse of `write`: leaves the codes in `codes`, returns the scales."""
        scales, packed = self._fields(message)
        unpack(packed, self.bits, self.lanes)
        return scales

    def _fields(self, message: Tensor) -> list[Tensor]:
        return split_bytes(message, (SCALE, self.scales), (torch.uint8, self.lanes.shape[1]))


def message_nbytes(n: int, block: int, bits: int) -> int:
    """Bytes of a `PackedCodes`."""
    return -(-n * bits // 8) + SCALE.itemsize * num_blocks(n, block)


def num_blocks(n: int, block: int) -> int:
    return -(-n // block) if block else 0


def in_blocks(tensor: Tensor, block: int) -> list[Tensor]:
    """(n,) -> views of its blocks: all whole ones (rows, block), and what is left over (1, rest)."""
    whole = tensor.numel() // block * block
    views = tensor[:whole].view(-1, block), tensor[whole:].view(1, -1)
    return [view for view in views if view.numel()]


def scaled_blocks(scales: Tensor, block: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each block's scale beside its elements: (rows, 1) and a view (rows, elements) of every tensor."""
    start = 0
    for views in zip(*(in_blocks(tensor, block) for tensor in tensors), strict=True):
        end = start + len(views[0])
        yield scales[start:end, None], *views
        start = end


class Rounding(NamedTuple):
    """The state of a quantiser that rounds at random."""

    message: PackedCodes
    generator: Generator


def write_rounded(acc: Tensor, work: Tensor, scales: Tensor, levels: int, state: Rounding) -> Tensor:
    """(n,) -> (bytes,): acc / scale rounded to a multiple of 1 / levels, up or down at random, so that the
    expectation is kept. What exceeds its scale is clipped to it; a block of scale 0 will be read as zeros.

    Args:
        work: (n,), a buffer.
        scales: (blocks,) float32: as they travel, so that rounding them can't bias anything.
    """
    message = state.message
    work.uniform_(generator=state.generator)
    divisors = torch.where(scales > 0, scales, 1).to(acc.dtype)  # 0 / 0 would be NaN
    for divisor, x, rounded in scaled_blocks(divisors, message.block, acc, work):
        # floor(x + u), u uniform below 1, is above x as often as x is above its floor; for x < 0 too.
        rounded.addcdiv_(x, divisor, value=levels)
    message.codes.copy_(work.floor_().clamp_(-levels, levels).add_(levels))
    return message.write(scales)


def read_rounded(message: Tensor, levels: int, out: Tensor, state: Rounding) -> Tensor:
    """Read what `write_rounded` wrote, into `out` (n,)."""
    scales = state.message.read(message)
    out.copy_(state.message.codes).sub_(levels)
    for step, values in scaled_blocks(scales.to(out.dtype) / levels, state.message.block, out):
        values.mul_(step)
    return out


def write_signs(acc: Tensor, scales: Tensor | None, message: PackedCodes) -> Tensor:
    """(n,) -> (bytes,): a bit for each element, 1 where it is 0 or above."""
    torch.ge(acc, 0, out=message.codes.view(torch.bool))  # into uint8 it would go through n floats
    return message.write(scales)


def read_signs(written: Tensor, out: Tensor, message: PackedCodes) -> Tensor:
    """Read what `write_signs` wrote, into `out` (n,): -1 and 1; returns the scales."""
    scales = message.read(written)
    out.copy_(message.codes).mul_(2).sub_(1)
    return scales


class Quantiser(MethodPart, ABC):
    """A rule that writes a whole bucket in few bits."""

    @abstractmethod
    def init(self, like: Tensor, context: BucketContext) -> Any:
        """The state for a bucket like this one."""

    @abstractmethod
    def encode(self, acc: Tensor, work: Tensor, state: Any) -> Tensor:
        """(n,) -> (bytes,) uint8, of a length that depends on sizes alone. `acc` is not to be written to;
        `work` (n,) is a buffer.
        """

    @abstractmethod
    def decode(self, message: Tensor, out: Tensor, state: Any) -> Tensor:
        """(bytes,) -> (n,), what `encode` wrote, into `out`."""

    @abstractmethod
    def nbytes(self, sizes: Sequence[int]) -> int:
        """Bytes of a message for tensors of so many elements."""


class QuantisedState(NamedTuple):
    quantise: Any
    feedback: Any
    workspace: Workspace


@dataclass(frozen=True)
class QuantisedAllGather(FeedbackMethod):
    """Send all of n in few bits each: an all-gather of messages, decoded and summed in rank order.

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
        with timer.phase("select"):
            mine = self._written(grad, step, state)
        with timer.phase("exchange"):
            messages = comm.all_gather(mine)
        self._read(messages, mine, grad, state, timer)
        return grad.numel()

    def aggregate_each(
        self,
        grads: Sequence[Tensor],
        step: StepSettings,
        states: Sequence[QuantisedState],
        comm: Comm,
        timer: PhaseTimer,
    ) -> int:
        """`aggregate` of several buckets, in one message."""
        with timer.phase("select"):
            mine = [self._written(grad, step, state) for grad, state in zip(grads, states, strict=True)]
            lengths = [len(message) for message in mine]
        with timer.phase("exchange"):
            received = [message.split(lengths) for message in comm.all_gather(torch.cat(mine))]
        for messages, own, grad, state in zip(zip(*received, strict=True), mine, grads, states, strict=True):
            self._read(messages, own, grad, state, timer)
        return sum(grad.numel() for grad in grads)

    def _written(self, grad: Tensor, step: StepSettings, state: QuantisedState) -> Tensor:
        acc = self.feedback.accumulate(grad, step.lr, state.feedback)
        return self.quantise.encode(acc, state.workspace.buffer("work"), state.quantise)

    def _read(
        self, messages: Sequence[Tensor], mine: Tensor, grad: Tensor, state: QuantisedState, timer: PhaseTimer
    ) -> None:
        """Write the average of the messages of all workers, and keep what was rounded off this one's."""
        work = state.workspace.buffer("work")
        with timer.phase("exchange"):
            # The gradient has been read: its own buffer serves for the sum, but for half types.
            total = grad if grad.dtype == work.dtype else state.workspace.buffer("total")
            total.zero_()
            for message in messages:
                total.add_(self.quantise.decode(message, work, state.quantise))
        with timer.phase("select"):
            if self.feedback.residual(state.feedback) is not None:
                delivered = DenseSlice(0, self.quantise.decode(mine, work, state.quantise))
                self.feedback.retain_undelivered(Delivery([], [delivered]), state.feedback)
        with timer.phase("scatter"):
            total = total.sign_() if self.majority else total.div_(len(messages))
            if total is not grad:
                grad.copy_(total)

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        return exact_bytes(cost.all_gather(self.quantise.nbytes(bucket_step.sizes), bucket_step.world_size))

    def broken_laws(self) -> dict[str, str]:
        rounded = {DENSE_AT_DENSITY_1: "every element is rounded to a few bits"}
        return rounded | self.quantise.broken_laws() | self.feedback.broken_laws()
