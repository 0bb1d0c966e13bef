"""Means over consecutive blocks of a job, with intervals that allow for the likeness of neighbours.

The times of a job drift: neighbouring blocks of 196 iterations correlate by 0.8 and more, so that 34 of them
say as much as three or four independent ones. An interval that takes them for independent is several times
too narrow.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from analysis.stats import CONFIDENCE, LOGGED, UNBOUNDED, Bounds, Estimate

JackknifeParts = NDArray[
    np.float64
]  # (1 + blocks,): what the table says, then what it says without each block
BLOCKS = 34  # of 196 iterations: four validations, which come every 49 iterations
# Correlations of neighbours that may be, all alike before the blocks are seen. Of 34 blocks with one of 0.98
# nobody can tell the mean.
CORRELATIONS = np.linspace(0, 0.98, 50)


def leave_one_block_out_sums(columns: np.ndarray, blocks: int = BLOCKS) -> np.ndarray:
    """Return sums over (iterations, m) columns: of all, then of all but each block; (1 + blocks, m).

    Means, ratios and slopes follow from sums by the same arithmetic for the table and for each rest.
    """
    if blocks > len(columns):
        raise ValueError(f"{len(columns)} iterations can't be cut into {blocks} blocks")
    block_sums = np.stack([part.sum(axis=0) for part in np.array_split(columns, blocks)])
    total = columns.sum(axis=0, keepdims=True)
    return np.concatenate([total, total - block_sums])


def jackknife_estimate(parts: JackknifeParts, bounds: Bounds = UNBOUNDED) -> Estimate:
    """Return the value of the table, which is first of `parts`, with the interval that its blocks give.

    The jackknife's pseudo-values, one a block in the order of time, have the statistic as their mean.

    Args:
        parts: the statistic of the table, then without each block.
        bounds: what the quantity can't reach; the interval is cut there.
    """
    whole, values_without_block = float(parts[0]), parts[1:]
    blocks = len(values_without_block)
    centred_pseudo_values = (blocks - 1) * (
        values_without_block.mean() - values_without_block
    )  # less the statistic itself, so that its mean is 0
    low, high = (
        float(np.clip(whole + edge, *bounds)) for edge in autocorrelated_mean_interval(centred_pseudo_values)
    )
    return Estimate(whole, low, high, blocks, LOGGED)


def autocorrelated_mean_interval(series: np.ndarray) -> tuple[float, float]:
    """Return the interval of the mean of an AR(1) series whose correlation of neighbours is not known.

    For each of `CORRELATIONS` the mean has a Student's distribution; they are weighted by how likely the
    series is under each (mean and variance integrated out, with flat and scale-free priors). By simulation
    of 34 samples the interval covers the mean in 95 % of series with a correlation of 0.76, in 93 % with
    0.88, and in 98 % without one. With the correlation plugged in, which a short series underestimates, it
    would in 88, 82 and 96 %.
    """
    import scipy.optimize  # as in analysis.stats: commands that only list need not wait for it
    import scipy.special

    n = len(series)
    r = CORRELATIONS[:, None]
    whitened_series, whitened_ones = (_whiten(vector, r) for vector in (series, np.ones(n)))
    information = (whitened_ones**2).sum(axis=1)
    means = (whitened_series * whitened_ones).sum(axis=1) / information
    squared_residuals = (whitened_series**2).sum(axis=1) - means**2 * information
    if not squared_residuals.max() > 0:
        return float(series.mean()), float(series.mean())
    errors = np.sqrt(squared_residuals / (n - 1) / information)
    log_likelihoods = -((n - 1) * np.log((1 - CORRELATIONS**2) * squared_residuals) + np.log(information)) / 2
    posterior_weights = np.exp(log_likelihoods - log_likelihoods.max())
    posterior_weights /= posterior_weights.sum()

    def below(x: float, share: float) -> float:
        return float(posterior_weights @ scipy.special.stdtr(n - 1, (x - means) / errors)) - share

    search_margin = 1e4 * errors.max()
    low, high = (
        float(
            scipy.optimize.brentq(
                below, means.min() - search_margin, means.max() + search_margin, args=(share,)
            )
        )
        for share in ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    )
    return low, high


def _whiten(series: np.ndarray, r: np.ndarray) -> np.ndarray:
    """Return (correlations, n): the series as independent samples of its variance, if r is right."""
    first, steps = np.broadcast_to(series[:1], r.shape), series[1:] - r * series[:-1]
    return np.concatenate([first, steps / np.sqrt(1 - r**2)], axis=1)


def combine_independent_estimates(statistic: Callable[..., float], *values: Estimate) -> Estimate:
    """Return a statistic of estimates, with an interval from theirs.

    The squares of what each estimate moves it by add up. This is MOVER (Zou and Donner 2008,
    doi:10.1002/sim.3095), for a statistic that rises or falls in each. It takes their errors for independent.
    The errors of one job's compression and iteration have the same sign, so that their ratio is known better
    than it says.
    """
    arguments = [value.value for value in values]
    combined_value = statistic(*arguments)
    squares_down = squares_up = 0.0
    for i, value in enumerate(values):
        if value.low is None or value.high is None:
            raise ValueError(f"{value} has no interval that could be combined")
        changes = [
            statistic(*arguments[:i], edge, *arguments[i + 1 :]) - combined_value
            for edge in (value.low, value.high)
        ]
        squares_down += min(0.0, *changes) ** 2
        squares_up += max(0.0, *changes) ** 2
    least_sampled = min(values, key=lambda value: value.n)
    return Estimate(
        combined_value,
        combined_value - squares_down**0.5,
        combined_value + squares_up**0.5,
        least_sampled.n,
        least_sampled.sample_kind,
    )
