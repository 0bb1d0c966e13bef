from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core import host_sync
from sparsify.core.wire import Wire
from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback
from sparsify.kernels import Workspace
from sparsify.method import Sparsifier
from sparsify.ranges import (
    Density,
    FloatAtLeast1,
    IndexFormat,
    PositiveInt,
    Scope,
    ValueFormat,
    check_arguments,
)
from sparsify.select import (
    FixedCountSelector,
    Selector,
    compute_magnitudes,
    compute_magnitudes_if_needed,
    mask_buffer,
    select_above_threshold,
)
from sparsify.types import DENSE_AT_DENSITY_1, Selection

PUBLISHED_PASSES = 3  # hclhkbu/GaussianK-SGD, compression.py
BOUNDED_PASSES = 20  # as many as Ok-Topk's re-implementation of Gaussian-k takes at most
SLACK = 2.0  # ours: few passes, and an exact top-k of at most 2k candidates
# Shares of k between which the published rule is content, and the factors of its threshold outside of them.
MIN_SHARE = 2 / 3
MAX_SHARE = 4 / 3
LOWERING_FACTOR = 0.5
RAISING_FACTOR = 1.5


@check_arguments
def gaussiank(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    rule: Literal["bounded", "published"] = "bounded",
    passes: PositiveInt | None = None,
    slack: FloatAtLeast1 | None = None,
    index: IndexFormat = "int32",
    value: ValueFormat = "as_is",
) -> Sparsifier:
    """Gaussian-k: a threshold from mean and standard deviation. Shi et al. 2019 (arXiv).

    arXiv:1911.08772. A step, of the gradient plus the residual:

    1. Compute the threshold that k of n elements exceed if they are normally distributed.
    2. Count the elements above it, and adjust it, in a few passes.
    3. Send all elements above it (`published`), or the k largest of them (`bounded`).

    Gradients plus residuals are seldom normal. Where they are not, the published rule sends far more or far
    less than k, because its few adjustments do not reach far: nothing of a uniform distribution, 555 k of a
    normal one that was clipped at one sigma. `bounded` starts from the same guess and ends at exactly k.

    Host synchronisations per step and bucket: `bounded` has 2 and one per pass (1 pass where acc is normal, 2
    to 5 with residuals; ties, or fewer than k nonzero elements, end in an exact top-k over everything);
    `published` has 1 per pass and 1 for the lengths.

    Args:
        density: k/n, the share of the elements that each worker sends in a step: exactly (`bounded`), or as
            the guess aims at (`published`). Lower: fewer bytes, more error.
        rule: `bounded`: the Gaussian guess, bisected until between k and `slack` x k magnitudes lie above it,
            of which the k largest are sent: the same as topk. `published`: the rule of hclhkbu/GaussianK-SGD,
            see `GaussianThreshold`.
        passes: how many thresholds are tried at most. None: 3 (published) or 20 (bounded). More: more time,
            and a number of elements nearer k (published).
        slack: candidates per element sent, for `bounded` only. None: 2. Lower: more passes, a smaller top-k.
    """
    select: Selector
    if rule == "published":
        if slack is not None:
            raise ValueError(
                f"{slack=} has no effect with rule='published'; leave it out, or take rule='bounded'"
            )
        select = GaussianThreshold(passes or PUBLISHED_PASSES)
    else:
        select = GaussianTopK(passes or BOUNDED_PASSES, slack or SLACK)
    exchange = AllGather(Wire(index, value), uneven=rule == "published")
    return Sparsifier(density, select, ErrorFeedback(), exchange, scope, tuple(density_warmup))


def gaussian_threshold(acc: Tensor, ratio: float) -> Tensor:
    """Return the threshold mu + |ppf(ratio / 2)| sigma, 0-d, of acc (n,).

    Of a normal acc with mean 0 the share `ratio` lies beyond it.
    """
    # torch.std in the published code: divided by n - 1, which a single element does not allow.
    sigma, mu = torch.std_mean(acc, correction=1 if acc.numel() > 1 else 0)
    return mu + abs(NormalDist().inv_cdf(ratio / 2)) * sigma


@dataclass(frozen=True)
class GaussianThreshold(Selector):
    """A selector by the published rule: it adjusts its threshold until between 2k/3 and 4k/3 lie above.

    The threshold is halved if it selects less and raised by half if it selects more, at most three times.
    What is sent after the third try is what the third threshold selected: its last adjustment is computed,
    but nothing is selected with it.
    """

    passes: PositiveInt = PUBLISHED_PASSES
    always_broken_laws: ClassVar[dict[str, str]] = {
        DENSE_AT_DENSITY_1: "an estimated threshold is content with 2/3 of k, and need not even reach that"
    }

    def select(self, acc: Tensor, k: int, comm: Comm, state: Workspace) -> Selection:
        compute_magnitudes_if_needed(acc, state)
        threshold = gaussian_threshold(acc, k / acc.numel())
        for _ in range(self.passes):
            chosen = select_above_threshold(acc, threshold, state, strict=True)
            if len(chosen.indices) < MIN_SHARE * k:
                threshold = threshold * LOWERING_FACTOR
            elif len(chosen.indices) > MAX_SHARE * k:
                threshold = threshold * RAISING_FACTOR
            else:
                break
        return chosen


@dataclass(frozen=True)
class GaussianTopK(FixedCountSelector):
    """A selector of exactly the k largest, among the elements above a guessed and bisected threshold."""

    passes: PositiveInt = BOUNDED_PASSES
    slack: FloatAtLeast1 = SLACK

    def select(self, acc: Tensor, k: int, comm: Comm, state: Workspace) -> Selection:
        candidates = self.find_candidates(acc, k, state) if k < acc.numel() else None
        if candidates is None:
            return Selection(state.kernel.topk(acc, None, k).indices)
        best = state.buffer("magnitudes")[candidates].topk(k, sorted=False).indices
        return Selection(candidates[best])

    def find_candidates(self, acc: Tensor, k: int, state: Workspace) -> Tensor | None:
        """Return k to slack x k indices, the k largest among them; None if no threshold was found."""
        magnitudes = compute_magnitudes(acc, state)
        # 1. Guess.
        guess = gaussian_threshold(acc, k / acc.numel())
        numbers = guess, magnitudes.amax(), torch.count_nonzero(acc)
        threshold, high, nonzeros = host_sync.to_host(torch.stack([number.double() for number in numbers]))
        if nonzeros < k:
            return None  # no threshold has k elements above it
        # 2. Bisect between thresholds with too many elements above them (low) and with too few (high).
        low = 0.0
        for _ in range(self.passes):
            if not low < threshold < high:
                # Geometric, for magnitudes span decades; but 0 has no logarithm, so halve until low is known.
                threshold = math.sqrt(low * high) if low else high / 2
            mask = torch.gt(magnitudes, threshold, out=mask_buffer(state))
            count = host_sync.to_host(torch.count_nonzero(mask))
            if count < k:
                high = threshold
            elif count > self.slack * k:
                low = threshold
            else:
                return host_sync.nonzero(mask)
        return None
