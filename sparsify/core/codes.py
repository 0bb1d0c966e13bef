"""Codes: how the values of a message are written in few bits, each tensor of a bucket by scales of its own.

Receivers read `decode(encode(x))`, so the rounding error can be kept in the residual. Receivers
only look numbers up and multiply them, so all read the same bits, whatever machines they are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsify.core import host_sync
from sparsify.core.packing import pack_codes, packed_nbytes, unpack_codes
from sparsify.core.wire import Wire, concat_bytes, split_bytes
from sparsify.ranges import CodeName, ValueFormat

SCALE = torch.float32  # the type that scales travel as
POWERS = tuple(2.0**power for power in range(-6, 1))  # of E3M0, times the scale
# Of Symmetric2; six rounds more would take another 2 % off the squared error on Gaussian values.
NUM_REFINEMENTS = 2
# tplr-ai/templar, hparams.json: quantization_bins, quantization_range.
NUM_BINS = 4
RANGE_DEVIATIONS = 6.0


class TensorSegments(NamedTuple):
    """The division of K values among T tensors, one tensor after the other."""

    counts: tuple[int, ...]  # values of each tensor
    lengths: Tensor  # (T,) int64: the counts on the device
    tensors: Tensor  # (K,) int64: the tensor of each value

    @classmethod
    def from_counts(cls, counts: Sequence[int], like: Tensor) -> TensorSegments:
        """Make the division on the device of `like`, given how many values each tensor has."""
        lengths = host_sync.to_device(list(counts), like)
        tensors = torch.arange(len(counts), device=like.device)
        return cls(tuple(counts), lengths, tensors.repeat_interleave(lengths, output_size=sum(counts)))

    def repeat_by_tensor(self, numbers: Tensor) -> Tensor:
        """Return for each value (K,) the number of its tensor, of numbers (T,)."""
        return numbers.index_select(0, self.tensors)

    def sum_by_tensor(self, values: Tensor) -> Tensor:
        """Return the sum of each tensor's values, (T,), in an order that is fixed on each machine."""
        return torch.segment_reduce(values, "sum", lengths=self.lengths, unsafe=True)

    def max_or_zero_by_tensor(self, values: Tensor) -> Tensor:
        """Return the largest of each tensor's values, 0 or above, (T,): NaN where there is one; 0 of none."""
        return torch.segment_reduce(values, "max", lengths=self.lengths, unsafe=True).clamp_(min=0)


class ValueCode(ABC):
    """A code that writes values as bytes."""

    @property
    def is_exact(self) -> bool:
        """True if float32 values are read as they were written."""
        return False

    @abstractmethod
    def nbytes(self, counts: Sequence[int], dtype: torch.dtype) -> int:
        """Return the number of bytes of a message, given how many values each tensor has and their type."""

    @abstractmethod
    def encode(self, values: Tensor, segments: TensorSegments) -> Tensor:
        """Write values (K,) as (bytes,) uint8, without a host synchronisation."""

    @abstractmethod
    def decode(self, message: Tensor, segments: TensorSegments, dtype: torch.dtype) -> Tensor:
        """Read values (K,) of this type from the bytes that `encode` wrote, as receivers do."""


@dataclass(frozen=True)
class PlainValues(ValueCode):
    """A code of values as numbers of some type, without scales; see `Wire` for numbers beyond its range."""

    value: ValueFormat = "as_is"

    @property
    def is_exact(self) -> bool:
        return self.value in ("as_is", "fp32")

    def nbytes(self, counts: Sequence[int], dtype: torch.dtype) -> int:
        return sum(counts) * Wire(value=self.value).value_dtype(dtype).itemsize

    def encode(self, values: Tensor, segments: TensorSegments) -> Tensor:
        return concat_bytes(Wire(value=self.value).narrow(values))

    def decode(self, message: Tensor, segments: TensorSegments, dtype: torch.dtype) -> Tensor:
        narrow = Wire(value=self.value).value_dtype(dtype)
        return split_bytes(message, (narrow, len(segments.tensors)))[0].to(dtype)


class LevelCode(ValueCode):
    """Base of codes that round to one of few levels.

    A message has `bits` for each value, and `num_scales` fp32 for each tensor, 4 bytes each, from which its
    levels follow. A tensor in which a value is not finite, or whose sum is not, is read as NaN throughout:
    few bits can't say which one it was.
    """

    bits: ClassVar[int]
    num_scales: ClassVar[int]

    @abstractmethod
    def scales_and_codes(self, values: Tensor, segments: TensorSegments) -> tuple[Tensor, Tensor]:
        """Return scales (T, num_scales), and codes (K,), whole numbers from 0 to 2^bits - 1, of values (K,).

        Where values are not finite, codes may be any and scales must not be finite.
        """

    @abstractmethod
    def levels(self, scales: Tensor) -> Tensor:
        """Return the values (T, 2^bits) float32 that codes are read as, for scales (T, num_scales)."""

    def nbytes(self, counts: Sequence[int], dtype: torch.dtype) -> int:
        return SCALE.itemsize * self.num_scales * len(counts) + packed_nbytes(sum(counts), self.bits)

    def encode(self, values: Tensor, segments: TensorSegments) -> Tensor:
        scales, codes = self.scales_and_codes(values, segments)
        scales = scales.to(SCALE)
        is_finite = scales.isfinite().all(dim=1, keepdim=True)
        scales = torch.where(is_finite, scales, torch.nan)
        return concat_bytes(scales.view(-1), pack_codes(codes.to(torch.uint8), self.bits))

    def decode(self, message: Tensor, segments: TensorSegments, dtype: torch.dtype) -> Tensor:
        k = len(segments.tensors)
        num_tensors = len(segments.counts)
        scale_field = (SCALE, num_tensors * self.num_scales)
        code_field = (torch.uint8, packed_nbytes(k, self.bits))
        scales, codes = split_bytes(message, scale_field, code_field)
        levels = self.levels(scales.view(num_tensors, self.num_scales)).to(dtype)
        indices = (segments.tensors << self.bits).add_(unpack_codes(codes, self.bits, k))
        return levels.view(-1).index_select(0, indices)


def _ratios_to_scale(values: Tensor, scales: Tensor, segments: TensorSegments) -> Tensor:
    """Divide values (K,) by their tensor's scale (T,), as it travels; 0 where that is 0 or not finite."""
    return (values / segments.repeat_by_tensor(scales.to(SCALE).to(values.dtype))).nan_to_num_(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Int8(LevelCode):
    """A code of 8 bits: the nearest of 255 multiples of 1/127 of the tensor's largest magnitude.

    An error is at most 1/254 of that magnitude.
    """

    bits: ClassVar[int] = 8
    num_scales: ClassVar[int] = 1

    def scales_and_codes(self, values: Tensor, segments: TensorSegments) -> tuple[Tensor, Tensor]:
        scales = segments.max_or_zero_by_tensor(values.abs())
        codes = _ratios_to_scale(values, scales, segments).mul_(127).round_().clamp_(-127, 127).add_(128)
        return scales[:, None], codes

    def levels(self, scales: Tensor) -> Tensor:
        steps = torch.arange(-128, 128, dtype=SCALE, device=scales.device)
        return (steps / 127) * scales


@dataclass(frozen=True)
class E3M0(LevelCode):
    """A code of 4 bits: a sign and 3 bits of exponent.

    Streaming DiLoCo, arXiv:2501.18512, for outer gradients. A value is read as the nearest of 0 and 7 powers
    of two, from 1/64 to 1 times the tensor's largest magnitude M. An error is at most a third of the value,
    or M/128 where that is more.
    """

    bits: ClassVar[int] = 4
    num_scales: ClassVar[int] = 1

    def scales_and_codes(self, values: Tensor, segments: TensorSegments) -> tuple[Tensor, Tensor]:
        scales = segments.max_or_zero_by_tensor(values.abs())
        ratio = _ratios_to_scale(values, scales, segments)
        magnitudes = ratio.abs()
        codes = torch.zeros_like(ratio, dtype=torch.uint8)
        for low, high in pairwise((0.0, *POWERS)):
            codes += magnitudes >= (low + high) / 2
        return scales[:, None], codes + 8 * (ratio < 0)

    def levels(self, scales: Tensor) -> Tensor:
        positive = [0.0, *POWERS]
        negative = [-level for level in positive]
        return host_sync.to_device([*positive, *negative], scales, SCALE) * scales


class TwoBitMeanCode(LevelCode):
    """Base of codes of 2 bits that are read as the mean of the values that have them."""

    bits: ClassVar[int] = 2

    def levels(self, scales: Tensor) -> Tensor:
        return scales


@dataclass(frozen=True)
class Symmetric2(TwoBitMeanCode):
    """A code of 2 bits: the sign, and whether the magnitude is a large one.

    A value is read as the mean of the tensor's large magnitudes, or of the small ones, with the sign: 8 bytes
    of scales for each tensor.

    Not published: half of the levels of `Statistical2` lie where Top-k leaves no values. Large is what lies
    nearer to the mean of the large ones (Lloyd 1982): from the mean magnitude on at first, and then twice
    from halfway between the means. Zeros among other values are read as small ones with a plus.
    """

    num_scales: ClassVar[int] = 2

    def scales_and_codes(self, values: Tensor, segments: TensorSegments) -> tuple[Tensor, Tensor]:
        magnitudes = values.abs()
        total = segments.sum_by_tensor(magnitudes)
        number = segments.lengths.to(values.dtype)
        border = total / number.clamp(min=1)
        for _ in range(1 + NUM_REFINEMENTS):
            is_large = magnitudes >= segments.repeat_by_tensor(border)
            large = segments.sum_by_tensor(magnitudes * is_large)
            num_large = segments.sum_by_tensor(is_large.to(values.dtype))
            # Where there are none the sum is zero, up to rounding, and no code refers to it.
            high = large / num_large.clamp(min=1)
            low = torch.where(num_large < number, (total - large) / (number - num_large).clamp(min=1), high)
            border = (low + high) / 2
        return torch.stack([low, high], dim=1), is_large + 2 * (values < 0)

    def levels(self, scales: Tensor) -> Tensor:
        return torch.cat([scales, -scales], dim=1)


@dataclass(frozen=True)
class Statistical2(TwoBitMeanCode):
    """A code of 2 bits: 4 bins around the tensor's mean, 1.5 standard deviations wide.

    The outer bins have no end. A value is read as the mean of the values in its bin: 16 bytes of scales for
    each tensor. SparseLoCo, arXiv:2508.15706, as tplr-ai/templar's compress.py has it: borders at -2.25,
    -0.75 and 0.75 standard deviations, so that what Top-k leaves of a bell falls into two of the four.
    """

    num_scales: ClassVar[int] = NUM_BINS

    def scales_and_codes(self, values: Tensor, segments: TensorSegments) -> tuple[Tensor, Tensor]:
        number = segments.lengths.to(values.dtype)
        mean = segments.sum_by_tensor(values) / number.clamp(min=1)
        centred = values - segments.repeat_by_tensor(mean)
        squares = segments.sum_by_tensor(centred.double().square())  # which float32 might not hold
        deviation = (squares / (number - 1).clamp(min=1)).sqrt_().to(values.dtype)
        # Where the deviation is 0 the width is 1, as in the published code.
        width = torch.where(deviation > 0, RANGE_DEVIATIONS / NUM_BINS * deviation, 1.0)
        codes = centred.div_(segments.repeat_by_tensor(width)).add_(NUM_BINS // 2).round_()
        codes = codes.nan_to_num_(0.0).clamp_(0, NUM_BINS - 1)
        sums, counts = [], []
        for code in range(NUM_BINS):
            inside = (codes == code).to(values.dtype)
            counts.append(segments.sum_by_tensor(inside))
            sums.append(segments.sum_by_tensor(inside.mul_(values)))
        means = torch.stack(sums, dim=1) / torch.stack(counts, dim=1).clamp(min=1)
        return means + mean.mul(0)[:, None], codes  # where the mean is not finite, no bin's is


# By the name that methods offer it by.
VALUE_CODES: Mapping[CodeName, ValueCode] = {
    "as_is": PlainValues(),
    "fp32": PlainValues("fp32"),
    "bf16": PlainValues("bf16"),
    "int8": Int8(),
    "e3m0": E3M0(),
    "symmetric2": Symmetric2(),
    "statistical2": Statistical2(),
}
