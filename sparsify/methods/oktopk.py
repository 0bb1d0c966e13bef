from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm, gather_lengths
from sparsify.core import host_sync
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
from sparsify.methods.gtopk import zero_rejected
from sparsify.ranges import (
    Density,
    FloatAtLeast1,
    NonNegativeInt,
    PositiveInt,
    Scope,
    ValueFormat,
    check_arguments,
)
from sparsify.select import SinglePassSelector
from sparsify.types import (
    BucketContext,
    BucketStep,
    Delivery,
    PredictedBytes,
    Selection,
    SparseVector,
    accumulation_dtype,
    bytes_between,
)

# Shigangli/Ok-Topk: a re-used threshold moves by a factor when it selects fewer or more elements than these
# multiples of k.
LOWEST_RATIO, HIGHEST_RATIO = 2 / 3, 5 / 4
# Above this multiple of k a threshold is computed anew: otherwise nothing would bound the number of bytes.
RENEWAL_RATIO = 4 / 3


@check_arguments
def oktopk(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    threshold_every: PositiveInt = 32,
    regions_every: PositiveInt = 64,
    local_drift: FloatAtLeast1 = 1.012,
    global_drift: FloatAtLeast1 = 1.008,
    balance: bool = True,
    index: Literal["int32", "int64"] = "int32",
    value: ValueFormat = "as_is",
) -> Sparsifier:
    """Ok-Topk: re-used thresholds, balanced regions. Li and Hoefler 2022 (PPoPP), algorithms 1 and 2.

    arXiv:2201.07598. A step of a worker:

    1. acc = residual + gradient
    2. Local threshold: the k-th largest magnitude of acc, computed every tau' steps and re-used meanwhile.
       The worker selects all elements of acc that reach it.
    3. Regions: every tau steps the borders between the P regions move to where they divide the selections
       equally.
    4. Split and reduce: worker r receives all selected elements of region r, and sums them.
    5. Global threshold: the k-th largest magnitude of all sums, computed every tau' steps and re-used
       meanwhile. Sums that do not reach it are dropped.
    6. Balance and all-gather: the workers share the remaining sums out equally, then each sends its share to
       all. The result is the update.
    7. The residual keeps acc, except for the elements that were selected in step 2 and remained in step 5.

    A worker sends at most 6 k (P-1)/P words where regions are balanced and about k elements are selected. So
    that this holds, a re-used threshold that selects more than 4k/3 elements is computed anew, from what it
    selects. Computing a global threshold sends k to P k more words. Host synchronisations per step and
    bucket: 6; one less where a local threshold is computed, one or two more where a global one is, and one
    more where regions are.

    Unlike the paper's, the residual is in the gradient domain: the learning rate is outside, as in the public
    code. Balancing is unconditional, in every step.

    Constants are those of the public code for VGG, except for the band in which a re-used threshold stays:
    2k/3 to 5k/4 for both thresholds, which can't be set. In the public code that is the band of the local
    threshold for VGG. The band of VGG's global threshold ends at 4k/3, where ours is computed anew. The local
    one for the LSTM is 3k/4 to 5k/4, both for BERT are 4k/5 to 5k/4. The public code runs the first 512
    iterations dense for VGG (128 for the LSTM, 0 for BERT), which the paper does not say:
    density_warmup=[1.0] does so for an epoch.

    Args:
        density: k/n, the share of the elements that each worker selects, and about that of the update.
            Lower: fewer bytes, more error.
        threshold_every: tau', steps between exact thresholds: 32; 128 for BERT. Higher: less time to select,
            and a number of selected elements further from k.
        regions_every: tau, steps between new borders of the regions: 64.
        local_drift: the factor by which a worker's re-used threshold moves when it selects less than 2k/3 or
            more than 5k/4: 1.012; 1.025 for BERT. Higher: back near k sooner, and further beyond.
        global_drift: the same of the threshold of the sums: 1.008; 1.036 for BERT.
        balance: share the remaining sums out equally before the all-gather, however equal they are already.
            The public code does so for BERT alone.
        index: how indices travel: `int32` or `int64`; delta16 has a header for every message, too long for
            pieces.
    """
    exchange = SplitReduceBalance(Wire(index, value), threshold_every, regions_every, global_drift, balance)
    selector = ReusedThresholdSelector(threshold_every, local_drift)
    return Sparsifier(density, selector, ErrorFeedback(), exchange, scope, tuple(density_warmup))


@dataclass
class ReusedThreshold:
    """A threshold that serves several steps, and the number of steps left until it is computed anew."""

    threshold: Tensor  # 0-d
    workspace: Workspace = field(metadata={"saved": False})  # with the kernel that searches, if any
    k: NonNegativeInt = 0  # the k that it was computed for; 0: not computed yet
    left: NonNegativeInt = 0

    def is_due(self, k: NonNegativeInt) -> bool:
        """Return True if the threshold must be computed anew: no steps are left, or k has changed."""
        return not self.left or self.k != k

    def renew(self, threshold: Tensor, k: NonNegativeInt, every: int) -> None:
        """Set a new threshold for the next `every` steps."""
        self.threshold = threshold
        self.k = k
        self.left = every

    def adjust(self, count: int, k: NonNegativeInt, factor: float) -> None:
        """Move the threshold by a factor if it selected too few or too many elements in this step."""
        if count < LOWEST_RATIO * k:
            self.threshold.div_(factor).clamp_(min=torch.finfo(self.threshold.dtype).tiny)
        elif count > HIGHEST_RATIO * k:
            self.threshold.mul_(factor)


@dataclass(frozen=True)
class ReusedThresholdSelector(SinglePassSelector):
    """A selector of all elements that reach a threshold, the k-th largest magnitude of an earlier step."""

    every: PositiveInt = 32
    drift: FloatAtLeast1 = 1.012

    def init(self, like: Tensor, context: BucketContext) -> ReusedThreshold:
        return ReusedThreshold(zero_threshold(like), Workspace.with_kernel(like, context))

    def accumulate_and_select(
        self, acc: Tensor, grad: Tensor | None, k: int, comm: Comm, state: ReusedThreshold
    ) -> Selection:
        if state.is_due(k):
            indices, values = state.workspace.kernel.topk(acc, grad, k)
            state.renew(minimum_or_tiny(values.abs()), k, self.every)
        else:
            indices, values = state.workspace.kernel.above_threshold(acc, grad, state.threshold)
            state.adjust(len(indices), k, self.drift)
            if len(indices) > RENEWAL_RATIO * k:  # the k largest are among them
                largest = values.abs().topk(k, sorted=False).indices
                indices, values = indices[largest], values[largest]
                state.renew(minimum_or_tiny(values.abs()), k, state.left)
        state.left -= 1
        return Selection(indices, values=values)


def zero_threshold(like: Tensor) -> Tensor:
    """Return a 0-d zero in the type in which a bucket's thresholds are kept."""
    return torch.zeros((), dtype=accumulation_dtype(like.dtype), device=like.device)


def minimum_or_tiny(magnitudes: Tensor) -> Tensor:
    """Return the smallest magnitude, 0-d, but never 0, because every element reaches 0."""
    return magnitudes.amin().clamp(min=torch.finfo(magnitudes.dtype).tiny)


@dataclass
class RegionState:
    """The borders of the regions and the global threshold, equal on all workers."""

    threshold: ReusedThreshold
    borders: list[NonNegativeInt] = field(default_factory=list)  # P + 1 positions
    step: NonNegativeInt = 0


class CountedShare(NamedTuple):
    """This worker's share of the remaining sums, and the number of elements in each worker's share."""

    elements: SparseVector
    counts: list[int]  # by rank


@dataclass(frozen=True)
class SplitReduceBalance(Exchange):
    """An exchange that reduces by regions, drops sums below a global threshold, and gathers the rest."""

    wire: Wire = Wire()
    threshold_every: PositiveInt = 32
    regions_every: PositiveInt = 64
    drift: FloatAtLeast1 = 1.008
    balance: bool = True

    def init(self, like: Tensor, context: BucketContext) -> RegionState:
        return RegionState(ReusedThreshold(zero_threshold(like), Workspace(like)))

    def exchange(self, selection: SparseVector, n: int, k: int, comm: Comm, state: RegionState) -> Delivery:
        # 3. Regions
        if state.step % self.regions_every == 0:
            state.borders = gather_balanced_borders(selection.indices, n, comm)
        state.step += 1
        # 4. Split and reduce
        reduced = split_and_reduce(selection, state.borders, n, comm, self.wire)
        # 5. Global threshold
        kept, counts = self.filter_globally(reduced, k, comm, state.threshold)
        # 6. Balance and all-gather
        errors = rounding_errors(kept, self.wire.round_values(kept))
        if self.balance:
            kept, counts = self.rebalance(kept, counts, n, comm)
        total = gather_selections(kept, counts, n, comm, self.wire)
        # 7. What is both in this worker's selection and in the total was delivered.
        total_indices = torch.cat([vector.indices for vector in total]).long()
        delivered = zero_rejected(self.wire.round_values(selection), total_indices)
        return Delivery([*total], [errors, delivered])

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        n, size, dtype = bucket_step.n, bucket_step.world_size, bucket_step.value_dtype
        least = [cost.exchange_pieces(0, size), cost.all_gather(cost.LENGTH_BYTES, size)]
        if bucket_step.step % self.regions_every == 0:
            least.append(cost.all_gather(cost.LENGTH_BYTES * (size - 1), size))
        max_reduced = min(n, sum(bucket_step.sent_counts))
        reduced_nbytes = self.wire.nbytes(max_reduced, n, dtype)
        most = [
            *least,
            cost.all_to_all(self.wire.nbytes(max(bucket_step.sent_counts), n, dtype), size),
            cost.all_gather(dtype.itemsize * max_reduced, size),  # in steps that compute a global threshold
            cost.all_to_all(reduced_nbytes, size),
            cost.all_gather(reduced_nbytes, size),
        ]
        return bytes_between(least, most)

    def filter_globally(
        self, reduced: SparseVector, k: int, comm: Comm, state: ReusedThreshold
    ) -> CountedShare:
        """Keep the sums of this worker's region that reach the global threshold; count each worker's.

        In a step that computes the threshold, from the sums of all workers, exactly the k largest are kept.
        """
        kept = reduced
        is_due = state.is_due(k)
        if not is_due:
            kept = keep_where(reduced, reduced.values.abs() >= state.threshold)
        counts = gather_lengths(comm, kept.indices)
        if not sum(counts):
            state.k = 0  # there is nothing to compute a threshold from: try again in the next step
        elif is_due or sum(counts) > RENEWAL_RATIO * k:
            masks, threshold = find_globally_largest(kept.values, counts, k, comm)
            state.renew(threshold, k, self.threshold_every if is_due else state.left)
            kept = keep_where(kept, masks[comm.rank])
            counts = host_sync.to_host(torch.stack([mask.sum() for mask in masks]))
        else:
            state.adjust(sum(counts), k, self.drift)
        state.left -= 1
        return CountedShare(kept, counts)

    def rebalance(self, kept: SparseVector, counts: list[int], n: int, comm: Comm) -> CountedShare:
        """Give all workers the same number of elements, without changing their order over all workers.

        Args:
            counts: the number of elements that each worker has.
        """
        rank, dtype = comm.rank, kept.values.dtype
        starts = [sum(counts[:worker]) for worker in range(comm.size + 1)]
        new_starts = even_borders(sum(counts), comm.size)
        sent_counts = overlap_lengths(starts[rank], starts[rank + 1], new_starts)
        received_counts = overlap_lengths(new_starts[rank], new_starts[rank + 1], starts)
        pieces = zip(kept.indices.split(sent_counts), kept.values.split(sent_counts), strict=True)
        messages = [self.wire.write(SparseVector(*piece), n) for piece in pieces]
        received = comm.all_to_all(
            torch.cat(messages),
            [len(message) for message in messages],
            [self.wire.nbytes(count, n, dtype) for count in received_counts],
        )
        vectors = [self.wire.read_whole(message, n, dtype) for message in received]
        return CountedShare(
            SparseVector(*map(torch.cat, zip(*vectors, strict=True))), differences(new_starts)
        )


def keep_where(vector: SparseVector, mask: Tensor) -> SparseVector:
    """Return the elements where mask (count,) is True. One host synchronisation."""
    positions = host_sync.nonzero(mask)
    return SparseVector(vector.indices[positions], vector.values[positions])


def find_globally_largest(
    values: Tensor, counts: list[int], k: int, comm: Comm
) -> tuple[list[Tensor], Tensor]:
    """Find the k largest magnitudes over all workers.

    Returns:
        A mask (count,) of each worker's values, and the smallest of the k largest magnitudes, 0-d.
    """
    padded = torch.cat([values, values.new_zeros(max(counts) - len(values))])
    gathered = zip(comm.all_gather(padded), counts, strict=True)
    magnitudes = torch.cat([padded[:count] for padded, count in gathered]).abs()
    largest = magnitudes.topk(min(k, len(magnitudes)), sorted=False).indices
    mask = torch.zeros_like(magnitudes, dtype=torch.bool).index_fill_(0, largest, True)
    return list(mask.split(counts)), minimum_or_tiny(magnitudes[largest])


def gather_balanced_borders(indices: Tensor, n: int, comm: Comm) -> list[int]:
    """Return P + 1 positions: the means over the workers of the P-quantiles of their selected indices."""
    if comm.size == 1:
        return [0, n]
    proposals = host_sync.to_host(torch.stack(comm.all_gather(index_quantiles(indices, n, comm.size))))
    # Python's integers can't overflow, as n x P can in the public code.
    inner = [sum(positions) // comm.size for positions in zip(*proposals, strict=True)]
    return [0, *inner, n]


def index_quantiles(indices: Tensor, n: int, size: int) -> Tensor:
    """Return (P - 1,) the P-quantiles of a worker's indices; of 0 to n - 1 if it selected nothing."""
    count = indices.numel()
    positions = host_sync.to_device(even_borders(count or n, size)[1:-1], indices)
    return indices.long().sort().values[positions] if count else positions


def overlap_lengths(start: int, end: int, borders: Sequence[int]) -> list[int]:
    """Return the number of positions from start to end that lie between each border and the next."""
    return differences([min(max(border, start), end) for border in borders])
