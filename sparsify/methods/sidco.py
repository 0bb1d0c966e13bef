from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

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
    compute_magnitudes_if_needed,
    mask_buffer,
    select_above_threshold,
)
from sparsify.types import BucketContext, Selection

FittedTail = Literal["exponential", "gamma", "pareto"]
StageRule = Literal["published", "reversing"]
# Lower bound of the variance of a fit, in units of mean^2: magnitudes that are all equal would divide by 0.
MIN_RELATIVE_VARIANCE = 1e-6


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

    A step of a worker:

    1. acc = residual + gradient
    2. The first stage fits a distribution to the magnitudes of acc. Its threshold is the magnitude that a
       share of `first_ratio` exceeds by this fit.
    3. Every further stage fits the magnitudes above the threshold before it, and raises the threshold. The
       shares of all stages multiply to the density.
    4. The worker sends all elements whose magnitude reaches the last threshold; the residual keeps the rest.
    5. Every `adapt_every` steps a stage is added or removed if too few or too many elements were selected.

    Host synchronisations per step and bucket: 2, one for the selection and one for the lengths. The fits need
    none (the authors' code: one a stage, and scipy on the host for the gamma quantile).

    Args:
        density: k/n, the share of the elements that the threshold aims at. Lower: fewer bytes, more error.
        fit: the distribution: `exponential`, `pareto` (generalised Pareto), or `gamma`: gamma in the first
            stage, generalised Pareto in the others.
        first_ratio: the share that the first of several stages aims at; the others share the rest alike.
            Published: 0.25. Lower: a higher first threshold, and less for the others to do.
        adapt_every: Q, steps after which the number of stages is reconsidered. Published: 5. Higher:
            steadier, and later.
        tolerance: the number of stages changes if the mean of selected / k in these steps leaves
            [1 - tolerance, 1 + tolerance]. Published: 0.2. Lower: more changes, nearer k.
        adapt: `published`: one stage more when too few were selected, one less when too many were. A tail
            heavier than the fitted one selects too many with a single stage, and stays there, because no
            stage can be removed. `reversing`: the direction is reversed when the last change made it worse
            (an option of the authors' code), or when no stage is left to remove or add (ours).
    """
    selector = SidcoSelector(fit, first_ratio, adapt_every, tolerance, adapt)
    exchange = AllGather(Wire(index, value), uneven=True)
    return Sparsifier(density, selector, ErrorFeedback(), exchange, scope, tuple(density_warmup))


@dataclass
class StageAdaptation:
    """The number of stages for one bucket, and the counts from which it is adapted.

    In the authors' code all buckets share one number.
    """

    workspace: Workspace = field(metadata={"saved": False})
    stages: PositiveInt = 1
    direction: Literal[-1, 1] = 1  # the change of stages after too few elements were selected
    estimate: NonNegativeFloat = 0.0  # mean of selected / k over the previous period; 0 before the first
    total: NonNegativeFloat = 0.0  # sum of selected / k over the steps of this period
    steps: NonNegativeInt = 0


@dataclass(frozen=True)
class SidcoSelector(Selector):
    """A selector of all elements above a threshold that several stages of fits estimate.

    The largest element is always selected, zeros never.
    """

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
        ratios = stage_ratios(ratio, state.stages, self.first_ratio)
        threshold = self.estimate_threshold(acc, ratios, state.workspace)  # 2. and 3.
        compute_magnitudes_if_needed(acc, state.workspace)
        selection = select_above_threshold(acc, threshold, state.workspace)  # 4.
        self.adapt_stages(len(selection.indices) / k, ratio, state)  # 5.
        return selection

    def estimate_threshold(self, acc: Tensor, ratios: list[float], workspace: Workspace) -> Tensor:
        """Return the threshold of the last stage, 0-d.

        It is never above the largest magnitude, so that some magnitudes exceed it and have a mean.

        Args:
            ratios: the share that each stage aims at.
        """
        threshold = largest = compute_magnitudes(acc, workspace).amax()
        fit_tail = exponential_threshold if self.fit == "exponential" else pareto_threshold
        for stage, ratio in enumerate(ratios):
            if self.fit == "gamma" and stage == 0:
                fitted = gamma_threshold(acc, ratio, workspace)
            else:
                lower = threshold if stage else None
                fitted = fit_tail(exceedance_moments(acc, lower, workspace), ratio)
            threshold = torch.minimum(fitted.to(largest.dtype), largest)
        return threshold.clamp_(min=torch.finfo(largest.dtype).tiny)

    def adapt_stages(self, selected_over_k: float, ratio: float, state: StageAdaptation) -> None:
        """Change the number of stages, at the end of a period, by the mean of selected / k.

        `adapt_stages` of the authors' code; its `stages=-1` is `published`.

        Args:
            selected_over_k: selected / k in this step.
        """
        state.total += selected_over_k
        state.steps += 1
        if state.steps < self.adapt_every:
            return
        estimate = state.total / state.steps
        # 1 if too few were selected, -1 if too many were.
        change = (estimate < 1 - self.tolerance) - (estimate > 1 + self.tolerance)
        if self.adapt == "reversing" and change:
            is_worse = state.estimate > 0 and abs(estimate - 1) > abs(state.estimate - 1)
            is_blocked = not 1 <= state.stages + change * state.direction <= max_stages(ratio)
            if is_worse or is_blocked:
                state.direction = -1 if state.direction == 1 else 1
        state.stages = min(max(state.stages + change * state.direction, 1), max_stages(ratio))
        state.estimate = estimate
        state.total = 0.0
        state.steps = 0


def max_stages(ratio: float) -> int:
    """Return ceil(log2(1 / ratio)), at least 1."""
    return max(1, math.ceil(-math.log2(ratio)))


def stage_ratios(ratio: float, stages: int, first: float) -> list[float]:
    """Return the share that each stage aims at, of what the stage before left. The product is `ratio`."""
    stages = min(stages, max_stages(ratio))  # k may have changed since
    if stages == 1 or ratio >= first:
        return [ratio]
    return [first] + [(ratio / first) ** (1 / (stages - 1))] * (stages - 1)


class ExceedanceMoments(NamedTuple):
    """Statistics of the magnitudes above a threshold, each 0-d in float64."""

    smallest: Tensor
    mean: Tensor  # of the distance from the smallest
    relative_variance: Tensor  # of the distance: variance / mean^2


def exceedance_moments(acc: Tensor, lower: Tensor | None, workspace: Workspace) -> ExceedanceMoments:
    """Return the moments of the magnitudes at or above `lower`, or of all.

    Sums over a buffer in which all other elements are 0, so that nothing is copied out of it and the host
    needs no size.
    """
    n = acc.numel()
    magnitudes = compute_magnitudes(acc, workspace)
    smallest = magnitudes.new_zeros(())
    count = torch.full_like(magnitudes[0], n)
    if lower is not None:
        is_below = torch.lt(magnitudes, lower, out=mask_buffer(workspace))
        count = (n - torch.count_nonzero(is_below)).to(magnitudes.dtype)
        smallest = magnitudes.masked_fill_(is_below, math.inf).amin()
        magnitudes = compute_magnitudes(acc, workspace).sub_(smallest).clamp_(min=0)
    mean = magnitudes.sum() / count
    scale = mean.clamp(min=torch.finfo(mean.dtype).tiny)
    relative_variance = magnitudes.div_(scale).square_().sum() / count - 1
    return ExceedanceMoments(smallest.double(), mean.double(), relative_variance.double())


def exponential_threshold(moments: ExceedanceMoments, ratio: float) -> Tensor:
    """Return eta = min - mean ln d, which a share d = `ratio` of an exponential distribution exceeds."""
    return moments.smallest - moments.mean * math.log(ratio)


def pareto_threshold(moments: ExceedanceMoments, ratio: float) -> Tensor:
    """Return eta = min + a (1 - d^c) / c, which a share d = `ratio` of a generalised Pareto exceeds.

    With the variance s^2: a = mean / 2 (mean^2 / s^2 + 1), c = (mean^2 / s^2 - 1) / 2.
    """
    inverse = 1 / moments.relative_variance.clamp(min=MIN_RELATIVE_VARIANCE)
    a = moments.mean * (inverse + 1) / 2
    c = (inverse - 1) / 2
    c = torch.where(c == 0, MIN_RELATIVE_VARIANCE, c)  # the limit at c = 0 is the exponential fit
    return moments.smallest - a * torch.expm1(c * math.log(ratio)) / c


def gamma_threshold(acc: Tensor, ratio: float, workspace: Workspace) -> Tensor:
    """Return eta = mean / alpha P^-1(alpha, 1 - d), which a share d of a gamma distribution exceeds.

    With the magnitudes u: s = ln mean(u) - mean(ln u), alpha = (3 - s + sqrt((s - 3)^2 + 24 s)) / (12 s).

    Zeros have no logarithm. They are left out, and d is a share of the other magnitudes, chosen so that it is
    `ratio` of all. (The authors' code adds an epsilon, whose logarithm dominates the mean where there are
    many zeros.)
    """
    n = acc.numel()
    magnitudes = compute_magnitudes(acc, workspace)
    is_zero = torch.eq(magnitudes, 0, out=mask_buffer(workspace))
    count = (n - torch.count_nonzero(is_zero)).clamp_(min=1).double()
    mean = magnitudes.sum().double() / count
    scale = mean.to(magnitudes.dtype).clamp(min=torch.finfo(magnitudes.dtype).tiny)
    logarithms = magnitudes.div_(scale).masked_fill_(is_zero, 1).log_()
    s = (-logarithms.sum().double() / count).clamp(min=MIN_RELATIVE_VARIANCE)
    alpha = (3 - s + ((s - 3) ** 2 + 24 * s).sqrt()) / (12 * s)
    return mean / alpha * gamma_quantile(alpha, (ratio * n / count).clamp(max=1))


GRID_POINTS = 64
GRID_ROUNDS = 8  # the last cell is the first bracket divided by 64^8 = 2^48


def gamma_quantile(alpha: Tensor, tail: Tensor) -> Tensor:
    """Return the x for which Q(alpha, x) = tail, 0-d in float64, by a grid that is refined repeatedly.

    No host synchronisation. The first bracket is a tail bound of the gamma distribution:
    Q(a, a + sqrt(2 a t) + t) <= exp(-t), Boucheron et al. 2013, section 2.4.
    """
    t = -tail.log()
    start = torch.zeros_like(alpha)
    width = alpha + (2 * alpha * t).sqrt() + t
    grid = torch.arange(GRID_POINTS, dtype=alpha.dtype, device=alpha.device) / GRID_POINTS
    for _ in range(GRID_ROUNDS):
        num_below = (torch.special.gammaincc(alpha, start + width * grid) > tail).sum()
        start = start + width * (num_below - 1).clamp(min=0) / GRID_POINTS
        width = width / GRID_POINTS
    return start
