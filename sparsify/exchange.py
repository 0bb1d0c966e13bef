"""Exchanges: how the workers' selections become one total."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsify.comm import Comm, exchange_pieces, gather_uneven
from sparsify.core import host_sync
from sparsify.core.wire import Wire, joined, split
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
    """Part of a method that sums the workers' selections."""

    needs_shared_indices: ClassVar[bool] = (
        False  # are indices left unsent, so that all workers must choose alike?
    )
    supports_groups: ClassVar[bool] = (
        False  # is the total of several buckets, exchanged as one, that of each by itself?
    )

    def __init_subclass__(cls) -> None:
        if "exchange" in vars(cls) and "supports_groups" not in vars(cls):
            cls.supports_groups = False  # said of another exchange

    @property
    def needs_equal_counts(self) -> bool:
        """True if every worker must bring the same number of elements."""
        return False

    def why_incompatible(self, select: MethodPart) -> str | None:
        """Reason why it can't exchange what this selector chooses; None where it can."""
        return None

    def init(self, like: Tensor, context: BucketContext) -> Any:
        """The state for a bucket like this one; None where nothing is kept from step to step."""
        return None

    @abstractmethod
    def exchange(self, part: SparseVector, n: int, k: int, comm: Comm, state: Any) -> Delivery:
        """One worker's selection in, the total over all workers out. Alike on all workers, to the bit."""

    def exchange_together(
        self, part: SparseVector, n: int, ks: Sequence[int], comm: Comm, states: Sequence[Any]
    ) -> Delivery:
        """`exchange` of several buckets, whose space has n elements, where it supports groups."""
        return self.exchange(part, n, sum(ks), comm, None)


@dataclass(frozen=True)
class AllGather(Exchange):
    """All-gather of values and indices, in one packed message (`wire` says how it is written).

    The sum is taken worker by worker in rank order, so that all workers get the same bits. Yoon and Oh 2022
    sent values and indices in two collectives, in flight together; `packed=False` does.

    Args:
        uneven: the workers bring different numbers of elements: lengths are gathered first.
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

    def exchange(self, part: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        if not self.packed:
            values, indices = comm.begin_all_gathers([part.values, part.indices.int()])()
            return Delivery([SparseVector(*pair) for pair in zip(indices, values, strict=True)], [part])
        mine = self.wire.write(part, n)
        messages = gather_uneven(comm, mine) if self.uneven else comm.all_gather(mine)
        total = [self.wire.read_all(message, n, part.values.dtype) for message in messages]
        return Delivery([*total], [self.wire.rounded(part)])

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        most = max(bucket_step.sent_counts)
        if not self.packed:
            each = bucket_step.value_dtype.itemsize, bucket_step.index_nbytes
            return [CollectiveCall("all_gather", nbytes * most) for nbytes in each]
        nbytes = self.wire.nbytes(most, bucket_step.n, bucket_step.value_dtype)
        return uneven_gather_calls(nbytes) if self.uneven else [CollectiveCall("all_gather", nbytes)]


@dataclass(frozen=True)
class AllGatherBlocks(Exchange):
    """All-gather of consecutive indices: one start and k values from each worker. Eghlidi and Jaggi 2020."""

    needs_equal_counts: ClassVar[bool] = True

    def exchange(self, part: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        start = index_dtype(n)
        messages = comm.all_gather(joined(part.indices[:1].to(start), part.values))
        row, total = torch.arange(k, device=part.values.device), list[SparseVector | DenseSlice]()
        for message in messages:
            first, values = split(message, (start, 1), (part.values.dtype, k))
            total.append(SparseVector((first + row) % n, values))
        return Delivery(total, [part])

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        return [
            CollectiveCall(
                "all_gather",
                bucket_step.index_nbytes + bucket_step.value_dtype.itemsize * max(bucket_step.sent_counts),
            )
        ]


@dataclass(frozen=True)
class AllReduce(Exchange):
    """All-reduce of values: no indices are sent, so all workers must have chosen alike."""

    needs_shared_indices: ClassVar[bool] = True
    supports_groups: ClassVar[bool] = True

    def exchange(self, part: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        if not part.values.numel():
            return Delivery([], [])  # alike everywhere, since the choice is
        total = SparseVector(part.indices, comm.all_reduce(part.values.clone()))
        return Delivery([total], [part])

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        nbytes = bucket_step.value_dtype.itemsize * max(bucket_step.sent_counts)
        return [CollectiveCall("all_reduce", nbytes)] if nbytes else []


# Split and reduce: every worker owns a region of the bucket and sums what all have selected in it.


def even_borders(n: int, size: int) -> list[int]:
    """size + 1 positions that divide n into regions whose lengths differ by at most 1."""
    return [n * rank // size for rank in range(size + 1)]


def split_and_reduce(
    part: SparseVector, borders: Sequence[int], n: int, comm: Comm, wire: Wire
) -> SparseVector:
    """One worker's selection in, the sum over all workers of its own region out: (m,) with ascending indices,
    summed in the order of ranks. Region r reaches from borders[r] to borders[r + 1]. Three host
    synchronisations: how much goes to each worker, how much comes from each, how many different indices that
    makes.
    """
    indices, order = part.indices.long().sort()
    values = part.values[order]
    cuts = torch.searchsorted(indices, host_sync.to_device(list(borders), indices))
    lengths = differences(host_sync.to_host(cuts))
    messages = [
        wire.write(SparseVector(*piece), n)
        for piece in zip(indices.split(lengths), values.split(lengths), strict=True)
    ]
    pieces = exchange_pieces(comm, torch.cat(messages), [len(message) for message in messages])
    return sum_in_rank_order([wire.read_all(piece, n, part.values.dtype) for piece in pieces])


def gather_counts(comm: Comm, part: SparseVector) -> list[int]:
    """Number of elements that each worker has. One host synchronisation."""
    count = host_sync.to_device([part.indices.numel()], part.indices)
    return [int(count) for count in host_sync.to_host(torch.cat(comm.all_gather(count)))]


def gather_selections(
    part: SparseVector, counts: Sequence[int], n: int, comm: Comm, wire: Wire
) -> list[SparseVector]:
    """All-gather of selections, by rank, whose lengths are known (`gather_counts`): padded to the longest."""
    dtype = part.values.dtype
    lengths = [wire.nbytes(count, n, dtype) for count in counts]
    if not max(lengths):
        return [part]
    message = wire.write(part, n)
    messages = comm.all_gather(torch.cat([message, message.new_zeros(max(lengths) - len(message))]))
    return [
        wire.read(message[:length], count, n, dtype)
        for message, length, count in zip(messages, lengths, counts, strict=True)
    ]


def sum_in_rank_order(received: Sequence[SparseVector]) -> SparseVector:
    """Several selections as one with distinct, ascending indices. One host synchronisation."""
    host_sync.count_sync()  # for how many different ones there are
    indices = torch.unique(torch.cat([part.indices.long() for part in received]))
    values = received[0].values.new_zeros(indices.numel())
    for part in received:  # distinct within each, so the order of the sum is fixed
        values.index_add_(0, torch.searchsorted(indices, part.indices.long()), part.values)
    return SparseVector(indices, values)


def scatter_sum(
    total: list[SparseVector | DenseSlice], scale: float, grad: Tensor, wide: Tensor | None
) -> None:
    """grad (n,) <- scale x the sum of `total`, in a fixed order: within a part indices are distinct."""
    into = grad if wide is None else wide
    into.zero_()
    for part in total:
        part.add_to(into, alpha=scale)
    if wide is not None:
        grad.copy_(wide)


def differences(positions: Sequence[int]) -> list[int]:
    """Lengths between each position and the next."""
    return [int(end) - int(start) for start, end in pairwise(positions)]


def rounding_errors(total: SparseVector, rounded: SparseVector) -> SparseVector:
    """Errors that an owner must take back into its residual, as delivered: its sums arrive rounded."""
    return SparseVector(total.indices, rounded.values - total.values)
