"""Selections as bytes."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
import torch
from torch import Tensor

import sparsify
from sparsify.core.wire import BLOCK_NUMEL, Wire
from sparsify.ranges import IndexFormat, ValueFormat
from sparsify.select import sample_indices
from sparsify.types import SparseVector
from tests.sparsify.laws import live

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NARROW: dict[ValueFormat, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
WIRES = [Wire(*both) for both in product(get_args(IndexFormat), get_args(ValueFormat))]


def part(n: int, k: int, dtype: torch.dtype = torch.float32) -> SparseVector:
    own = torch.Generator().manual_seed(n + k)
    return SparseVector(sample_indices(n, k, 7, torch.device("cpu")), torch.randn(k, generator=own).to(dtype))


def check_trip(wire: Wire, sent: SparseVector, n: int, offset: int = 0) -> Tensor:
    """Check that what is read is what was sent, with rounded values, in any order; return the message."""
    k = len(sent.values)
    message = wire.write(sent, n)
    buffer = torch.cat([torch.full((offset,), 255, dtype=torch.uint8), message])
    received = wire.read(buffer[offset:], k, n, sent.values.dtype)
    expected = wire.round_values(sent)
    order, expected_order = (indices.argsort() for indices in (received.indices, sent.indices))
    assert received.values.dtype == sent.values.dtype
    assert torch.equal(received.indices[order], sent.indices[expected_order])
    assert torch.equal(received.values[order], expected.values[expected_order])
    return message


@pytest.mark.parametrize("wire", WIRES, ids=repr)
def test_what_is_written_is_read(wire: Wire) -> None:
    """Also odd numbers of elements, behind which wide types would not be aligned.

    Also no elements, and a read from the middle of a buffer.
    """
    n = 3 * BLOCK_NUMEL + 11
    for dtype in DTYPES:
        for k, offset in ((0, 0), (1, 1), (7, 3), (13, 4), (13, 8), (1000, 0)):
            message = check_trip(wire, part(n, k, dtype), n, offset)
            assert message.dtype == torch.uint8
            assert len(message) == wire.nbytes(k, n, dtype)
            assert wire.num_elements(len(message), n, dtype) == k


def test_messages_have_the_stated_size() -> None:
    """Each block has a count besides its 16-bit offsets."""
    wires = (Wire("int64"), Wire("int64", "bf16"), Wire("delta16"))
    nbytes = [wire.nbytes(10, 2 * BLOCK_NUMEL + 1, torch.float32) for wire in wires]
    assert nbytes == [10 * (8 + 4), 10 * (8 + 2), 10 * (2 + 4) + 4 * 3]


def test_indices_reach_to_the_borders_of_their_types() -> None:
    """Offsets of 16 bits across blocks, of which one is empty; int32 to 2^31, and no farther."""
    indices = torch.tensor([4 * BLOCK_NUMEL - 1, 0, BLOCK_NUMEL - 1, BLOCK_NUMEL, 3 * BLOCK_NUMEL])
    check_trip(Wire("delta16"), SparseVector(indices, torch.arange(5.0)), 4 * BLOCK_NUMEL)
    borders: list[tuple[IndexFormat, int]] = [
        ("delta16", BLOCK_NUMEL - 1), ("delta16", BLOCK_NUMEL), ("delta16", BLOCK_NUMEL + 1),
        ("int32", 2**31), ("int64", 2**31 + 1),
    ]  # fmt: skip
    for index, n in borders:
        edge = SparseVector(torch.tensor([n - 1, 0]), torch.tensor([1.0, 2.0]))
        check_trip(Wire(index), edge, n)
    with pytest.raises(ValueError, match=rf"a bucket of {n} elements needs index='int64'"):
        Wire().write(edge, n)


def test_values_are_rounded_to_the_nearest_of_their_type() -> None:
    exact = torch.tensor([1.0, 1 + 2**-8, 1 + 2**-9, 1 + 2**-12, -3.14159, 1e-8, 0.0], dtype=torch.float64)
    sent = SparseVector(torch.arange(7), exact)
    for value, dtype in NARROW.items():
        rounded = Wire("int32", value).round_values(sent).values
        assert torch.equal(rounded, exact.to(dtype).double())
        assert (rounded != exact).any()
    assert Wire().round_values(sent) is sent  # values as they are are not copied


def test_what_fp16_cannot_hold_is_cut_to_its_largest_and_the_rest_is_owed() -> None:
    method = sparsify.build("topk", density=0.5, value="fp16")
    lived = live(method, 2, steps=1, shapes=[(2,)], make=lambda *where: torch.tensor([1e6, 0.0]).double())
    assert lived[0].updates[0].tolist() == [65504.0, 0.0]
    assert lived[0].residual.tolist() == [1e6 - 65504.0, 0.0]


def test_unknown_encodings_are_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no index 'int16' .*; there are: delta16, int32, int64"):
        Wire(index="int16")  # type: ignore[arg-type]  # a wrong word, as an unchecked script has it
    with pytest.raises(ValueError, match=r"no value 'int8'.*; there are: as_is, bf16, fp16, fp32"):
        Wire(value="int8")  # type: ignore[arg-type]  # the same
