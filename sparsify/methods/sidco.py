from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core.wire import Wire
from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback
from sparsify.kernels import Workspace
from sparsify.method import Sparsifier
from sparsify.ranges import (
    Constraint,
    Density,
    IndexFormat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Scope,
    ValueFormat,
    check_arguments,
)
from sparsify.select import (
    Selector,
    compute_magnitudes,
    mask_buffer,
    prepare_magnitudes,
    select_above_threshold,
)
from sparsify.types import BucketContext, Selection

FittedTail = Literal["exponential", "gamma", "pareto"]
StageRule = Literal["published", "reversing"]
MIN_SPREAD = 1e-6  # of a fit, squared and relative to the mean: else all-equal magnitudes would divide by 0


@check_arguments
def sidco(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    fit: FittedTail = "exponential",
    first_ratio: Annotated[float, Constraint(gt=0, lt=1)] = 0.25,
    adapt_every: PositiveInt = 5,
    tolerance: Annotated[float, Constraint(gt=0, lt=1)] = 0.2,
    adapt: StageRule = "published",
    index: IndexFormat = "int32",
    value: ValueFormat = "as_is",
) -> Sparsifier:
    """SIDCo: a threshold from distributions fitted stage by stage. Abdelmoniem et al. 2021 (MLSys).

    The first stage fits all magnitudes and aims at `first_ratio`; every further one fits what exceeds the
    threshold before it. Host synchronisations per step and bucket: 2, one for the selection and one for the
    lengths; the fits need none (theirs: one a stage, and scipy on the host for the gamma quantile).

    Args:
        density: k/n, the share of the elements that the threshold aims at.
        fit: `exponential`, `pareto` (generalised Pareto), or `gamma`: gamma first, then generalised Pareto.
        first_ratio: what the first of several stages aims at; the others share the rest alike. Published:
            0.25.
        adapt_every: Q, steps after which the number of stages is reconsidered. Published: 5.
        tolerance: it changes if the mean of selected / k in these steps leaves [1 - tolerance, 1 +
            tolerance]. Published: 0.2.
        adapt: `published`: one stage more when too few were selected, one less when too many were. A tail
            heavier than the fitted one selects too many with a single stage, and stays there, for there is no
            stage less. `reversing`: the direction is reversed when the last change made it worse (an option
            of the authors' code), or when no stage is left to take away or add (ours).
    """
    select = SidcoSelector(fit, first_ratio, adapt_every, tolerance, adapt)
    exchange = AllGather(Wire(index, value), uneven=True)
    return Sparsifier(density, select, ErrorFeedback(), exchange, scope, tuple(density_warmup))


@dataclass
class StageAdaptation:
    """The number of stages of one bucket (the authors' code: of all), and what it is judged by."""

    workspace: Workspace = field(metadata={"saved": False})
    stages: PositiveInt = 1
    direction: Literal[-1, 1] = 1  # what follows upon too few: +1 stage
    estimate: NonNegativeFloat = 0.0  # selected / k, mean over the previous period; 0: none yet
    total: NonNegativeFloat = 0.0  # selected / k, sum over the steps of this period
    steps: NonNegativeInt = 0


@dataclass(frozen=True)
class SidcoSelector(Selector):
    """|acc| >= a threshold of several fitted stages. The largest element is always selected, zeros never."""

    fit: FittedTail = "exponential"
    first_ratio: Annotated[float, Constraint(gt=0, lt=1)] = 0.25
    adapt_every: PositiveInt = 5
    tolerance: Annotated[float, Constraint(gt=0, lt=1)] = 0.2
    adapt: StageRule = "published"

    def init(self, like: Tensor, context: BucketContext) -> StageAdaptation:
        return StageAdaptation(Workspace.with_kernel(like, context))

    def select(self, acc: Tensor, k: int, comm: Comm, state: StageAdaptation) -> Selection:
        n = acc.numel()
        if k == n:
            return Selection(torch.arange(n, device=acc.device))
        ratio = k / n
        threshold = self.estimate_threshold(acc, stage_ratios(ratio, state.stages, self.first_ratio), state.workspace)
        prepare_magnitudes(acc, state.workspace)
        chosen = select_above_threshold(acc, threshold, state.workspace)
        self.adapt_stages(len(chosen.indices) / k, ratio, state)
        return chosen

    def estimate_threshold(self, acc: Tensor, ratios: list[float], workspace: Workspace) -> Tensor:
        """(n,) -> 0-d. Never above the largest magnitude: what exceeds it is never empty and has a mean."""
        largest = compute_magnitudes(acc, workspace).amax()
        least = torch.finfo(largest.dtype).tiny
        first = gamma if self.fit == "gamma" else self.fit_tail
        threshold = first(acc, ratios[0], None, workspace)
        for ratio in ratios[1:]:
            threshold = torch.minimum(threshold.to(largest.dtype), largest)
            threshold = self.fit_tail(acc, ratio, threshold, workspace)
        return torch.minimum(threshold.to(largest.dtype), largest).clamp_(min=least)

    def fit_tail(self, acc: Tensor, ratio: float, above: Tensor | None, workspace: Workspace) -> Tensor:
        """Threshold beyond which a fitted distribution has this share."""
        rule = exponential if self.fit == "exponential" else pareto
        return rule(*exceedance_moments(acc, above, workspace), ratio)

    def adapt_stages(self, achieved: float, ratio: float, state: StageAdaptation) -> None:
        """`adapt_stages` of the authors' code; its `stages=-1` is `published`."""
        state.total += achieved
        state.steps += 1
        if state.steps < self.adapt_every:
            return
        estimate, before = state.total / state.steps, state.estimate
        too_few, too_many = estimate < 1 - self.tolerance, estimate > 1 + self.tolerance
        change = int(too_few) - int(too_many)
        if self.adapt == "reversing" and change:
            worse = before > 0 and abs(estimate - 1) > abs(before - 1)
            blocked = not 1 <= state.stages + change * state.direction <= max_stages(ratio)
            if worse or blocked:
                state.direction = -1 if state.direction == 1 else 1
        state.stages = min(max(state.stages + change * state.direction, 1), max_stages(ratio))
        state.estimate, state.total, state.steps = estimate, 0.0, 0


def max_stages(ratio: float) -> int:
    """ceil(log2(1 / ratio)), at least 1."""
    return max(1, math.ceil(-math.log2(ratio)))


def stage_ratios(ratio: float, stages: int, first: float) -> list[float]:
    """Shares that each stage aims at, of what the one before left; their product is `ratio`."""
    stages = min(stages, max_stages(ratio))  # k may have changed since
    if stages == 1 or ratio >= first:
        return [ratio]
    return [first] + [(ratio / first) ** (1 / (stages - 1))] * (stages - 1)


def exceedance_moments(acc: Tensor, above: Tensor | None, workspace: Workspace) -> tuple[Tensor, Tensor, Tensor]:
    """The smallest magnitude at or above a threshold (0 without one), the mean distance from it, and the
    squares' mean over the mean's square, less 1: the variance in units of the mean.

    Sums over a buffer in which everything else is 0, so that nothing is copied out of it and no size has to
    be known.
    """
    n, magnitudes = acc.numel(), compute_magnitudes(acc, workspace)
    low, count = magnitudes.new_zeros(()), torch.full_like(magnitudes[0], n)
    if above is not None:
        below = torch.lt(magnitudes, above, out=mask_buffer(workspace))
        count = (n - torch.count_nonzero(below)).to(magnitudes.dtype)
        low = magnitudes.masked_fill_(below, math.inf).amin()
        magnitudes = compute_magnitudes(acc, workspace).sub_(low).clamp_(min=0)
    mean = magnitudes.sum() / count
    scale = mean.clamp(min=torch.finfo(mean.dtype).tiny)
    spread = magnitudes.div_(scale).square_().sum() / count - 1
    return low.double(), mean.double(), spread.double()


def exponential_threshold(low: Tensor, mean: Tensor, spread: Tensor, ratio: float) -> Tensor:
    """eta = -mean ln d + min."""
    return low - mean * math.log(ratio)


def pareto_threshold(low: Tensor, mean: Tensor, spread: Tensor, ratio: float) -> Tensor:
    """a = mean / 2 (mean^2/s^2 + 1), c = (mean^2/s^2 - 1) / 2, eta = a (1 - d^c) / c + min."""
    inverse = 1 / spread.clamp(min=MIN_SPREAD)
    a, c = mean * (inverse + 1) / 2, (inverse - 1) / 2
    c = torch.where(c == 0, MIN_SPREAD, c)  # its limit is the exponential fit
    return low - a * torch.expm1(c * math.log(ratio)) / c


def gamma_threshold(acc: Tensor, ratio: float, above: None, workspace: Workspace) -> Tensor:
    """s = ln mean - mean ln|u|, alpha = (3 - s + sqrt((s - 3)^2 + 24 s)) / 12 s, eta = mean / alpha
    P^-1(alpha, 1 - d).

    Zeros have no logarithm: they are left out, and the ratio is one of the others. (The authors' code adds
    an epsilon, whose logarithm weighs heavily on the mean where zeros are many.)
    """
    n, magnitudes = acc.numel(), compute_magnitudes(acc, workspace)
    zero = torch.eq(magnitudes, 0, out=mask_buffer(workspace))
    count = (n - torch.count_nonzero(zero)).clamp_(min=1).double()
    mean = magnitudes.sum().double() / count
    scale = mean.to(magnitudes.dtype).clamp(min=torch.finfo(magnitudes.dtype).tiny)
    logarithms = magnitudes.div_(scale).masked_fill_(zero, 1).log_()
    s = (-logarithms.sum().double() / count).clamp(min=MIN_SPREAD)
    alpha = (3 - s + ((s - 3) ** 2 + 24 * s).sqrt()) / (12 * s)
    return mean / alpha * gamma_quantile(alpha, (ratio * n / count).clamp(max=1))


GRID_POINTS = 64  # of a search's grid
GRID_ROUNDS = 8  # 64^8 = 2^48 of the first bracket


def gamma_quantile(alpha: Tensor, tail: Tensor) -> Tensor:
    """x with Q(alpha, x) = tail, 0-d in float64: a grid, refined again and again; no host synchronisation.

    The first bracket is a tail bound of the gamma distribution: Q(a, a + sqrt(2 a t) + t) <= exp(-t),
    Boucheron et al. 2013, section 2.4.
    """
    t = -tail.log()
    low, width = torch.zeros_like(alpha), alpha + (2 * alpha * t).sqrt() + t
    grid = torch.arange(GRID_POINTS, dtype=alpha.dtype, device=alpha.device) / GRID_POINTS
    for _ in range(GRID_ROUNDS):
        points = low + width * grid
        left = (torch.special.gammaincc(alpha, points) > tail).sum()  # so many lie below the quantile
        low, width = low + width * (left - 1).clamp(min=0) / GRID_POINTS, width / GRID_POINTS
    return low
