"""Selections that nobody's gradients made: index sets of a given density, overlap and skew, for any number of
workers.

Each element has a popularity p, with which every worker selects it, independently of the others. Popularities
are Beta-distributed: the one distribution of two parameters on [0, 1], and two numbers are known, the mean of
p, which is the density, and how much two workers' selections have in common, E[p^2] / E[p]. How many workers
select an element is then Beta-binomial, which also says how the union grows with their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple, overload

import numpy as np
import torch

from sparsify import ranges
from sparsify.ranges import NonNegativeFraction, PositiveFraction
from sparsify.types import SparseVector

MOST_POPULAR = 1 - 1e-6  # of an element that all workers are to select: so likely each does
UNPOPULAR = 1e-3  # times the density: what is less popular is never drawn, a thousandth of all at most
SLICES = 64  # in which skew is measured
MORE = 4.0  # standard deviations of how many are drawn: so much more, to leave some out again
HASH = 0x9E3779B1  # Knuth's multiplier: spreads consecutive indices


class Statistics(NamedTuple):
    """Known properties of the workers' selections."""

    density: float  # k/n
    overlap: float  # the share of a worker's selection that another worker selected as well, over all pairs
    shares: tuple[float, ...] = (1.0,)  # of all that was selected, in slices of equal length, first to last

    @property
    def skew(self) -> float:
        """The share of the fullest slice over the mean share: 1 where selections spread evenly."""
        return max(self.shares) * len(self.shares)


def measured(parts: Sequence[SparseVector], n: int) -> Statistics:
    """Properties of what several workers selected of n elements.

    Raises:
        ValueError: fewer than two workers, or nothing was selected.
    """
    together = sum(part.indices.numel() for part in parts)
    if len(parts) < 2 or not together:
        raise ValueError("overlap is between two workers at least, and of something that they selected")
    common = [
        2 * np.intersect1d(one.indices.numpy(), other.indices.numpy(), assume_unique=True).size
        / max(1, one.indices.numel() + other.indices.numel())
        for one, other in combinations(parts, 2)
    ]  # fmt: skip
    chosen = np.concatenate([part.indices.numpy() for part in parts]).astype(np.int64)
    slices = min(SLICES, n)
    counts = np.bincount(chosen * slices // n, minlength=slices)
    return Statistics(together / len(parts) / n, float(np.mean(common)), tuple((counts / together).tolist()))


def skewed(skew: float, slices: int = SLICES) -> tuple[float, ...]:
    """Shares that fall by the same factor from slice to slice, the first `skew` times the mean: from 1, even,
    to `slices`.
    """
    if not 1 <= skew <= slices:
        raise ValueError(f"{skew=} is out of range: from 1, even, to {slices}, all in one of {slices} slices")
    low, high = 0.0, 1.0  # of the factor; the first share falls as it grows
    for _ in range(60):
        factor = (low + high) / 2
        first = slices / sum(factor**at for at in range(slices))
        low, high = (factor, high) if first > skew else (low, factor)
    weights = [high**at for at in range(slices)]
    return tuple(weight / sum(weights) for weight in weights)


class Generated(Sequence[SparseVector]):
    """k of n elements for each of `size` workers, ascending; made anew whenever they are asked for, alike
    each time.

    Values are those of a Laplace distribution's largest, ln(n/k) and something exponential, with a sign that
    is the element's: they add up where workers selected alike.

    Args:
        k: None: what the density makes of n.

    Raises:
        ValueError: a density, an overlap or a share out of range.
    """

    def __init__(self, statistics: Statistics, n: int, size: int, seed: int = 0) -> None:
        self.n, self.size, self.seed = n, size, seed
        self.k = min(n, max(1, int(statistics.density * n)))
        self.tail = math.log(n / self.k)
        popularity = popularities(statistics, n, np.random.default_rng(seed))
        self.elements = np.flatnonzero(popularity > UNPOPULAR * statistics.density)  # (m,) that are drawn
        # (m,) where an element's stretch of a line ends
        self.reach = np.cumsum(-np.log1p(-popularity[self.elements]))

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, rank: int) -> SparseVector: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[SparseVector]: ...
    def __getitem__(self, rank: int | slice) -> SparseVector | Sequence[SparseVector]:
        if isinstance(rank, slice):
            return [self[each] for each in range(*rank.indices(self.size))]
        if not 0 <= rank < self.size:
            raise IndexError(rank)
        own = np.random.default_rng([self.seed, rank + 1])
        indices = self._exactly_k(self._drawn(own), own)
        magnitudes = self.tail + own.standard_exponential(self.k, dtype=np.float32)
        is_negative = (indices * HASH >> 16) & 1
        values = np.where(is_negative, -magnitudes, magnitudes).astype(np.float32)
        return SparseVector(torch.from_numpy(indices), torch.from_numpy(values))

    def _drawn(self, own: np.random.Generator) -> np.ndarray:
        """Distinct elements, ascending, mostly some more than k: points at random on the line of all
        stretches hit an element of popularity p with probability p.
        """
        total = float(self.reach[-1])
        many = own.poisson(total * (1 + MORE / math.sqrt(self.k)))
        spaces = own.standard_exponential(many + 1)  # between points that are in order already
        points = np.cumsum(spaces)
        hit = np.searchsorted(self.reach, points[:-1] * (total / points[-1]), side="right")
        hit = np.minimum(hit, len(self.reach) - 1)  # a point that was rounded beyond the end
        drawn: np.ndarray = self.elements[hit[np.diff(hit, prepend=-1) > 0]]
        return drawn

    def _exactly_k(self, indices: np.ndarray, own: np.random.Generator) -> np.ndarray:
        """Some left out, or some more at random."""
        if len(indices) > self.k:
            return np.delete(indices, own.choice(len(indices), len(indices) - self.k, replace=False))
        while len(indices) < self.k:
            more = own.integers(self.n, size=self.k - len(indices))
            indices = np.union1d(indices, more)
        return indices


def popularities(statistics: Statistics, n: int, rng: np.random.Generator) -> np.ndarray:
    """(n,) float64. In each slice their mean is the slice's density, and what two workers have in common of
    it is `overlap`, or as much as chance makes of a slice so full.
    """
    density, overlap, shares = statistics
    ranges.check_value("density", density, PositiveFraction)
    ranges.check_value("overlap", overlap, NonNegativeFraction)
    borders = [n * at // len(shares) for at in range(len(shares) + 1)]
    found = []
    for share, start, end in zip(shares, borders, borders[1:], strict=False):
        mean = min(1.0, share * density * n / max(1, end - start))
        found.append(popularities_of_slice(mean, overlap, end - start, rng))
    return np.concatenate(found)


def popularities_of_slice(mean: float, overlap: float, length: int, rng: np.random.Generator) -> np.ndarray:
    """Beta-distributed, with this mean and E[p^2] / E[p] = overlap; all alike where chance does as much."""
    if not mean or overlap <= mean:
        return np.full(length, min(mean, MOST_POPULAR))
    together = (1 - overlap) / (overlap - mean)  # a + b
    if not together:
        return np.where(rng.random(length) < mean, MOST_POPULAR, 0.0)
    popularity = rng.beta(mean * together, (1 - mean) * together, length)
    return np.minimum(popularity, MOST_POPULAR, out=popularity)
