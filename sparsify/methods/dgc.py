from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsify.bucket_group import BucketGroup
from sparsify.comm import Comm
from sparsify.core import huge_pages
from sparsify.core.timer import PhaseTimer
from sparsify.core.wire import Wire
from sparsify.exchange import AllGather
from sparsify.feedback import MomentumCorrection
from sparsify.kernels import Workspace
from sparsify.kernels.group_kernel import split_like
from sparsify.method import Dense, Sparsifier, SparsifierState
from sparsify.ranges import (
    Density,
    IndexFormat,
    MomentumFactor,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    Scope,
    ValueFormat,
    check_arguments,
)
from sparsify.select import RandomKeyStream, Selector, compute_magnitudes_if_needed, select_above_threshold
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    BucketContext,
    BucketStep,
    PredictedBytes,
    Selection,
    StepSettings,
    accumulation_dtype,
)


@check_arguments
def dgc(
    density: Density = 0.001,
    scope: Scope = "layer",
    density_warmup: Sequence[Density] = (),
    momentum: MomentumFactor = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    clip_norm: PositiveFloat | None = None,
    sample: PositiveFraction = 0.01,
    adaptations: NonNegativeInt = 10,
    dense_vectors: bool = True,
    index: IndexFormat = "int32",
    value: ValueFormat = "as_is",
) -> Sparsifier:
    """Deep Gradient Compression: sampled thresholds, corrected momentum. Lin et al. 2018 (ICLR), algorithm 4.

    arXiv:1712.01887. A step, with the momentum u and the residual v:

    1. Each worker clips its gradient g, if `clip_norm` is given.
    2. u <- m u + g;  v <- v + u (momentum correction).
    3. The elements of v above a threshold, which is estimated from a sample, are sent.
    4. u, v <- 0 where they were sent (momentum factor masking).
    5. The update is the mean over the workers.

    Where the paper leaves facts open, they are those of synxlin/deep-gradient-compression. The method applies
    momentum, so the optimizer must have none. Weight decay is the optimizer's; in the public code it has a
    momentum of its own.

    Args:
        density: k/n, the share of the elements that each worker sends in a step, at most. Lower: fewer bytes,
            more error.
        scope: the elements of which k are chosen: the whole model (`global`), every tensor (`layer`, as in
            the paper), or buckets of a size in MB.
        density_warmup: lower bounds of the density for the first epochs, one each. The paper's are [0.25,
            0.0625, 0.015625, 0.004, 0.001]. The README of the public code says the same; run without a list,
            the code takes 0.316, 0.1, 0.0316, 0.01, 0.0032.
        momentum: m of the momentum that is applied before accumulation; 0: none.
        nesterov: take Nesterov's momentum.
        masking: where an element was sent, its momentum begins at 0 again.
        clip_norm: clip each worker's gradient, over the whole model, to this norm divided by sqrt(P); None:
            do not clip.
        sample: share of the elements that the threshold is estimated from; the paper's is 0.001 to 0.01.
            Higher: a better threshold, more time.
        adaptations: how often the threshold is lowered at most. Higher: more time, and seldom fewer than 0.8
            k elements.
        dense_vectors: buckets of 1-D tensors only (biases, normalisations) are averaged whole, with ordinary
            momentum, as in the public code.
    """
    method_class = SparsifierWithDenseVectors if dense_vectors else Sparsifier
    return method_class(
        density,
        SampledThreshold(sample, adaptations),
        MomentumCorrection(momentum, masking, nesterov),
        AllGather(Wire(index, value), uneven=True),
        scope,
        tuple(density_warmup),
        clip_norm=clip_norm,
    )


# The public code's compress_lower_bound: where less than this share of k reaches the threshold, the threshold
# is lowered to this share of itself.
LOWER_BOUND = 0.8
MIN_SAMPLES_ABOVE = 2  # so many elements of the sample lie above its threshold at least


@dataclass
class SampledThresholdState:
    """The draws so far, and buffers."""

    draws: RandomKeyStream
    workspace: Workspace = field(metadata={"saved": False})


@dataclass(frozen=True)
class SampledThreshold(Selector):
    """A selector of at most k elements above a threshold that is estimated from a sample.

    Lin et al. 2018, section 5. Where more than k reach the threshold, the k largest of them are taken,
    exactly ("hierarchical"). The public code does so above 1.3 k, and below that takes the first k by
    position, which favours the front of every tensor; with 1.3 k candidates there is nothing to be saved.
    Where fewer than 0.8 k reach it, it is lowered to 0.8 of itself. Small tensors, of which the sample would
    be all, get an exact top-k.

    One host synchronisation, and one for every adaptation.
    """

    sample: PositiveFraction = 0.01
    adaptations: NonNegativeInt = 10

    def init(self, like: Tensor, context: BucketContext) -> SampledThresholdState:
        return SampledThresholdState(RandomKeyStream(context), Workspace.with_kernel(like, context))

    def select(self, acc: Tensor, k: int, comm: Comm, state: SampledThresholdState) -> Selection:
        n = acc.numel()
        workspace = state.workspace
        num_sampled = math.ceil(max(self.sample * n, MIN_SAMPLES_ABOVE * n / k))
        if num_sampled >= n or k == n:
            return Selection(workspace.kernel.topk(acc, None, k).indices)
        compute_magnitudes_if_needed(acc, workspace)
        # Odd, lest the sample walk along one row of a tensor whose sides are even (published: 32 i + 1).
        stride = (n // num_sampled - 1) | 1
        sample = acc[state.draws.next_key() % stride :: stride].abs()
        largest = sample.topk(math.ceil(k / n * len(sample)), sorted=False).values
        # Zeros reach no threshold: in a sparse gradient they would all be candidates.
        least = torch.finfo(acc.dtype).tiny
        threshold = largest.min().clamp_(min=least)
        chosen = select_above_threshold(acc, threshold, workspace)
        for _ in range(self.adaptations):
            if not 0 < len(chosen.indices) < LOWER_BOUND * k:  # none: then all are zero
                break
            threshold.mul_(LOWER_BOUND).clamp_(min=least)
            chosen = select_above_threshold(acc, threshold, workspace)
        if len(chosen.indices) <= k:
            return chosen
        best = acc[chosen.indices].abs().topk(k, sorted=False).indices
        return Selection(chosen.indices[best])


@dataclass
class DenseMomentumState:
    """The ordinary momentum of a bucket that is not sparsified, equal on all workers."""

    momentum: Tensor  # (n,)


@dataclass(frozen=True, repr=False)
class SparsifierWithDenseVectors(Sparsifier):
    """A sparsifier that averages buckets of 1-D tensors whole, with ordinary momentum of equal strength."""

    feedback: MomentumCorrection

    def init(self, like: Tensor, context: BucketContext) -> Any:
        if context.shapes and all(len(shape) <= 1 for shape in context.shapes):
            return DenseMomentumState(huge_pages.zeros_like(like, accumulation_dtype(like.dtype)))
        return super().init(like, context)

    def aggregate(
        self,
        grad: Tensor,
        step: StepSettings,
        state: SparsifierState | DenseMomentumState,
        comm: Comm,
        timer: PhaseTimer,
    ) -> int:
        if not isinstance(state, DenseMomentumState):
            return super().aggregate(grad, step, state, comm, timer)
        comm.all_reduce(grad)
        with timer.phase("scatter"):
            self.average_with_momentum_in_place(grad, state, comm.size)
        return grad.numel()

    def aggregate_group(self, group: BucketGroup, comm: Comm, timer: PhaseTimer) -> int:
        # The buckets of a group have states of one kind.
        states = group.gradients.states
        if not isinstance(states[0], DenseMomentumState):
            return super().aggregate_group(group, comm, timer)
        grads = [grad for (grad,) in group.gradients.pieces]
        total = comm.all_reduce(torch.cat(grads))
        with timer.phase("scatter"):
            torch._foreach_copy_(grads, split_like(total, grads))
            for grad, state in zip(grads, states, strict=True):
                self.average_with_momentum_in_place(grad, state, comm.size)
        return total.numel()

    def average_with_momentum_in_place(
        self, summed_grad: Tensor, state: DenseMomentumState, world_size: int
    ) -> None:
        """Replace the sum of the workers' gradients (n,) by their average with momentum."""
        u = state.momentum
        m = self.feedback.momentum
        summed_grad.div_(world_size)
        if self.feedback.nesterov:
            u.add_(summed_grad).mul_(m)
            summed_grad.add_(u)
        else:
            summed_grad.copy_(u.mul_(m).add_(summed_grad))

    def residual(self, state: SparsifierState | DenseMomentumState) -> Tensor | None:
        return None if isinstance(state, DenseMomentumState) else super().residual(state)

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        is_vector = all(len(shape) <= 1 for shape in bucket_step.shapes)
        return Dense().predict_bytes(bucket_step) if is_vector else super().predict_bytes(bucket_step)

    def broken_laws(self) -> dict[str, str]:
        broken = super().broken_laws()
        if self.feedback.nesterov:
            broken[DENSE_AT_DENSITY_1] = "Nesterov's form looks ahead: the first step is (1 + momentum) g"
        return broken

    def __repr__(self) -> str:
        """Return the text by which saved states name this method."""
        return f"WithDenseVectors(sparse={Sparsifier(**vars(self))!r}, correction={self.feedback!r})"
