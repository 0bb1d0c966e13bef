from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core.wire import Wire
from sparsify.cost import num_tree_rounds
from sparsify.exchange import Exchange
from sparsify.feedback import ErrorFeedback
from sparsify.method import Sparsifier
from sparsify.ranges import Density, IndexFormat, Scope, check_arguments
from sparsify.select import TopK
from sparsify.types import (
    NOTHING_IS_LOST,
    BucketStep,
    CollectiveCall,
    Delivery,
    DenseSlice,
    SparseVector,
    isin_sorted,
)


@check_arguments
def gtopk(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    leak: Literal["returned", "published"] = "returned",
    index: IndexFormat = "int32",
) -> Sparsifier:
    """gTop-k: the workers' k largest are merged along a tree, k survive each merge. Shi et al. 2019, ICDCS,
    arXiv:1901.04359.

    4 k log P words on the critical path instead of Top-k's 2 k (P-1), and k elements in the update whatever
    P. The result is not the exact global top-k of the sum. Any number of workers; no host synchronisation.

    Args:
        density: k/n, the share of the elements that each worker brings in, and that the update has.
        leak: an element may be dropped at a merge and yet be in the final result, through other workers.
            `published`: those whose contribution was dropped take it as sent, and it is lost. `returned`: the
            worker that merged keeps the dropped sum in its own residual, so that nothing is lost.
    """
    return Sparsifier(density, TopK(), ErrorFeedback(), Tree(Wire(index), leak), scope, tuple(density_warmup))


@dataclass(frozen=True)
class Tree(Exchange):
    """Merge two by two towards worker 0, which broadcasts what is left; who has no partner waits."""

    wire: Wire = Wire()
    leak: Literal["returned", "published"] = "returned"
    needs_equal_counts: ClassVar[bool] = True

    def broken_laws(self) -> dict[str, str]:
        lost = "what a merge drops is lost if its index reaches the root by way of other workers"
        return {NOTHING_IS_LOST: lost} if self.leak == "published" else {}

    def exchange(self, part: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        best, dropped, dtype = part, list[SparseVector](), part.values.dtype
        for route in merges(comm.size):
            received = comm.permute(self.wire.write(best, n), route)
            if received is not None:
                best, lost = merge(best, self.wire.read(received, k, n, dtype), k)
                dropped.append(lost)
        message = comm.broadcast(self.wire.write(best, n))
        final = self.wire.read(message, k, n, dtype)
        survivors = final.indices.long().sort().values
        # Locally selected and globally rejected values return to the residual: they were not delivered.
        delivered: list[SparseVector | DenseSlice] = [only(part, survivors)]
        if self.leak == "returned":  # and of what I dropped, what its owners take for delivered is mine now
            delivered += [only(SparseVector(lost.indices, -lost.values), survivors) for lost in dropped]
        return Delivery([final], delivered)

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        nbytes = self.wire.nbytes(bucket_step.k, bucket_step.n, bucket_step.value_dtype)
        return [
            *(CollectiveCall("permute", nbytes, route) for route in merges(bucket_step.world_size)),
            CollectiveCall("broadcast", nbytes),
        ]


def merges(size: int) -> list[list[tuple[int, int]]]:
    """Who sends to whom in each round."""
    strides = [2**turn for turn in range(num_tree_rounds(size))]
    return [[(to + stride, to) for to in range(0, size - stride, 2 * stride)] for stride in strides]


def only(part: SparseVector, survivors: Tensor) -> SparseVector:
    """`part`, with 0 for elements that are not among the survivors (m,), sorted."""
    return SparseVector(part.indices, part.values.where(isin_sorted(part.indices.long(), survivors), 0))


def merge(left: SparseVector, right: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
    """The k largest of the sum of two, and the rest of it, (2k,) with 0 for what was kept."""
    indices, order = torch.cat([left.indices.long(), right.indices.long()]).sort(stable=True)
    values = torch.cat([left.values, right.values])[order]
    is_double = torch.zeros_like(indices, dtype=torch.bool)  # the second of an index that both have
    torch.eq(indices[1:], indices[:-1], out=is_double[1:])
    values[:-1] += values[1:].where(is_double[1:], 0)  # not a product: an infinity times 0 is no number
    values.masked_fill_(is_double, 0)
    kept = values.abs().masked_fill_(is_double, -1).topk(k).indices
    return SparseVector(indices[kept], values[kept]), SparseVector(indices, values.index_fill(0, kept, 0))
