from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm, gather_lengths
from sparsify.core.wire import Wire
from sparsify.exchange import (
    Exchange,
    differences,
    even_borders,
    gather_selections,
    rounding_errors,
    split_and_reduce,
)
from sparsify.feedback import ErrorFeedback
from sparsify.kernels import Workspace
from sparsify.method import Sparsifier
from sparsify.methods._quantise import split_into_block_matrices
from sparsify.ranges import Density, PositiveFraction, PositiveInt, Scope, ValueFormat, check_arguments
from sparsify.select import FixedCountSelector, TopK, compute_magnitudes
from sparsify.types import (
    BucketContext,
    BucketStep,
    Delivery,
    DenseSlice,
    PredictedBytes,
    Selection,
    SparseVector,
    bytes_between,
)


@check_arguments
def sparcml(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    bucket: PositiveInt | None = None,
    dense_at: PositiveFraction | None = None,
    index: Literal["int32", "int64"] = "int32",
    value: ValueFormat = "as_is",
) -> Sparsifier:
    """SparCML (TopkDSA): owners of regions sum the selections and send the sums. Renggli et al. 2019 (SC).

    DSAR_Split_allgather, arXiv:1802.08021. A step of a worker:

    1. acc = residual + gradient; select the k largest elements of acc. The residual keeps the rest.
    2. Split: the bucket is divided into P equal regions. Worker r receives all selected elements of region r,
       and sums them.
    3. All-gather the sums of all regions: as indices and values while they are few, else as dense regions.

    The update equals that of Top-k. A worker sends between 4 k (P-1)/P words, where all workers choose alike,
    and (2k + n) (P-1)/P. Four host synchronisations per step and bucket: three in `split_and_reduce`, one for
    the owners' counts. The paper's quantisation of values to 2, 4 or 8 bits is missing: `value` rounds to 16
    bits at most.

    Args:
        density: k/n, the share of the elements that each worker selects. Lower: fewer bytes, more error.
        bucket: choose the share k/n of every `bucket` consecutive elements; 512 in the paper. None: choose k
            of all n.
        dense_at: the share of elements from which the sums travel dense. None: value bytes / (index bytes +
            value bytes), the paper's delta, from which on indices and values take more bytes: 1/2 for 4 + 4
            bytes; or less, where the longest message, to which all are padded, is longer than a region.
            Ok-Topk's copy takes 1/3.
        index: how indices travel: `int32` or `int64`; delta16 has a header for every message, too long for
            pieces.
    """
    selector = TopK() if bucket is None else TopKPerBucket(bucket)
    exchange = SplitAllGather(Wire(index, value), dense_at)
    return Sparsifier(density, selector, ErrorFeedback(), exchange, scope, tuple(density_warmup))


@dataclass(frozen=True)
class TopKPerBucket(FixedCountSelector):
    """A selector of the largest of every `bucket` consecutive elements, at least one of each.

    The last bucket may be shorter.
    """

    bucket: PositiveInt = 512

    def init(self, like: Tensor, context: BucketContext) -> Workspace:
        return Workspace(like)

    def select(self, acc: Tensor, k: int, comm: Comm, state: Workspace) -> Selection:
        n = acc.numel()
        chosen = list[Tensor]()
        start = 0
        for buckets in split_into_block_matrices(compute_magnitudes(acc, state), self.bucket):
            length = buckets.shape[1]
            end = start + buckets.numel()
            indices = buckets.topk(max(1, length * k // n), sorted=False).indices
            indices += torch.arange(start, end, length, device=acc.device)[:, None]
            chosen.append(indices.flatten())
            start = end
        return Selection(torch.cat(chosen))


@dataclass(frozen=True)
class SplitAllGather(Exchange):
    """An exchange that sums selections by regions, and all-gathers the sums, sparse or dense."""

    wire: Wire = Wire()
    dense_at: PositiveFraction | None = None

    def is_dense(self, counts: list[int], n: int, dtype: torch.dtype) -> bool:
        """Return True if the sums travel dense. It follows from the owners' counts, so all workers agree."""
        if self.dense_at is not None:
            return sum(counts) >= n * self.dense_at
        delta = self.wire.value_dtype(dtype).itemsize / self.wire.nbytes(1, n, dtype)
        is_sparse_longer = self.wire.nbytes(max(counts), n, dtype) > self.longest_region_nbytes(
            n, len(counts), dtype
        )
        return is_sparse_longer or sum(counts) >= n * delta

    def longest_region_nbytes(self, n: int, size: int, dtype: torch.dtype) -> int:
        """Return the bytes of the longest dense region."""
        return -(-n // size) * self.wire.value_dtype(dtype).itemsize

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        n, size, dtype = bucket_step.n, bucket_step.world_size, bucket_step.value_dtype
        max_selected = max(bucket_step.sent_counts)
        max_reduced = min(n, sum(bucket_step.sent_counts))
        max_gathered_nbytes = max(
            self.wire.nbytes(max_reduced, n, dtype), self.longest_region_nbytes(n, size, dtype)
        )
        counts = cost.all_gather(cost.LENGTH_BYTES, size)
        least = [cost.exchange_pieces(0, size), counts]
        most = [
            cost.exchange_pieces(self.wire.nbytes(max_selected, n, dtype), size),
            counts,
            cost.all_gather(max_gathered_nbytes, size),
        ]
        return bytes_between(least, most)

    def exchange(self, selection: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        # 2. Split
        borders = even_borders(n, comm.size)
        reduced = split_and_reduce(selection, borders, n, comm, self.wire)
        # 3. All-gather
        counts = gather_lengths(comm, reduced.indices)
        total: list[SparseVector | DenseSlice]
        if self.is_dense(counts, n, selection.values.dtype):
            total = [*self.gather_regions(reduced, borders, comm)]
        else:
            total = [*gather_selections(reduced, counts, n, comm, self.wire)]
        errors = rounding_errors(reduced, self.wire.round_values(reduced))
        return Delivery(total, [self.wire.round_values(selection), errors])

    def gather_regions(self, reduced: SparseVector, borders: list[int], comm: Comm) -> list[DenseSlice]:
        """All-gather whole regions, padded to the longest."""
        lengths = differences(borders)
        values = self.wire.narrow(reduced.values)
        region = values.new_zeros(max(lengths))
        region.index_copy_(0, reduced.indices - borders[comm.rank], values)
        return [
            DenseSlice(start, padded[:length].to(reduced.values.dtype))
            for start, padded, length in zip(borders, comm.all_gather(region), lengths, strict=False)
        ]
