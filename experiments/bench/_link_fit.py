"""Alpha and beta of a link from measured times: relative least squares, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.worker.link_probe import fitted
from sparsify.cost import Cost

RESAMPLES = 500


class Number(NamedTuple):
    """With its 95 % interval."""

    value: float
    low: float
    high: float


class Fit(NamedTuple):
    """seconds = alpha x messages + beta x bytes."""

    alpha_s: Number
    beta_s_per_byte: Number
    residuals: list[float]  # fitted / measured - 1 of each size, in their order


def fit(costs: Sequence[Cost], samples: Sequence[Sequence[float]]) -> Fit:
    """To the medians of samples, seconds, of each cost; repetitions are resampled for the intervals."""
    measured = np.array([np.median(each) for each in samples])
    alpha, beta = fitted(costs, measured)
    draws = np.random.default_rng(0)
    drawn = np.array([
        np.median(draws.choice(each, (RESAMPLES, len(each))), axis=1) for each in samples
    ])  # fmt: skip
    low, high = np.quantile([fitted(costs, seconds) for seconds in drawn.T], (0.025, 0.975), axis=0)
    predicted = np.array([alpha * cost.messages + beta * cost.sent_bytes for cost in costs])
    return Fit(
        Number(alpha, float(low[0]), float(high[0])),
        Number(beta, float(low[1]), float(high[1])),
        [float(residual) for residual in predicted / measured - 1],
    )


def together(found: Mapping[str, tuple[Sequence[Cost], Sequence[Sequence[float]]]]) -> Fit:
    """One alpha and beta for all kinds of messages."""
    costs = [cost for of_kind, _ in found.values() for cost in of_kind]
    return fit(costs, [each for _, samples in found.values() for each in samples])
