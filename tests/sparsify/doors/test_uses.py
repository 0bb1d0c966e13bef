"""What users do with a model, an optimiser and a scaler under `distribute`: right, or refused at once."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.comm.torch import TorchComm
from sparsify.core.gradients import layout_of
from sparsify.doors import wrapping
from sparsify.doors.engine import StepReport
from sparsify.doors.optimiser import DistributedOptimiser
from tests.conftest import there
from tests.sparsify.doors.uses import CHANGES, LR, Net, check_balanced, loss_of, net, train, weights


def wrap(
    comm: Comm,
    model: nn.Module,
    name: str = "topk",
    inner: torch.optim.Optimizer | None = None,
    **choices: Any,
) -> DistributedOptimiser:
    options = {key: choices.pop(key) for key in ("seed", "steps_per_epoch", "scaler") if key in choices}
    inner = inner or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    method = sparsify.build(name, **{"density": 0.2, "scope": "layer", **choices})
    return DistributedOptimiser(inner, model, method, comm, **options)


def owed_by(optimiser: DistributedOptimiser) -> dict[str, Tensor]:
    """Residuals by the parameter's name, shaped like it; of a method with scope=layer."""
    aggregator, parameters = optimiser.aggregator, dict(optimiser.aggregator.source.parameters)
    found = {}
    for bucket, state in zip(aggregator.buckets, aggregator.states, strict=True):
        residual, p = there(aggregator.method.residual(state)), parameters[bucket.names[0]]
        pairs = torch.view_as_complex(residual.view(-1, 2)) if p.is_complex() else residual
        found[bucket.names[0]] = pairs.as_strided(p.shape, layout_of(p)).clone()
    return found


def begun(
    comm: Comm, scaler: torch.amp.GradScaler | None = None, is_known: bool = False
) -> tuple[Net, DistributedOptimiser]:
    """A model and its optimiser after backward; is the loss's scaler handed over?"""
    model = net()
    known: dict[str, Any] = {"scaler": scaler} if is_known else {}
    optimiser = wrap(comm, model, **known)
    loss = loss_of(model, comm.rank, 0)
    (scaler.scale(loss) if scaler else loss).backward()
    return model, optimiser


def all_equal(ranks: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether these are the same on all workers."""
    return all(torch.equal(rank[name], tensor) for rank in ranks for name, tensor in ranks[0].items())


def step(model: nn.Module, optimiser: DistributedOptimiser, rank: int, at: int = 0) -> None:
    optimiser.zero_grad()
    loss_of(model, rank, at).backward()
    optimiser.step()


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_a_model_between_two_steps_loses_nothing(change: str) -> None:
    def body(comm: virtual.VirtualComm) -> Any:
        model = net(comm.rank)
        optimiser = wrap(comm, model)
        return train(model, model, optimiser, lambda: owed_by(optimiser), comm.rank, CHANGES[change])

    check_balanced(virtual.run(2, body))


class Head(nn.Module):
    """Something between the images and three scores."""

    def __init__(self, build: Callable[[Any], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.output = nn.Linear(18, 3)
        self.between = build(self)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.output(self.between(images.flatten(1)))
        return scores


def with_gaps(head: Any) -> Callable[[Tensor], Tensor]:
    head.pruned = nn.Parameter(torch.randn(18, 36).double()[:, ::2])  # every second column is gone
    head.after = nn.Parameter(torch.randn(18))
    return lambda x: x @ head.pruned + head.after


def tied(head: Any) -> Callable[[Tensor], Tensor]:
    head.first, head.second = nn.Linear(18, 18), nn.Linear(18, 18)
    head.second.weight = head.first.weight
    return lambda x: head.second(head.first(x).tanh())


def parametrised(head: Any) -> Callable[[Tensor], Tensor]:
    head.inner = nn.utils.parametrizations.weight_norm(nn.Linear(18, 18))
    return lambda x: head.inner(x)


def spectral(head: Any) -> Callable[[Tensor], Tensor]:
    head.mode = nn.Parameter(torch.randn(18, 18, dtype=torch.complex128))
    return lambda x: (x.to(head.mode.dtype) @ head.mode).real.to(x.dtype)


def words(head: Any) -> Callable[[Tensor], Tensor]:
    head.embedding = nn.Embedding(7, 18, sparse=True)
    return lambda x: x + head.embedding(x.abs().sum(dim=1).long() % 7)


def partly_frozen(head: Any) -> Callable[[Tensor], Tensor]:
    head.inner = nn.Linear(18, 18)
    head.inner.weight.requires_grad_(False)
    return lambda x: head.inner(x)


def buffers(head: Any) -> Callable[[Tensor], Tensor]:
    """Of all kinds: with gaps, one number for many, not saved, empty, of other types."""
    head.register_buffer("gaps", torch.randn(18, 2).double()[:, 0])
    head.register_buffer("expanded", torch.randn(1).double().expand(18))
    head.register_buffer("hidden", torch.randn(18), persistent=False)
    head.register_buffer("empty", torch.zeros(0))
    head.register_buffer("mask", torch.rand(18) > 0.5)
    head.register_buffer("number", torch.randint(9, ()))
    return lambda x: (x + head.gaps + head.expanded + head.hidden) * head.mask + head.number


def with_extra_state(head: Any) -> Callable[[Tensor], Tensor]:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"some": "thing"}

        def set_extra_state(self, state: Any) -> None: ...

    head.inner = Extra(18, 18)
    return lambda x: head.inner(x)


def used_by_nobody(head: Any) -> Callable[[Tensor], Tensor]:
    head.spare = nn.Linear(18, 18)
    return lambda x: x


def taking_turns(head: Any) -> Callable[[Tensor], Tensor]:
    """What nobody uses in a step is still owed, and delivered."""
    head.turns = nn.ModuleList(nn.Linear(18, 18) for _ in range(2))
    calls = itertools.count()  # two in each step of `train`
    return lambda x: head.turns[next(calls) // 2 % 2](x)


MODELS = (
    with_gaps, tied, parametrised, spectral, words, partly_frozen, buffers, with_extra_state, used_by_nobody,
    taking_turns,
)  # fmt: skip


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_models_of_all_kinds_are_averaged_without_a_loss(kind: Callable[[Any], Any]) -> None:
    def body(comm: virtual.VirtualComm) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(comm.rank)
            model = Head(kind).double()
        optimiser = wrap(comm, model)
        lived = train(model, model, optimiser, lambda: owed_by(optimiser), comm.rank)
        return lived, dict(model.named_buffers())

    (first, its_buffers), (second, other_buffers) = virtual.run(2, body)
    check_balanced([first, second])
    for name, buffer in its_buffers.items():
        assert torch.equal(buffer, other_buffers[name]), name


def test_a_compiled_model_of_many_small_buckets() -> None:
    def body(comm: virtual.VirtualComm) -> Any:
        model = net(comm.rank)
        compiled = torch.compile(model, backend="aot_eager")
        assert isinstance(compiled, nn.Module)
        optimiser = wrap(comm, compiled, scope=0.0001)
        assert len(optimiser.aggregator.buckets) > 2
        return train(compiled, compiled, optimiser, lambda: owed_by(optimiser), comm.rank)

    check_balanced(virtual.run(2, body))


def test_what_nobody_uses_and_what_is_frozen_stands_still() -> None:
    """Under momentum and weight decay, as without the wrapper; what one worker uses moves on all."""

    def body(comm: virtual.VirtualComm) -> list[dict[str, Tensor]]:
        layers = nn.ModuleDict(
            {name: nn.Linear(3, 3) for name in ("always", "never", "freezes", "one")}
        ).double()
        inner = torch.optim.SGD(layers.parameters(), lr=LR, momentum=0.9, weight_decay=0.1)
        optimiser, seen = wrap(comm, layers, inner=inner, density=0.5), []
        for at in range(5):
            if at == 2:
                layers["freezes"].requires_grad_(False)
            optimiser.zero_grad()
            used = ["always", "freezes", *(["one"] if comm.rank == 1 and at >= 3 else [])]
            inputs = torch.ones(3).double() + comm.rank
            # A gradient of zero is one: weight decay moves what one worker uses.
            sum((name != "one") * layers[name](inputs).pow(2).sum() for name in used).backward()
            nn.utils.clip_grad_norm_(layers.parameters(), 1e9)
            optimiser.step()
            seen.append(weights(layers))
        return seen

    ranks = virtual.run(2, body)
    for mine, others in zip(*ranks, strict=True):
        assert all(torch.equal(mine[name], others[name]) for name in mine)
    for before, after, moves in zip(
        ranks[0], ranks[0][1:], [{"freezes"}, set(), {"one"}, {"one"}], strict=False
    ):
        moved = {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}
        assert moved == {"always"} | moves


def test_two_optimisers_of_one_model_average_their_own_parameters() -> None:
    def body(comm: virtual.VirtualComm) -> Any:
        model = net(comm.rank)
        parts = [torch.optim.SGD(part.parameters(), lr=LR) for part in (model.convolution, model.output)]
        first, second = (wrap(comm, model, inner=part) for part in parts)

        def both() -> None:
            first.step()
            second.step()
            second.zero_grad()

        return train(model, model, Stepping(first, both), lambda: owed_by(first) | owed_by(second), comm.rank)

    check_balanced(virtual.run(2, body))


def test_what_was_unfrozen_is_trained_after_wrapping_anew() -> None:
    def body(comm: virtual.VirtualComm) -> dict[str, Tensor]:
        model = net(comm.rank)
        model.convolution.requires_grad_(False)
        optimiser = wrap(comm, model, inner=torch.optim.SGD(model.parameters(), lr=LR))
        step(model, optimiser, comm.rank)
        before = weights(model)
        model.convolution.requires_grad_(True)
        optimiser = wrap(comm, model, inner=optimiser.optimiser)
        step(model, optimiser, comm.rank, 1)
        assert not any(torch.equal(before[name], p) for name, p in weights(model).items())
        return weights(model)

    assert all_equal(virtual.run(2, body))


def test_a_closure_is_called_once_and_its_gradients_are_averaged() -> None:
    """As trainers hand over a step."""

    def body(comm: virtual.VirtualComm) -> list[dict[str, Tensor]]:
        plain, model = net(), net()
        by_line, by_closure = wrap(comm, plain), wrap(comm, model)

        def closure() -> Tensor:
            by_closure.zero_grad()
            losses.append(loss_of(model, comm.rank, len(losses)))
            losses[-1].backward()
            return losses[-1]

        losses = list[Tensor]()
        for at in range(3):
            step(plain, by_line, comm.rank, at)
            with torch.no_grad():
                assert by_closure.step(closure) is losses[at]
        assert len(losses) == 3
        return [weights(plain), weights(model)]

    ranks = virtual.run(2, body)
    for found in (ranks[0][1], *ranks[1]):
        assert all_equal([ranks[0][0], found])


def test_a_step_may_be_left_out_after_averaging() -> None:
    def body(comm: virtual.VirtualComm) -> dict[str, Tensor]:
        model, optimiser = begun(comm)
        optimiser.aggregate()
        step(model, optimiser, comm.rank, 1)  # it clears the gradients first
        return weights(model)

    assert all_equal(virtual.run(2, body))


def test_a_step_may_be_skipped_after_averaging() -> None:
    """As loops with a scaler of their own do where it overflows; the next step averages as ever."""

    def body(comm: virtual.VirtualComm) -> dict[str, Tensor]:
        model = net()
        optimiser = wrap(comm, model)
        for at in range(3):
            optimiser.zero_grad()
            (loss_of(model, comm.rank, at) * 8).backward()
            if at == 1 and comm.rank == 1:
                there(model.output.bias.grad)[0] = torch.nan
            if optimiser.aggregate(8.0) is None:
                assert at == 1
                continue
            for p in model.parameters():
                there(p.grad).div_(8.0)
            optimiser.step()
        return weights(model)

    assert all_equal(virtual.run(2, body))


def test_a_batch_is_skipped_under_a_scaler_that_has_not_scaled_yet() -> None:
    def body(comm: virtual.VirtualComm) -> dict[str, Tensor]:
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=4.0)
        optimiser = wrap(comm, model, scaler=scaler)
        for at in range(3):
            optimiser.zero_grad()
            if comm.rank == 1 and at < 2:
                optimiser.skip()
            else:
                scaler.scale(loss_of(model, comm.rank, at)).backward()
                scaler.step(optimiser)
            scaler.update()
        return {**weights(model), "scale": torch.tensor(scaler.get_scale())}

    assert all_equal(virtual.run(2, body))


OVERFLOW = 2  # the step in which it happens, on worker 1


def plain(scaler: torch.amp.GradScaler, optimiser: DistributedOptimiser, model: nn.Module) -> None:
    """The recipe of PyTorch's documentation."""


def clipping(scaler: torch.amp.GradScaler, optimiser: DistributedOptimiser, model: nn.Module) -> None:
    scaler.unscale_(optimiser)
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def averaging_first(scaler: torch.amp.GradScaler, optimiser: DistributedOptimiser, model: nn.Module) -> None:
    if optimiser.aggregate() is not None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def unscaling_and_averaging(
    scaler: torch.amp.GradScaler, optimiser: DistributedOptimiser, model: nn.Module
) -> None:
    scaler.unscale_(optimiser)
    optimiser.aggregate()


RECIPES = (plain, clipping, averaging_first, unscaling_and_averaging)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_a_grad_scaler_that_was_handed_over_works_as_documented(recipe: Callable[..., None]) -> None:
    """An overflow on one worker skips the step on all, lowers all scales, and reaches no residual."""

    def body(comm: virtual.VirtualComm) -> tuple[Tensor, float]:
        model, unscaled = net(), net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        optimiser, reference = wrap(comm, model, scaler=scaler), wrap(comm, unscaled)
        for at in range(5):
            owed, before = owed_by(optimiser), weights(model)
            optimiser.zero_grad()
            scaler.scale(loss_of(model, comm.rank, at)).backward()
            if at == OVERFLOW and comm.rank == 1:
                there(model.output.weight.grad)[0, 0] = torch.inf
            recipe(scaler, optimiser, model)
            scaler.step(optimiser)
            scaler.update()
            if at == OVERFLOW:
                assert optimiser.last_report is None
                assert all(torch.equal(before[name], p) for name, p in weights(model).items())
                assert all(torch.equal(owed[name], residual) for name, residual in owed_by(optimiser).items())
                continue
            step(unscaled, reference, comm.rank, at)
        torch.testing.assert_close(weights(model), weights(unscaled), rtol=1e-12, atol=1e-12)
        return model.output.weight.detach().clone(), scaler.get_scale()

    ranks = virtual.run(2, body)
    assert torch.equal(ranks[0][0], ranks[1][0])
    assert [scale for _, scale in ranks] == [2.0**9, 2.0**9]


def test_gradients_that_were_replaced_after_averaging_are_unscaled_too() -> None:
    def body(comm: virtual.VirtualComm) -> None:
        model, unscaled = net(), net()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        optimiser, reference = wrap(comm, model), wrap(comm, unscaled)
        scaler.scale(loss_of(model, comm.rank, 0)).backward()
        optimiser.aggregate(scaler.get_scale())
        CHANGES["gradients replaced"](model)
        scaler.step(optimiser)
        step(unscaled, reference, comm.rank)
        torch.testing.assert_close(weights(model), weights(unscaled), rtol=1e-12, atol=1e-12)

    virtual.run(2, body)


class Stepping:
    """Steps as it is told."""

    def __init__(self, optimiser: DistributedOptimiser, step: Callable[[], object]) -> None:
        self.zero_grad: Callable[[], None] = optimiser.zero_grad
        self.step: Callable[[], object] = step


def test_a_grad_scaler_that_is_switched_off_changes_nothing() -> None:
    def body(comm: virtual.VirtualComm) -> Any:
        model = net(comm.rank)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        optimiser = wrap(comm, model, scaler=scaler)
        stepping = Stepping(optimiser, lambda: scaler.step(optimiser))
        return train(model, model, stepping, lambda: owed_by(optimiser), comm.rank)

    check_balanced(virtual.run(2, body))


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "from zero": lambda optimiser: lr_scheduler.LambdaLR(optimiser, lambda at: at / 4),
    "steps": lambda optimiser: lr_scheduler.StepLR(optimiser, 1),
    "restarts": lambda optimiser: lr_scheduler.CosineAnnealingWarmRestarts(optimiser, 3),
    "one cycle": lambda optimiser: lr_scheduler.OneCycleLR(optimiser, [0.1, 0.3], 9, cycle_momentum=False),
    "cycles": lambda optimiser: lr_scheduler.CyclicLR(optimiser, [0, 0.1], 0.3, 2, cycle_momentum=False),
    "sequence": lambda optimiser: lr_scheduler.SequentialLR(
        optimiser, [lr_scheduler.LinearLR(optimiser, 0.1), lr_scheduler.ExponentialLR(optimiser, 0.9)], [2]
    ),
    "chain": lambda optimiser: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimiser), lr_scheduler.PolynomialLR(optimiser)]
    ),
    "averaged weights": lambda optimiser: torch.optim.swa_utils.SWALR(optimiser, 0.01, 2),
    "plateaus": lambda optimiser: lr_scheduler.ReduceLROnPlateau(optimiser, patience=0),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["topk", "randomk"])
def test_the_learning_rate_domain_follows_every_schedule_and_every_group(name: str, schedule: str) -> None:
    """In units of weights: P times what was applied, plus what is owed, is the sum of lr x gradient."""

    def body(comm: virtual.VirtualComm) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model = net()
        groups: list[dict[str, Any]] = [
            {"params": model.convolution.parameters(), "lr": 0.2},
            {"params": model.output.parameters()},
        ]
        optimiser = wrap(comm, model, name, torch.optim.SGD(groups, lr=LR), feedback="learning_rate")
        scheduler, start = SCHEDULES[schedule](optimiser), weights(model)
        seen = {key: torch.zeros_like(p) for key, p in start.items()}
        for at in range(6):
            optimiser.zero_grad()
            loss_of(model, comm.rank, at).backward()
            for group, part in zip(optimiser.param_groups, ("convolution", "output"), strict=True):
                for which_p, p in model.named_parameters():
                    if which_p.startswith(part):
                        seen[which_p] += group["lr"] * p.grad
            optimiser.step()
            scheduler.step(*([1.0] if schedule == "plateaus" else []))
        owed = owed_by(optimiser)
        for bucket, state in zip(optimiser.aggregator.buckets, optimiser.aggregator.states, strict=True):
            owed[bucket.names[0]] *= state.feedback.lr
        return {key: start[key] - p for key, p in weights(model).items()}, owed, seen

    ranks = virtual.run(2, body)
    for name, applied in ranks[0][0].items():
        assert torch.equal(applied, ranks[1][0][name])
        owed, seen = (ranks[0][kind][name] + ranks[1][kind][name] for kind in (1, 2))
        torch.testing.assert_close(2 * applied + owed, seen, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["powersgd", "efsignsgd", "qsgd", "topk"])
def test_methods_wake_up_from_rate_0(name: str) -> None:
    def body(comm: virtual.VirtualComm) -> dict[str, Tensor]:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        density = {} if name == "topk" else {"density": None}
        choices = {key: value for key, value in {"feedback": "learning_rate", **density}.items() if value}
        method = sparsify.build(
            name, scope="layer", **choices, **({"density": 0.2} if name == "topk" else {})
        )
        optimiser = DistributedOptimiser(inner, model, method, comm)
        before = weights(model)
        step(model, optimiser, comm.rank)
        assert all(torch.equal(before[name], p) for name, p in weights(model).items())
        inner.param_groups[0]["lr"] = LR
        for at in (1, 2):
            step(model, optimiser, comm.rank, at)
        assert not any(torch.equal(before[name], p) for name, p in weights(model).items())
        return weights(model)

    assert all_equal(virtual.run(2, body))


def test_the_density_falls_as_epochs_go_by() -> None:
    def body(comm: virtual.VirtualComm) -> list[list[int]]:
        found = []
        for choices in ({"steps_per_epoch": 2}, dict[str, Any]()):
            model = net()
            optimiser = wrap(comm, model, scope="global", density_warmup=[1.0, 0.5], **choices)
            selected = []
            for at in range(6):
                if not choices:
                    optimiser.epoch = at // 2
                step(model, optimiser, comm.rank, at)
                assert isinstance(optimiser.last_report, StepReport)
                selected.append(optimiser.last_report.selected)
            found.append(selected)
        n = sum(p.numel() for p in model.parameters())
        assert found[0] == [n, n, n // 2, n // 2, n // 5, n // 5]
        return found

    for by_number, by_hand in virtual.run(2, body):
        assert by_number == by_hand


CLIPPED = 0.01  # the norm of an average that is clipped
STUCK = "so the density stays at 1 and does not fall to 0.2"


def test_a_warm_up_that_nobody_advances_is_told_once_by_rank_0(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapping, "LONG_EPOCH_STEPS", 3)

    def body(comm: virtual.VirtualComm) -> None:
        model = net()
        optimiser = wrap(comm, model, scope="global", density_warmup=[1.0])
        optimiser.epoch = 0
        for at in range(3):
            step(model, optimiser, comm.rank, at)
        assert comm.rank or not caplog.messages
        for at in range(3, 9):
            optimiser.epoch = 0  # said again, it is not advanced
            step(model, optimiser, comm.rank, at)

    virtual.run(2, body)
    (told,) = caplog.messages
    assert told.startswith(f".epoch has been 0 for 3 steps, {STUCK} (density_warmup); unless")
    assert told.endswith("set .epoch before each one, or pass steps_per_epoch=len(batches)")


@pytest.mark.parametrize(
    ("epochs", "choices"),
    [
        ([0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2], {"density_warmup": [1.0, 0.5]}),  # it is over in time
        ([None] * 12, {"density_warmup": [1.0], "steps_per_epoch": 6}),  # advances by itself
        ([0] * 12, {"density_warmup": [0.2]}),  # nothing falls
    ],
)
def test_a_warm_up_that_ends_is_not_told(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    epochs: list[int | None],
    choices: dict[str, Any],
) -> None:
    monkeypatch.setattr(wrapping, "LONG_EPOCH_STEPS", 3)

    def body(comm: virtual.VirtualComm) -> None:
        model = net()
        optimiser = wrap(comm, model, scope="global", **choices)
        for at, epoch in enumerate(epochs):
            if epoch is not None:
                optimiser.epoch = epoch
            step(model, optimiser, comm.rank, at)

    virtual.run(1, body)
    assert not caplog.messages


def test_the_last_report_has_density_and_bytes() -> None:
    def body(comm: virtual.VirtualComm) -> None:
        model = net()
        optimiser = wrap(comm, model, scope="global")
        assert optimiser.last_report is None
        step(model, optimiser, comm.rank)
        n, k = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in model.parameters()) // 5
        report = optimiser.last_report
        assert report is not None
        assert (report.selected, report.num_elements, report.sent_density) == (k, n, k / n)
        assert report.density == report.sent_density
        assert report.wire_bytes == k * (4 + next(model.parameters()).element_size())  # to one other worker

    virtual.run(2, body)


def test_what_is_clipped_after_aggregate_is_the_average() -> None:
    def body(comm: virtual.VirtualComm) -> tuple[Tensor, list[Tensor]]:
        model, optimiser = begun(comm)
        optimiser.aggregate()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimiser.step()
        return norm, [(before[name] - p.detach()) / LR for name, p in model.named_parameters()]

    (norm, update), (other_norm, other_update) = virtual.run(2, body)
    assert norm == other_norm > 2 * CLIPPED
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(update, other_update, strict=True))
    length = torch.cat([part.flatten() for part in update]).norm()
    assert length.item() == pytest.approx(CLIPPED, rel=1e-4)


def test_hooks_see_the_average_once_a_step() -> None:
    everywhere: list[torch.optim.Optimizer] = []

    def body(comm: virtual.VirtualComm) -> list[Tensor]:
        model = net()
        optimiser, seen = wrap(comm, model), list[Tensor]()

        def note(which: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            assert which is optimiser
            seen.append(there(model.output.bias.grad).clone())

        optimiser.register_step_pre_hook(note)
        optimiser.register_step_post_hook(note)
        step(model, optimiser, comm.rank)
        return seen

    handle = register_optimizer_step_pre_hook(lambda which, *_: everywhere.append(which))
    try:
        before, after = virtual.run(2, body)
    finally:
        handle.remove()
    assert len(everywhere) == 2  # one a worker
    assert len(before) == len(after) == 2
    assert all(torch.equal(one, before[0]) for one in before + after)


def test_state_dict_hooks_run() -> None:
    def body(comm: virtual.VirtualComm) -> None:
        model, order = net(), []
        optimiser = wrap(comm, model)
        optimiser.register_state_dict_pre_hook(lambda which: order.append("before saving"))
        optimiser.register_state_dict_post_hook(lambda which, saved: {**saved, "note": 7})
        optimiser.register_load_state_dict_pre_hook(
            lambda which, saved: {key: value for key, value in saved.items() if key != "note"}
        )
        optimiser.register_load_state_dict_post_hook(lambda which: order.append("after loading"))
        step(model, optimiser, comm.rank)
        saved = optimiser.state_dict()
        assert saved["note"] == 7
        optimiser.load_state_dict(saved)
        assert order == ["before saving", "after loading"]

    virtual.run(1, body)


def test_a_saved_state_reads_like_any_optimisers_and_older_ones_are_read() -> None:
    def body(comm: virtual.VirtualComm) -> None:
        model = net()
        optimiser = wrap(comm, model, inner=torch.optim.Adam(model.parameters(), lr=LR))
        step(model, optimiser, comm.rank)
        saved = copy.deepcopy(optimiser.state_dict())
        assert saved["param_groups"][0]["lr"] == LR
        named: dict[str, Any] = get_optimizer_state_dict(model, optimiser)
        assert torch.equal(named["state"]["output.bias"]["exp_avg"], saved["state"][3]["exp_avg"])
        with pytest.raises(ValueError, match=r"has no residuals.*Save .*state_dict.. on every worker"):
            set_optimizer_state_dict(model, optimiser, named)
        older = {"optimiser": optimiser.optimiser.state_dict(), "method": saved["method"], "epoch": 3}
        step(model, optimiser, comm.rank, 1)
        first = {name: owed.clone() for name, owed in owed_by(optimiser).items()}
        optimiser.load_state_dict(older)
        assert optimiser.epoch == 3
        assert not torch.equal(owed_by(optimiser)["output.bias"], first["output.bias"])
        set_optimizer_state_dict(model, optimiser.optimiser, named)  # without residuals, as the sentence says
        optimiser.optimiser.load_state_dict(saved)  # and so is rank 0's, where there is no other

    virtual.run(2, body)


@pytest.mark.usefixtures("group_of_one")
def test_a_process_group_of_its_own_is_used() -> None:
    group, model = dist.new_group([0]), net()
    assert isinstance(group, dist.ProcessGroup)
    inner, method = torch.optim.SGD(model.parameters(), lr=LR), sparsify.build("topk", density=0.2)
    optimiser = sparsify.distribute(inner, model, method, group=group)
    assert isinstance(optimiser.comm, TorchComm)
    assert optimiser.comm.group is group
    step(model, optimiser, 0)
    with pytest.raises(ValueError, match="comm and group both say who averages"):
        sparsify.distribute(inner, model, method, TorchComm(), group=group)


Refusal = Callable[[Comm], object]
REFUSED: dict[str, tuple[Refusal, str]] = {}


def refused(sentence: str) -> Callable[[Refusal], Refusal]:
    """What the decorated function does is answered with `sentence`, on all workers."""

    def note(use: Refusal) -> Refusal:
        REFUSED[use.__name__] = use, sentence
        return use

    return note


@refused(r"output.bias was .*float64.* and is now .*float32.*; convert the model first")
def a_cast(comm: Comm) -> None:
    model, optimiser = begun(comm)
    model.float()
    optimiser.step()


@refused(
    r"the strides of convolution.weight were \(8, 4, 2, 1\) and are now \(8, 1, 4, 2\); convert the model"
)
def another_memory_format(comm: Comm) -> None:
    """Fused optimisers would add the gradient to other weights than its own."""
    model = net()
    optimiser = wrap(comm, model, inner=torch.optim.SGD(model.parameters(), lr=LR, fused=True))
    loss_of(model, comm.rank, 0).backward()
    weight = model.convolution.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)  # as model.to does it
    optimiser.step()


@refused(r"parameter of shape \(5,\) that the model does not have; hand over a module that has all")
def a_parameter_of_the_loss(comm: Comm) -> None:
    model = net()
    wrap(comm, model, inner=torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(5).double())], LR))


@refused("has other parameters than when it was wrapped; wrap it anew")
def a_group_added_to_the_inner_optimiser(comm: Comm) -> None:
    model = net()
    inner = torch.optim.SGD(model.output.parameters(), lr=LR)
    optimiser = wrap(comm, model, inner=inner)
    inner.add_param_group({"params": model.convolution.parameters()})
    step(model, optimiser, comm.rank)


@refused("convolution.weight was frozen when its optimiser was wrapped, and is trained now; wrap it anew")
def unfrozen_later(comm: Comm) -> None:
    """At once, on workers too that have no gradient of it."""
    model = net()
    model.convolution.requires_grad_(False)
    optimiser = wrap(comm, model, inner=torch.optim.SGD(model.parameters(), lr=LR))
    loss_of(model, comm.rank, 0).backward()
    model.convolution.requires_grad_(True)
    optimiser.step()


@refused("wrapped already")
def wrapping_twice(comm: Comm) -> None:
    model = net()
    wrap(comm, model, inner=wrap(comm, model))


@refused("were wrapped anew since; go on with what that returned")
def going_on_with_the_older_wrapper(comm: Comm) -> None:
    model = net()
    older = wrap(comm, model)
    newer = wrap(comm, model)
    step(model, newer, comm.rank)
    step(model, older, comm.rank)


@refused("its own step would not average; call that of what sparsify.distribute or")
def stepping_the_inner_optimiser(comm: Comm) -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    wrap(comm, model, inner=inner)
    loss_of(model, comm.rank, 0).backward()
    inner.step()


@refused("aggregate was called twice")
def averaging_twice(comm: Comm) -> None:
    _, optimiser = begun(comm)
    optimiser.aggregate()
    optimiser.aggregate()


@refused("backward ran after aggregate")
def backward_after_averaging(comm: Comm) -> None:
    model, optimiser = begun(comm)
    optimiser.aggregate()
    loss_of(model, comm.rank, 1).backward()
    optimiser.step()


@refused("does not know of overflows on other workers; hand the scaler over")
def a_scaler_that_nobody_knows(comm: Comm) -> None:
    scaler = torch.amp.GradScaler("cpu")
    _, optimiser = begun(comm, scaler)
    scaler.step(optimiser)


@refused("unscale_ and aggregate.scale. both divide by the scale; hand the scaler over")
def dividing_by_the_scale_twice(comm: Comm) -> None:
    scaler = torch.amp.GradScaler("cpu")
    _, optimiser = begun(comm, scaler)
    scaler.unscale_(optimiser)
    optimiser.aggregate(scaler.get_scale())
    scaler.step(optimiser)


@refused("the scaler was handed over, so its scale is known")
def telling_a_known_scale(comm: Comm) -> None:
    scaler = torch.amp.GradScaler("cpu")
    _, optimiser = begun(comm, scaler, is_known=True)
    optimiser.aggregate(scaler.get_scale())


@refused("the scaler was given the inner optimiser")
def unscaling_the_inner_optimiser(comm: Comm) -> None:
    scaler = torch.amp.GradScaler("cpu")
    _, optimiser = begun(comm, scaler, is_known=True)
    scaler.unscale_(optimiser.optimiser)
    scaler.step(optimiser)


@refused(r"nobody says which one this is; pass steps_per_epoch=, or set .epoch")
def a_density_warmup_without_epochs(comm: Comm) -> None:
    model = net()
    step(model, wrap(comm, model, density_warmup=[0.5]), comm.rank)


@refused("steps_per_epoch=2.5 must be a whole number above 0")
def half_a_step_an_epoch(comm: Comm) -> None:
    wrap(comm, net(), steps_per_epoch=2.5)


@refused("the epoch follows from steps_per_epoch; leave one of them out")
def saying_the_epoch_twice(comm: Comm) -> None:
    wrap(comm, net(), steps_per_epoch=2).epoch = 1


@refused("applies momentum itself, and the optimiser has 0.9 too")
def a_schedule_that_brings_momentum(comm: Comm) -> None:
    model = net()
    optimiser = wrap(comm, model, "dgc", torch.optim.SGD(model.parameters(), lr=LR))
    lr_scheduler.OneCycleLR(optimiser, max_lr=0.1, total_steps=9, max_momentum=0.9)
    step(model, optimiser, comm.rank)


@refused(r"needs one rate for all that is exchanged together, and these have \[0.05, 0.2\]; .*scope='layer'")
def one_bucket_of_two_rates(comm: Comm) -> None:
    model = net()
    groups: list[dict[str, Any]] = [
        {"params": model.convolution.parameters(), "lr": 0.2}, {"params": model.output.parameters()},
    ]  # fmt: skip
    inner = torch.optim.SGD(groups, lr=LR)
    optimiser = wrap(comm, model, inner=inner, scope="global", feedback="learning_rate")
    step(model, optimiser, comm.rank)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # at which the compiler looks
def test_a_compiled_step_is_the_same_to_the_bit(overlap: bool) -> None:
    """Of the optimiser alone, or of the whole training."""

    def trained(compiles: Callable[[Callable[..., Any]], Callable[..., Any]], is_whole: bool) -> Any:
        torch.compiler.reset()
        model = net()
        optimiser = sparsify.distribute(
            torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), model, topk(), overlap=overlap
        )
        update = optimiser.step if is_whole else compiles(optimiser.step)

        def one(at: int) -> None:
            loss_of(model, 0, at).backward()
            update()
            optimiser.zero_grad()

        for at in range(3):
            (compiles(one) if is_whole else one)(at)
        return weights(model)

    def aot(function: Callable[..., Any]) -> Any:
        return torch.compile(function, backend="aot_eager")

    expected = trained(lambda function: function, is_whole=False)
    assert all_equal([expected, trained(aot, is_whole=False), trained(aot, is_whole=True)])


def topk() -> Any:
    return sparsify.build("topk", density=0.2, scope="layer")


class WithModes(torch.optim.SGD):
    """As optimisers without schedules are: weights in evaluation are others than in training."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def eval(self) -> None:
        self.is_training = False


@pytest.mark.usefixtures("group_of_one")
def test_the_modes_of_an_optimiser_are_reached_through_the_wrapper() -> None:
    model = net()
    inner = WithModes(model.parameters(), lr=LR)
    optimiser = sparsify.distribute(inner, model, topk())
    optimiser.train()
    assert inner.is_training
    optimiser.eval()
    assert not inner.is_training
    assert not hasattr(sparsify.distribute(torch.optim.SGD(model.parameters()), model, topk()), "train")


@pytest.mark.usefixtures("group_of_one")
def test_a_mesh_of_one_dimension_is_a_group() -> None:
    model, mesh = net(), init_device_mesh("cpu", (1,))
    optimiser = sparsify.distribute(torch.optim.SGD(model.parameters()), model, topk(), group=mesh)
    assert isinstance(optimiser.comm, TorchComm)
    assert optimiser.comm.group is mesh.get_group()
    ddp = nn.parallel.DistributedDataParallel(net())
    registered = sparsify.register(ddp, topk(), group=mesh).comm
    assert isinstance(registered, TorchComm)
    assert registered.group is mesh.get_group()
    plane = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="a group for each of its 2 dimensions; hand over the one whose"):
        sparsify.distribute(torch.optim.SGD(model.parameters()), model, topk(), group=plane)
    sparsify.distribute(torch.optim.SGD(model.parameters()), model, topk(), group=plane["replicate"])


@pytest.mark.usefixtures("group_of_one")
def test_a_group_without_this_worker_is_refused_by_every_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ddp = net(), nn.parallel.DistributedDataParallel(net())
    inner = torch.optim.SGD(model.parameters())
    mesh = init_device_mesh("cpu", (1,))
    monkeypatch.setattr(mesh, "get_coordinate", lambda: None)  # as of a mesh of other workers
    sharded = net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    of_shards = torch.optim.SGD(sharded.parameters())
    ways: list[Callable[[Any], object]] = [
        lambda group: sparsify.distribute(inner, model, topk(), group=group),
        lambda group: sparsify.distribute(inner, model, sparsify.localsgd(every=2), group=group),
        lambda group: sparsify.register(ddp, topk(), group=group),
        lambda group: sparsify.shard(sharded, of_shards, topk(), group),
        lambda group: sparsify.shard(sharded, of_shards, sparsify.localsgd(every=2), group),
    ]
    for way in ways:
        for group in (dist.GroupMember.NON_GROUP_MEMBER, mesh):
            with pytest.raises(ValueError, match="rank 0 of all, is not in the group that was handed over"):
                way(group)
        with pytest.raises(ValueError, match=r"\[0\] is no process group; take what torch.distributed.new"):
            way([0])


@pytest.mark.usefixtures("group_of_one")
def test_an_optimiser_with_a_closure_works_under_register() -> None:
    def trained(model: nn.Module, called: nn.Module) -> dict[str, Tensor]:
        optimiser = torch.optim.LBFGS(model.parameters(), max_iter=3)

        def closure() -> Tensor:
            optimiser.zero_grad()
            loss = loss_of(called, 0, 0)
            loss.backward()
            return loss

        optimiser.step(closure)
        return weights(model)

    ddp = nn.parallel.DistributedDataParallel(net())
    sparsify.register(ddp, sparsify.build("topk", density=1.0, scope="layer", feedback="none"))
    assert all_equal([trained(alone := net(), alone), trained(ddp.module, ddp)])


@refused("LBFGS computes gradients within its step.*take DistributedDataParallel and sparsify.register")
def an_optimiser_that_calls_its_closure_again(comm: Comm) -> None:
    model = net()
    wrap(comm, model, inner=torch.optim.LBFGS(model.parameters()))


@refused("Net is not an optimiser; sparsify.distribute takes an optimiser, its model, and a method")
def model_first(comm: Comm) -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    DistributedOptimiser(model, inner, sparsify.build("topk"), comm)  # type: ignore[arg-type]


@refused("'topk' is not a method; build one, such as")
def a_method_by_name(comm: Comm) -> None:
    model = net()
    DistributedOptimiser(torch.optim.SGD(model.parameters(), lr=LR), model, "topk", comm)  # type: ignore[arg-type]


@refused("scaler=1024.0 is no torch.amp.GradScaler; with others call aggregate.scale.")
def a_scale_for_a_scaler(comm: Comm) -> None:
    wrap(comm, net(), scaler=1024.0)


@refused("seed='0' must be a whole number")
def a_seed_in_words(comm: Comm) -> None:
    wrap(comm, net(), seed="0")


@refused("NoRate has no learning rate for feedback in the learning-rate domain to follow")
def no_rate_to_follow(comm: Comm) -> None:
    class NoRate(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

    model = net()
    step(model, wrap(comm, model, inner=NoRate(model.parameters()), feedback="learning_rate"), comm.rank)


@refused("weight has no shape yet; run one batch through the model first")
def a_lazy_model(comm: Comm) -> None:
    wrap(comm, nn.LazyLinear(3))


class Scaled(Tensor):
    """A tensor whose elements lie in another one, as those of quantised ones do."""

    elements: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.elements = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return cls(args[0].elements)
        raise NotImplementedError(f"{func} of a scaled tensor")


def with_more(kind: Tensor, is_trained: bool) -> Net:
    """Return a model that has such a parameter, too."""
    model = net()
    model.more = nn.Parameter(kind, requires_grad=is_trained)
    return model


@refused("more is of the type Scaled and no plain tensor, so that its elements can't be exchanged")
def a_trained_tensor_of_another_kind(comm: Comm) -> None:
    wrap(comm, with_more(Scaled(torch.ones(3)), is_trained=True))


@refused("more is of the type Scaled and no plain tensor.* tell its name to DistributedDataParallel._set")
def a_frozen_tensor_of_another_kind(comm: Comm) -> None:
    wrap(comm, with_more(Scaled(torch.ones(3)), is_trained=False))


@refused("more is trained in torch.float8_e4m3fn, which has no sums to average")
def eight_bits_trained(comm: Comm) -> None:
    wrap(comm, with_more(torch.ones(3).to(torch.float8_e4m3fn), is_trained=True))


@refused("weight is in torch.float64 and takes gradients in torch.float32, its grad_dtype")
def gradients_of_another_type(comm: Comm) -> None:
    model = net()
    model.output.weight.grad_dtype = torch.float32
    wrap(comm, model)


@refused("weight is stepped within the backward pass, by _apply_optimizer_in_backward, before anything")
def optimisers_in_the_backward_pass(comm: Comm) -> None:
    model = net()
    model.output.weight._in_backward_optimizers = []  # type: ignore[attr-defined]  # as torch marks it
    wrap(comm, model)


@refused("told to ignore output.weight, so that it is each worker's own, and this optimiser would average it")
def a_parameter_that_ddp_ignores(comm: Comm) -> None:
    model = net()
    ignore(model, "output.weight")
    wrap(comm, model)


def ignore(model: nn.Module, *names: str) -> None:
    told = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    told(model, names)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("method", [topk(), sparsify.localsgd(every=1)], ids=["topk", "localsgd"])
def test_what_ddp_is_told_to_ignore_is_each_workers_own(method: Any) -> None:
    """Buffers and frozen parameters, of whatever shape and kind."""

    def body(comm: virtual.VirtualComm) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = net(comm.rank)
        model.frozen = nn.Parameter(Scaled(torch.ones(3 + comm.rank)), requires_grad=False)
        model.register_buffer("own", torch.full((2 + comm.rank,), float(comm.rank)))
        model.register_buffer("common", torch.full((2,), float(comm.rank)))
        ignore(model, "frozen", "own")
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        optimiser = sparsify.distribute(inner, model, method, comm)
        loss_of(model, comm.rank, 0).backward()
        optimiser.step()
        of_trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        return model.get_buffer("own"), model.get_buffer("common"), of_trained

    (_, _, first), (own, common, second) = virtual.run(2, body)
    assert own.tolist() == [1.0, 1.0, 1.0]
    assert common.tolist() == [0.0, 0.0]
    assert all_equal([first, second])


@refused("weight is on the meta device")
def a_model_without_weights(comm: Comm) -> None:
    wrap(comm, nn.Linear(3, 3, device="meta"))


@refused("weight was made in inference mode")
def a_model_made_in_inference_mode(comm: Comm) -> None:
    with torch.inference_mode():
        model = nn.Linear(30, 3)
    wrap(comm, model)


@refused("these have .*bfloat16.*float64.*; give each kind an optimiser of its own")
def two_types_of_weights(comm: Comm) -> None:
    model = net()
    model.output.bfloat16()
    wrap(comm, model)


@refused("copy its state_dict")
def copying(comm: Comm) -> None:
    copy.deepcopy(wrap(comm, net()))


@refused("copy its state_dict")
def pickling(comm: Comm) -> None:
    pickle.dumps(wrap(comm, net()))


@refused("is of rank 0, and this is rank 1; .*Where there is only one, load the inner optimiser's alone")
def loading_rank_0s_checkpoint_everywhere(comm: Comm) -> None:
    model = net()
    optimiser = wrap(comm, model)
    saved = optimiser.state_dict()
    saved["method"]["rank"] = 0
    optimiser.load_state_dict(saved)


@pytest.mark.parametrize("use", REFUSED)
def test_what_can_not_be_right_is_refused_in_a_sentence_at_once(use: str) -> None:
    does, sentence = REFUSED[use]
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        virtual.run(2, does)
    assert len(str(caught.value)) < 350


@pytest.mark.usefixtures("group_of_one")
def test_models_that_are_distributed_already_are_refused() -> None:
    sharded = net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    whole = nn.parallel.DistributedDataParallel(net())
    models: list[tuple[nn.Module, str]] = [
        (whole, r"model.module.*or take sparsify.register"), (sharded, "is a DTensor, as FSDP2"),
    ]  # fmt: skip
    for model, sentence in models:
        inner = torch.optim.SGD(model.parameters(), lr=LR)
        with pytest.raises(ValueError, match=sentence):
            sparsify.distribute(inner, model, sparsify.build("topk", density=0.2))
