"""Synthetic selections: index sets of a given density, overlap and skew, for any number of workers.

Each element has a popularity p, with which every worker selects it, independently of the others. Popularities
are Beta-distributed: the one distribution of two parameters on [0, 1], and two numbers are known, the mean of
p, which is the density, and how much two workers' selections have in common, E[p^2] / E[p]. How many workers
select an element is then Beta-binomial, which also says how the union grows with their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sparsify import ranges
from sparsify.ranges import NonNegativeFraction, PositiveFraction
from sparsify.types import SparseVector

MAX_POPULARITY = 1 - 1e-6  # of an element that all workers are to select
# Times the density: less popular elements are never drawn, which are a thousandth of all at most.
MIN_RELATIVE_POPULARITY = 1e-3
NUM_SLICES = 64  # in which skew is measured
SURPLUS_DEVIATIONS = 4.0  # so many standard deviations more are drawn, to leave some out again
KNUTH_MULTIPLIER = 0x9E3779B1  # spreads consecutive indices


class SelectionStatistics(NamedTuple):
    """Density, overlap and skew of the workers' selections."""

    density: float  # k/n
    overlap: float  # the share of a worker's selection that another worker selected as well, over all pairs
    shares: tuple[float, ...] = (1.0,)  # of all that was selected, in slices of equal length, first to last


def skewed_shares(skew: float, slices: int = NUM_SLICES) -> tuple[float, ...]:
    """Return shares that fall by a constant factor from slice to slice, the first `skew` times the mean.

    Args:
        skew: from 1, even, to `slices`, all in the first slice.
    """
    if not 1 <= skew <= slices:
        raise ValueError(f"{skew=} is out of range: from 1, even, to {slices}, all in one of {slices} slices")
    # Bounds of the factor; the first share falls as it grows.
    low = 0.0
    high = 1.0
    for _ in range(60):
        factor = (low + high) / 2
        if slices / sum(factor**index for index in range(slices)) > skew:
            low = factor
        else:
            high = factor
    weights = [high**index for index in range(slices)]
    return tuple(weight / sum(weights) for weight in weights)


class SyntheticSelections(Sequence[SparseVector]):
    """Random selections of k of n elements, ascending, for each of `size` workers.

    A selection is drawn whenever it is asked for, and is the same each time.

    Values are those of a Laplace distribution's largest, ln(n/k) and something exponential, with a sign that
    is the element's: they add up where workers selected alike.

    Raises:
        ValueError: a density, an overlap or a share out of range.
    """

    def __init__(self, statistics: SelectionStatistics, n: int, size: int, seed: int = 0) -> None:
        self.n = n
        self.size = size
        self.seed = seed
        self.k = min(n, max(1, int(statistics.density * n)))
        self.tail = math.log(n / self.k)
        popularity = _draw_popularities(statistics, n, np.random.default_rng(seed))
        # (m,) elements that can be drawn; each has a stretch of a line, which ends at (m,).
        self.elements = np.flatnonzero(popularity > MIN_RELATIVE_POPULARITY * statistics.density)
        self.stretch_ends = np.cumsum(-np.log1p(-popularity[self.elements]))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, rank: Any) -> Any:  # an int: there are no slices
        if not 0 <= rank < self.size:
            raise IndexError(rank)
        rng = np.random.default_rng([self.seed, rank + 1])
        indices = self._adjust_to_k(self._draw_elements(rng), rng)
        magnitudes = self.tail + rng.standard_exponential(self.k, dtype=np.float32)
        is_negative = (indices * KNUTH_MULTIPLIER >> 16) & 1
        values = np.where(is_negative, -magnitudes, magnitudes).astype(np.float32)
        return SparseVector(torch.from_numpy(indices), torch.from_numpy(values))

    def _draw_elements(self, rng: np.random.Generator) -> np.ndarray:
        """Draw distinct elements, ascending, mostly some more than k.

        Points at random on the line of all stretches hit an element of popularity p with probability p.
        """
        length = float(self.stretch_ends[-1])
        num_points = rng.poisson(length * (1 + SURPLUS_DEVIATIONS / math.sqrt(self.k)))
        spaces = rng.standard_exponential(num_points + 1)  # between points that are in order already
        points = np.cumsum(spaces)
        hits = np.searchsorted(self.stretch_ends, points[:-1] * (length / points[-1]), side="right")
        hits = np.minimum(hits, len(self.stretch_ends) - 1)  # a point that was rounded beyond the end
        elements: np.ndarray = self.elements[hits[np.diff(hits, prepend=-1) > 0]]
        return elements

    def _adjust_to_k(self, indices: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Leave some elements out, or add some at random, so that there are k."""
        if len(indices) > self.k:
            return np.delete(indices, rng.choice(len(indices), len(indices) - self.k, replace=False))
        while len(indices) < self.k:
            additions = rng.integers(self.n, size=self.k - len(indices))
            indices = np.union1d(indices, additions)
        return indices


def _draw_popularities(statistics: SelectionStatistics, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the popularities of n elements, (n,) float64.

    In each slice their mean is the slice's density, and two workers have `overlap` of it in common, or as
    much as chance makes of a slice so full.
    """
    density, overlap, shares = statistics
    ranges.check_value("density", density, PositiveFraction)
    ranges.check_value("overlap", overlap, NonNegativeFraction)
    borders = [n * index // len(shares) for index in range(len(shares) + 1)]
    slices = []
    for share, length in zip(shares, np.diff(borders).tolist(), strict=True):
        mean = min(1.0, share * density * n / max(1, length))
        slices.append(_draw_slice_popularities(mean, overlap, length, rng))
    return np.concatenate(slices)


def _draw_slice_popularities(
    mean: float, overlap: float, length: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw Beta-distributed popularities with this mean and E[p^2] / E[p] = overlap.

    They are all equal where chance makes as much overlap.
    """
    if not mean or overlap <= mean:
        return np.full(length, min(mean, MAX_POPULARITY))
    concentration = (1 - overlap) / (overlap - mean)  # the sum of both parameters of the distribution
    if not concentration:
        return np.where(rng.random(length) < mean, MAX_POPULARITY, 0.0)
    popularity = rng.beta(mean * concentration, (1 - mean) * concentration, length)
    return np.minimum(popularity, MAX_POPULARITY, out=popularity)
