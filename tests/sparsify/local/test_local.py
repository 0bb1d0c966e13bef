"""Laws of local steps, on virtual ranks: whatever averages the drift, whatever steps inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsify
from sparsify.comm import Comm, CountingComm, virtual
from sparsify.doors.states import StateMismatch
from sparsify.local.fragments import NonFiniteDrift, block_of, copies_of, fragments_of
from sparsify.local.optimiser import LocalOptimiser
from sparsify.local.strategy import ANCHORS_AGREE, HeavyBall, Local, Nesterov, Outer, Plain
from sparsify.method import Dense, Method
from sparsify.methods import per_step
from sparsify.methods.noloco import pairs
from sparsify.types import DENSE_AT_DENSITY_1, NOTHING_IS_LOST, BucketContext, SeenStep

MakeInner = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
SIZE, EVERY = 3, 4
KEPT = {"density": 0.1, "feedback": "gradient"}


def matrices(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.ndim == 2]


class Inner(NamedTuple):
    """Inner optimisers by name."""

    sgd: MakeInner = lambda ps: torch.optim.SGD(ps, lr=0.05)
    momentum: MakeInner = lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9)
    adamw: MakeInner = lambda ps: torch.optim.AdamW(ps, lr=0.01)
    muon: MakeInner = lambda ps: torch.optim.Muon(matrices(ps), lr=0.01)


INNER = Inner()


def model_of(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Two blocks with matrices and vectors."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to(dtype)


def fill(model: nn.Module, rank: int, step: int, share: int = 0) -> Tensor:
    """Gradients of a batch that is this worker's own."""
    draws = torch.Generator().manual_seed(1000 * step + 10 * rank + share)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(8, 6, generator=draws, dtype=dtype)
    labels = torch.randint(3, (8,), generator=draws)
    loss = functional.cross_entropy(model(inputs), labels)
    loss.backward()
    return loss.detach()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def anchor(optimiser: LocalOptimiser, model: nn.Module) -> Tensor:
    with optimiser.at_anchor():
        return flat(model).clone()


class Lived(NamedTuple):
    """What one rank saw."""

    own: list[Tensor]  # (n,) its parameters after each step
    anchors: list[Tensor]  # (n,) after each step
    sent: list[int]  # bytes of each step, as reported
    counted: list[int]  # bytes of each step, as the communicator counted them
    optimiser: LocalOptimiser


def live(
    strategy: Local, size: int = SIZE, steps: int = 3 * EVERY, inner: MakeInner = INNER.adamw, **options: Any
) -> list[Lived]:
    """Train for some steps on virtual ranks."""

    def body(comm: Comm) -> Lived:
        model, counting = model_of(comm.rank), CountingComm(comm)  # broadcast makes them alike
        optimiser = wrapped(inner, model, strategy, counting, **options)
        lived = Lived([], [], [], [], optimiser)
        for step in range(steps):
            optimiser.zero_grad()
            fill(model, comm.rank, step)
            before = counting.counted
            optimiser.step()
            lived.own.append(flat(model).clone())
            lived.anchors.append(anchor(optimiser, model))
            lived.sent.append(there(optimiser).wire_bytes)
            lived.counted.append(int(counting.counted[0] - before[0]))
        return lived

    return virtual.run(size, body)


def wrapped(
    inner: MakeInner, model: nn.Module, strategy: Local, comm: Comm | None, **options: Any
) -> LocalOptimiser:
    found = sparsify.distribute(inner([*model.parameters()]), model, strategy, comm, **options)
    assert isinstance(found, LocalOptimiser)
    return found


def there(optimiser: LocalOptimiser) -> Any:
    assert optimiser.last_report is not None
    return optimiser.last_report


def local(name: str, outer: Outer | None = None, every: int = EVERY, **others: Any) -> Local:
    """Any method of every step, every few steps."""
    known = sparsify.defaults(name)
    wanted = {"density": 0.2, "scope": "layer", "momentum": 0.0}  # which the outer step has
    method = sparsify.build(name, **{key: wanted[key] for key in wanted if key in known})
    return Local(every, method, outer or Nesterov(), **others)


@pytest.mark.parametrize("name", per_step())
def test_anchors_agree_after_every_step_whatever_averages_and_all_go_on_from_them(name: str) -> None:
    first, *others = live(local(name))
    for other in others:
        for mine, theirs in zip(first.anchors, other.anchors, strict=True):
            assert torch.equal(mine, theirs)
    for step, (mine, theirs) in enumerate(zip(first.own, others[0].own, strict=True), 1):
        assert torch.equal(mine, theirs) == (step % EVERY == 0)
    moved = {step for step, (a, b) in enumerate(pairwise(first.anchors), 2) if not torch.equal(a, b)}
    assert moved <= {EVERY, 2 * EVERY, 3 * EVERY}  # a threshold may hold a whole round back


@pytest.mark.parametrize("name", per_step())
def test_nothing_is_sent_in_the_steps_between(name: str) -> None:
    for lived in live(local(name), check=False):
        assert lived.sent == lived.counted
        assert [bool(sent) for sent in lived.sent] == [step % EVERY == 0 for step in range(1, 3 * EVERY + 1)]


@pytest.mark.parametrize("inner", Inner._fields)
def test_one_worker_with_a_plain_outer_step_is_the_inner_optimiser_to_the_bit(inner: str) -> None:
    make: MakeInner = getattr(INNER, inner)
    (lived,) = live(sparsify.localsgd(every=EVERY), size=1, inner=make)
    model = model_of()
    optimiser = make([*model.parameters()])
    for step, own in enumerate(lived.own):
        optimiser.zero_grad()
        fill(model, 0, step)
        optimiser.step()
        assert torch.equal(own, flat(model))


@pytest.mark.parametrize(
    "strategy", [sparsify.localsgd(every=1), Local(1, Dense(), Plain(1.0)), local("topk", Plain(), 1)]
)
def test_every_step_with_sgd_inside_is_data_parallel_sgd(strategy: Local) -> None:
    """With a sparsifier too: it averages the rate times the gradient."""

    def body(comm: Comm) -> Tensor:
        model = model_of()
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        optimiser = sparsify.distribute(inner, model, strategy.method, comm)
        for step in range(8):
            optimiser.zero_grad()
            fill(model, comm.rank, step)
            optimiser.step()
        return flat(model)

    ours = live(strategy, steps=8, inner=INNER.sgd)[0].own[-1]
    torch.testing.assert_close(ours, virtual.run(SIZE, body)[0], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("outer", "theirs"),
    [
        (Nesterov(0.7, 0.9), {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        (HeavyBall(0.4, 0.3), {"lr": 0.4, "momentum": 0.3}), (Plain(0.6), {"lr": 0.6}),
    ],
)  # fmt: skip
def test_the_outer_step_is_torchs_own_on_the_mean_drift(outer: Outer, theirs: dict[str, Any]) -> None:
    lives = live(Local(EVERY, Dense(), outer), inner=INNER.sgd)
    start = flat(model_of())
    p = nn.Parameter(start.clone())
    optimiser = torch.optim.SGD([p], **theirs)
    own = [start] * SIZE
    for step in range(3 * EVERY):
        for rank in range(SIZE):
            model = model_of()
            nn.utils.vector_to_parameters(own[rank], model.parameters())
            fill(model, rank, step)
            grads = torch.cat([there_grad(q) for q in model.parameters()])
            own[rank] = own[rank] - 0.05 * grads
        if (step + 1) % EVERY == 0:
            p.grad = torch.stack([p.detach() - each for each in own]).mean(0)
            optimiser.step()
            own = [p.detach().clone()] * SIZE
            torch.testing.assert_close(lives[0].anchors[step], p.detach(), rtol=1e-12, atol=1e-12)


def there_grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad.flatten()


EXACT_HERE = ("powersgd",)  # a rank of 4 is all that so small a model has


@pytest.mark.parametrize("name", per_step())
def test_nothing_of_the_drift_is_lost(name: str) -> None:
    """theta_0 - theta_T = lr / R sum over workers of (all drift - residual). Exceptions are those of the
    method, and needed.
    """
    lr, method = 0.8, kept(name)
    lives = live(Local(EVERY, method, Plain(lr)), steps=5 * EVERY)
    start, owed = flat(model_of()), torch.zeros(())
    seen = torch.zeros_like(start)
    ends = drifts(Local(EVERY, method, Plain(lr)), 5)
    for lived, drift in zip(lives, ends, strict=True):
        residuals, model = lived.optimiser.engine.residuals(), model_of()
        held = torch.cat([residuals.get(key, torch.zeros(p.numel())) for key, p in model.named_parameters()])
        seen = seen + (drift - held) / SIZE
        owed = owed + held.abs().sum()
    moved = start - lives[0].anchors[-1]
    is_kept = torch.allclose(moved, lr * seen, rtol=1e-12, atol=1e-12)
    assert is_kept == (NOTHING_IS_LOST not in method.broken_laws() or name in EXACT_HERE)
    has_residual = bool(lives[0].optimiser.engine.residuals())
    assert (owed > 0) == (has_residual and name not in EXACT_HERE)


@pytest.mark.parametrize("name", [name for name in per_step() if "density" in sparsify.defaults(name)])
def test_at_density_1_the_first_round_is_plain_averaging_of_the_drift(name: str) -> None:
    method = kept(name, density=1.0)
    ours, plain = (live(Local(EVERY, each), steps=EVERY)[0].anchors[-1] for each in (method, Dense()))
    is_plain = torch.allclose(ours, plain, rtol=1e-12, atol=1e-12)
    assert is_plain == (DENSE_AT_DENSITY_1 not in method.broken_laws())


def kept(name: str, **changes: Any) -> Method:
    """A method that keeps what it does not send, where it can."""
    known = sparsify.defaults(name)
    chosen = {key: value for key, value in {**KEPT, **changes}.items() if key in known}
    return cast("Method", sparsify.build(name, **chosen))


def drifts(strategy: Local, rounds: int) -> list[Tensor]:
    """The sum of each worker's drift."""

    def body(comm: Comm) -> Tensor:
        model = model_of()
        optimiser = wrapped(INNER.adamw, model, strategy, comm)
        total, (fragment,) = torch.zeros_like(flat(model)), optimiser.fragments
        take = fragment.take

        def taken() -> None:
            nonlocal total
            start = dict(zip(fragment.names, fragment.anchor, strict=True))
            total = total + torch.cat(
                [start[name] - p.detach().flatten() for name, p in model.named_parameters()]
            )
            take()

        fragment.take = taken  # type: ignore[method-assign]  # to see what is taken
        for step in range(rounds * EVERY):
            optimiser.zero_grad()
            fill(model, comm.rank, step)
            optimiser.step()
        return total

    return virtual.run(SIZE, body)


@pytest.mark.parametrize("size", [2, 3])
def test_noloco_is_its_formula_and_its_anchors_differ_as_it_says(size: int) -> None:
    """Against the formula, worker by worker, for gradients that do not depend on the parameters."""
    strategy = sparsify.noloco(every=EVERY, lr=0.6, momentum=0.5)
    assert ANCHORS_AGREE in strategy.broken_laws()
    rounds, n = 6, 5

    def moved(rank: int, turn: int) -> Tensor:
        """theta - phi after the local steps."""
        return torch.randn(n, generator=torch.Generator().manual_seed(100 * turn + rank), dtype=torch.float64)

    def body(comm: Comm) -> Tensor:
        model = nn.Linear(n, 1, bias=False, dtype=torch.float64)
        optimiser = wrapped(INNER.sgd, model, strategy, comm, seed=3)
        with torch.no_grad():
            model.weight.zero_()
            optimiser.fragments[0].anchor[0].zero_()
        for turn in range(rounds):
            for step in range(EVERY):
                model.weight.grad = -moved(comm.rank, turn).view(1, n) / 0.05 * (step == 0)
                optimiser.step()
        return anchor(optimiser, model)

    found = virtual.run(size, body)
    phi = [torch.zeros(n, dtype=torch.float64) for _ in range(size)]
    momentum = [torch.zeros(n, dtype=torch.float64) for _ in range(size)]
    draws = strategy.method.init(torch.empty(n), BucketContext(3, 0, 0))
    for turn in range(rounds):
        routes = dict(pairs(size, draws.key()))
        meet = [[rank, routes.get(rank, rank)] for rank in range(size)]
        drift = [torch.stack([moved(one, turn) for one in both]).mean(0) for both in meet]
        mean = [torch.stack([phi[one] for one in both]).mean(0) for both in meet]
        for rank in range(size):
            momentum[rank] = 0.5 * momentum[rank] + 0.6 * drift[rank] + 0.6 * (mean[rank] - phi[rank])
        phi = [phi[rank] + momentum[rank] for rank in range(size)]
    for ours, theirs in zip(found, phi, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert torch.equal(found[0], found[1]) == (size == 2)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_noloco_counts_two_models_a_round_and_an_odd_worker_out_sends_none_of_them(size: int) -> None:
    """All are charged what a worker with a partner sends, as for every collective; nobody alone counts."""
    strategy, rounds = sparsify.noloco(every=EVERY), 6
    lives = live(strategy, size, rounds * EVERY, check=False)
    n = lives[0].optimiser.num_elements
    nbytes = n * torch.float64.itemsize * (size > 1)
    for lived in lives:
        assert lived.sent == lived.counted == [*[0] * (EVERY - 1), 2 * nbytes] * rounds
    seen = SeenStep(((n,),), n, torch.float64, size, 0, [])
    assert strategy.method.promised(seen) == (nbytes, nbytes)
    draws = strategy.method.init(torch.empty(n), BucketContext(0, 0, 0))
    for route in (pairs(size, draws.key()) for _ in range(rounds)):
        assert len({source for source, _ in route}) == len(route) == size - size % 2


def test_a_round_sends_each_fragment_once_and_a_moment_in_rounds_of_its_own() -> None:
    fragments = sparsify.streaming_diloco(every=EVERY, fragments=2, delay=1)
    sent = in_rounds(live(fragments, steps=6 * EVERY)[0].sent)
    assert sent == in_rounds(live(replace(fragments, fragments=1), steps=6 * EVERY)[0].sent)
    assert len(set(sent)) == 1
    moments = sparsify.desloc(every=EVERY, first_moment=2, second_moment=3)
    once, *others = in_rounds(live(moments, steps=6 * EVERY)[0].sent)
    assert [each / once for each in others] == [2, 2, 2, 1, 3]


def in_rounds(sent: list[int]) -> list[int]:
    return [sum(sent[first : first + EVERY]) for first in range(0, len(sent), EVERY)]


def test_desloc_averages_each_moment_at_its_own_period_and_says_what_it_needs() -> None:
    strategy = sparsify.desloc(every=2, first_moment=2, second_moment=3)

    def body(comm: Comm) -> list[tuple[bool, ...]]:
        model = model_of()
        optimiser = wrapped(INNER.adamw, model, strategy, comm)
        weight, alike = model.get_parameter("0.weight"), list[tuple[bool, ...]]()
        for step in range(12):
            optimiser.zero_grad()
            fill(model, comm.rank, step)
            optimiser.step()
            state = optimiser.optimiser.state[weight]
            tensors = weight.detach(), state["exp_avg"], state["exp_avg_sq"]
            all_of = [comm.all_gather(tensor.contiguous()) for tensor in tensors]
            alike.append(tuple(torch.equal(first, second) for first, second in all_of))
        return alike

    expected = [(step % 2 == 0, step % 4 == 0, step % 6 == 0) for step in range(1, 13)]
    assert virtual.run(2, body) == [expected, expected]

    def without(comm: Comm) -> None:
        model = model_of()
        optimiser = wrapped(INNER.sgd, model, sparsify.desloc(1, 1, 1), comm)
        fill(model, comm.rank, 0)
        with pytest.raises(ValueError, match=r"SGD keeps no 'exp_avg' of 2\.bias to be averaged"):
            optimiser.step()

    virtual.run(1, without)


STREAMING = [
    {"fragments": 2}, {"delay": 2}, {"mix": 0.5}, {"fragments": 2, "delay": 1, "mix": 0.25},
]  # fmt: skip


@pytest.mark.parametrize("how", STREAMING)
def test_streaming_keeps_anchors_alike_and_a_mix_keeps_replicas_apart(how: dict[str, Any]) -> None:
    first, second, _ = live(local("topk", **how), steps=3 * EVERY + how.get("delay", 0))
    for mine, theirs in zip(first.anchors, second.anchors, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(first.anchors[-1], first.anchors[0])
    is_whole = not how.get("mix") and how.get("fragments", 1) == 1
    assert torch.equal(first.own[-1], second.own[-1]) == is_whole


def test_fragments_are_exchanged_in_turns_and_a_delay_moves_what_is_applied_alone() -> None:
    strategy = local("topk", Plain(), fragments=2)
    lived = live(strategy, check=False)[0]
    assert [step for step, sent in enumerate(lived.sent, 1) if sent] == [2, 4, 6, 8, 10, 12]
    late = live(local("topk", Plain(), delay=3), check=False, steps=11)[0]
    assert [step for step, sent in enumerate(late.sent, 1) if sent] == [4, 8]
    moved = [at for at, (a, b) in enumerate(pairwise(late.anchors), 2) if not torch.equal(a, b)]
    assert moved == [7, 11]


def test_fragments_take_blocks_in_turns() -> None:
    named = [(name, nn.Parameter(torch.zeros(1))) for name in (
        "wte.weight", "h.0.a.weight", "h.0.b.bias", "h.1.a.weight", "h.2.a.weight", "ln.weight", "ln.bias",
    )]  # fmt: skip
    found = [[name for name, _ in inside] for inside in fragments_of(named, 2)]
    assert found == [
        ["wte.weight", "h.1.a.weight", "ln.weight", "ln.bias"],
        ["h.0.a.weight", "h.0.b.bias", "h.2.a.weight"],
    ]
    assert block_of("a.b.weight") == "a.b"
    with pytest.raises(ValueError, match="fragments=6 of a model that has 5 blocks"):
        fragments_of(named, 6)


@pytest.mark.parametrize("how", [{}, *STREAMING])
@pytest.mark.parametrize("stop", [3, 6, 8])
def test_a_saved_state_goes_on_in_mid_round_to_the_bit(how: dict[str, Any], stop: int) -> None:
    strategy, steps = local("topk", **how), 12

    def train(model: nn.Module, optimiser: LocalOptimiser, rank: int, which: range) -> None:
        for step in which:
            optimiser.zero_grad()
            fill(model, rank, step)
            optimiser.step()

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        model = model_of()
        optimiser = wrapped(INNER.adamw, model, strategy, comm)
        train(model, optimiser, comm.rank, range(stop))
        saved = copy.deepcopy(optimiser.state_dict())
        train(model, optimiser, comm.rank, range(stop, steps))
        other = model_of(7)
        again = wrapped(INNER.adamw, other, strategy, comm)
        again.load_state_dict(saved)
        assert again.steps == stop
        train(other, again, comm.rank, range(stop, steps))
        return flat(model), flat(other), anchor(optimiser, model), anchor(again, other)

    for own, again, anchored, anchored_again in virtual.run(SIZE, body):
        assert torch.equal(own, again)
        assert torch.equal(anchored, anchored_again)


def test_a_saved_state_of_something_else_is_refused_by_all_and_changes_nothing() -> None:
    def body(comm: Comm) -> list[str]:
        model = model_of()
        optimiser = wrapped(INNER.adamw, model, local("topk"), comm)
        fill(model, comm.rank, 0)
        optimiser.step()
        saved = optimiser.state_dict()
        before, told = flat(model).clone(), []
        others: list[dict[str, Any]] = [
            {**saved, "local": {**saved["local"], "size": 2}},
            {**saved, "local": {**saved["local"], "strategy": "Local(every=5)"}},
            {key: part for key, part in saved.items() if key != "local"},
            {**saved, "local": {**saved["local"], "step": 1 + comm.rank}},
        ]
        broken = copy.deepcopy(saved)
        broken["local"]["fragments"][0]["state"]["anchor"][0][0] = torch.nan
        for other in [*others, broken]:
            with pytest.raises(StateMismatch) as refused:
                optimiser.load_state_dict(other)
            told.append(str(refused.value))
        assert torch.equal(before, flat(model))
        return told

    size, strategy, missing, step, broken = virtual.run(SIZE, body)[0]
    assert "of 2 workers, and there are 3; in the middle of a round" in size
    assert "Local(every=5)" in strategy
    assert "no anchor" in missing
    assert "differ in their step" in step
    assert "NaN or Inf" in broken


def test_a_nan_in_a_local_step_is_named_before_the_exchange_and_the_anchor_is_kept() -> None:
    def body(comm: Comm) -> tuple[str, Tensor, Tensor]:
        model = model_of()
        optimiser = wrapped(INNER.sgd, model, local("topk"), comm)
        start = anchor(optimiser, model)
        for step in range(EVERY):
            optimiser.zero_grad()
            fill(model, comm.rank, step)
            if (comm.rank, step) == (1, EVERY - 1):
                there_grad(model.get_parameter("2.weight"))[0] = torch.nan
            try:
                optimiser.step()
            except NonFiniteDrift as error:
                return str(error), start, anchor(optimiser, model)
        raise AssertionError

    for told, start, end in virtual.run(SIZE, body):
        assert "rank 1, round 0: 2.weight has a NaN or Inf" in told
        assert torch.equal(start, end)


def test_after_a_nan_all_go_on_from_the_anchor_with_a_late_average_missing() -> None:
    """An average that was never made is not applied: anchors stay alike, and move again in the next round."""

    def body(comm: Comm) -> list[Tensor]:
        model = model_of()
        optimiser = wrapped(INNER.sgd, model, local("topk", delay=2), comm)
        anchors = [anchor(optimiser, model)]
        for step in range(2 * EVERY + 3):
            optimiser.zero_grad()
            fill(model, comm.rank, step)
            if (comm.rank, step) == (1, EVERY - 1):
                there_grad(model.get_parameter("2.weight"))[0] = torch.nan
            try:
                optimiser.step()
            except NonFiniteDrift:
                with torch.no_grad():
                    nn.utils.vector_to_parameters(anchors[0].clone(), model.parameters())
            anchors.append(anchor(optimiser, model))
        return anchors

    first, *others = virtual.run(SIZE, body)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))
    moved = [at for at, (a, b) in enumerate(pairwise(first), 1) if not torch.equal(a, b)]
    assert moved == [2 * EVERY + 2]


def test_a_step_that_is_left_out_counts_so_all_exchange_together() -> None:
    def body(comm: Comm) -> Tensor:
        model = model_of()
        optimiser = wrapped(INNER.adamw, model, local("topk"), comm)
        for step in range(2 * EVERY):
            optimiser.zero_grad()
            if comm.rank == 1 and step in (1, 3):
                optimiser.skip()
                continue
            fill(model, comm.rank, step)
            optimiser.step()
        return flat(model)

    first, *others = virtual.run(SIZE, body)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("scheduled", ["inner", "inner before it is wrapped", "outer"])
def test_accumulation_clipping_schedules_and_closures_stay_local(scheduled: str) -> None:
    """Two half batches, a clipped norm, a schedule of whichever optimiser: as without local steps."""
    strategy = sparsify.localsgd(every=EVERY)

    def schedule_of(optimiser: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
        return torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 / (1 + step))

    def plain(optimiser: Any, schedule: torch.optim.lr_scheduler.LambdaLR, model: nn.Module) -> Tensor:
        for step in range(6):

            def closure(step: int = step) -> Tensor:
                optimiser.zero_grad()
                loss = fill(model, 0, step) + fill(model, 0, step, share=1)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

            assert float(optimiser.step(closure)) > 0
            schedule.step()
        return flat(model)

    def body(comm: Comm) -> Tensor:
        model = model_of()
        inner = INNER.adamw([*model.parameters()])
        early = schedule_of(inner) if "before" in scheduled else None
        optimiser = sparsify.distribute(inner, model, strategy, comm)
        return plain(optimiser, early or schedule_of(inner if scheduled == "inner" else optimiser), model)

    model = model_of()
    inner = INNER.adamw([*model.parameters()])
    assert torch.equal(virtual.run(1, body)[0], plain(inner, schedule_of(inner), model))


def test_a_grad_scaler_skips_alone_and_the_step_counts() -> None:
    def body(comm: Comm) -> tuple[Tensor, float]:
        model = model_of(dtype=torch.float32)
        optimiser = wrapped(INNER.sgd, model, local("dense", Plain()), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(EVERY):
            optimiser.zero_grad()
            draws = torch.Generator().manual_seed(step)
            loss = model(torch.randn(8, 6, generator=draws)).square().mean()
            if (comm.rank, step) == (1, 2):
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
        return flat(model), scaler.get_scale()

    (mine, my_scale), (theirs, their_scale) = virtual.run(2, body)
    assert torch.equal(mine, theirs)
    assert torch.isfinite(mine).all()
    assert (my_scale, their_scale) == (8.0, 4.0)


def test_evaluation_at_the_anchor_gives_the_replica_back() -> None:
    def body(comm: Comm) -> None:
        model = model_of()
        optimiser = wrapped(INNER.adamw, model, local("topk"), comm)
        start = flat(model).clone()
        fill(model, comm.rank, 0)
        optimiser.step()
        own = flat(model).clone()
        with optimiser.at_anchor():
            assert torch.equal(flat(model), start)
        assert torch.equal(flat(model), own)
        assert not torch.equal(own, start)

    virtual.run(2, body)


def test_a_parameter_that_joins_the_inner_optimiser_in_mid_round_is_refused_in_the_next_step() -> None:
    def body(comm: Comm) -> None:
        optimiser = wrapped(INNER.sgd, model_of(), local("topk"), comm)
        optimiser.step()
        optimiser.optimiser.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ValueError, match="has other parameters than when it was wrapped; wrap it anew"):
            optimiser.step()
        assert optimiser.steps == 1

    virtual.run(2, body)


def test_what_makes_no_sense_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="every=0 is out of range"):
        sparsify.diloco(every=0)
    bad: list[tuple[dict[str, Any], str]] = [
        ({"fragments": 5}, "fragments=5 can't take turns within every=4"),
        ({"delay": 4}, "delay=4 steps: the next exchange"), ({"mix": 1.0}, "mix=1.0 is out of range"),
        ({"method": sparsify.localsgd()}, "does not average; give Local one of every step"),
        ({"outer": "nesterov"}, "outer='nesterov' is no outer step; take Plain, Nesterov"),
        ({"outer": None}, "outer=None is no outer step"),
    ]  # fmt: skip
    for how, told in bad:
        with pytest.raises(ValueError, match=told):
            Local(**{"every": 4, "method": Dense(), **how})

    def body(comm: Comm) -> None:
        model = model_of()
        optimiser = wrapped(INNER.sgd, model, local("topk"), comm)
        with pytest.raises(ValueError, match="wrapped already"):
            sparsify.distribute(optimiser, model, local("topk"), comm)
        with pytest.raises(ValueError, match="its own step would not average"):
            optimiser.optimiser.step()
        with pytest.raises(ValueError, match="parameters can't join later"):
            optimiser.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ValueError, match="overlap=True averages while the steps of a delay go on"):
            sparsify.distribute(INNER.sgd([*model.parameters()]), model, local("topk"), comm, overlap=True)
        gappy = nn.Linear(6, 4, dtype=torch.float64)
        gappy.weight = nn.Parameter(torch.zeros(4, 12, dtype=torch.float64)[:, ::2])
        with pytest.raises(ValueError, match=r"weight has strides \(12, 2\) for shape \(4, 6\): gaps"):
            wrapped(INNER.sgd, gappy, local("topk"), comm)
        turned = nn.Conv2d(2, 3, 2, dtype=torch.float64)
        held = wrapped(INNER.sgd, turned, sparsify.localsgd(every=1), comm)
        turned.to(memory_format=torch.channels_last)
        with pytest.raises(ValueError, match=r"weight was .* and is now .*, strides \(8, 1, 4, 2\), in the"):
            held.step()
        model.get_parameter("0.weight").requires_grad_(False)
        for _ in range(EVERY - 1):
            optimiser.step()
        with pytest.raises(ValueError, match=r"0\.weight was .* and is now .*, frozen, in the middle"):
            optimiser.step()

    virtual.run(1, body)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)])
def test_copies_of_parameters_are_alike_and_their_own(dtypes: tuple[torch.dtype, ...]) -> None:
    pieces = [torch.randn(n).to(dtype) for n, dtype in zip((5, 3), dtypes, strict=True)]
    copies = copies_of(pieces)
    for piece, other in zip(pieces, copies, strict=True):
        assert other.dtype == piece.dtype
        assert torch.equal(other, piece)
        before = piece.clone()
        other.zero_()
        assert torch.equal(piece, before)


@pytest.mark.parametrize("outer", [Nesterov(), HeavyBall(), Nesterov(momentum=0.0), Plain()], ids=repr)
@pytest.mark.parametrize("name", per_step())
def test_momentum_is_applied_once(name: str, outer: Outer) -> None:
    method = sparsify.build(name)
    if method.momentum_inside and getattr(outer, "momentum", 0):
        with pytest.raises(ValueError, match=r"itself, and the outer step has 0\.9 too"):
            Local(EVERY, method, outer)
    else:
        assert Local(EVERY, method, outer).outer == outer
