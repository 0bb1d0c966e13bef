"""The hook in DistributedDataParallel: a matrix of uses, each right, or refused in a sentence at once."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import sparsify
from sparsify.doors import wrapping
from sparsify.doors.ddp import DDPHook
from sparsify.doors.engine import NonFinite, StepReport
from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback
from sparsify.method import Sparsifier
from sparsify.select import RandomK
from tests.conftest import there
from tests.sparsify import worker_functions
from tests.sparsify.doors import uses
from tests.sparsify.doors.uses import check_balanced
from tests.sparsify.doors.uses_ddp import OVERLAPPED, USES, Training, found_in
from tests.sparsify.worker_functions import on_processes


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """What two gloo processes lived through, by rank."""
    return on_processes(worker_functions.uses_of_ddp, 2, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("name", USES)
def test_nothing_is_lost_and_replicas_are_equal(name: str, used: list[dict[str, Tensor]]) -> None:
    ranks = [found_in(name, found) for found in used]
    assert any(p.any() for p in ranks[0].seen.values())
    for together in [[rank] for rank in ranks] if name.startswith("alone") else [ranks]:
        check_balanced(together)


@pytest.mark.parametrize("name", OVERLAPPED)
def test_overlap_changes_no_bit(name: str, used: list[dict[str, Tensor]]) -> None:
    for found in used:
        alone, overlapped = found_in(name, found), found_in(f"{name}, overlapped", found)
        for p, end in alone.end.items():
            assert torch.equal(end, overlapped.end[p]), p
            assert torch.equal(alone.owed[p], overlapped.owed[p]), p


TOPK = {"density": 0.1, "scope": "layer"}


def registered(name: str = "topk", **others: Any) -> tuple[DistributedDataParallel, DDPHook]:
    ddp = DistributedDataParallel(uses.net())
    choices = {key: others.pop(key) for key in list(others) if key in sparsify.defaults(name)}
    method = sparsify.build(name, **{**(TOPK if name == "topk" else {}), **choices})
    options = {"optimiser": torch.optim.SGD(ddp.parameters(), lr=0.1), **others}
    return ddp, sparsify.register(ddp, method, **options)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"scope": "global", "overlap": True},
            "scope='global' spans several; take scope='layer' or 'bucket', or leave overlap out",
        ),
        ({"scope": 1.0, "overlap": True}, "scope=1.0 spans several; take scope='layer'"),
        (
            {"name": "dgc", "clip_norm": 1.0, "overlap": True},
            "overlap=True begins before the norm of the whole",
        ),
        ({"density": 0.001}, r"density=0.001 of 87 gradients selects none \(k = 0\)"),
        ({"name": "dgc", "optimiser": None}, "momentum itself, so it must know the optimiser"),
        ({"feedback": "learning_rate", "optimiser": None}, "follows the learning rate, so it must know"),
        ({"name": "efsignsgd", "optimiser": None}, "follows the learning rate, so it must know"),
        (
            {"feedback": "learning_rate", "optimiser": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
            "learning rate, and convolution.weight is not the optimiser's",
        ),
        (
            {"name": "dgc", "optimiser": torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9)},
            "the method applies momentum itself, and the optimiser has 0.9 too",
        ),
        ({"steps_per_epoch": 0}, "steps_per_epoch=0 must be a whole number above 0"),
    ],
    ids=str,
)
def test_what_the_hook_can_not_do_is_refused_at_once(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        registered(**options)


def delayed(model: nn.Module) -> DistributedDataParallel:
    """A DistributedDataParallel that averages one parameter by itself."""
    first, *_ = named = list(model.named_parameters())
    return DistributedDataParallel(
        model, delay_all_reduce_named_params=[first], param_to_hook_all_reduce=named[-1][1]
    )


def by_python(model: nn.Module) -> DistributedDataParallel:
    """As one is made under `optimize_ddp="python_reducer"`, which would stay on in other tests."""
    made = DistributedDataParallel(model)
    assert made._use_python_reducer is False
    made._use_python_reducer = True
    return made


def ignore(model: nn.Module, *names: str) -> None:
    told = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    told(model, names)  # type: ignore[no-untyped-call]


def without(*names: str) -> Callable[[nn.Module], DistributedDataParallel]:
    """Return a function that makes a DistributedDataParallel which is told to ignore these."""

    def made(model: nn.Module) -> DistributedDataParallel:
        model.scale = nn.Parameter(torch.ones(1))
        model.again = nn.Linear(16, 3, dtype=torch.float64)
        model.again.weight = cast(nn.Parameter, model.get_submodule("output").weight)
        ignore(model, *names)
        return DistributedDataParallel(model)

    return made


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda model: DistributedDataParallel(model, skip_all_reduce_unused_params=True),
            "with skip_all_reduce_unused_params DDP hands over other buckets in each step",
        ),
        (delayed, "DDP averages delay_all_reduce_named_params in a hook of its own"),
        (by_python, 'optimize_ddp="python_reducer" lets DDP average each parameter by itself'),
        (without("scale"), "DDP was told to ignore scale, and averages it nevertheless"),
        (without("output.weight"), "DDP was told to ignore again.weight, and averages it nevertheless"),
    ],
    ids=["skip", "delay", "python", "outermost", "tied"],
)
def test_what_ddp_does_not_hand_over_rightly_is_refused(
    make: Callable[[nn.Module], DistributedDataParallel], sentence: str
) -> None:
    ddp = make(uses.net())
    with pytest.raises(ValueError, match=sentence) as caught:
        sparsify.register(ddp, sparsify.build("topk", **TOPK))
    assert len(str(caught.value)) < 350


@pytest.mark.usefixtures("group_of_one")
def test_what_ddp_ignores_is_left_alone() -> None:
    model = uses.net()
    ignore(model, "output.bias")
    ddp = DistributedDataParallel(model)
    hook = sparsify.register(ddp, sparsify.build("topk", **TOPK))
    uses.loss_of(ddp, 0, 0).backward()
    assert "output.bias" not in hook.names.values()
    assert hook.steps == 1


@pytest.mark.usefixtures("group_of_one")
def test_only_a_model_that_takes_a_hook_gets_one() -> None:
    method = sparsify.build("topk", **TOPK)
    with pytest.raises(ValueError, match="takes a DistributedDataParallel, and Net has no buckets"):
        sparsify.register(uses.net(), method)
    ddp, _ = registered()
    with pytest.raises(ValueError, match="has a communication hook already, and DDP takes no other"):
        sparsify.register(ddp, method)
    fresh = DistributedDataParallel(uses.net())
    with pytest.raises(ValueError, match=r"comm and group both"):
        sparsify.register(fresh, method, comm=object(), group=dist.group.WORLD)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="is not a method; build one"):
        sparsify.register(fresh, "topk")  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(
        ValueError, match="nothing would be left to exchange after local steps; train the model"
    ):
        sparsify.register(fresh, sparsify.sparseloco())  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="ModuleList has 2 inside, to be registered one by one"):
        sparsify.register(nn.ModuleList([ddp, fresh]), method)
    averaging = sparsify.distribute(torch.optim.SGD(fresh.parameters(), lr=0.1), fresh.module, method)
    with pytest.raises(ValueError, match="optimiser averages by itself"):
        sparsify.register(fresh, method, averaging)


@pytest.mark.usefixtures("group_of_one")
def test_a_sharded_model_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    model = uses.net()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="shards its gradients, and sparsification needs whole ones"):
        sparsify.register(model, sparsify.build("topk", **TOPK))


@pytest.mark.usefixtures("group_of_one")
def test_what_wraps_a_ddp_may_be_handed_over() -> None:
    """It trains as the bare one does."""

    def compiled(ddp: nn.Module) -> nn.Module:
        found = torch.compile(ddp, backend="aot_eager")
        assert isinstance(found, nn.Module)
        return found

    trained = []
    for wraps in (lambda ddp: ddp, compiled, nn.Sequential):
        ddp = DistributedDataParallel(uses.net())
        called = wraps(ddp)
        uses.loss_of(called, 0, 0).backward()
        hook = sparsify.register(
            called, sparsify.build("topk", **TOPK), torch.optim.SGD(ddp.parameters(), lr=0.1)
        )
        for at in range(3):
            step(called, hook, at)
        trained.append(uses.weights(ddp.module))
    for weights in trained[1:]:
        torch.testing.assert_close(weights, trained[0], rtol=1e-12, atol=1e-12)


def step(ddp: nn.Module, hook: DDPHook, at: int = 0) -> None:
    assert hook.optimiser is not None
    hook.optimiser.zero_grad()
    uses.loss_of(ddp, 0, at).backward()
    hook.optimiser.step()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", ["dense", "topk"])
def test_what_would_mix_up_gradients_is_refused_in_the_next_step(name: str) -> None:
    ddp, hook = registered(name)
    ddp.module.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"weight lies in memory otherwise.*convert the model first"):
        step(ddp, hook)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", ["dense", "topk"])
def test_what_was_frozen_for_a_moment_is_refused_in_the_next_step(name: str) -> None:
    """DDP averages what required a gradient when it was made."""
    ddp = DistributedDataParallel(uses.net())
    bias = ddp.module.output.bias.requires_grad_(False)
    method = sparsify.build(name, **(TOPK if name == "topk" else {}))
    hook = sparsify.register(ddp, method, torch.optim.SGD(ddp.parameters(), lr=0.1))
    bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"shape \(3,\) was frozen when `register` was called"):
        step(ddp, hook)


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", ["dense", "topk"])
def test_what_was_frozen_when_ddp_was_made_is_refused_in_the_first_step(name: str) -> None:
    """DDP does not average it, so it would be each worker's own."""
    model = uses.net()
    model.output.bias.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model.output.bias.requires_grad_(True)
    method = sparsify.build(name, **(TOPK if name == "topk" else {}))
    hook = sparsify.register(ddp, method, torch.optim.SGD(ddp.parameters(), lr=0.1))
    with pytest.raises(
        ValueError, match=r"output\.bias requires a gradient, but was frozen when Distributed"
    ):
        step(ddp, hook)


@pytest.mark.usefixtures("group_of_one")
def test_one_bucket_has_one_type_and_one_rate() -> None:
    model = uses.net()
    model.output.float()
    ddp = DistributedDataParallel(model)
    with pytest.raises(ValueError, match=r"these have .*float32.*float64.*; take scope='layer', which mixes"):
        sparsify.register(ddp, sparsify.build("topk", density=0.1))
    sparsify.register(ddp, sparsify.build("topk", density=0.1, scope="layer"))
    ddp = DistributedDataParallel(uses.net())
    groups = [{"params": [p], "lr": 0.1 + at} for at, p in enumerate(ddp.parameters())]
    follower = sparsify.build("topk", density=0.1, feedback="learning_rate")
    hook = sparsify.register(ddp, follower, torch.optim.SGD(groups))
    with pytest.raises(ValueError, match=r"needs one rate for all that is exchanged together"):
        step(ddp, hook)


@pytest.mark.usefixtures("group_of_one")
def test_a_scaler_that_was_not_handed_over_is_refused_in_the_first_step() -> None:
    ddp, hook = registered()
    step(ddp, hook)  # no scaler: nothing to say
    unknown: dict[str, Any] = {"optimiser": None}
    for options in ({}, unknown):
        ddp, hook = registered(**options)
        mine = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        other.step()  # of another model
        scaler.scale(uses.loss_of(ddp, 0, 0)).backward()
        with pytest.raises(
            ValueError, match=r"GradScaler steps the optimiser.*register\(\.\.\., scaler=scaler\)"
        ):
            scaler.step(mine)
    ddp, hook = registered()
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    uses.loss_of(ddp, 0, 0).backward()
    disabled.step(torch.optim.SGD(ddp.parameters(), lr=0.1))


@pytest.mark.usefixtures("group_of_one")
def test_a_warm_up_that_nobody_advances_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wrapping, "LONG_EPOCH_STEPS", 3)
    ddp, hook = registered(density_warmup=[1.0])
    hook.epoch = 0
    for at in range(3):
        step(ddp, hook, at)
    assert not caplog.messages
    for at in range(3, 9):
        step(ddp, hook, at)
    (told,) = caplog.messages
    assert told.startswith(".epoch has been 0 for 3 steps, so the density stays at 1 and")


@pytest.mark.usefixtures("group_of_one")
def test_a_schedule_that_brings_momentum_is_refused_in_the_next_step() -> None:
    """Else it would be applied twice."""
    ddp, hook = registered("dgc", density=0.1)
    step(ddp, hook)
    lr_scheduler.OneCycleLR(there(hook.optimiser), max_lr=0.1, total_steps=9)
    with pytest.raises(ValueError, match=r"applies momentum itself, and the optimiser has 0\.95 too"):
        step(ddp, hook, 1)


@pytest.mark.usefixtures("group_of_one")
def test_a_density_warm_up_ends() -> None:
    ddp, hook = registered(density_warmup=[1.0, 0.5])
    with pytest.raises(ValueError, match=r"nobody says which one this is; pass steps_per_epoch="):
        step(ddp, hook)
    ddp, hook = registered(density_warmup=[1.0, 0.5])
    hook.epoch = 1
    step(ddp, hook)
    ddp, hook = registered(density_warmup=[1.0, 0.5], steps_per_epoch=2)
    selected = []
    for at in range(6):
        step(ddp, hook, at)
        selected.append(there(hook.last_report).selected)
    sizes = [p.numel() for p in ddp.parameters()]
    assert (
        selected
        == [sum(sizes)] * 2 + [sum(n // 2 for n in sizes)] * 2 + [sum(max(1, n // 10) for n in sizes)] * 2
    )


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize(
    "scaler", [None, torch.amp.GradScaler("cpu", enabled=False)], ids=["none", "disabled"]
)
def test_a_nan_stops_before_anything_is_delivered(scaler: torch.amp.GradScaler | None) -> None:
    """In the last bucket that gets full, too."""
    training = Training(0, scaler=scaler)
    training.backward(0)
    residuals = training.hook.state_dict()
    training.model.convolution.weight.register_hook(lambda grad: grad * torch.nan)
    with pytest.raises(NonFinite, match=r"rank 0, step 1: the gradient of convolution\.weight"):
        training.backward(1)
    for before, after in zip(residuals["buckets"], training.hook.state_dict()["buckets"], strict=True):
        assert torch.equal(before["state"]["feedback"], after["state"]["feedback"])


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", ["topk", "dense"])
def test_each_step_is_reported(name: str) -> None:
    ddp, hook = registered(name)
    assert hook.last_report is None
    step(ddp, hook)
    ns = [p.numel() for p in ddp.parameters()]
    ks = ns if name == "dense" else [max(1, n // 10) for n in ns]
    report = hook.last_report
    assert isinstance(report, StepReport)
    assert (report.selected, report.num_elements, report.wire_bytes) == (sum(ks), sum(ns), 0)  # to nobody


@pytest.mark.usefixtures("group_of_one")
def test_a_hook_goes_with_its_model() -> None:
    """What watches for scalers does not keep residuals alive."""
    ddp, hook = registered()
    alive = ref(hook)
    del ddp, hook
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("group_of_one")
def test_a_model_with_a_hook_is_copied_and_saved_like_another(tmp_path: Path) -> None:
    ddp, hook = registered()
    step(ddp, hook)
    torch.save(ddp, tmp_path / "model.pt")
    for other in (copy.deepcopy(ddp), torch.load(tmp_path / "model.pt", weights_only=False)):
        again = sparsify.register(other, hook.method, torch.optim.SGD(other.parameters(), lr=0.1))
        step(other, again)
        assert again.steps == 1
    assert hook.steps == 1


SCOPES = ["layer", "bucket", "global", 0.001]


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("scope", SCOPES)
def test_float32_is_searched_and_written_at_once_to_the_same_bits(scope: str | float) -> None:
    """As by torch's operators, one bucket after the other."""
    ends = []
    for select in ("auto", "torch"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5))
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001)
        optimiser = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        method = sparsify.build("topk", density=0.1, scope=scope)
        hook = sparsify.register(ddp, method, optimiser, select=select)
        hook.engine.together = select == "auto" or scope != "layer"
        for at in range(5):
            optimiser.zero_grad()
            own = torch.Generator().manual_seed(at)
            ddp(torch.randn(8, 30, generator=own)).square().sum().backward()
            optimiser.step()
        ends.append(uses.weights(model))
    assert all(map(torch.equal, ends[0].values(), ends[1].values()))


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_collectives_are_as_many_as_buckets_of_ddp_and_one_for_the_check(
    scope: str | float, overlap: bool
) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    if overlap and scope not in ("layer", "bucket"):
        return
    hook = sparsify.register(ddp, sparsify.build("topk", density=0.1, scope=scope), overlap=overlap)
    for _ in range(3):
        before = hook.engine.comm.collectives
        ddp(torch.ones(2, 4)).sum().backward()
        collectives = hook.engine.comm.collectives - before
    buckets = len(hook._known)
    assert 1 < buckets < 20
    assert collectives <= (2 * buckets if overlap else buckets + 1)


@pytest.mark.usefixtures("group_of_one")
def test_k_is_that_of_each_bucket_of_ddp() -> None:
    """And not of each tensor: of 16 and 4 elements these are 4 and 1, of both together 6."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    hook = sparsify.register(ddp, sparsify.build("topk", density=0.3, scope="bucket"))
    for _ in range(3):
        ddp(torch.randn(2, 4)).sum().backward()
    sizes = [sum(known.sizes) for known in hook._known.values()]
    assert there(hook.last_report).selected == sum(int(0.3 * n) for n in sizes) == 120


@pytest.mark.usefixtures("group_of_one")
def test_only_methods_that_mix_tensors_take_the_buckets_of_ddp() -> None:
    other = Sparsifier(0.1, RandomK(), ErrorFeedback(), AllGather(), "bucket")
    ddp, model = DistributedDataParallel(uses.net()), uses.net()
    with pytest.raises(ValueError, match=r"scope='bucket' chooses the largest of several tensors"):
        sparsify.register(ddp, other)
    with pytest.raises(ValueError, match=r"for sparsify.register; here take a size in MB, such as scope=25"):
        sparsify.distribute(
            torch.optim.SGD(model.parameters(), lr=0.1), model, sparsify.build("topk", scope="bucket")
        )


@pytest.mark.usefixtures("group_of_one")
def test_a_saved_state_of_scope_bucket_is_loaded_before_the_first_step() -> None:
    """States are each parameter's, whatever DDP's buckets are by then."""
    ends = []
    for is_resumed in (False, True):
        ddp, hook = registered(scope="bucket")
        for at in range(4):
            if at == 2 and is_resumed:
                saved, weights = hook.state_dict(), ddp.module.state_dict()
                ddp, hook = registered(scope="bucket")
                ddp.module.load_state_dict(weights)
                hook.load_state_dict(saved)
            step(ddp, hook, at)
        ends.append(uses.weights(ddp.module))
    assert all(map(torch.equal, ends[0].values(), ends[1].values()))
