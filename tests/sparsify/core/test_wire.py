"""Selections as bytes."""

from __future__ import annotations

from itertools import product
from typing import get_args

import pytest
import torch

import sparsify
from sparsify.core.wire import BLOCK, Wire, joined, split
from sparsify.ranges import Index, ValueType
from sparsify.select import sample
from sparsify.types import Sparse
from tests.sparsify.laws import live

CPU = torch.device("cpu")


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


NARROW = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


WIRES = [Wire(*both) for both in product(get_args(Index), get_args(ValueType))]


def part(n: int, k: int, dtype: torch.dtype = torch.float32) -> Sparse:
    own = torch.Generator().manual_seed(n + k)
    return Sparse(sample(n, k, 7, CPU), torch.randn(k, generator=own).to(dtype))


def in_order(one: Sparse) -> tuple[list[int], list[float]]:
    order = one.indices.argsort()
    return one.indices[order].tolist(), one.values[order].tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", WIRES, ids=repr)
def test_what_is_written_is_read(wire: Wire, dtype: torch.dtype) -> None:
    """Odd numbers of elements too, behind which wide types would not be aligned; and no elements."""
    n = 3 * BLOCK + 11
    for k in (0, 1, 7, 1000):
        sent = part(n, k, dtype)
        message = wire.write(sent, n)
        assert message.dtype == torch.uint8
        assert len(message) == wire.nbytes(k, n, dtype)
        assert wire.count(len(message), n, dtype) == k
        received = wire.read(message, k, n, dtype)
        assert received.values.dtype == dtype
        assert in_order(received) == in_order(wire.rounded(sent))


@pytest.mark.parametrize("wire", WIRES, ids=repr)
@pytest.mark.parametrize("offset", [1, 3, 4, 8])
def test_a_message_is_read_from_the_middle_of_a_buffer(wire: Wire, offset: int) -> None:
    n, k = 1000, 13
    sent = part(n, k, torch.float64)
    message = wire.write(sent, n)
    buffer = torch.cat([torch.full((offset,), 255, dtype=torch.uint8), message])
    assert in_order(wire.read(buffer[offset:], k, n, torch.float64)) == in_order(wire.rounded(sent))


@pytest.mark.parametrize(
    ("index", "nbytes"), [("int32", 10 * (4 + 4)), ("int64", 10 * (8 + 4)), ("delta16", 10 * (2 + 4) + 4 * 3)]
)
def test_messages_have_the_stated_size(index: Index, nbytes: int) -> None:
    n = 2 * BLOCK + 1  # three blocks
    assert Wire(index).nbytes(10, n, torch.float32) == nbytes
    assert Wire(index, "bf16").nbytes(10, n, torch.float32) == nbytes - 20
    assert len(Wire(index).write(part(n, 10), n)) == nbytes


def test_short_offsets_reach_across_the_borders_of_blocks() -> None:
    n = 4 * BLOCK  # and nothing in the third
    indices = torch.tensor([4 * BLOCK - 1, 0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, BLOCK // 2, 3 * BLOCK])
    sent = Sparse(indices, torch.arange(7.0))
    wire = Wire("delta16")
    received = wire.read(wire.write(sent, n), 7, n, torch.float32)
    assert in_order(received) == in_order(sent)
    assert received.indices.tolist() == sorted(indices.tolist())
    for n in (BLOCK - 1, BLOCK, BLOCK + 1):
        last = Sparse(torch.tensor([n - 1, 0]), torch.tensor([1.0, 2.0]))
        assert in_order(wire.read(wire.write(last, n), 2, n, torch.float32)) == in_order(last)


@pytest.mark.parametrize("value", ["fp32", "bf16", "fp16"])
def test_values_are_rounded_to_the_nearest_of_their_type(value: ValueType) -> None:
    exact = torch.tensor([1.0, 1 + 2**-8, 1 + 2**-9, 1 + 2**-12, -3.14159, 1e-8, 0.0], dtype=torch.float64)
    sent = Sparse(torch.arange(7), exact)
    wire = Wire("int32", value)
    received = wire.read(wire.write(sent, 7), 7, 7, torch.float64)
    assert torch.equal(received.values, exact.to(NARROW[value]).double())
    assert torch.equal(wire.rounded(sent).values, received.values)
    assert (wire.rounded(sent).values != exact).any()


def test_values_as_they_are_are_not_copied() -> None:
    sent = part(100, 5)
    assert Wire().rounded(sent) is sent


def test_int32_ends_at_two_to_the_31() -> None:
    n = 2**31
    edge = Sparse(torch.tensor([n - 1, 0]), torch.tensor([1.0, 2.0]))
    assert in_order(Wire().read(Wire().write(edge, n), 2, n, torch.float32)) == in_order(edge)
    beyond = Sparse(torch.tensor([n]), torch.tensor([1.0]))
    with pytest.raises(ValueError, match=rf"a bucket of {n + 1} elements needs index='int64'"):
        Wire().write(beyond, n + 1)
    wide = Wire("int64")
    assert in_order(wire_trip(wide, beyond, n + 1)) == in_order(beyond)


def wire_trip(wire: Wire, sent: Sparse, n: int) -> Sparse:
    return wire.read(wire.write(sent, n), len(sent.values), n, sent.values.dtype)


def test_unknown_encodings_are_answered_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no index 'int16' .*; there are: delta16, int32, int64"):
        Wire(index="int16")  # type: ignore[arg-type]  # a wrong word, as an unchecked script has it
    with pytest.raises(ValueError, match=r"no value 'int8'.*; there are: as_is, bf16, fp16, fp32"):
        Wire(value="int8")  # type: ignore[arg-type]  # the same


def test_fields_of_several_widths_are_joined_and_split() -> None:
    fields = [
        torch.arange(3, dtype=torch.uint8), torch.arange(5, dtype=torch.int16),
        torch.arange(1, dtype=torch.float64), torch.empty(0), torch.arange(3, dtype=torch.int32),
    ]  # fmt: skip
    message = joined(*fields)
    found = split(message, *((field.dtype, len(field)) for field in fields))
    assert all(torch.equal(a, b) for a, b in zip(fields, found, strict=True))


def test_what_fp16_cannot_hold_is_cut_to_its_largest_and_the_rest_is_owed() -> None:
    method = sparsify.build("topk", density=0.5, value="fp16")
    lived = live(method, 2, steps=1, shapes=[(2,)], make=lambda *where: torch.tensor([1e6, 0.0]).double())
    assert lived[0].updates[0].tolist() == [65504.0, 0.0]
    assert lived[0].residual.tolist() == [1e6 - 65504.0, 0.0]
