from __future__ import annotations

import math
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
    ExclusiveIndices,
    Selector,
    gather_exclusive_indices,
    predict_union_bytes,
    split_evenly,
)
from sparsify.types import BucketContext, BucketStep, PredictedBytes, Selection

# kljp/micro and kljp/exdyna, gradient_reducers.py: the band of r = k'/k, and the factors of the threshold.
ABOVE, BELOW = 1.1, 0.909
RISE, FALL = 1.005, 0.995  # outside of the band
DRIFT_UP, DRIFT_DOWN = 1.00125, 0.9987  # inside


@check_arguments
def micro(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    rule: ImplementationVariant = "intended",
    threshold: PositiveFloat | None = None,
) -> Sparsifier:
    """MiCRO: each worker a partition of its own and one threshold for all. Yoon and Oh, HiPC 2023,
    arXiv:2310.00967.

    No build-up (partitions do not overlap), and no top-k: one pass over n/P elements. Two host
    synchronisations per step and bucket.

    The threshold moves by 0.5 % per step at most. From the published first one, where it is 100 times off,
    about 920 steps pass until the density is reached: if it is too low, n elements are sent meanwhile; if too
    high, one of each worker. Give `threshold` where the scale of the gradients is known.

    Nor does it rest where k of the first gradient lie above it: what is not sent piles up in the residual, so
    the threshold rises, as published, until as much leaves in each step as comes in. Where n elements of
    magnitude g always have the same sign, each is sent whenever it has summed up to the threshold t, n g / t
    of them in a step, so t comes to about g / density; where signs are random, to about g / sqrt(density);
    with several workers, who see a partition in turns, to at most twice that. At density 0.001 this takes
    some 1,000 steps from a threshold that suits the first gradient.

    Args:
        density: k/n, the share of the elements that all workers send together in a step.
        scope: what k is taken of: the whole model (`global`), every tensor (`layer`), or buckets of so many
            MB. Buckets of fewer than P elements leave some workers without a partition.
        rule: `intended`, or `published`: the public code, where inside the band of 0.909 < k'/k <= 1.1 the
            threshold always rises. See `sparsify.methods.micro.ExclusiveThreshold`.
        threshold: the first one; None: 1 / (2 sqrt k).
    """
    select = Micro(rule, threshold)
    return Sparsifier(density, select, ErrorFeedback(), AllReduce(), scope, tuple(density_warmup))


@dataclass
class Threshold:
    """The threshold, alike on all workers since it is computed from gathered counts alone."""

    workspace: Workspace = field(metadata={"saved": False})
    value: NonNegativeFloat = 0.0  # 0: none yet
    step: NonNegativeInt = 0
    blocks: list[NonNegativeInt] = field(default_factory=list)  # of each partition; ExDyna's


@dataclass(frozen=True)
class ExclusiveThreshold(Selector):
    """Selector that MiCRO and ExDyna share: all of the own partition that reaches a threshold, which follows
    the count.

    Two host synchronisations: for this worker's choices, and for all workers' counts.

    Args:
        rule: how the threshold follows r = k'/k. Above the band it rises by 0.5 %, below it falls by 0.5 %.
            Inside, `published`, the public code: it always rises, by 0.125 %, since the test that should tell
            r > 1 from r < 1 reads r > 0. `intended`: it rises by 0.125 % if r > 1, else falls by 0.13 %;
            and k is taken as the number of workers at least, since each sends one element at least (see
            `choose`): with less, r never reaches the band and the threshold never stops rising.
        threshold: the first one; None: 1 / (2 sqrt k), the public code's.
    """

    rule: ImplementationVariant = "intended"
    threshold: PositiveFloat | None = None
    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> Threshold:
        return Threshold(Workspace.with_kernel(like, context))

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        return predict_union_bytes(bucket_step)

    def choose(self, acc: Tensor, k: int, sizes: list[int], comm: Comm, state: Threshold) -> ExclusiveIndices:
        """Worker r looks at partition (step + r) mod P. `sizes` are the partitions', in order."""
        n, at = acc.numel(), (state.step + comm.rank) % comm.size
        start, length = sum(sizes[:at]), sizes[at]
        state.value = state.value or self.threshold or 1 / (2 * math.sqrt(k))
        if k == n:  # a threshold can't ask for everything
            chosen = torch.arange(start, start + length, device=acc.device)
        else:
            # Zeros reach no threshold, however low it has fallen.
            threshold = max(state.value, torch.finfo(acc.dtype).tiny)
            own = acc[start : start + length]
            chosen = state.workspace.kernel.above_threshold(own, None, threshold).indices.long().add_(start)
            if length and not len(chosen):  # as published: then one element, another one in each step
                chosen = host_sync.to_device([start + state.step % length], acc)
        return gather_exclusive_indices(comm, chosen, n)

    def follow(self, count: int, k: int, size: int, state: Threshold) -> None:
        """Move the threshold after a step in which the workers sent `count` elements together."""
        state.step += 1
        r = count / (max(k, size) if self.rule == "intended" else k)
        if r > ABOVE:
            factor = RISE
        elif r > BELOW:
            factor = DRIFT_UP if self.rule == "published" or r > 1 else DRIFT_DOWN
        else:
            factor = FALL
        state.value *= factor


@dataclass(frozen=True)
class Micro(ExclusiveThreshold):
    """P partitions of one size, which the workers take in turns."""

    def select(self, acc: Tensor, k: int, comm: Comm, state: Threshold) -> Selection:
        union = self.choose(acc, k, split_evenly(acc.numel(), comm.size), comm, state)
        self.follow(len(union.indices), k, comm.size, state)
        return Selection(union.indices)
