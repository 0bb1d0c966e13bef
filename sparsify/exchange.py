"""Exchanges, which sum the selections of all workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsify.comm import Comm, exchange_pieces, gather_padded, gather_uneven
from sparsify.core import host_sync
from sparsify.core.wire import Wire, concat_bytes, split_bytes
from sparsify.types import (
    BucketContext,
    BucketStep,
    CollectiveCall,
    Delivery,
    DenseSlice,
    MethodPart,
    SparseVector,
    index_dtype,
    uneven_gather_calls,
)


class Exchange(MethodPart, ABC):
    """Base of the parts of methods that sum the workers' selections."""

    # True if indices are not sent, so that all workers must choose the same ones.
    needs_shared_indices: ClassVar[bool] = False
    # True if several buckets have the same total when they are exchanged as one bucket.
    supports_groups: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "exchange" in vars(cls) and "supports_groups" not in vars(cls):
            cls.supports_groups = False  # the base class declared it for its own `exchange`

    @property
    def needs_equal_counts(self) -> bool:
        """True if every worker must send the same number of elements."""
        return False

    def why_incompatible(self, selector: MethodPart) -> str | None:
        """Return the reason why a selector's choices can't be exchanged; None if they can."""
        return None

    def init(self, like: Tensor, context: BucketContext) -> Any:
        """Return the state for a bucket like this tensor; None where none is kept from step to step."""
        return None

    @abstractmethod
    def exchange(self, selection: SparseVector, n: int, k: int, comm: Comm, state: Any) -> Delivery:
        """Sum the selections of all workers. The total is equal on all workers, to the bit.

        Args:
            selection: this worker's.
            n: the number of elements of the bucket.
            k: the number of elements to select of it.
        """

    def exchange_group(
        self, selection: SparseVector, n: int, ks: Sequence[int], comm: Comm, states: Sequence[Any]
    ) -> Delivery:
        """Exchange the joint selection of a group of buckets with n elements together.

        Called where `supports_groups` only.
        """
        return self.exchange(selection, n, sum(ks), comm, None)


@dataclass(frozen=True)
class AllGather(Exchange):
    """An all-gather of values and indices, in one packed message in the format of `wire`.

    Selections are summed in the order of ranks, so that all workers get the same bits.

    Args:
        uneven: the workers send different numbers of elements, so lengths are gathered first.
        packed: False sends values and indices in two concurrent collectives, as Yoon and Oh 2022 did.
    """

    supports_groups: ClassVar[bool] = True

    wire: Wire = Wire()
    uneven: bool = False
    packed: bool = True

    def __post_init__(self) -> None:
        if not self.packed and (self.uneven or self.wire != Wire()):
            raise ValueError(
                "packed=False is the published form: exactly k elements, int32 indices, values as they are; "
                "leave packed=True for anything else"
            )

    @property
    def needs_equal_counts(self) -> bool:
        return not self.uneven

    def exchange(self, selection: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        if not self.packed:
            values, indices = comm.all_gather_several([selection.values, selection.indices.int()])
            return Delivery([SparseVector(*pair) for pair in zip(indices, values, strict=True)], [selection])
        message = self.wire.write(selection, n)
        messages = gather_uneven(comm, message) if self.uneven else comm.all_gather(message)
        total = [self.wire.read_whole(message, n, selection.values.dtype) for message in messages]
        return Delivery([*total], [self.wire.round_values(selection)])

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        count = max(bucket_step.sent_counts)
        if not self.packed:
            element_nbytes = bucket_step.value_dtype.itemsize, bucket_step.index_nbytes
            return [CollectiveCall("all_gather", nbytes * count) for nbytes in element_nbytes]
        nbytes = self.wire.nbytes(count, bucket_step.n, bucket_step.value_dtype)
        return uneven_gather_calls(nbytes) if self.uneven else [CollectiveCall("all_gather", nbytes)]


@dataclass(frozen=True)
class AllGatherBlocks(Exchange):
    """An all-gather of one start and k consecutive values from each worker. Eghlidi and Jaggi 2020."""

    needs_equal_counts: ClassVar[bool] = True

    def exchange(self, selection: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        start_dtype = index_dtype(n)
        messages = comm.all_gather(concat_bytes(selection.indices[:1].to(start_dtype), selection.values))
        offsets = torch.arange(k, device=selection.values.device)
        total = list[SparseVector | DenseSlice]()
        for message in messages:
            start, values = split_bytes(message, (start_dtype, 1), (selection.values.dtype, k))
            total.append(SparseVector((start + offsets) % n, values))
        return Delivery(total, [selection])

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        values_nbytes = bucket_step.value_dtype.itemsize * max(bucket_step.sent_counts)
        return [CollectiveCall("all_gather", bucket_step.index_nbytes + values_nbytes)]


@dataclass(frozen=True)
class AllReduce(Exchange):
    """An all-reduce of values without indices, for selectors that choose alike on all workers."""

    needs_shared_indices: ClassVar[bool] = True
    supports_groups: ClassVar[bool] = True

    def exchange(self, selection: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        if not selection.values.numel():
            return Delivery([], [])  # on all workers, since the choice is shared
        total = SparseVector(selection.indices, comm.all_reduce(selection.values.clone()))
        return Delivery([total], [selection])

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        nbytes = bucket_step.value_dtype.itemsize * max(bucket_step.sent_counts)
        return [CollectiveCall("all_reduce", nbytes)] if nbytes else []


# Split and reduce: every worker owns a region of the bucket and sums all selections within it.


def even_borders(n: int, size: int) -> list[int]:
    """Return size + 1 positions that divide n into regions whose lengths differ by at most 1."""
    return [n * rank // size for rank in range(size + 1)]


def split_and_reduce(
    selection: SparseVector, borders: Sequence[int], n: int, comm: Comm, wire: Wire
) -> SparseVector:
    """Sum the selections of all workers within this worker's region, by an all-to-all.

    Region r reaches from borders[r] to borders[r + 1]. The result has ascending indices and is summed in the
    order of ranks. Three host synchronisations: for the number of elements that go to each worker, that come
    from each, and of different indices.
    """
    indices, order = selection.indices.long().sort()
    values = selection.values[order]
    cuts = torch.searchsorted(indices, host_sync.to_device(list(borders), indices))
    lengths = differences(host_sync.to_host(cuts))
    messages = [
        wire.write(SparseVector(*piece), n)
        for piece in zip(indices.split(lengths), values.split(lengths), strict=True)
    ]
    pieces = exchange_pieces(comm, torch.cat(messages), [len(message) for message in messages])
    return sum_in_rank_order([wire.read_whole(piece, n, selection.values.dtype) for piece in pieces])


def gather_selections(
    selection: SparseVector, counts: Sequence[int], n: int, comm: Comm, wire: Wire
) -> list[SparseVector]:
    """All-gather selections of known lengths, padded to the longest; return them by rank."""
    dtype = selection.values.dtype
    lengths = [wire.nbytes(count, n, dtype) for count in counts]
    if not max(lengths):
        return [selection]
    messages = gather_padded(comm, wire.write(selection, n), lengths)
    return [wire.read(message, count, n, dtype) for message, count in zip(messages, counts, strict=True)]


def sum_in_rank_order(selections: Sequence[SparseVector]) -> SparseVector:
    """Return the sum of selections, with distinct, ascending indices. One host synchronisation."""
    host_sync.record_syncs()  # for the number of different indices
    indices = torch.unique(torch.cat([selection.indices.long() for selection in selections]))
    values = selections[0].values.new_zeros(indices.numel())
    for selection in selections:  # indices are distinct within each, so the order of the sum is fixed
        values.index_add_(0, torch.searchsorted(indices, selection.indices.long()), selection.values)
    return SparseVector(indices, values)


def write_scaled_sum(
    parts: list[SparseVector | DenseSlice], scale: float, out: Tensor, wide_buffer: Tensor | None
) -> None:
    """Write scale times the sum of the parts, which are added in this order, into out (n,).

    Args:
        wide_buffer: (n,) of a wider type, in which the sum is taken, if any.
    """
    buffer = out if wide_buffer is None else wide_buffer
    buffer.zero_()
    for part in parts:
        part.add_to(buffer, alpha=scale)
    if buffer is not out:
        out.copy_(buffer)


def differences(positions: Sequence[int]) -> list[int]:
    """Return the differences between each position and the next."""
    return [int(end) - int(start) for start, end in pairwise(positions)]


def rounding_errors(exact: SparseVector, rounded: SparseVector) -> SparseVector:
    """Return the rounded values less the exact ones, which the owner of a region counts as delivered."""
    return SparseVector(exact.indices, rounded.values - exact.values)
