"""Laws of local steps, on virtual ranks: whatever averages the drift, whatever steps inside."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback
from sparsify.local.fragments import NonFiniteDriftError, divide_into_fragments
from sparsify.local.strategy import HeavyBall, LocalSteps, Nesterov, OuterStep, PlainStep
from sparsify.method import Dense, Method, Sparsifier
from sparsify.methods import per_step_names
from sparsify.select import TopK
from sparsify.types import ANCHORS_AGREE, DENSE_AT_DENSITY_1, NOTHING_IS_LOST
from sparsify.wrappers.saved_states import StateMismatch
from tests.conftest import there
from tests.sparsify.local.rounds import (
    EVERY,
    INNER,
    SIZE,
    STRATEGIES,
    History,
    MakeInner,
    Worker,
    fill,
    flat,
    live,
    local,
    model_of,
    wrapped,
)

KEPT = {"density": 0.1, "feedback": "gradient"}
EXACT_HERE = ("powersgd",)  # a rank of 4 is all that so small a model has


def changes(tensors: list[Tensor]) -> list[int]:
    """Return the steps, from the second on, after which tensors differ from those of the step before."""
    return [step for step, (a, b) in enumerate(pairwise(tensors), 2) if not torch.equal(a, b)]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]


def kept(name: str, **changed: Any) -> Method:
    """Return a method that keeps what it does not send, where it can."""
    known = sparsify.defaults(name)
    chosen = {key: value for key, value in {**KEPT, **changed}.items() if key in known}
    return cast("Method", sparsify.build(name, **chosen))


@cache
def averaged_once() -> Tensor:
    """(n,) the anchor after one round of plain averaging."""
    return live(LocalSteps(EVERY, Dense()), steps=EVERY)[0].anchors[-1]


@pytest.mark.parametrize("name", per_step_names())
def test_nothing_of_the_drift_is_lost(name: str) -> None:
    """Check theta_0 - theta_T = lr / R sum over workers of (all drift - residual).

    At density 1 a method averages plainly at once. Exceptions are those of the method, and needed.
    """
    method = kept(name)
    histories = live(LocalSteps(EVERY, method, PlainStep(0.8)), steps=5 * EVERY)
    seen = torch.zeros_like(averaged_once())
    num_owed = 0
    for history in histories:
        residuals = history.worker.optimizer.engine.residuals()
        named = history.worker.model.named_parameters()
        held = torch.cat([residuals.get(key, torch.zeros(p.numel())) for key, p in named])
        seen += (torch.stack(history.drifts[EVERY - 1 :: EVERY]).sum(0) - held) / SIZE
        num_owed += int(held.count_nonzero())
    moved = flat(model_of()) - histories[0].anchors[-1]
    is_kept = torch.allclose(moved, 0.8 * seen, rtol=1e-12, atol=1e-12)
    assert is_kept == (NOTHING_IS_LOST not in method.broken_laws() or name in EXACT_HERE)
    assert (num_owed > 0) == (bool(residuals) and name not in EXACT_HERE)
    if "density" in sparsify.defaults(name):
        whole = kept(name, density=1.0)
        ours = live(LocalSteps(EVERY, whole), steps=EVERY)[0].anchors[-1]
        is_plain = torch.allclose(ours, averaged_once(), rtol=1e-12, atol=1e-12)
        assert is_plain == (DENSE_AT_DENSITY_1 not in whole.broken_laws())


def test_momentum_is_applied_once() -> None:
    outers = [Nesterov(), HeavyBall(), Nesterov(momentum=0.0), PlainStep()]
    for method in map(sparsify.build, per_step_names()):
        for outer in outers:
            if method.applies_momentum and getattr(outer, "momentum", 0):
                with pytest.raises(ValueError, match=r"itself, and the outer step has 0\.9 too"):
                    LocalSteps(EVERY, method, outer)
            else:
                assert LocalSteps(EVERY, method, outer).outer == outer


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


@pytest.mark.parametrize(
    ("inner", "scheduled"),
    [
        (INNER.sgd, "inner"),
        (INNER.momentum, "outer"),
        (INNER.adamw, "inner before it is wrapped"),
        (INNER.muon, "outer"),
    ],
    ids=["sgd", "momentum", "adamw", "muon"],
)
def test_one_worker_with_a_plain_outer_step_is_the_inner_optimizer_to_the_bit(
    inner: MakeInner, scheduled: str
) -> None:
    """With two half batches in a closure, a clipped norm, and a schedule of whichever optimizer."""

    def train(comm: Comm | None) -> Tensor:
        model = model_of()
        alone = inner([*model.parameters()])
        early = schedule_of(alone) if "before" in scheduled else None
        optimizer: Any = alone
        if comm is not None:
            optimizer = sparsify.distribute(alone, model, sparsify.localsgd(every=EVERY), comm)
        schedule = early or schedule_of(alone if scheduled == "inner" else optimizer)
        for step in range(6):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = fill(model, 0, step) + fill(model, 0, step, share=1)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return loss

            assert float(optimizer.step(closure)) > 0
            schedule.step()
        return flat(model)

    assert torch.equal(virtual.run(1, train)[0], train(None))


@pytest.mark.parametrize(
    ("outer", "theirs"),
    [
        (Nesterov(0.7, 0.9), {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
        (HeavyBall(0.4, 0.3), {"lr": 0.4, "momentum": 0.3}), (PlainStep(0.6), {"lr": 0.6}),
    ],
)  # fmt: skip
def test_the_outer_step_is_torchs_own_on_the_mean_drift(outer: OuterStep, theirs: dict[str, Any]) -> None:
    histories = live(LocalSteps(EVERY, Dense(), outer), inner=INNER.sgd)
    p = nn.Parameter(flat(model_of()))
    optimizer = torch.optim.SGD([p], **theirs)
    for last in range(EVERY - 1, 3 * EVERY, EVERY):
        p.grad = torch.stack([history.drifts[last] for history in histories]).mean(0)
        optimizer.step()
        torch.testing.assert_close(histories[0].anchors[last], p.detach(), rtol=1e-12, atol=1e-12)


def test_a_round_sends_each_fragment_once_and_a_moment_in_rounds_of_its_own() -> None:
    whole, in_parts = (
        in_rounds(sparsify.streaming_diloco(every=EVERY, fragments=count, delay=1)) for count in (1, 2)
    )
    assert whole == in_parts
    assert len({*whole}) == 1
    once, *others = in_rounds(sparsify.desloc(every=EVERY, first_moment=2, second_moment=3))
    assert [each / once for each in others] == [2, 2, 2, 1, 3]


def in_rounds(strategy: LocalSteps) -> list[int]:
    """Bytes sent in each of six rounds."""
    sent = live(strategy, steps=6 * EVERY)[0].sent
    return [sum(sent[first : first + EVERY]) for first in range(0, len(sent), EVERY)]


def test_desloc_averages_each_moment_at_its_own_period() -> None:
    strategy = sparsify.desloc(every=2, first_moment=2, second_moment=3)

    def body(comm: Comm) -> list[tuple[bool, ...]]:
        worker = Worker(strategy, comm)
        weight = worker.model.get_parameter("0.weight")
        alike = list[tuple[bool, ...]]()
        for step in range(1, 13):
            worker.train(step)
            state = worker.optimizer.inner_optimizer.state[weight]
            tensors = weight.detach(), state["exp_avg"], state["exp_avg_sq"]
            alike.append(tuple(torch.equal(*comm.all_gather(tensor.contiguous())) for tensor in tensors))
        return alike

    expected = [(step % 2 == 0, step % 4 == 0, step % 6 == 0) for step in range(1, 13)]
    assert virtual.run(2, body) == [expected, expected]


def test_a_moment_that_a_worker_lacks_is_refused_by_all() -> None:
    def body(comm: Comm, inner: MakeInner, rank: int) -> None:
        worker = Worker(sparsify.desloc(1, 1, 1), comm, inner)
        worker.backward()
        if comm.rank == rank:
            worker.model.get_parameter("2.bias").grad = None
        name = type(worker.optimizer.inner_optimizer).__name__
        with pytest.raises(
            ValueError, match=rf"{name} keeps no 'exp_avg' of 2\.bias to be averaged \(rank {rank}\)"
        ):
            worker.optimizer.step()

    virtual.run(2, lambda comm: body(comm, INNER.sgd, 0))
    virtual.run(2, lambda comm: body(comm, INNER.adamw, 1))


STREAMING: list[dict[str, Any]] = [
    {"fragments": 2}, {"delay": 2}, {"mix": 0.5}, {"fragments": 2, "delay": 1, "mix": 0.25},
]  # fmt: skip
ALL = STRATEGIES | {str(how): local("topk", **how) for how in STREAMING}


@pytest.mark.parametrize("name", [*ALL, *per_step_names()])
def test_all_go_on_from_one_anchor_and_send_nothing_between_exchanges(name: str) -> None:
    """But where a strategy breaks this law and says so; a mix, or another fragment, keeps replicas apart."""
    chosen = ALL.get(name) or local(name)
    agrees = ANCHORS_AGREE not in chosen.broken_laws()
    is_due = [chosen.fragments == 1 and step % EVERY == 0 for step in range(1, 3 * EVERY + chosen.delay + 1)]
    meet = [False] * len(is_due) if chosen.mix else is_due
    for inner in INNER if name in ALL and not chosen.states else [INNER.adamw]:
        first, *others = histories = live(chosen, steps=len(is_due), inner=inner, check=False)
        assert changes(first.anchors) or name == "hardthreshold"  # which may hold a round back
        for other in others:
            assert all(equal(first.anchors, other.anchors)) == agrees
            if agrees and not chosen.delay:
                assert equal(first.own, other.own) == meet
        for history in histories:
            assert history.sent == history.counted or chosen.states  # which are looked for first
            if chosen.fragments == 1 and not chosen.delay:
                assert [sent > 0 for sent in history.sent] == is_due


def test_fragments_are_exchanged_in_turns_and_a_delay_moves_what_is_applied_alone() -> None:
    def sent_in(history: History) -> list[int]:
        return [step for step, sent in enumerate(history.sent, 1) if sent]

    assert sent_in(live(local("topk", PlainStep(), fragments=2), check=False)[0]) == [2, 4, 6, 8, 10, 12]
    late = live(local("topk", PlainStep(), delay=3), check=False, steps=11)[0]
    assert sent_in(late) == [4, 8]
    assert changes(late.anchors) == [7, 11]


def test_fragments_take_blocks_in_turns() -> None:
    names = (
        "wte.weight", "h.0.a.weight", "h.0.b.bias", "h.1.a.weight", "h.2.a.weight", "ln.weight", "ln.bias",
    )  # fmt: skip
    named = [(name, nn.Parameter(torch.zeros(1))) for name in names]
    found = [[name for name, _ in inside] for inside in divide_into_fragments(named, 2)]
    assert found == [
        ["wte.weight", "h.1.a.weight", "ln.weight", "ln.bias"],
        ["h.0.a.weight", "h.0.b.bias", "h.2.a.weight"],
    ]
    with pytest.raises(ValueError, match="fragments=6 of a model that has 5 blocks"):
        divide_into_fragments(named, 6)


@pytest.mark.parametrize("strategy", ALL)
def test_a_saved_state_goes_on_in_mid_round_to_the_bit(strategy: str) -> None:
    def body(comm: Comm) -> None:
        worker = Worker(ALL[strategy], comm)
        states = []
        for stop in (3, 6, 8):
            worker.train(stop)
            states.append(copy.deepcopy(worker.optimizer.state_dict()))
        worker.train(12)
        for state in states:
            again = Worker(ALL[strategy], comm, model=model_of(7))
            again.optimizer.load_state_dict(state)
            assert again.optimizer.steps == state["local"]["step"]
            again.train(12)
            assert torch.equal(again.own(), worker.own())
            assert torch.equal(again.anchor(), worker.anchor())

    virtual.run(SIZE, body)


def test_a_saved_state_of_something_else_is_refused_by_all_and_changes_nothing() -> None:
    def body(comm: Comm) -> None:
        worker = Worker(local("topk"), comm)
        worker.train(1)
        saved = worker.optimizer.state_dict()
        before = worker.own()
        broken = copy.deepcopy(saved["local"])
        broken["fragments"][0]["state"]["anchor"][0][0] = torch.nan
        others = {
            "of 2 workers, and there are 3; in the middle of a round": {"size": 2},
            r"LocalSteps\(every=5\)": {"strategy": "LocalSteps(every=5)"},
            "differ in their step": {"step": 1 + comm.rank},
            "NaN or Inf": broken,
        }
        for sentence, change in others.items():
            with pytest.raises(StateMismatch, match=sentence):
                worker.optimizer.load_state_dict({**saved, "local": saved["local"] | change})
        del saved["local"]
        with pytest.raises(StateMismatch, match="no anchor"):
            worker.optimizer.load_state_dict(saved)
        assert torch.equal(before, worker.own())

    virtual.run(SIZE, body)


@pytest.mark.parametrize("delay", [0, 2])
def test_after_a_nan_that_is_named_all_go_on_from_the_anchor(delay: int) -> None:
    """Nothing was exchanged, so an average that would be late is not applied.

    Anchors stay alike, and move again in the next round.
    """

    def body(comm: Comm) -> list[Tensor]:
        worker = Worker(local("topk", delay=delay), comm, INNER.sgd)
        anchors = [worker.anchor()]
        for step in range(1, 2 * EVERY + 4):
            worker.backward()
            if step != EVERY:
                worker.optimizer.step()
            else:
                if comm.rank == 1:
                    there(worker.model.get_parameter("2.weight").grad)[0] = torch.nan
                with pytest.raises(NonFiniteDriftError, match=r"rank 1, round 0: 2\.weight has a NaN or Inf"):
                    worker.optimizer.step()
                with torch.no_grad():
                    nn.utils.vector_to_parameters(anchors[0].clone(), worker.model.parameters())
            anchors.append(worker.anchor())
        return anchors

    first, *others = virtual.run(SIZE, body)
    assert all(all(equal(first, other)) for other in others)
    assert changes(first) == [2 * EVERY + delay + 1]  # counted from the anchor before all steps


def test_a_step_that_is_left_out_counts_so_all_exchange_together() -> None:
    """Also where a GradScaler leaves it out, alone."""

    def body(comm: Comm) -> tuple[Tensor, float]:
        worker = Worker(local("topk"), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2 * EVERY):
            if comm.rank == 1 and step in (1, 3):
                worker.optimizer.skip()
                continue
            worker.backward()
            loss = scaler.scale(worker.model(torch.ones(6).double()).sum())
            (loss * (torch.inf if (comm.rank, step) == (1, 2) else 1.0)).backward()
            scaler.step(worker.optimizer)
            scaler.update()
        return worker.own(), scaler.get_scale()

    ends, scales = zip(*virtual.run(SIZE, body), strict=True)
    assert all(torch.equal(end, ends[0]) for end in ends)
    assert torch.isfinite(ends[0]).all()
    assert scales == (8.0, 4.0, 8.0)


class Gossip(Sparsifier):
    """A sparse method that says of itself that workers end with different averages."""

    def broken_laws(self) -> dict[str, str]:
        return {ANCHORS_AGREE: "a worker meets one other in a round"}


def test_strategies_that_make_no_sense_are_refused_in_a_sentence() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"every": 0}, "every=0 is out of range"),
        ({"fragments": 5}, "fragments=5 can't take turns within every=4"),
        ({"delay": 4}, "delay=4 steps: the next exchange"), ({"mix": 1.0}, "mix=1.0 is out of range"),
        ({"method": sparsify.localsgd()}, "does not average; give LocalSteps one of every step"),
        ({"outer": "nesterov"}, "outer='nesterov' is no outer step; take PlainStep, Nesterov"),
        ({"outer": None}, "outer=None is no outer step"),
        ({"method": Gossip(0.5, TopK(), ErrorFeedback(), AllGather())}, "it would send only a part of them"),
    ]  # fmt: skip
    for how, sentence in bad:
        with pytest.raises(ValueError, match=sentence):
            LocalSteps(**{"every": 4, "method": Dense(), **how})


def test_models_and_optimizers_that_can_not_be_wrapped_are_refused_in_a_sentence() -> None:
    def body(comm: Comm) -> None:
        model = model_of()
        optimizer = wrapped(INNER.sgd, model, local("topk"), comm)
        with pytest.raises(ValueError, match="wrapped already"):
            sparsify.distribute(optimizer, model, local("topk"), comm)
        with pytest.raises(ValueError, match="parameters can't join later"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(ValueError, match="overlap=True averages while the steps of a delay go on"):
            wrapped(INNER.sgd, model, local("topk"), comm, overlap=True)
        gappy = nn.Linear(6, 4, dtype=torch.float64)
        gappy.weight = nn.Parameter(torch.zeros(4, 12, dtype=torch.float64)[:, ::2])
        with pytest.raises(ValueError, match=r"weight has strides \(12, 2\) for shape \(4, 6\): gaps"):
            wrapped(INNER.sgd, gappy, local("topk"), comm)

    virtual.run(1, body)


def test_a_model_of_real_and_complex_parameters_is_trained_as_its_parts_alone() -> None:
    types = (torch.float32, torch.complex64)

    def body(comm: Comm, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        model = nn.ParameterList([torch.ones(5, dtype=dtype) for dtype in dtypes])
        optimizer = wrapped(INNER.momentum, model, sparsify.diloco(every=2), comm)
        for step in range(5):
            for p in model:
                p.grad = torch.full_like(p, step + comm.rank)
            optimizer.step()
        return [*model]

    together = virtual.run(2, partial(body, dtypes=types))
    floats, complexes = (virtual.run(2, partial(body, dtypes=[dtype])) for dtype in types)
    for parts, (of_floats,), (of_complexes,) in zip(together, floats, complexes, strict=True):
        assert all(equal(parts, [of_floats, of_complexes]))
