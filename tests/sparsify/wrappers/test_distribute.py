"""The optimizer that `distribute` returns, beside what it has in common with the other wrappers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import sparsify
from sparsify.comm import Comm, virtual
from sparsify.wrappers import wrapper_base
from tests.sparsify import laws
from tests.sparsify.wrappers.test_refused import Scaled, ignore, sgd
from tests.sparsify.wrappers.user_acts import LR, loss_of, net, weights

TOPK = sparsify.build("topk", density=0.2, scope="layer")


def averaging(model: Any, comm: Comm | None = None, method: Any = TOPK, **options: Any) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return sparsify.distribute(torch.optim.SGD(trained, lr=LR), model, method, comm, **options)


def step(model: nn.Module, optimizer: Any, rank: int = 0, number: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model, rank, number).backward()
    optimizer.step()


def check_alike(body: Callable[[Comm], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Run it on two virtual ranks, check that both return the same, and return that."""
    first, second = virtual.run(2, body)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    return first


def test_what_nobody_uses_and_what_is_frozen_stands_still() -> None:
    """Under momentum and weight decay, as without the wrapper; what one worker uses moves on all."""

    def body(comm: Comm) -> dict[str, Tensor]:
        layers = nn.ModuleDict({name: nn.Linear(3, 3) for name in ("always", "never", "freezes", "one")})
        inner = torch.optim.SGD(layers.parameters(), lr=LR, momentum=0.9, weight_decay=0.1)
        optimizer = sparsify.distribute(inner, layers, laws.build("topk", 0.5), comm)
        for number, moves in enumerate(({"freezes"}, {"freezes"}, set[str](), {"one"}, {"one"})):
            if number == 2:
                layers["freezes"].requires_grad_(False)
            before = weights(layers)
            optimizer.zero_grad()
            used = ["always", "freezes", *(["one"] if comm.rank == 1 and number >= 3 else [])]
            inputs = torch.ones(3) + comm.rank
            # A gradient of zero is one: weight decay moves what one worker uses.
            sum((name != "one") * layers[name](inputs).pow(2).sum() for name in used).backward()
            nn.utils.clip_grad_norm_(layers.parameters(), 1e9)
            optimizer.step()
            after = weights(layers)
            moved = {name.partition(".")[0] for name in after if not torch.equal(before[name], after[name])}
            assert moved == {"always"} | moves, number
        return weights(layers)

    check_alike(body)


def test_a_batch_is_skipped_under_a_scaler_that_has_not_scaled_yet() -> None:
    def body(comm: Comm) -> dict[str, Tensor]:
        model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = averaging(model, comm, scaler=scaler)
        for number in range(3):
            optimizer.zero_grad()
            if comm.rank == 1 and number < 2:
                optimizer.skip()
            else:
                scaler.scale(loss_of(model, comm.rank, number)).backward()
                scaler.step(optimizer)
            scaler.update()
        return {**weights(model), "scale": torch.tensor(scaler.get_scale())}

    check_alike(body)


def test_methods_wake_up_from_rate_0() -> None:
    def body(comm: Comm) -> dict[str, Tensor]:
        for name in ("powersgd", "efsignsgd", "qsgd", "topk"):
            model = net()
            optimizer = averaging(model, comm, laws.build(name, 0.2, feedback="learning_rate"))
            for rate in (0.0, LR):
                optimizer.param_groups[0]["lr"] = rate
                before = weights(model)
                for number in range(2):
                    step(model, optimizer, comm.rank, number)
                for key, p in weights(model).items():
                    assert torch.equal(before[key], p) is (rate == 0.0)
        return weights(model)

    check_alike(body)


@pytest.mark.parametrize("method", [TOPK, sparsify.localsgd(every=1)], ids=["topk", "localsgd"])
def test_what_ddp_is_told_to_ignore_is_each_workers_own(method: Any) -> None:
    """Buffers and frozen parameters, of whatever shape and kind."""

    def body(comm: Comm) -> dict[str, Tensor]:
        model = net(comm.rank)
        model.frozen = nn.Parameter(Scaled(torch.ones(3 + comm.rank)), requires_grad=False)
        model.register_buffer("own", torch.full((2 + comm.rank,), float(comm.rank)))
        model.register_buffer("common", torch.full((2,), float(comm.rank)))
        ignore(model, "frozen", "own")
        step(model, averaging(model, comm, method), comm.rank)
        assert model.own.tolist() == [float(comm.rank)] * (2 + comm.rank)
        trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        return {**trained, "common": model.common}

    assert check_alike(body)["common"].tolist() == [0.0, 0.0]


def test_what_is_clipped_after_aggregate_is_the_average() -> None:
    def body(comm: Comm) -> dict[str, Tensor]:
        model = net()
        optimizer = averaging(model, comm)
        loss_of(model, comm.rank, 0).backward()
        optimizer.aggregate()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        before = nn.utils.parameters_to_vector(model.parameters())
        optimizer.step()
        return {"moved": before - nn.utils.parameters_to_vector(model.parameters())}

    assert check_alike(body)["moved"].norm().item() == pytest.approx(0.01 * LR, rel=1e-4)


def test_the_density_falls_as_epochs_go_by() -> None:
    def body(comm: Comm) -> None:
        model = net()
        n = sum(p.numel() for p in model.parameters())
        warmed = sparsify.build("topk", density=0.2, density_warmup=[1.0, 0.5])
        for options in ({"steps_per_epoch": 2}, dict[str, Any]()):
            optimizer = averaging(model, comm, warmed, **options)
            selected = []
            for number in range(6):
                if not options:
                    optimizer.epoch = number // 2
                step(model, optimizer, comm.rank, number)
                selected.append(optimizer.last_report.selected)
            assert selected == [n, n, n // 2, n // 2, n // 5, n // 5]

    virtual.run(2, body)


@pytest.mark.parametrize(
    ("epochs", "warmup", "options", "is_told"),
    [
        ([0] * 9, [1.0], {}, True),  # said again, it is not advanced
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], [1.0, 0.5], {}, False),  # it is over in time
        ([0] * 9, [1.0], {"steps_per_epoch": 6}, False),  # advances by itself
        ([0] * 9, [0.2], {}, False),  # nothing falls
    ],
    ids=["stuck", "over", "by itself", "none"],
)
def test_a_warm_up_that_nobody_advances_is_told_once_by_rank_0(
    epochs: list[int],
    warmup: list[float],
    options: dict[str, Any],
    is_told: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wrapper_base, "LONG_EPOCH_STEPS", 3)
    method = sparsify.build("topk", density=0.2, density_warmup=warmup)

    def body(comm: Comm) -> None:
        model = net()
        optimizer = averaging(model, comm, method, **options)
        for number, epoch in enumerate(epochs):
            if not options:
                optimizer.epoch = epoch
            step(model, optimizer, comm.rank, number)
            assert number >= 3 or comm.rank or not caplog.messages

    virtual.run(2, body)
    stuck = ".epoch has been 0 for 3 steps, so the density stays at 1 and does not fall to 0.2"
    assert [stuck in message for message in caplog.messages] == [True] * is_told


def test_hooks_see_the_average_once_a_step_and_states_that_are_saved_and_loaded() -> None:
    everywhere: list[torch.optim.Optimizer] = []
    order: list[str] = []

    def body(comm: Comm) -> dict[str, Tensor]:
        model = net()
        optimizer = averaging(model, comm)
        seen = list[Tensor]()

        def note(stepped: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            assert stepped is optimizer
            seen.append(model.output.bias.grad.clone())

        optimizer.register_step_pre_hook(note)
        optimizer.register_step_post_hook(note)
        optimizer.register_state_dict_pre_hook(lambda _: order.append("before saving"))
        optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "epoch": 7})
        optimizer.register_load_state_dict_pre_hook(lambda _, saved: {**saved, "epoch": 8})
        optimizer.register_load_state_dict_post_hook(lambda _: order.append("after loading"))
        step(model, optimizer, comm.rank)
        saved = optimizer.state_dict()
        assert saved["epoch"] == 7
        optimizer.load_state_dict(saved)
        assert optimizer.epoch == 8
        before, after = seen
        assert torch.equal(before, after)
        return {"seen": before}

    handle = register_optimizer_step_pre_hook(lambda stepped, *_: everywhere.append(stepped))
    try:
        check_alike(body)
    finally:
        handle.remove()
    assert len(everywhere) == 2  # one a worker
    assert sorted(order) == ["after loading"] * 2 + ["before saving"] * 2


def test_a_saved_state_reads_like_any_optimizers_and_older_ones_are_read() -> None:
    def body(comm: Comm) -> None:
        model = net()
        inner = torch.optim.Adam(model.parameters(), lr=LR)
        optimizer = sparsify.distribute(inner, model, TOPK, comm)
        step(model, optimizer, comm.rank)
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved["param_groups"][0]["lr"] == LR
        named: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
        assert torch.equal(named["state"]["output.bias"]["exp_avg"], saved["state"][3]["exp_avg"])
        with pytest.raises(ValueError, match=r"has no residuals.*Save .*state_dict.. on every worker"):
            set_optimizer_state_dict(model, optimizer, named)
        older = {"optimiser": inner.state_dict(), "method": saved["method"], "epoch": 3}
        step(model, optimizer, comm.rank, 1)
        later = optimizer.engine.residuals()["output.bias"].clone()
        optimizer.load_state_dict(older)
        assert optimizer.epoch == 3
        assert not torch.equal(optimizer.engine.residuals()["output.bias"], later)
        set_optimizer_state_dict(model, inner, named)  # without residuals, as the sentence says
        inner.load_state_dict(saved)  # and so is rank 0's, where there is no other

    virtual.run(2, body)


@pytest.mark.usefixtures("group_of_one")
def test_a_group_or_a_mesh_of_one_dimension_is_used() -> None:
    mesh = init_device_mesh("cpu", (1,))
    plane = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))["replicate"]
    own: Any = dist.new_group([0])
    groups: dict[Any, Any] = {mesh: mesh.get_group(), plane: plane.get_group(), own: own}
    for handed, group in groups.items():
        hook: Any = sparsify.register(DistributedDataParallel(net()), TOPK, group=handed)
        assert averaging(net(), group=handed).comm.group is hook.comm.group is group


class WithModes(torch.optim.SGD):
    """As optimizers without schedules are: weights in evaluation are others than in training."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def eval(self) -> None:
        self.is_training = False


@pytest.mark.usefixtures("group_of_one")
def test_the_modes_of_an_optimizer_are_reached_through_the_wrapper() -> None:
    model = net()
    inner = WithModes(model.parameters(), lr=LR)
    optimizer = sparsify.distribute(inner, model, TOPK)
    optimizer.train()
    assert inner.is_training
    optimizer.eval()
    assert not inner.is_training
    assert not hasattr(averaging(model), "train")


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager")


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.extended)])
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # at which the compiler looks
def test_a_compiled_step_is_the_same_to_the_bit(overlap: bool) -> None:
    """Compile the optimizer alone, or the whole training."""
    ends = []
    for what in ("nothing", "step", "training"):
        torch.compiler.reset()
        model = net()
        optimizer = sparsify.distribute(sgd(model, momentum=0.9), model, TOPK, overlap=overlap)
        update = compiled(optimizer.step) if what == "step" else optimizer.step

        def train(number: int, model: Any, update: Any, optimizer: Any) -> None:
            loss_of(model, 0, number).backward()
            update()
            optimizer.zero_grad()

        for number in range(3):
            (compiled(train) if what == "training" else train)(number, model, update, optimizer)
        ends.append(weights(model))
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=0, atol=0)


@pytest.mark.usefixtures("group_of_one")
def test_a_model_that_is_wrapped_once_more_trains_as_the_bare_one() -> None:
    for wrapper in ("distribute", "register"):
        ends = []
        for wraps in (lambda model: model, compiled, nn.Sequential):
            model = net()
            optimizer: Any = sgd(model)
            called = wraps(DistributedDataParallel(model) if wrapper == "register" else model)
            if wrapper == "register":
                loss_of(called, 0, 0).backward()
                sparsify.register(called, TOPK, optimizer)
            else:
                optimizer = sparsify.distribute(optimizer, called, sparsify.topk(density=0.2, scope=0.0001))
                assert len(optimizer.aggregator.buckets) > 2
            for number in range(3):
                step(called, optimizer, 0, number)
            ends.append(weights(model))
        for end in ends[1:]:
            torch.testing.assert_close(end, ends[0], rtol=1e-12, atol=1e-12)
