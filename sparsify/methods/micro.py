from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core import host_sync
from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.kernels import Workspace
from sparsify.method import Sparsifier
from sparsify.ranges import (
    Density,
    ImplementationVariant,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    Scope,
    check_arguments,
)
from sparsify.select import (
    Selector,
    gather_exclusive_indices,
    predict_exclusive_index_gather_bytes,
    split_evenly,
)
from sparsify.types import BucketContext, BucketStep, PredictedBytes, Selection

# kljp/micro and kljp/exdyna, gradient_reducers.py: the band of r = k'/k, where k' elements were sent, and the
# factors of the threshold outside of the band and within.
BAND = (0.909, 1.1)
FALL, RISE = 0.995, 1.005
SLOW_FALL, SLOW_RISE = 0.9987, 1.00125


@check_arguments
def micro(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    rule: ImplementationVariant = "intended",
    threshold: PositiveFloat | None = None,
) -> Sparsifier:
    """MiCRO: each worker a partition of its own and one threshold for all. Yoon and Oh 2023 (HiPC).

    arXiv:2310.00967. Step t on worker r of P, with the residual e:

    1. acc = e + gradient
    2. In partition (t + r) mod P of acc, worker r chooses the elements whose magnitude reaches the threshold.
    3. The indices are all-gathered. Partitions do not overlap, so no index is chosen twice (no build-up).
    4. An all-reduce averages the values at all these indices; e keeps the rest of acc.
    5. The threshold rises if more than k elements were sent, and falls if fewer were.

    There is no top-k: each worker passes over n/P elements. Two host synchronisations per step and bucket.

    The threshold moves by 0.5 % per step at most. If the first threshold is wrong by a factor of 100, about
    920 steps pass until the density is reached. Meanwhile all n elements are sent if it is too low, and one
    per worker if it is too high. Give `threshold` where the scale of the gradients is known.

    The threshold does not stay where k elements of the first gradient lie above it. The residual collects
    what is not sent, so the threshold rises, as published, until as much leaves in each step as comes in.
    Where n elements of magnitude g always have the same sign, each is sent whenever its sum reaches the
    threshold t. That is n g / t elements in a step, so t tends to about g / density. Where signs are random,
    t tends to about g / sqrt(density); with several workers, which take turns at a partition, to at most
    twice that. At density 0.001 this takes some 1,000 steps from a threshold that suits the first gradient.

    Args:
        density: k/n, the share of the elements that all workers send together in a step. Lower: fewer bytes,
            more error.
        scope: the elements of which k are chosen: the whole model (`global`), every tensor (`layer`), or
            buckets of a size in MB. Buckets of fewer than P elements leave some workers without a partition.
        rule: `intended`; or `published`, the public code, where the threshold always rises within the band
            0.909 < k'/k <= 1.1, with k' elements sent. See
            `sparsify.methods.micro.ExclusiveThresholdSelector`.
        threshold: the first threshold; None for 1 / (2 sqrt k). Higher: fewer elements in the first steps.
    """
    selector = MicroSelector(rule, threshold)
    return Sparsifier(density, selector, ErrorFeedback(), AllReduce(), scope, tuple(density_warmup))


@dataclass
class SharedThreshold:
    """A threshold that is equal on all workers, since it follows gathered counts alone."""

    workspace: Workspace = field(metadata={"saved": False})
    value: NonNegativeFloat = 0.0  # 0 before the first step
    step: NonNegativeInt = 0
    blocks: list[NonNegativeInt] = field(default_factory=list)  # ExDyna: number of blocks of each partition


@dataclass(frozen=True)
class ExclusiveThresholdSelector(Selector):
    """Base of the selectors of MiCRO and ExDyna: each worker selects by a threshold in its own partition.

    Two host synchronisations: for this worker's choices, and for all workers' counts.

    Args:
        rule: how the threshold follows r = k'/k, where k' elements were sent. Above the band it rises by
            0.5 %, below it falls by 0.5 %. Within, `published` always rises by 0.125 %: in the public code
            the test that should tell r > 1 from r < 1 reads r > 0. `intended` rises by 0.125 % if r > 1, else
            falls by 0.13 %. It also takes k as the number of workers at least, since each worker sends at
            least one element (see `select`): with a smaller k, r never reaches the band, and the
            threshold never stops rising.
        threshold: the first threshold; None for 1 / (2 sqrt k), as in the public code.
    """

    rule: ImplementationVariant = "intended"
    threshold: PositiveFloat | None = None
    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> SharedThreshold:
        return SharedThreshold(Workspace.with_kernel(like, context))

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        return predict_exclusive_index_gather_bytes(bucket_step)

    @abstractmethod
    def partition_sizes(self, n: int, size: int, state: SharedThreshold) -> list[int]:
        """Return the number of elements of each of `size` partitions, in order."""

    def select(self, acc: Tensor, k: int, comm: Comm, state: SharedThreshold) -> Selection:
        n = acc.numel()
        # 2. Worker r chooses in partition (step + r) mod P.
        sizes = self.partition_sizes(n, comm.size, state)
        turn = (state.step + comm.rank) % comm.size
        start = sum(sizes[:turn])
        length = sizes[turn]
        state.value = state.value or self.threshold or 1 / (2 * math.sqrt(k))
        if k == n:  # a threshold can't ask for everything
            chosen = torch.arange(start, start + length, device=acc.device)
        else:
            # Zeros reach no threshold, however low it has fallen.
            threshold = max(state.value, torch.finfo(acc.dtype).tiny)
            partition = acc[start : start + length]
            chosen = state.workspace.kernel.above_threshold(partition, None, threshold).indices
            chosen = chosen.long().add_(start)
            if length and not len(chosen):  # as published: send one element, another one in each step
                chosen = host_sync.to_device([start + state.step % length], acc)
        # 3. Gather the indices.
        union = gather_exclusive_indices(comm, chosen, n)
        # 5. Move the borders of partitions (ExDyna) and the threshold.
        if k < n:
            self.move_borders(union.counts, n, state)
        self.adapt_threshold(len(union.indices), k, comm.size, state)
        return Selection(union.indices)

    def move_borders(self, counts: list[int], n: int, state: SharedThreshold) -> None:
        """Change the partitions of the next step, given how many elements each worker chose."""

    def adapt_threshold(self, count: int, k: int, size: int, state: SharedThreshold) -> None:
        """Move the threshold after a step in which the workers sent `count` elements together."""
        state.step += 1
        r = count / (max(k, size) if self.rule == "intended" else k)
        low, high = BAND
        if r > high:
            state.value *= RISE
        elif r <= low:
            state.value *= FALL
        elif self.rule == "published" or r > 1:
            state.value *= SLOW_RISE
        else:
            state.value *= SLOW_FALL


@dataclass(frozen=True)
class MicroSelector(ExclusiveThresholdSelector):
    """A selector whose P partitions have the same size. Workers take turns at them."""

    def partition_sizes(self, n: int, size: int, state: SharedThreshold) -> list[int]:
        return split_evenly(n, size)
