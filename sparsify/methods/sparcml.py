from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm
from sparsify.core.wire import Wire
from sparsify.exchange import (
    Exchange,
    differences,
    even_borders,
    gather_counts,
    gather_selections,
    rounding_errors,
    split_and_reduce,
)
from sparsify.feedback import ErrorFeedback
from sparsify.kernels import Workspace
from sparsify.method import Sparsifier
from sparsify.ranges import Density, PositiveFraction, PositiveInt, Scope, ValueFormat, check_arguments
from sparsify.select import ExactlyKSelector, TopK
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
    """SparCML (TopkDSA): pairs go to the owners of regions, which reduce them; what comes of it goes to all,
    dense where it has filled up. Renggli et al. 2019 (SC), arXiv:1802.08021: DSAR_Split_allgather.

    The update is Top-k's; between 4 k (P-1)/P words, where all workers choose alike, and (2k + n) (P-1)/P.
    Four host synchronisations per step and bucket: three in `split_and_reduce`, one for the owners' counts.
    The paper's quantisation of values to 2, 4 or 8 bits is missing: `value` rounds to 16 bits at most.

    Args:
        density: k/n, the share of the elements that each worker selects.
        bucket: select k n / bucket of every `bucket` elements instead of k of n; 512 in the paper. None: of
            n.
        dense_at: the share of elements from which the result travels dense. None: value bytes / (index bytes
            + value bytes), the paper's delta, from which on pairs are longer: 1/2 for 4 + 4 bytes; or less,
            where one owner's pairs, which all are padded to, are longer than a region. Ok-Topk's copy takes
            1/3.
        index: how indices travel: `int32` or `int64`; delta16 has a header for every message, too long for
            pieces.
    """
    select = TopK() if bucket is None else TopKPerBucket(bucket)
    exchange = SplitAllGather(Wire(index, value), dense_at)
    return Sparsifier(density, select, ErrorFeedback(), exchange, scope, tuple(density_warmup))


@dataclass(frozen=True)
class TopKPerBucket(ExactlyKSelector):
    """The largest of every `bucket` consecutive elements, at least one of each; the last may be shorter."""

    bucket: PositiveInt = 512

    def counts_per_bucket(self, n: int, k: int) -> tuple[int, int]:
        """Number chosen of every whole bucket, and of the rest."""
        rest = n % self.bucket
        return max(1, self.bucket * k // n), min(rest, max(1, rest * k // n)) if rest else 0

    def init(self, like: Tensor, context: BucketContext) -> Workspace:
        return Workspace(like)

    def select(self, acc: Tensor, k: int, comm: Comm, state: Workspace) -> Selection:
        n, work = acc.numel(), state.buffer("magnitudes")
        whole, (each, last) = n // self.bucket * self.bucket, self.counts_per_bucket(n, k)
        torch.abs(acc, out=work)
        best = work[:whole].view(-1, self.bucket).topk(each, sorted=False).indices
        best += torch.arange(0, whole, self.bucket, device=acc.device)[:, None]
        chosen = [best.flatten()]
        if last:
            chosen.append(work[whole:].topk(last, sorted=False).indices + whole)
        return Selection(torch.cat(chosen))


@dataclass(frozen=True)
class SplitAllGather(Exchange):
    """Split and reduce, then allgather, of pairs or of dense regions."""

    wire: Wire = Wire()
    dense_at: PositiveFraction | None = None

    def is_dense(self, counts: list[int], n: int, dtype: torch.dtype) -> bool:
        """True if the result travels dense: by the owners' counts alone, so that all workers decide alike."""
        value, longest_region = self.wire.value_dtype(dtype).itemsize, -(-n // len(counts))
        if self.dense_at is not None:
            return sum(counts) >= n * self.dense_at
        longer = self.wire.nbytes(max(counts), n, dtype) > longest_region * value
        return longer or sum(counts) >= n * (value / self.wire.nbytes(1, n, dtype))  # n x delta

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        size, nbytes = (
            bucket_step.world_size,
            partial(self.wire.nbytes, n=bucket_step.n, dtype=bucket_step.value_dtype),
        )
        counts = cost.all_gather(cost.LENGTH_BYTES, size)
        pairs = nbytes(min(bucket_step.n, sum(bucket_step.sent_counts)))
        region = -(-bucket_step.n // size) * self.wire.value_dtype(bucket_step.value_dtype).itemsize
        split = cost.exchange_pieces(nbytes(max(bucket_step.sent_counts)), size)
        most = [split, counts, cost.all_gather(max(pairs, region), size)]
        return bytes_between([cost.exchange_pieces(0, size), counts], most)

    def exchange(self, part: SparseVector, n: int, k: int, comm: Comm, state: None) -> Delivery:
        borders = even_borders(n, comm.size)
        reduced = split_and_reduce(part, borders, n, comm, self.wire)
        counts = gather_counts(comm, reduced)
        total: list[SparseVector | DenseSlice]
        if self.is_dense(counts, n, part.values.dtype):
            total = [*self.gather_regions(reduced, borders, comm)]
        else:
            total = [*gather_selections(reduced, counts, n, comm, self.wire)]
        lost = rounding_errors(reduced, self.wire.round_values(reduced))
        return Delivery(total, [self.wire.round_values(part), lost])

    def gather_regions(self, reduced: SparseVector, borders: list[int], comm: Comm) -> list[DenseSlice]:
        """All-gather of whole regions, padded to the longest."""
        lengths = differences(borders)
        narrow = self.wire.narrow(reduced.values)
        region = narrow.new_zeros(max(lengths))
        region.index_copy_(0, reduced.indices - borders[comm.rank], narrow)
        return [
            DenseSlice(start, theirs[:length].to(reduced.values.dtype))
            for start, theirs, length in zip(borders, comm.all_gather(region), lengths, strict=False)
        ]
