import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from sparsify import cost
from sparsify.comm import Comm
from sparsify.core import host_sync, huge_pages
from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.method import Sparsifier
from sparsify.ranges import Density, NonNegativeInt, Scope, check_arguments
from sparsify.select import (
    Selector,
    gather_exclusive_indices,
    predict_exclusive_index_gather_bytes,
    split_evenly,
)
from sparsify.types import (
    BucketContext,
    BucketStep,
    PredictedBytes,
    Selection,
    accumulation_dtype,
    exact_bytes,
    index_dtype,
)


@check_arguments
def deft(
    density: Density = 0.001, scope: Scope = "global", density_warmup: Sequence[Density] = ()
) -> Sparsifier:
    """DEFT: fragments of the model shared out to the workers, top-k in each. Yoon and Oh 2023 (ICPP).

    arXiv:2307.03500. A step:

    1. Tensors of more than n/P elements are cut into P fragments. Other tensors are one fragment each.
    2. The leader, another worker in each step, divides k among the fragments by their norms.
    3. The leader packs the fragments into P bins of about equal cost, and broadcasts its plan.
    4. Each worker selects the largest elements of each fragment in its bin.
    5. The indices are all-gathered, and an all-reduce averages the values at all these indices.

    Fragments do not overlap, so no index is chosen twice (no build-up), and the cost of selecting falls with
    P. Two host synchronisations per step and bucket: for all norms (on workers other than the leader: for the
    plan), and for the counts.

    Every fragment gets at least one element, which raises the density of a model of many small tensors: up to
    k + (number of fragments) - 1 elements are sent.

    In the published code every worker computes the k of each fragment from its own norms, and only the
    packing is the leader's. Here the leader's norms decide both, so that the workers send k elements
    together. Where fragments are smaller than their share of k, the rest goes to the fragments of the largest
    norms; the published code leaves it unsent.

    Args:
        density: k/n, the share of the elements that all workers send together in a step. Lower: fewer bytes,
            more error.
        scope: the elements of which k are chosen: the whole model (`global`), every tensor (`layer`), or
            buckets of a size in MB. Fragments are cut within a bucket, so this method is for large buckets.
    """
    return Sparsifier(density, Deft(), ErrorFeedback(), AllReduce(), scope, tuple(density_warmup))


@dataclass
class DeftState:
    """The turn of the leader, which plans for all workers; and what follows from the bucket's shapes."""

    work: Tensor = field(metadata={"saved": False})  # (elements of the largest fragment,), once seen
    sizes: list[int] = field(metadata={"saved": False})  # of the tensors in the bucket
    step: NonNegativeInt = 0


@dataclass(frozen=True)
class Deft(Selector):
    """A selector of k elements, divided among fragments in proportion to the fragments' norms."""

    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> DeftState:
        work = like.new_empty(0, dtype=accumulation_dtype(like.dtype))
        return DeftState(work, context.sizes or [like.numel()])

    def select(self, acc: Tensor, k: int, comm: Comm, state: DeftState) -> Selection:
        n = acc.numel()
        leader = state.step % comm.size
        state.step += 1
        # 1. Cut.
        sizes = fragment_sizes(state.sizes, comm.size)
        if comm.rank == leader:
            # 2. Divide k. All norms in one call, and in float64 so that squares can't overflow.
            norms = host_sync.to_host(torch.stack(torch._foreach_norm(acc.split(sizes), dtype=torch.float64)))
            ks = allot_k(norms, sizes, k)
            # 3. Pack. A top-k costs elements x log2 k; for k = 1, where that is 0, one pass.
            costs = [size * math.log2(max(k, 2)) for size, k in zip(sizes, ks, strict=True)]
            bins = pack_bins(costs, comm.size)
            comm.broadcast(host_sync.to_device([ks, bins], acc, plan_dtype(n)), leader)
        else:
            plan = torch.empty(2, len(sizes), dtype=plan_dtype(n), device=acc.device)
            comm.broadcast(plan, leader)
            ks, bins = host_sync.to_host(plan)
        # 4. Select in the fragments of this worker's bin.
        if state.work.numel() < max(sizes):
            state.work = huge_pages.request(acc.new_empty(max(sizes)))
        own_bin = (leader + comm.rank) % comm.size
        chosen = [acc.new_empty(0, dtype=torch.int64)]
        start = 0
        for size, fragment_k, fragment_bin in zip(sizes, ks, bins, strict=True):
            if fragment_bin == own_bin:
                magnitudes = torch.abs(acc[start : start + size], out=state.work[:size])
                chosen.append(magnitudes.topk(fragment_k, sorted=False).indices.add_(start))
            start += size
        # 5. Gather.
        return Selection(gather_exclusive_indices(comm, torch.cat(chosen), n).indices)

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        num_fragments = len(fragment_sizes(bucket_step.sizes, bucket_step.world_size))
        plan_nbytes = 2 * plan_dtype(bucket_step.n).itemsize * num_fragments
        plan_bytes = exact_bytes(cost.broadcast(plan_nbytes, bucket_step.world_size))
        return plan_bytes + predict_exclusive_index_gather_bytes(bucket_step)


def plan_dtype(n: int) -> torch.dtype:
    """Return the type of a plan, which holds counts: they reach n itself, where indices end at n - 1."""
    return index_dtype(n + 1)


def fragment_sizes(tensor_sizes: list[int], world_size: int) -> list[int]:
    """Cut tensors of more than n/P elements into P fragments; return the sizes of all that are not empty."""
    n = sum(tensor_sizes)
    sizes = list[int]()
    for size in tensor_sizes:
        sizes += split_evenly(size, world_size) if size * world_size > n else [size]
    return [size for size in sizes if size]


def allot_k(norms: list[float], sizes: list[int], k: int) -> list[int]:
    """Divide k among fragments in proportion to their norms: at least 1 and at most all of each.

    The sum is at least k.
    """
    largest_first = sorted(range(len(sizes)), key=lambda index: -norms[index])
    # Norms of this and all smaller ones, added up from the smallest: subtracting would leave rounding errors.
    remaining_norms = list(accumulate(norms[index] for index in reversed(largest_first)))[::-1]
    ks = [0] * len(sizes)
    for index, remaining in zip(largest_first, remaining_norms, strict=True):
        share = norms[index] / remaining if 0 < remaining < math.inf else 0
        ks[index] = min(sizes[index], max(1, int(k * share)))
        k -= ks[index]
    for index in largest_first:  # the rest of k, since some fragments were too small for their share
        more = min(max(k, 0), sizes[index] - ks[index])
        ks[index] += more
        k -= more
    return ks


def pack_bins(costs: list[float], num_bins: int) -> list[int]:
    """Return the bin of each fragment: in order of falling cost, each goes into the lightest bin."""
    bins = [0] * len(costs)
    loads = [0.0] * num_bins
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        bins[index] = loads.index(min(loads))
        loads[bins[index]] += costs[index]
    return bins
