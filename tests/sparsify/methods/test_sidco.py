"""SIDCo against the paper's fits in numpy and scipy."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy import special

import sparsify
from sparsify.methods import sidco
from sparsify.methods.sidco import Sidco, stage_ratios
from tests.sparsify.methods.replays import CONTEXT, STEPS, Array, N, count, follows, heavy, run


def sidco_threshold(acc: Array, rho: float, stages: int, fit: sidco.FittedTail) -> float:
    """Abdelmoniem et al. 2021, with sets of exceedances as such and scipy's quantile."""
    u = np.abs(acc)
    stages = min(stages, max(1, math.ceil(math.log2(1 / rho))))
    single = stages == 1 or rho >= 0.25
    ratios = [rho] if single else [0.25] + [(rho / 0.25) ** (1 / (stages - 1))] * (stages - 1)
    eta, low = 0.0, 0.0
    for stage, d in enumerate(ratios):
        if stage:
            u = u[u >= min(eta, np.abs(acc).max())]
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
            a, c = mean / 2 * (ratio + 1), (ratio - 1) / 2
            eta = a * (1 - d**c) / c + low
    return min(eta, float(np.abs(acc).max()))


class SidcoWorker:
    """One worker, with a number of stages that adapts every five steps."""

    def __init__(self, rho: float, fit: sidco.FittedTail) -> None:
        self.rho, self.fit, self.stages = rho, fit, [1]
        self.achieved: list[float] = []

    def choose(self, acc: Array) -> Array:
        chosen = np.flatnonzero(np.abs(acc) >= sidco_threshold(acc, self.rho, self.stages[-1], self.fit))
        self.achieved.append(len(chosen) / (self.rho * len(acc)))
        if len(self.achieved) == 5:
            mean = np.mean(self.achieved)
            stages = self.stages[-1] + (1 if mean < 0.8 else -1 if mean > 1.2 else 0)
            self.stages.append(min(max(stages, 1), math.ceil(math.log2(1 / self.rho))))
            self.achieved = []
        return chosen


def light(rank: int, step: int, shape: tuple[int, ...] = (N,)) -> torch.Tensor:
    """(N,) gradients without a tail: of an exponential distribution's single stage they reach too few."""
    own = torch.Generator().manual_seed(100 * step + rank)
    return torch.rand(shape, generator=own, dtype=torch.float64)


@pytest.mark.parametrize("gradients", [heavy, light])
@pytest.mark.parametrize("fit", get_args(sidco.FittedTail))
def test_sidco_follows_its_algorithm(fit: sidco.FittedTail, gradients: Any) -> None:
    k = int(0.05 * N)
    lived = run("sidco", density=0.05, make=gradients, fit=fit)
    workers = [SidcoWorker(k / N, fit) for _ in lived]
    follows(lived, lambda acc, step: [w.choose(a) for w, a in zip(workers, acc, strict=True)])
    assert lived[0].host_syncs == [2] * STEPS
    if fit == "exponential" and gradients is light:
        assert workers[0].stages[-1] > 1  # so this run adapts, as the reference does


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("gradients", [heavy, light])
@pytest.mark.parametrize("fit", get_args(sidco.FittedTail))
def test_every_stage_of_sidco_fits_as_published(fit: sidco.FittedTail, gradients: Any, stages: int) -> None:
    acc, rho = gradients(0, 0), 0.02
    selector = Sidco(fit)
    found = selector.threshold(acc, stage_ratios(rho, stages, 0.25), selector.init(acc, CONTEXT).workspace)
    # Sums in another order, and a variance as a difference of two means
    assert found.item() == pytest.approx(sidco_threshold(acc.numpy(), rho, stages, fit), rel=1e-9)


@pytest.mark.parametrize("alpha", [1e-3, 0.05, 0.5, 1.0, 3.0, 50.0, 5e5])
@pytest.mark.parametrize("tail", [1e-6, 0.001, 0.25, 1.0])
def test_the_gamma_quantile_is_scipys(alpha: float, tail: float) -> None:
    found = sidco.gamma_quantile(*(torch.tensor(x, dtype=torch.float64) for x in (alpha, tail)))
    # 2^-48 of a bracket of at most a few times alpha + 1, and what the two libraries differ by
    assert found.item() == pytest.approx(special.gammainccinv(alpha, tail), rel=1e-9, abs=1e-9)


def test_stages_share_what_the_first_leaves() -> None:
    assert stage_ratios(0.001, 1, 0.25) == [0.001]
    ratios = stage_ratios(0.001, 4, 0.25)
    assert ratios[0] == 0.25
    assert math.prod(ratios) == pytest.approx(0.001)
    assert len(stage_ratios(0.001, 99, 0.25)) == 10  # ceil(log2 1000)
    assert stage_ratios(0.3, 2, 0.25) == [0.3]  # the code divides 0.3 among them by ratios above 1


def test_published_constants_of_sidco() -> None:
    known = sparsify.defaults("sidco")
    assert (known["first_ratio"], known["adapt_every"], known["tolerance"]) == (0.25, 5, 0.2)


def stages_after(
    periods: list[float], adapt: sidco.StageRule = "published", ratio: float = 0.001
) -> list[int]:
    """Stages after each period of five steps in which selected / k was as given."""
    selector = Sidco(adapt=adapt)
    state, found = selector.init(torch.zeros(1), CONTEXT), []
    for achieved in periods:
        for _ in range(5):
            selector.adapt_stages(achieved, ratio, state)
        found.append(state.stages)
    return found


def test_stages_adapt_every_five_steps_where_the_mean_leaves_its_band() -> None:
    assert stages_after([0.1, 0.79, 0.81, 1.19, 1.21, 1.21, 5.0]) == [2, 3, 3, 3, 2, 1, 1]
    assert stages_after([0.1] * 12)[-1] == 10  # ceil(log2 1000)


def test_as_published_a_heavy_tail_keeps_sidco_at_one_stage_and_several_times_k() -> None:
    """It answers too many with one stage less, but has only one; `reversing` tries one more."""
    generator = torch.Generator().manual_seed(0)
    normals = torch.randn(4, 30_000, generator=generator, dtype=torch.float64)
    student = normals[0] / normals[1:].square().mean(dim=0).sqrt()
    counts: dict[str, list[float]] = {}
    for adapt in get_args(sidco.StageRule):
        selector = Sidco(adapt=adapt)
        state = selector.init(student, CONTEXT)
        counts[adapt] = [count(selector, student, 30, state) / 30 for _ in range(40)]
    assert min(counts["published"]) > 4
    assert max(counts["reversing"][-20:]) < 1.5
    assert stages_after([5.0, 4.0, 3.0], "reversing") == [2, 3, 4]
    assert stages_after([0.1, 0.05], "reversing") == [2, 1]  # the second stage made it worse


def test_every_bucket_of_sidco_adapts_on_its_own() -> None:
    """In the authors' code one number of stages serves all tensors."""
    selector = Sidco()
    states = [selector.init(torch.zeros(2000), CONTEXT) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        light = torch.rand(2000, generator=generator)
        laplace = torch.empty(2000).exponential_(generator=generator)
        for acc, state in zip((light, laplace), states, strict=True):
            count(selector, acc, 100, state)
    assert states[0].stages > states[1].stages == 1


@pytest.mark.parametrize("fit", get_args(sidco.FittedTail))
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_sets_that_nothing_exceeds_do_no_harm(fit: sidco.FittedTail, stages: int) -> None:
    """Equal magnitudes, one nonzero element, none: `min()` of an empty set ends the authors' code."""
    for acc, expected in [
        (torch.full((100,), -3.0), 100),  # the largest are selected, and all are
        (torch.eye(1, 100)[0], 1),
        (torch.zeros(100), 0),
        (torch.full((100,), 1e-30), 100),
    ]:
        selector = Sidco(fit)
        state = selector.init(acc, CONTEXT)
        state.stages = stages
        assert count(selector, acc, 2, state) == expected
