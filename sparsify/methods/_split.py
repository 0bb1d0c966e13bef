"""Split and reduce: every worker owns a region of the bucket and sums what all have selected in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from sparsify import host_sync
from sparsify.comm import Comm, exchange_pieces
from sparsify.types import Sparse
from sparsify.wire import Wire


def even_borders(n: int, size: int) -> list[int]:
    """size + 1 positions that divide n into regions whose lengths differ by at most 1."""
    return [n * rank // size for rank in range(size + 1)]


def split_and_reduce(part: Sparse, borders: Sequence[int], n: int, comm: Comm, wire: Wire) -> Sparse:
    """One worker's selection in, the sum over all workers of its own region out: (m,) with ascending indices,
    sums taken in the order of ranks. Region r reaches from borders[r] to borders[r + 1]. Three host
    synchronisations: how much goes to each worker, how much comes from each, and how many different indices
    that makes.
    """
    indices, order = part.indices.long().sort()
    values = part.values[order]
    cuts = torch.searchsorted(indices, host_sync.to_device(list(borders), indices))
    lengths = differences(host_sync.to_host(cuts))
    messages = [
        wire.write(Sparse(*piece), n)
        for piece in zip(indices.split(lengths), values.split(lengths), strict=True)
    ]
    pieces = exchange_pieces(comm, torch.cat(messages), [len(message) for message in messages])
    return sum_by_rank([wire.read_all(piece, n, part.values.dtype) for piece in pieces])


def gather_counts(comm: Comm, part: Sparse) -> list[int]:
    """How many elements each worker has. One host synchronisation."""
    count = host_sync.to_device([part.indices.numel()], part.indices)
    return [int(count) for count in host_sync.to_host(torch.cat(comm.all_gather(count)))]


def gather_pairs(part: Sparse, counts: Sequence[int], n: int, comm: Comm, wire: Wire) -> list[Sparse]:
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


def sum_by_rank(received: Sequence[Sparse]) -> Sparse:
    """Several selections as one with distinct, ascending indices. One host synchronisation."""
    host_sync.count_sync()  # for how many different ones there are
    indices = torch.unique(torch.cat([part.indices.long() for part in received]))
    values = received[0].values.new_zeros(indices.numel())
    for part in received:  # distinct within each, so the order of the sum is fixed
        values.index_add_(0, torch.searchsorted(indices, part.indices.long()), part.values)
    return Sparse(indices, values)


def differences(positions: Sequence[int]) -> list[int]:
    return [int(end) - int(start) for start, end in pairwise(positions)]


def rounding_errors(total: Sparse, rounded: Sparse) -> Sparse:
    """What an owner must take back into its residual, as something delivered: its sums arrive rounded."""
    return Sparse(total.indices, rounded.values - total.values)
