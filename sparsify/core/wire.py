"""Selections as bytes: how indices and values are written into one message."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsify import ranges
from sparsify.ranges import IndexFormat, ValueFormat
from sparsify.types import SparseVector, index_dtype

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = 2**16  # delta16: what an offset of 16 bits reaches


@dataclass(frozen=True)
class Wire:
    """A message of k elements of a bucket of n: values and indices, one after the other.

    Args:
        index: `int32`; `int64`, for n above 2^31; or `delta16`, offsets of 16 bits from the beginning of
            their block of 65,536, behind one int32 count per block: 2 bytes an index instead of 4, at the
            cost of sorting k.
        value: `as_is`, the gradient's own type; or rounded to `fp32`, `bf16`, `fp16`. The rounding
            error stays in the residual.
    """

    index: IndexFormat = "int32"
    value: ValueFormat = "as_is"

    def __post_init__(self) -> None:
        ranges.check_fields(self)

    def nbytes(self, k: int, n: int, dtype: torch.dtype) -> int:
        """Bytes of a message."""
        per_index = {"int32": 4 * k, "int64": 8 * k, "delta16": 2 * k + 4 * num_blocks(n)}
        return per_index[self.index] + k * self.value_dtype(dtype).itemsize

    def count(self, nbytes: int, n: int, dtype: torch.dtype) -> int:
        """The inverse of `nbytes`: how many elements a message holds."""
        return (nbytes - self.nbytes(0, n, dtype)) // (self.nbytes(1, n, dtype) - self.nbytes(0, n, dtype))

    def value_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Type that values of a bucket travel as."""
        return DTYPES.get(self.value, dtype)

    def rounded(self, part: SparseVector) -> SparseVector:
        """The part as its receivers will read it."""
        narrow = self.narrowed(part.values)
        return part if narrow is part.values else SparseVector(part.indices, narrow.to(part.values.dtype))

    def narrowed(self, values: Tensor) -> Tensor:
        """(k,) in the type that travels. Its largest number stands for what lies beyond: fp16 ends at 65,504,
        and an infinity would never leave the residual.
        """
        dtype = self.value_dtype(values.dtype)
        if dtype.itemsize >= values.dtype.itemsize:
            return values if dtype == values.dtype else values.to(dtype)
        largest = torch.finfo(dtype).max
        return values.clamp(-largest, largest).to(dtype)

    def write(self, part: SparseVector, n: int) -> Tensor:
        """(k,) indices and values -> (bytes,) uint8. Raises ValueError where n needs wider indices."""
        if self.index == "int32" and index_dtype(n) != torch.int32:
            raise ValueError(f"a bucket of {n} elements needs index='int64': int32 ends at {2**31}")
        values = self.narrowed(part.values)
        if self.index == "delta16":
            order = part.indices.argsort()
            indices, values = part.indices[order].long(), values[order]
            counts = torch.zeros(num_blocks(n), dtype=torch.int32, device=indices.device)
            counts.index_add_(0, indices // BLOCK, torch.ones_like(indices, dtype=torch.int32))
            return joined(counts, (indices % BLOCK).to(torch.int16), values)
        return joined(part.indices.to(torch.int64 if self.index == "int64" else torch.int32), values)

    def read_all(self, message: Tensor, n: int, dtype: torch.dtype) -> SparseVector:
        """`read`, where only the message's length tells how many elements it holds."""
        return self.read(message, self.count(len(message), n, dtype), n, dtype)

    def read(self, message: Tensor, k: int, n: int, dtype: torch.dtype) -> SparseVector:
        """The inverse of `write`, for a bucket of type `dtype`."""
        value_dtype = self.value_dtype(dtype)
        if self.index == "delta16":
            counts, offsets, values = split(
                message, (torch.int32, num_blocks(n)), (torch.int16, k), (value_dtype, k)
            )
            starts = torch.arange(0, BLOCK * num_blocks(n), BLOCK, device=message.device)
            indices = starts.repeat_interleave(counts, output_size=k) + (offsets.long() & BLOCK - 1)
            return SparseVector(indices, values.to(dtype))
        index_dtype = torch.int64 if self.index == "int64" else torch.int32
        indices, values = split(message, (index_dtype, k), (value_dtype, k))
        return SparseVector(indices, values.to(dtype))


def num_blocks(n: int) -> int:
    """Number of blocks of n elements."""
    return -(-n // BLOCK)


def joined(*fields: Tensor) -> Tensor:
    """1-D tensors of several types as one (bytes,) uint8; wide types first, to be read in place."""
    ordered = sorted(fields, key=lambda field: -field.element_size())
    return torch.cat([field.contiguous().view(torch.uint8) for field in ordered])


def split(message: Tensor, *fields: tuple[torch.dtype, int]) -> list[Tensor]:
    """The inverse of `joined`, given each field's type and length, in the order in which they were joined."""
    if message.storage_offset() % 8:
        message = message.clone()  # a piece of a larger buffer, at an address that no wide type can start at
    found: list[Tensor] = [message] * len(fields)
    start = 0
    for at in sorted(range(len(fields)), key=lambda at: -fields[at][0].itemsize):
        dtype, length = fields[at]
        end = start + dtype.itemsize * length
        found[at] = message[start:end].view(dtype)
        start = end
    return found
