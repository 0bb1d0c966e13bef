"""Messages: how the indices and values of a selection are written as bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsify import ranges
from sparsify.ranges import IndexFormat, ValueFormat
from sparsify.types import SparseVector, index_dtype

DTYPE_BY_VALUE_FORMAT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK_NUMEL = 2**16  # delta16: what an offset of 16 bits reaches


@dataclass(frozen=True)
class Wire:
    """The format of a message of k elements of a bucket of n: values and indices, one after the other.

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
        """Return the number of bytes of a message."""
        index_nbytes = {"int32": 4 * k, "int64": 8 * k, "delta16": 2 * k + 4 * _num_blocks(n)}
        return index_nbytes[self.index] + k * self.value_dtype(dtype).itemsize

    def num_elements(self, nbytes: int, n: int, dtype: torch.dtype) -> int:
        """Return how many elements a message of so many bytes holds; the inverse of `nbytes`."""
        return (nbytes - self.nbytes(0, n, dtype)) // (self.nbytes(1, n, dtype) - self.nbytes(0, n, dtype))

    def value_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type that values of a bucket travel as."""
        return DTYPE_BY_VALUE_FORMAT.get(self.value, dtype)

    def round_values(self, selection: SparseVector) -> SparseVector:
        """Return a selection as its receivers will read it."""
        narrow = self.narrow(selection.values)
        return (
            selection
            if narrow is selection.values
            else SparseVector(selection.indices, narrow.to(selection.values.dtype))
        )

    def narrow(self, values: Tensor) -> Tensor:
        """Convert values (k,) to the type that travels.

        Its largest number stands for numbers beyond it: fp16 ends at 65,504, and an infinity would never
            leave
        the residual.
        """
        dtype = self.value_dtype(values.dtype)
        if dtype.itemsize >= values.dtype.itemsize:
            return values if dtype == values.dtype else values.to(dtype)
        largest = torch.finfo(dtype).max
        return values.clamp(-largest, largest).to(dtype)

    def write(self, selection: SparseVector, n: int) -> Tensor:
        """Write indices and values (k,) as (bytes,) uint8; ValueError where n needs wider indices."""
        if self.index == "int32" and index_dtype(n) != torch.int32:
            raise ValueError(f"a bucket of {n} elements needs index='int64': int32 ends at {2**31}")
        values = self.narrow(selection.values)
        if self.index == "delta16":
            order = selection.indices.argsort()
            indices, values = selection.indices[order].long(), values[order]
            counts = torch.zeros(_num_blocks(n), dtype=torch.int32, device=indices.device)
            counts.index_add_(0, indices // BLOCK_NUMEL, torch.ones_like(indices, dtype=torch.int32))
            return concat_bytes(counts, (indices % BLOCK_NUMEL).to(torch.int16), values)
        return concat_bytes(
            selection.indices.to(torch.int64 if self.index == "int64" else torch.int32), values
        )

    def read_whole(self, message: Tensor, n: int, dtype: torch.dtype) -> SparseVector:
        """Read a message whose length alone tells how many elements it holds; see `read`."""
        return self.read(message, self.num_elements(len(message), n, dtype), n, dtype)

    def read(self, message: Tensor, k: int, n: int, dtype: torch.dtype) -> SparseVector:
        """Read the indices and values of a message, for a bucket of type `dtype`; the inverse of `write`."""
        value_dtype = self.value_dtype(dtype)
        if self.index == "delta16":
            counts, offsets, values = split_bytes(
                message, (torch.int32, _num_blocks(n)), (torch.int16, k), (value_dtype, k)
            )
            starts = torch.arange(0, BLOCK_NUMEL * _num_blocks(n), BLOCK_NUMEL, device=message.device)
            indices = starts.repeat_interleave(counts, output_size=k) + (offsets.long() & BLOCK_NUMEL - 1)
            return SparseVector(indices, values.to(dtype))
        index_dtype = torch.int64 if self.index == "int64" else torch.int32
        indices, values = split_bytes(message, (index_dtype, k), (value_dtype, k))
        return SparseVector(indices, values.to(dtype))


def _num_blocks(n: int) -> int:
    """Return the number of blocks of n elements."""
    return -(-n // BLOCK_NUMEL)


def concat_bytes(*fields: Tensor) -> Tensor:
    """Concatenate 1-D tensors of several types to (bytes,) uint8; wide types first, to be read in place."""
    ordered = sorted(fields, key=lambda field: -field.element_size())
    return torch.cat([field.contiguous().view(torch.uint8) for field in ordered])


def split_bytes(message: Tensor, *fields: tuple[torch.dtype, int]) -> list[Tensor]:
    """View the fields of a message (bytes,) uint8; the inverse of `concat_bytes`.

    Args:
        fields: type and length of each, in the order in which they were given to `concat_bytes`.
    """
    if message.storage_offset() % 8:
        message = message.clone()  # a piece of a larger buffer, at an address that no wide type can start at
    views: list[Tensor] = [message] * len(fields)
    start = 0
    for index in sorted(range(len(fields)), key=lambda index: -fields[index][0].itemsize):
        dtype, length = fields[index]
        end = start + dtype.itemsize * length
        views[index] = message[start:end].view(dtype)
        start = end
    return views
