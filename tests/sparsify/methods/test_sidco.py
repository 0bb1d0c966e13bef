"""SIDCo against the paper's fits in numpy and scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy import special

from sparsify.methods import sidco
from sparsify.methods.sidco import SidcoSelector, stage_ratios
from tests.sparsify.methods.replays import (
    CONTEXT,
    Array,
    N,
    check_choices,
    count_selected,
    draw_heavy,
    run,
)

FITS: Sequence[sidco.FittedTail] = get_args(sidco.FittedTail)


def fit_threshold(acc: Array, rho: float, stages: int, fit: sidco.FittedTail) -> float:
    """Abdelmoniem et al. 2021, with sets of exceedances as such and scipy's quantile.

    The ratios of stages, and how their number adapts, have tests of their own.
    """
    u = np.abs(acc)
    largest = float(u.max())
    eta = low = 0.0
    for stage, d in enumerate(stage_ratios(rho, stages, 0.25)):
        if stage:
            u = u[u >= min(eta, largest)]
            low = u.min()
        mean = (u - low).mean()
        if fit == "exponential":
            eta = -mean * math.log(d) + low
        elif fit == "gamma" and not stage:
            s = math.log(mean) - np.log(u).mean()
            alpha = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
            eta = mean / alpha * special.gammaincinv(alpha, 1 - d)
        elif len(u) == 1:
            eta = low
        else:
            ratio = mean**2 / (u - low).var()
            c = (ratio - 1) / 2
            eta = mean / 2 * (ratio + 1) * (1 - d**c) / c + low
    return min(eta, largest)


def draw_light(rank: int, step: int, shape: tuple[int, ...] = (N,)) -> torch.Tensor:
    """Draw gradients without a tail: of an exponential distribution's single stage they reach too few."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("draw", [draw_heavy, draw_light])
@pytest.mark.parametrize("fit", FITS)
def test_sidco_follows_its_algorithm(fit: sidco.FittedTail, draw: Any) -> None:
    lived = run("sidco", density=0.05, make=draw, fit=fit)
    rho = int(0.05 * N) / N
    selector = sidco.SidcoSelector(fit)
    states = [selector.init(torch.zeros(1), CONTEXT) for _ in lived]

    def choose(accs: list[Array], step: int) -> list[Array]:
        chosen = []
        for acc, state in zip(accs, states, strict=True):
            chosen.append(np.flatnonzero(np.abs(acc) >= fit_threshold(acc, rho, state.stages, fit)))
            selector.adapt_stages(len(chosen[-1]) / (rho * N), rho, state)
        return chosen

    check_choices(lived, choose)
    if fit == "exponential" and draw is draw_light:
        assert states[0].stages > 1  # so this run adapts, as the reference does


@pytest.mark.parametrize("draw", [draw_heavy, draw_light])
@pytest.mark.parametrize("fit", FITS)
def test_every_stage_of_sidco_fits_as_published(fit: sidco.FittedTail, draw: Any) -> None:
    acc = draw(0, 0)
    selector = SidcoSelector(fit)
    workspace = selector.init(acc, CONTEXT).workspace
    for stages in (1, 2, 3, 5):
        found = selector.estimate_threshold(acc, stage_ratios(0.02, stages, 0.25), workspace).item()
        # Sums in another order, and a variance as a difference of two means
        assert found == pytest.approx(fit_threshold(acc.numpy(), 0.02, stages, fit), rel=1e-9), stages


@pytest.mark.parametrize("alpha", [1e-3, 0.05, 0.5, 1.0, 3.0, 50.0, 5e5])
def test_the_gamma_quantile_is_scipys(alpha: float) -> None:
    for tail in (1e-6, 0.001, 0.25, 1.0):
        found = sidco.gamma_quantile(*torch.tensor([alpha, tail], dtype=torch.float64)).item()
        # 2^-48 of a bracket of at most a few times alpha + 1, and what the two libraries differ by
        assert found == pytest.approx(special.gammainccinv(alpha, tail), rel=1e-9, abs=1e-9), tail


def test_stages_share_what_the_first_leaves() -> None:
    assert stage_ratios(0.001, 3, 0.25) == pytest.approx([0.25, 0.004**0.5, 0.004**0.5])
    assert len(stage_ratios(0.001, 99, 0.25)) == 10  # ceil(log2 1000)
    assert stage_ratios(0.3, 2, 0.25) == [0.3]  # the code divides 0.3 among them by ratios above 1


@pytest.mark.parametrize(
    ("adapt", "periods", "expected"),
    [
        ("published", [0.1, 0.79, 0.81, 1.19, 1.21, 1.21, 5.0], [2, 3, 3, 3, 2, 1, 1]),
        ("published", [0.1] * 12, [2, 3, 4, 5, 6, 7, 8, 9, 10, 10, 10, 10]),  # ceil(log2 1000)
        ("reversing", [5.0, 4.0, 3.0], [2, 3, 4]),
        ("reversing", [0.1, 0.05], [2, 1]),  # the second stage made it worse
    ],
)
def test_stages_adapt_every_five_steps_where_the_mean_leaves_its_band(
    adapt: sidco.StageRule, periods: list[float], expected: list[int]
) -> None:
    """In each period of five steps selected / k is as given."""
    selector = SidcoSelector(adapt=adapt)
    state = selector.init(torch.zeros(1), CONTEXT)
    stages = []
    for achieved in periods:
        for _ in range(5):
            selector.adapt_stages(achieved, 0.001, state)
        stages.append(state.stages)
    assert stages == expected


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_sets_that_nothing_exceeds_do_no_harm(fit: sidco.FittedTail, stages: int) -> None:
    """Equal magnitudes, one nonzero element, none: `min()` of an empty set ends the authors' code."""
    for acc, expected in (
        (torch.full((100,), -3.0), 100),  # the largest are selected, and all are
        (torch.eye(1, 100)[0], 1),
        (torch.zeros(100), 0),
        (torch.full((100,), 1e-30), 100),
    ):
        selector = SidcoSelector(fit)
        state = selector.init(acc, CONTEXT)
        state.stages = stages
        assert count_selected(selector, acc, 2, state) == expected
