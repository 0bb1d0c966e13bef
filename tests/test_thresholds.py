"""Gaussian-k, hard threshold, SIDCo, Stable Top-K and ScaleCom against their papers' rules in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special

import sparsify
from sparsify import cost, host
from sparsify.aggregate import Sparsifier
from sparsify.kernels.vectorised import Vectorised
from sparsify.methods import gaussiank, hardthreshold, scalecom, sidco, stable_topk
from sparsify.methods.gaussiank import GaussianGuess, GaussianThreshold
from sparsify.methods.sidco import Sidco, stage_ratios
from sparsify.methods.stable_topk import StableBlocks
from sparsify.parts import Place, Sparse
from tests.laws import Lived, live

PLACE = Place(seed=0, rank=0, bucket=0)
N, SIZE, STEPS = 227, 3, 12
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # float64, sums of three in another order
Array = np.ndarray[Any, Any]
Chooser = Callable[[list[Array], int], list[Array]]  # everybody's acc, the step -> everybody's indices


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def choose(selector: Any, acc: torch.Tensor, k: int, state: Any = None) -> torch.Tensor:
    """(k',) indices, by a worker alone."""
    state = selector.init(acc, PLACE) if state is None else state
    return selector.select(acc, k, Alone(), state).indices


def count(selector: Any, acc: torch.Tensor, k: int, state: Any = None) -> int:
    return choose(selector, acc, k, state).numel()


def run(name: str, density: float, make: Any = None, **others: Any) -> list[Lived]:
    method = sparsify.build(name, density=density, **others)
    make = make or (lambda rank, step, shape: heavy(rank, step))
    return live(method, SIZE, STEPS, make, [(N,)])


def heavy(rank: int, step: int) -> torch.Tensor:
    """(N,) gradients, heavier in the tails than normal."""
    own = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(N, generator=own, dtype=torch.float64) ** 3


def follows(lived: list[Lived], choose: Chooser, beta: float = 1.0, send: Any = lambda x: x) -> None:
    """Do the updates agree with error feedback around this choice?"""
    memory = [np.zeros(N) for _ in lived]
    for step in range(STEPS):
        acc = [m + one.gradients[step].numpy() for m, one in zip(memory, lived, strict=True)]
        total = np.zeros(N)
        chosen = choose(acc, step)
        for rank, indices in enumerate(chosen):
            sent = np.zeros(N)
            sent[indices] = send(acc[rank][indices])
            total += sent
            memory[rank] = (1 - beta) * memory[rank] + beta * (acc[rank] - sent)
            assert lived[rank].selected[step] == len(indices)
        np.testing.assert_allclose(lived[0].updates[step].numpy(), total / len(lived), **EXACT)
    for one, m in zip(lived, memory, strict=True):
        np.testing.assert_allclose(one.residual.numpy(), m, rtol=1e-10, atol=1e-10)


def top(acc: Array, k: int) -> Array:
    return np.argsort(-np.abs(acc), kind="stable")[:k]


# Gaussian-k


def gaussian_published(acc: Array, k: int) -> Array:
    """hclhkbu/GaussianK-SGD, compression.py, in our words."""
    threshold = acc.mean() - NormalDist().inv_cdf(k / len(acc) / 2) * acc.std(ddof=1)
    for _ in range(3):
        chosen = np.flatnonzero(np.abs(acc) > threshold)
        if len(chosen) < 2 * k / 3:
            threshold *= 0.5
        elif len(chosen) > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return chosen


def test_gaussian_k_as_published_follows_its_code() -> None:
    k = int(0.05 * N)
    follows(
        run("gaussiank", 0.05, rule="published"), lambda acc, step: [gaussian_published(a, k) for a in acc]
    )


def test_bounded_gaussian_k_selects_the_k_largest() -> None:
    k = int(0.05 * N)
    follows(run("gaussiank", 0.05), lambda acc, step: [top(a, k) for a in acc])


def normal(n: int = 200_000) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


BUCKETS: dict[str, tuple[torch.Tensor, float, float]] = {
    "normal": (normal(), 0.9, 1.2),
    "normal, clamped to one sigma": (normal().clamp(-1, 1), 550, 560),
    "uniform": (torch.rand(200_000, generator=torch.Generator().manual_seed(0)) * 2 - 1, 0, 0),
    "a few outliers": (normal() * torch.where(torch.arange(200_000) % 10_000 == 0, 1000.0, 1.0), 0.05, 0.15),
}


@pytest.mark.parametrize(("acc", "low", "high"), BUCKETS.values(), ids=BUCKETS)
def test_the_published_gaussian_rule_misses_k_where_the_bounded_one_does_not(
    acc: torch.Tensor, low: float, high: float
) -> None:
    k = 200
    assert low <= count(GaussianThreshold(), acc, k) / k <= high
    assert count(GaussianGuess(), acc, k) == k


def test_in_a_merged_bucket_with_residuals_the_published_rule_sends_a_small_part_of_k() -> None:
    """20 layers with scales from 0.01 to 1: a tenth of what was asked for, at most."""
    n, k = 30_000, 30  # below the size at which torch starts threads, which would wait for busy cores
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-2, 0, 20).repeat_interleave(n // 20)
    counts: dict[str, list[int]] = {}
    for selector in (GaussianThreshold(), GaussianGuess()):
        residual = torch.zeros(n)
        state = selector.init(residual, PLACE)
        counts[type(selector).__name__] = one = []
        for _ in range(100):
            residual.add_(torch.randn(n, generator=generator) * scales)
            chosen = choose(selector, residual, k, state)
            residual[chosen] = 0
            one.append(len(chosen))
    assert np.median(counts["GaussianThreshold"]) < 0.1 * k
    assert set(counts["GaussianGuess"]) == {k}


def test_a_clipped_signal_costs_the_bounded_rule_an_exact_top_k_instead_of_a_flood() -> None:
    acc, k = normal().clamp(-1, 1), 200
    selector = GaussianGuess()
    assert selector.candidates(acc, k, selector.init(acc, PLACE)) is None
    assert len(set(choose(selector, acc, k).tolist())) == k


def test_a_normal_bucket_takes_the_bounded_rule_three_host_synchronisations() -> None:
    acc, before = normal(), host.waits()
    count(GaussianGuess(), acc, 200)
    assert host.waits() - before == 3


def test_published_constants_of_gaussian_k() -> None:
    assert gaussiank.PUBLISHED_PASSES == 3
    assert (gaussiank.FEWEST, gaussiank.MOST, gaussiank.DOWN, gaussiank.UP) == (2 / 3, 4 / 3, 0.5, 1.5)
    standard = torch.tensor([-1.0, 1.0], dtype=torch.float64)  # sigma sqrt 2, divided by n - 1
    found = gaussiank.gaussian_threshold(standard, 0.001).item()
    assert found == pytest.approx(3.2905 * math.sqrt(2), rel=1e-4)


# Hard threshold


def test_hard_threshold_sends_what_reaches_lambda() -> None:
    k = int(0.05 * N)
    lived = run("hardthreshold", 0.05)
    follows(lived, lambda acc, step: [np.flatnonzero(np.abs(a) >= 1 / (2 * math.sqrt(k))) for a in acc])
    assert lived[0].host_syncs == [2] * STEPS


def test_stroms_words_send_tau_and_keep_the_rest() -> None:
    tau = 0.75
    lived = run("hardthreshold", 0.05, threshold=tau, send="strom")
    follows(
        lived,
        lambda acc, step: [np.flatnonzero(np.abs(a) >= tau) for a in acc],
        send=lambda values: tau * np.sign(values),
    )
    longest = max(one.selected[0] for one in lived)
    assert lived[0].wire_bytes[0] == cost.gather_uneven(4 * longest, SIZE).sent_bytes


def test_lambda_for_resnet_18_is_the_published_one() -> None:
    """4.73e-3 in kljp's run.sh, at density 0.001 of 11,173,962 parameters."""
    assert hardthreshold.threshold_for(None, int(0.001 * 11_173_962)) == pytest.approx(4.73e-3, abs=5e-6)


def test_gradients_that_are_all_negative_are_selected_by_magnitude() -> None:
    """GRACE lowers the threshold to the largest signed element: here it would select all."""
    acc = -torch.tensor([0.1, 0.2, 0.3, 0.9])
    assert count(hardthreshold.HardThreshold(0.5), acc, 1) == 1


def test_a_threshold_above_everything_sends_only_the_lengths() -> None:
    for send in ("values", "strom"):
        lived = run("hardthreshold", 0.05, threshold=1e6, send=send)
        assert {count for one in lived for count in one.selected} == {0}
        assert set(lived[0].wire_bytes) == {8 * (SIZE - 1)}
        assert not torch.stack(lived[0].updates).any()


def test_words_hold_31_bits_of_index_and_a_sign() -> None:
    part = Sparse(torch.tensor([0, 5, 2**31 - 1, 0]), torch.tensor([1.0, -2.0, -3.0, -4.0]))
    written = hardthreshold.words(part, 2**31)
    assert written.dtype == torch.int32
    read = hardthreshold.signed(written, 0.5, torch.float64)
    assert read.indices.tolist() == part.indices.tolist()
    assert read.values.tolist() == [0.5, -0.5, -0.5, -0.5]
    with pytest.raises(ValueError, match="needs wider indices than Strom's 31 bits"):
        hardthreshold.words(part, 2**31 + 1)


# SIDCo


def sidco_threshold(acc: Array, rho: float, stages: int, fit: str) -> float:
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

    def __init__(self, rho: float, fit: str) -> None:
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


def light(rank: int, step: int) -> torch.Tensor:
    """(N,) gradients without a tail: of an exponential distribution's single stage they reach too few."""
    own = torch.Generator().manual_seed(100 * step + rank)
    return torch.rand(N, generator=own, dtype=torch.float64)


@pytest.mark.parametrize("gradients", [heavy, light])
@pytest.mark.parametrize("fit", sidco.FITS)
def test_sidco_follows_its_algorithm(fit: str, gradients: Any) -> None:
    k = int(0.05 * N)
    lived = run("sidco", 0.05, lambda rank, step, shape: gradients(rank, step), fit=fit)
    workers = [SidcoWorker(k / N, fit) for _ in lived]
    follows(lived, lambda acc, step: [w.choose(a) for w, a in zip(workers, acc, strict=True)])
    assert lived[0].host_syncs == [2] * STEPS
    if fit == "exponential" and gradients is light:
        assert workers[0].stages[-1] > 1  # so this run adapts, as the reference does


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("gradients", [heavy, light])
@pytest.mark.parametrize("fit", sidco.FITS)
def test_every_stage_of_sidco_fits_as_published(fit: str, gradients: Any, stages: int) -> None:
    acc, rho = gradients(0, 0), 0.02
    selector = Sidco(fit)
    found = selector.threshold(acc, stage_ratios(rho, stages, 0.25), selector.init(acc, PLACE).scratch)
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


def stages_after(periods: list[float], adapt: str = "published", ratio: float = 0.001) -> list[int]:
    """Stages after each period of five steps in which selected / k was as given."""
    selector = Sidco(adapt=adapt)
    state, found = selector.init(torch.zeros(1), PLACE), []
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
    for adapt in sidco.ADAPTATIONS:
        selector = Sidco(adapt=adapt)
        state = selector.init(student, PLACE)
        counts[adapt] = [count(selector, student, 30, state) / 30 for _ in range(40)]
    assert min(counts["published"]) > 4
    assert max(counts["reversing"][-20:]) < 1.5
    assert stages_after([5.0, 4.0, 3.0], "reversing") == [2, 3, 4]
    assert stages_after([0.1, 0.05], "reversing") == [2, 1]  # the second stage made it worse


def test_every_bucket_of_sidco_adapts_on_its_own() -> None:
    """In the authors' code one number of stages serves all tensors."""
    selector = Sidco()
    states = [selector.init(torch.zeros(2000), PLACE) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        light = torch.rand(2000, generator=generator)
        laplace = torch.empty(2000).exponential_(generator=generator)
        for acc, state in zip((light, laplace), states, strict=True):
            count(selector, acc, 100, state)
    assert states[0].stages > states[1].stages == 1


@pytest.mark.parametrize("fit", sidco.FITS)
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_sets_that_nothing_exceeds_do_no_harm(fit: str, stages: int) -> None:
    """Equal magnitudes, one nonzero element, none: `min()` of an empty set ends the authors' code."""
    for acc, expected in [
        (torch.full((100,), -3.0), 100),  # the largest are selected, and all are
        (torch.eye(1, 100)[0], 1),
        (torch.zeros(100), 0),
        (torch.full((100,), 1e-30), 100),
    ]:
        selector = Sidco(fit)
        state = selector.init(acc, PLACE)
        state.stages = stages
        assert count(selector, acc, 2, state) == expected


# Stable Top-K


def stable_reference(block: int, every: int, density: float) -> Chooser:
    """The slides' scheme with an l1 score: choose buckets every N steps, else apply the same mask."""
    k, mask = int(density * N), list[Array]()
    block = min(block, k)

    def choose(acc: list[Array], step: int) -> list[Array]:
        if step % every == 0:
            scores = [sum(np.abs(a[i : i + block]).sum() for a in acc) for i in range(0, N, block)]
            best = np.argsort(-np.array(scores), kind="stable")[: k // block]
            mask[:] = [np.concatenate([np.arange(N)[b * block : (b + 1) * block] for b in sorted(best)])]
        return mask * SIZE

    return choose


@pytest.mark.parametrize(("block", "every"), [(4, 5), (10, 1), (1, 3), (10_000, 100)])
def test_stable_top_k_chooses_buckets_every_n_steps(block: int, every: int) -> None:
    lived = run("stable_topk", 0.2, block=block, every=every)
    follows(lived, stable_reference(block, every, 0.2))


@pytest.mark.parametrize("score", stable_topk.SCORES)
def test_between_choices_indices_stay_and_only_values_travel(score: str) -> None:
    block, every, k = 4, 5, int(0.2 * N)
    lived = run("stable_topk", 0.2, block=block, every=every, score=score)
    supports = [tuple(update.nonzero().flatten().tolist()) for update in lived[0].updates]
    for start in range(0, STEPS, every):
        assert len(set(supports[start : start + every])) == 1
    assert len(set(supports)) == 3
    scores = cost.all_reduce(8 * -(-N // block), SIZE).sent_bytes
    for step, (sent, selected) in enumerate(zip(lived[0].wire_bytes, lived[0].selected, strict=True)):
        values = 8 * selected * 2 * (SIZE - 1) // SIZE  # float64
        assert sent == values + (0 if step % every else scores)
        assert selected <= k
        assert lived[0].host_syncs[step] == (0 if step % every else 1)


def test_choosing_takes_no_host_synchronisation_where_buckets_divide_n() -> None:
    method = sparsify.build("stable_topk", density=0.25, block=4, every=2)
    assert live(method, 3, 4, shapes=[(8, 8)])[0].host_syncs == [0] * 4


@pytest.mark.parametrize(
    ("score", "expected"), [("l1", [0, 1]), ("l2", [4, 5]), ("max", [4, 5]), ("count", [0, 1])]
)
def test_scores_rank_buckets_differently(score: str, expected: list[int]) -> None:
    acc = torch.tensor([3.0, -3.0, 0.1, 0.1, 5.0, 0.0])
    selector = StableBlocks(block=2, score=score)
    chosen = choose(selector, acc, 3)
    assert chosen.tolist() == expected


def test_equal_scores_are_resolved_alike_first_bucket_first() -> None:
    selector = StableBlocks(block=2)
    acc = torch.ones(7)
    chosen = choose(selector, acc, 4)
    assert chosen.tolist() == [0, 1, 2, 3]


def test_another_k_asks_for_another_choice() -> None:
    selector = StableBlocks(block=2, every=100)
    acc = torch.arange(8.0)
    state = selector.init(acc, PLACE)
    assert count(selector, acc, 2, state) == 2
    assert count(selector, acc, 4, state) == 4


def test_a_bucket_that_is_not_chosen_accumulates_and_is_flushed_by_the_next_choice() -> None:
    """Gradients of 1 there, of 2 in the chosen one: after five steps it owes 5, and wins."""

    def make(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor([2.0, 2.0, 1.0, 1.0]).double()

    method = sparsify.build("stable_topk", density=0.5, block=2, every=5)
    lived = live(method, SIZE, 6, make, [(4,)])
    updates = torch.stack(lived[0].updates)
    assert (updates[:5] == torch.tensor([2.0, 2, 0, 0]).double()).all()
    assert updates[5].tolist() == [0, 0, 6, 6]
    assert lived[0].residual.tolist() == [2, 2, 0, 0]


# ScaleCom


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_scalecom_follows_the_leaders_top_k(beta: float) -> None:
    k = int(0.05 * N)
    lived = run("scalecom", 0.05, beta=beta)
    follows(lived, lambda acc, step: [top(acc[step % SIZE], k)] * SIZE, beta)
    expected = cost.broadcast(4 * k, SIZE).sent_bytes + cost.all_reduce(8 * k, SIZE).sent_bytes
    assert lived[0].wire_bytes == [expected] * STEPS
    assert lived[0].host_syncs == [0] * STEPS


def test_only_the_leader_runs_a_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """In kljp's CLT-k all workers do, and all but one throw it away."""
    calls: list[int] = []

    original = Vectorised.top

    def counted(kernel: Vectorised, acc: torch.Tensor, grad: None, k: int) -> Sparse:
        calls.append(k)
        return original(kernel, acc, grad, k)

    monkeypatch.setattr(Vectorised, "top", counted)
    run("scalecom", 0.05)
    assert len(calls) == STEPS


def test_scalecom_is_plain_error_feedback_unless_asked() -> None:
    assert sparsify.defaults("scalecom")["beta"] == 1.0
    assert isinstance(scalecom.scalecom(), Sparsifier)
    assert not scalecom.scalecom().broken_laws()
    assert scalecom.scalecom(beta=0.1).broken_laws()


# All


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("gaussiank", {"rule": "exact"}, "no rule 'exact'; there are: bounded, published"),
        ("gaussiank", {"rule": "published", "slack": 3.0}, "slack=3.0 has no effect"),
        ("gaussiank", {"passes": 0}, "passes=0 is out of range"),
        ("gaussiank", {"slack": 0.5}, "slack=0.5 is out of range"),
        ("hardthreshold", {"threshold": 0.0}, "threshold=0.0 is out of range"),
        ("hardthreshold", {"send": "signs"}, "no send 'signs'; there are: values, strom"),
        ("hardthreshold", {"send": "strom", "value": "fp16"}, "leave out index and value"),
        ("hardthreshold", {"threshold": 1.0, "density_warmup": [0.1]}, "density_warmup has no effect"),
        ("sidco", {"fit": "normal"}, "no fit 'normal'; there are: exponential, gamma, pareto"),
        ("sidco", {"adapt": "never"}, "no adapt 'never'; there are: published, reversing"),
        ("sidco", {"first_ratio": 1.0}, "first_ratio=1.0 is out of range"),
        ("sidco", {"tolerance": 0.0}, "tolerance=0.0 is out of range"),
        ("sidco", {"adapt_every": 0}, "adapt_every=0 is out of range"),
        ("stable_topk", {"score": "sum"}, "no score 'sum'; there are: l1, l2, max, count"),
        ("stable_topk", {"block": 0}, "block=0 is out of range"),
        ("stable_topk", {"every": 0}, "every=0 is out of range"),
        ("scalecom", {"beta": 0.0}, "beta=0.0 is out of range"),
    ],
)
def test_what_cannot_be_is_refused(name: str, values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sparsify.build(name, **values)
