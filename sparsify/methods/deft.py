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
from sparsify.select import Selector, gather_exclusive_indices, predict_union_bytes, split_evenly
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
    """DEFT: fragments of the model shared out to the workers, top-k in each. Yoon and Oh, ICPP 2023,
    arXiv:2307.03500.

    No build-up (fragments do not overlap), and the cost of selecting falls with P. Two host synchronisations
    per step and bucket: all norms together (on other workers than the leader: the plan), and the counts.

    Every fragment gets one element at least, which raises the density of a model of many small tensors: up to
    k + (number of fragments) - 1 elements are sent.

    In the published code every worker computes the k of each fragment from its own norms, and the packing
    alone is the leader's. Here the leader's norms decide both, so that together the workers send k. What is
    left of k in the end, since fragments were smaller than their shares, goes to those of the largest norms;
    the published code leaves it unsent.

    Args:
        density: k/n, the share of the elements that all workers send together in a step.
        scope: what k is taken of: the whole model (`global`), every tensor (`layer`), or buckets of so many
            MB. Fragments are cut within a bucket, so this is for large ones.
    """
    return Sparsifier(density, Deft(), ErrorFeedback(), AllReduce(), scope, tuple(density_warmup))


@dataclass
class PlannerTurn:
    """Whose turn it is to plan."""

    work: Tensor = field(metadata={"saved": False})  # (elements of the largest fragment,), once seen
    sizes: list[int] = field(metadata={"saved": False})  # of the tensors in the bucket
    step: NonNegativeInt = 0


@dataclass(frozen=True)
class Deft(Selector):
    """The k largest in proportion to each fragment's norm."""

    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> PlannerTurn:
        return PlannerTurn(
            like.new_empty(0, dtype=accumulation_dtype(like.dtype)), context.sizes or [like.numel()]
        )

    def select(self, acc: Tensor, k: int, comm: Comm, state: PlannerTurn) -> Selection:
        n, turn = acc.numel(), state.step % comm.size
        state.step += 1
        sizes = fragments(state.sizes, comm.size)
        if comm.rank == turn:
            # All in one call, and in float64 so that squares can't overflow.
            norms = host_sync.to_host(torch.stack(torch._foreach_norm(acc.split(sizes), dtype=torch.float64)))
            ks = shares(norms, sizes, k)
            # A top-k costs elements x log2 k; for k = 1, where that is 0, one pass.
            costs = [size * (math.log2(k) if k > 1 else 1) for size, k in zip(sizes, ks, strict=True)]
            bins = packed(costs, comm.size)
            plan = host_sync.to_device([ks, bins], acc, plan_dtype(n))
            comm.broadcast(plan, turn)
        else:
            plan = torch.empty(2, len(sizes), dtype=plan_dtype(n), device=acc.device)
            ks, bins = host_sync.to_host(comm.broadcast(plan, turn))
        if state.work.numel() < max(sizes):
            state.work = huge_pages.request(acc.new_empty(max(sizes)))
        mine, chosen, start = (turn + comm.rank) % comm.size, [acc.new_empty(0, dtype=torch.int64)], 0
        for size, k_, bin_ in zip(sizes, ks, bins, strict=True):
            if bin_ == mine:
                magnitudes = torch.abs(acc[start : start + size], out=state.work[:size])
                chosen.append(magnitudes.topk(k_, sorted=False).indices.add_(start))
            start += size
        return Selection(gather_exclusive_indices(comm, torch.cat(chosen), n).indices)

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        sizes = fragments([torch.Size(shape).numel() for shape in bucket_step.shapes], bucket_step.world_size)
        plan = 2 * plan_dtype(bucket_step.n).itemsize * len(sizes)
        return exact_bytes(cost.broadcast(plan, bucket_step.world_size)) + predict_union_bytes(bucket_step)


def plan_dtype(n: int) -> torch.dtype:
    """A plan holds counts, which reach n itself, where indices end at n - 1."""
    return index_dtype(n + 1)


def fragments(tensors: list[int], size: int) -> list[int]:
    """Tensors of more than n/P elements in P pieces, others whole: their sizes. Empty ones are left out."""
    n = sum(tensors)
    pieces = [split_evenly(length, size) if length * size > n else [length] for length in tensors]
    return [piece for tensor in pieces for piece in tensor if piece]


def shares(norms: list[float], sizes: list[int], k: int) -> list[int]:
    """The k of each fragment: in proportion to its norm, at least 1, at most all. Together at least k."""
    order = sorted(range(len(sizes)), key=lambda at: -norms[at])
    # Norms of this and all smaller ones, added up from the smallest: subtracting would leave rounding errors.
    remaining = list(accumulate(norms[at] for at in reversed(order)))[::-1]
    ks = [0] * len(sizes)
    for at, norm in zip(order, remaining, strict=True):
        share = norms[at] / norm if 0 < norm < math.inf else 0
        ks[at] = min(sizes[at], max(1, int(k * share)))
        k -= ks[at]
    for at in order:  # what is left, since some fragments were too small for their share
        more = min(max(k, 0), sizes[at] - ks[at])
        ks[at] += more
        k -= more
    return ks


def packed(weights: list[float], size: int) -> list[int]:
    """The bin of each fragment: the heaviest first, each into the bin that is lightest by then."""
    bins, loads = [0] * len(weights), [0.0] * size
    for at in sorted(range(len(weights)), key=lambda at: -weights[at]):
        bins[at] = loads.index(min(loads))
        loads[bins[at]] += weights[at]
    return bins
