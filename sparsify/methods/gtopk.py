from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

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
    """gTop-k: the k largest are merged along a tree; k survive. Shi et al. 2019 (ICDCS), algorithm 2.

    arXiv:1901.04359. A step:

    1. Each worker selects its k largest elements.
    2. In each of log P rounds, one of two workers sends its k elements to the other, which keeps the k
       largest of their sum.
    3. Worker 0 broadcasts the k elements that are left. Divided by P, they are the update.
    4. A worker returns the elements that it selected and that did not survive to its residual.

    On the critical path are 4 k log P words instead of the 2 k (P-1) of Top-k, and the update has k elements
    whatever P. It is not the exact global top-k of the sum. Any number of workers; no host synchronisation.

    Args:
        density: k/n, the share of the elements that each worker brings in, and that the update has. Lower:
            fewer bytes, more error.
        leak: an element may be dropped at a merge and yet be in the final result, through other workers.
            `published`: the workers whose contribution was dropped count it as sent, and it is lost.
            `returned`: the worker that merged keeps the dropped sum in its own residual, so that nothing is
            lost.
    """
    return Sparsifier(
        density, TopK(), ErrorFeedback(), TreeMerge(Wire(index), leak), scope, tuple(density_warmup)
    )


@dataclass(frozen=True)
class TreeMerge(Exchange):
    """An exchange that merges selections two by two towards worker 0, which broadcasts the last k elements.

    A worker without a partner waits.
    """

    wire: Wire = Wire()
    leak: Literal["returned", "published"] = "returned"
    needs_equal_counts: ClassVar[bool] = True

    def broken_laws(self) -> dict[str, str]:
        reason = "what a merge drops is lost if its index reaches the root by way of other workers"
        return {NOTHING_IS_LOST: reason} if self.leak == "published" else {}

    def exchange(self, selection: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        dtype = selection.values.dtype
        # 2. Merge along the tree.
        largest = selection
        contributions = [selection]
        for route in tree_routes(comm.size):
            received = comm.permute(self.wire.write(largest, n), route)
            if received is not None:
                largest, rest = merge_topk(largest, self.wire.read(received, k, n, dtype), k)
                if self.leak == "returned":
                    # Other workers count their elements as delivered that a merge on this worker dropped.
                    contributions.append(SparseVector(rest.indices, -rest.values))
        # 3. Broadcast.
        message = self.wire.write(largest, n)
        comm.broadcast(message)
        final = self.wire.read(message, k, n, dtype)
        # 4. Elements that are selected here and rejected on the way were not delivered.
        survivors = final.indices.long().sort().values
        return Delivery([final], [zero_rejected(part, survivors) for part in contributions])

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        nbytes = self.wire.nbytes(bucket_step.k, bucket_step.n, bucket_step.value_dtype)
        return [
            *(CollectiveCall("permute", nbytes, route) for route in tree_routes(bucket_step.world_size)),
            CollectiveCall("broadcast", nbytes),
        ]


def tree_routes(world_size: int) -> list[list[tuple[int, int]]]:
    """Return the (source, destination) pairs of each round of merges."""
    strides = [2**turn for turn in range(num_tree_rounds(world_size))]
    return [[(to + stride, to) for to in range(0, world_size - stride, 2 * stride)] for stride in strides]


def zero_rejected(vector: SparseVector, survivors: Tensor) -> SparseVector:
    """Replace the values of elements that are not among the survivors (m,), sorted, by 0."""
    is_survivor = isin_sorted(vector.indices.long(), survivors)
    return SparseVector(vector.indices, vector.values.where(is_survivor, 0))


class MergedTopK(NamedTuple):
    """The largest elements of the sum of two selections, and the rest of the sum."""

    largest: SparseVector  # (k,)
    rest: SparseVector  # (2k,), with 0 for the largest and for what is left of doubles


def merge_topk(left: SparseVector, right: SparseVector, k: int) -> MergedTopK:
    """Sum two selections (k,), and divide the sum into its k largest elements and the rest."""
    indices, order = torch.cat([left.indices.long(), right.indices.long()]).sort(stable=True)
    values = torch.cat([left.values, right.values])[order]
    is_double = torch.zeros_like(indices, dtype=torch.bool)  # the second of an index that both have
    torch.eq(indices[1:], indices[:-1], out=is_double[1:])
    values[:-1] += values[1:].where(is_double[1:], 0)  # not a product: an infinity times 0 is no number
    values.masked_fill_(is_double, 0)
    kept = values.abs().masked_fill_(is_double, -1).topk(k).indices
    rest = SparseVector(indices, values.index_fill(0, kept, 0))
    return MergedTopK(SparseVector(indices[kept], values[kept]), rest)
