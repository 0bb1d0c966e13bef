"""Split and reduce: every worker owns a region of the bucket and sums what all have selected in it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from sparsify import cost, host
from sparsify.comm import Comm, exchange_pieces
from sparsify.parts import Sparse
from sparsify.wire import Wire


class Reduced(NamedTuple):
    """What a region's owner holds."""

    total: Sparse  # (m,) of its region, indices ascending; sums over the workers, taken in the order of ranks
    sent_bytes: int  # by this worker


def even_borders(n: int, size: int) -> list[int]:
    """size + 1 positions that divide n into regions whose lengths differ by at most 1."""
    return [n * rank // size for rank in range(size + 1)]


def split_and_reduce(part: Sparse, borders: Sequence[int], n: int, comm: Comm, wire: Wire) -> Reduced:
    """One worker's selection in, the sum over all workers of its own region out. Region r reaches from
    borders[r] to borders[r + 1]. Three host synchronisations: how much goes to whom, how much comes, and how
    many different indices that makes.
    """
    indices, order = part.indices.long().sort()
    values = part.values[order]
    cuts = torch.searchsorted(indices, host.put(list(borders), indices))
    lengths = differences(host.read(cuts))
    messages = [
        wire.write(Sparse(*piece), n)
        for piece in zip(indices.split(lengths), values.split(lengths), strict=True)
    ]
    pieces = exchange_pieces(comm, torch.cat(messages), [len(message) for message in messages])
    sent = sum(len(message) for message in messages) - len(messages[comm.rank])
    dtype = part.values.dtype
    received = [wire.read(piece, wire.count(len(piece), n, dtype), n, dtype) for piece in pieces]
    return Reduced(sum_by_rank(received), cost.exchange_pieces(sent, comm.size).sent_bytes)


def sum_by_rank(received: Sequence[Sparse]) -> Sparse:
    """Several selections as one with distinct, ascending indices. One host synchronisation."""
    host.waited()  # for how many different ones there are
    indices = torch.unique(torch.cat([one.indices.long() for one in received]))
    values = received[0].values.new_zeros(indices.numel())
    for one in received:  # distinct within each, so the order of the sum is fixed
        values.index_add_(0, torch.searchsorted(indices, one.indices.long()), one.values)
    return Sparse(indices, values)


def differences(positions: Sequence[int]) -> list[int]:
    return [int(end) - int(start) for start, end in pairwise(positions)]


def rounding_errors(total: Sparse, rounded: Sparse) -> Sparse:
    """What an owner must take back into its residual, as something delivered: its sums arrive rounded."""
    return Sparse(total.indices, rounded.values - total.values)
