"""Arguments that can't be right are refused at once, in a sentence, whatever the wrapper."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import sparsify
from sparsify.comm import virtual
from sparsify.comm.torch import TorchComm
from sparsify.exchange import AllGather
from sparsify.feedback import ErrorFeedback
from sparsify.method import Sparsifier
from sparsify.select import RandomK
from tests.sparsify import laws
from tests.sparsify.wrappers.user_acts import (
    LR,
    frozen_net,
    loss_of,
    move_gradients,
    net,
    replace_gradients,
    seeded,
)

Optimizer = torch.optim.Optimizer
SHORT = 350  # characters of a sentence that is read
TOPK = sparsify.build("topk", density=0.2, scope="layer")
RANDOMK_OF_BUCKETS = Sparsifier(0.1, RandomK(), ErrorFeedback(), AllGather(), "bucket")


class Begun(NamedTuple):
    """A model that was wrapped, and what steps it."""

    model: Any
    called: nn.Module  # computes
    optimizer: Any
    holder: Any  # what the wrapper returned
    scaler: torch.amp.GradScaler  # made before wrapping, and not handed over

    def backward(self, step: int = 0) -> None:
        loss_of(self.called, 0, step).backward()


def sgd(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, **options)


def begin(
    wrapper: str = "distribute",
    make: Callable[[], Any] = net,
    inner: Callable[[nn.Module], Any] = sgd,
    name: str = "topk",
    ddp: Callable[..., Any] = DistributedDataParallel,
    **others: Any,
) -> Begun:
    """Wrap a model in the default group, with choices of the method and options of the wrapper."""
    known = sparsify.defaults(name)
    choices = {key: value for key, value in others.items() if key in known}
    options = {key: value for key, value in others.items() if key not in known}
    method = laws.build(name, **{"density": 0.2, **choices})
    model = make()
    scaler = torch.amp.GradScaler("cpu")
    if wrapper == "register":
        called = ddp(model)
        optimizer = inner(model)
        hook = sparsify.register(called, method, optimizer, **options)
        return Begun(model, called, optimizer, hook, scaler)
    averaging = sparsify.distribute(inner(model), model, method, **options)
    return Begun(model, model, averaging, averaging, scaler)


def follow_other_rates(model: Any) -> Optimizer:
    groups = [{"params": model.convolution.parameters(), "lr": 0.2}, {"params": model.output.parameters()}]
    return torch.optim.SGD(groups, lr=LR)


class NoRate(torch.optim.Optimizer):
    """An optimizer without a learning rate."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})


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


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    """Return a function that makes a model and changes it."""

    def make() -> nn.Module:
        model: nn.Module = net()
        change(model)
        return model

    return make


def with_more(kind: Callable[[], Tensor], is_trained: bool = True) -> Callable[[], nn.Module]:
    """Return a function that makes a model which has such a parameter, too."""
    return changed(lambda model: setattr(model, "more", nn.Parameter(kind(), requires_grad=is_trained)))


def ignore(model: nn.Module, *names: str) -> None:
    told = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    told(model, names)  # type: ignore[no-untyped-call]


def make_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(30, 3)


def make_sharded() -> nn.Module:
    model: nn.Module = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


# --- under DistributedDataParallel


def delay(model: nn.Module) -> DistributedDataParallel:
    """Let DDP average one parameter by itself."""
    first, *_ = named = list(model.named_parameters())
    return DistributedDataParallel(
        model, delay_all_reduce_named_params=[first], param_to_hook_all_reduce=named[-1][1]
    )


def reduce_by_python(model: nn.Module) -> DistributedDataParallel:
    """Make a DDP as under `optimize_ddp="python_reducer"`, which would stay on in other tests."""
    made = DistributedDataParallel(model)
    assert made._use_python_reducer is False
    made._use_python_reducer = True
    return made


def ignoring(*names: str) -> Callable[[Any], DistributedDataParallel]:
    """Return a function that makes a DDP which is told to ignore these."""

    def made(model: Any) -> DistributedDataParallel:
        model.scale = nn.Parameter(torch.ones(1))
        model.again = nn.Linear(16, 3, dtype=torch.float64)
        model.again.weight = model.output.weight
        ignore(model, *names)
        return DistributedDataParallel(model)

    return made


def frozen(model: Any) -> nn.Module:
    whole: nn.Module = model
    model.convolution.requires_grad_(False)
    return whole


def freeze_after(model: Any) -> DistributedDataParallel:
    made = DistributedDataParallel(model)
    model.convolution.requires_grad_(False)
    return made


def freeze_before(model: Any) -> DistributedDataParallel:
    model.convolution.requires_grad_(False)
    made = DistributedDataParallel(model)
    model.convolution.requires_grad_(True)
    return made


# --- after wrapping


def unfreeze(begun: Begun) -> None:
    begun.model.convolution.requires_grad_(True)


def lie_otherwise(begun: Begun) -> None:
    """Let a weight lie as `model.to` does it. Fused optimizers would add its gradient to other elements."""
    weight = begun.model.convolution.weight
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)


def wrap_again(begun: Begun) -> None:
    sparsify.distribute(sgd(begun.model), begun.model, TOPK)


def average_twice(begun: Begun) -> None:
    for _ in range(2):
        begun.optimizer.aggregate()


def average_and_go_on(begun: Begun) -> None:
    begun.optimizer.aggregate()
    begun.backward(1)


def scale(begun: Begun) -> torch.amp.GradScaler:
    """Scale a loss as somebody does who does not hand the scaler over."""
    begun.optimizer.zero_grad()
    begun.scaler.scale(loss_of(begun.called, 0, 0)).backward()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    other.step()  # of another model
    return begun.scaler


def step_by_a_scaler(begun: Begun) -> None:
    scaler = scale(begun)
    scaler.step(sgd(begun.model) if begun.optimizer is None else begun.optimizer)


def step_by_a_later_scaler(begun: Begun) -> None:
    step_by_a_scaler(begun._replace(scaler=torch.amp.GradScaler("cpu")))


def unscale_twice(begun: Begun) -> None:
    scaler = scale(begun)
    scaler.unscale_(begun.optimizer)
    begun.optimizer.aggregate(scaler.get_scale())
    scaler.step(begun.optimizer)


def unscale_inner(begun: Begun) -> None:
    scaler = begun.optimizer.scaler
    scaler.scale(torch.ones(()))
    scaler.unscale_(begun.optimizer.inner_optimizer)
    scaler.step(begun.optimizer)


def bring_momentum(begun: Begun) -> None:
    lr_scheduler.OneCycleLR(begun.optimizer, max_lr=0.1, total_steps=9, max_momentum=0.9)


def load_of_another_rank(begun: Begun) -> None:
    saved = begun.optimizer.state_dict()
    saved["method"]["rank"] = 1
    begun.optimizer.load_state_dict(saved)


def go_on(begun: Begun) -> None: ...


def clip_past_autograd(begun: Begun) -> None:
    for p in begun.model.parameters():
        p.grad.data.clamp_(-1e-3, 1e-3)


class Row(NamedTuple):
    """Refused act, and the sentence that refuses it."""

    sentence: str
    act: Callable[[Begun], object] | None  # after wrapping; None: it is not even wrapped
    options: dict[str, Any]  # of `begin`


def row(sentence: str, act: Callable[[Begun], object] | None = None, **options: Any) -> Row:
    return Row(sentence, act, options)


def under_ddp(sentence: str, act: Callable[[Begun], object] | None = None, **options: Any) -> Row:
    return Row(sentence, act, {"wrapper": "register", **options})


def overlapped(sentence: str, act: Callable[[Begun], object] | None = None, **options: Any) -> Row:
    return Row(sentence, act, {"overlap": True, **options})


MOMENTUM = r"applies momentum itself, and the optimizer has 0\.\d+ too"
RATES = r"needs one rate for all that is exchanged together, and these have \[0.05, 0.2\]; .*scope='layer'"
EPOCH = r"nobody says which one this is; pass steps_per_epoch=, or set .epoch"
NO_METHOD = "'topk' is not a method; build one, such as"
SCALED = "more is of the type Scaled and no plain tensor"
CHANGED = "changed between backward and step.*change .or clip. their average, after optimizer.aggregate"
HALFWAY = r"came between backward and step, when gradients are on their way already; call it after step"
OF_OTHERS = [nn.Parameter(torch.ones(1))]
# Wrapped, trained, and what comes in between.
REFUSED: list[Row] = [
    row(
        r"parameter of shape \(5,\) that the model does not have; hand over a module that has all",
        inner=lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(5))], LR),
    ),
    row("wrapped already", inner=lambda model: sparsify.distribute(sgd(model), model, TOPK)),
    row(
        "PostLocalSGDOptimizer hides another optimizer",
        inner=lambda model: PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=2)),
    ),
    row(
        "LBFGS computes gradients within its step.*take DistributedDataParallel and sparsify.register",
        inner=lambda model: torch.optim.LBFGS(model.parameters()),
    ),
    row("steps_per_epoch=2.5 must be a whole number above 0", steps_per_epoch=2.5),
    row("scaler=1024.0 is no torch.amp.GradScaler; with others call aggregate.scale.", scaler=1024.0),
    row("seed='0' must be a whole number", seed="0"),
    row("for sparsify.register; here take a size in MB, such as scope=25", scope="bucket"),
    row("weight has no shape yet; run one batch through the model first", make=lambda: nn.LazyLinear(3)),
    row("weight is on the meta device", make=lambda: nn.Linear(3, 3, device="meta")),
    row("weight was made in inference mode", make=make_in_inference_mode),
    row(
        "these have .*bfloat16.*float64.*; give each kind an optimizer of its own",
        make=changed(lambda model: model.output.bfloat16()),
    ),
    row(f"{SCALED}, so that its elements can't be exchanged", make=with_more(lambda: Scaled(torch.ones(3)))),
    row(
        f"{SCALED}.* tell its name to DistributedDataParallel._set",
        make=with_more(lambda: Scaled(torch.ones(3)), is_trained=False),
    ),
    row(
        "more is trained in torch.float8_e4m3fn, which has no sums to average",
        make=with_more(lambda: torch.ones(3).to(torch.float8_e4m3fn)),
    ),
    row(
        "weight is in torch.float64 and takes gradients in torch.float32, its grad_dtype",
        make=changed(lambda model: setattr(model.output.weight, "grad_dtype", torch.float32)),
    ),
    row(
        "weight is stepped within the backward pass, by _apply_optimizer_in_backward, before anything",
        make=changed(lambda model: setattr(model.output.weight, "_in_backward_optimizers", [])),
    ),
    row(
        "told to ignore output.weight, so that it is each worker's own, and this optimizer would average it",
        make=changed(lambda model: ignore(model, "output.weight")),
    ),
    row("is a DTensor, as FSDP2", make=make_sharded),
    row(
        "model.module.*or take sparsify.register",
        lambda begun: sparsify.distribute(sgd(begun.model), DistributedDataParallel(begun.model), TOPK),
    ),
    row(
        "Net is not an optimizer; sparsify.distribute takes an optimizer, its model, and a method",
        lambda begun: sparsify.distribute(begun.model, cast(Any, sgd(begun.model)), TOPK),
    ),
    row(NO_METHOD, lambda begun: sparsify.distribute(sgd(begun.model), begun.model, cast(Any, "topk"))),
    row(
        "comm and group both say who averages",
        lambda begun: sparsify.distribute(
            sgd(begun.model), begun.model, TOPK, TorchComm(), group=dist.group.WORLD
        ),
    ),
    row(
        r"output.bias was .*float64.* and is now .*float32.*; convert the model first",
        lambda begun: begun.model.float(),
    ),
    row(
        r"the strides of convolution.weight were \(8, 4, 2, 1\) and are now \(8, 1, 4, 2\); convert the",
        lie_otherwise,
        inner=lambda model: sgd(model, fused=True),
    ),
    row(
        "has other parameters than when it was wrapped; wrap it anew",
        lambda begun: begun.holder.inner_optimizer.add_param_group(
            {"params": begun.model.output.parameters()}
        ),
        inner=lambda model: sgd(model.get_submodule("convolution")),
    ),
    row(
        "convolution.weight was frozen when its optimizer was wrapped, and is trained now; wrap it anew",
        unfreeze,
        make=partial(seeded, frozen_net),
    ),
    row("were wrapped anew since; go on with what that returned", wrap_again),
    row(
        "its own step would not average; call that of what sparsify.distribute or",
        lambda begun: begun.holder.inner_optimizer.step(),
    ),
    row("aggregate was called twice", average_twice),
    row("backward ran after aggregate", average_and_go_on),
    row("does not know of overflows on other workers; hand the scaler over", step_by_a_scaler),
    row("unscale_ and aggregate.scale. both divide by the scale; hand the scaler over", unscale_twice),
    row(
        "the scaler was handed over, so its scale is known",
        lambda begun: begun.optimizer.aggregate(8.0),
        scaler=torch.amp.GradScaler("cpu"),
    ),
    row("the scaler was given the inner optimizer", unscale_inner, scaler=torch.amp.GradScaler("cpu")),
    row(EPOCH, go_on, density_warmup=[0.5]),
    row(
        "the epoch follows from steps_per_epoch; leave one of them out",
        lambda begun: setattr(begun.optimizer, "epoch", 1),
        steps_per_epoch=2,
    ),
    row("epoch=-1 is out of range", lambda begun: setattr(begun.optimizer, "epoch", -1)),
    row(MOMENTUM, bring_momentum, name="dgc"),
    row(RATES, go_on, inner=follow_other_rates, scope="global", feedback="learning_rate"),
    row(
        "NoRate has no learning rate for feedback in the learning-rate domain to follow",
        go_on,
        inner=lambda model: NoRate(model.parameters()),
        feedback="learning_rate",
    ),
    row("copy its state_dict", lambda begun: copy.deepcopy(begun.optimizer)),
    row("copy its state_dict", lambda begun: pickle.dumps(begun.optimizer)),
    row(
        "is of rank 1, and this is rank 0; .*Where there is only one, load the inner optimizer's alone",
        load_of_another_rank,
    ),
    # ---- overlapped
    overlapped(CHANGED, lambda begun: nn.utils.clip_grad_norm_(begun.model.parameters(), 1e-3)),
    overlapped(CHANGED, lambda begun: replace_gradients(begun.model)),
    overlapped(CHANGED, clip_past_autograd),
    overlapped(CHANGED, lambda begun: begun.model.output.bias.grad.norm()),
    overlapped(CHANGED, lambda begun: move_gradients(begun.model)),
    overlapped(CHANGED, lambda begun: begun.model.zero_grad()),
    overlapped(
        r"a second gradient of output\.\w+ came before the step.*with optimizer.no_sync",
        lambda begun: begun.backward(1),
    ),
    overlapped(HALFWAY, lambda begun: begun.optimizer.zero_grad()),
    overlapped(HALFWAY, lambda begun: begun.optimizer.state_dict()),
    overlapped(HALFWAY, lambda begun: begun.optimizer.load_state_dict({})),
    overlapped(r"before aggregate\(scale\) can divide them", lambda begun: begun.optimizer.aggregate(8.0)),
    overlapped("GradScaler would then skip the step; train in bfloat16", scaler=torch.amp.GradScaler("cpu")),
    overlapped(
        "GradScaler would then skip the step; train in bfloat16",
        wrapper="register",
        scaler=torch.amp.GradScaler("cpu"),
    ),
    overlapped("there is one bucket", scope="global"),
    overlapped("which clip_norm needs", name="dgc", clip_norm=1.0),
    overlapped(
        "scope='global' spans several; take scope='layer' or 'bucket', or leave overlap out",
        wrapper="register",
        scope="global",
    ),
    overlapped("scope=1.0 spans several; take scope='layer'", wrapper="register", scope=1.0),
    overlapped(
        "overlap=True begins before the norm of the whole", wrapper="register", name="dgc", clip_norm=1.0
    ),
    overlapped(
        r"workers \[0\] is DDP's own; make another one of them",
        lambda begun: sparsify.register(
            DistributedDataParallel(net(), process_group=begun.holder.comm.group),
            TOPK,
            overlap=True,
            group=begun.holder.comm.group,
        ),
    ),
    # ---- under DDP
    under_ddp(r"density=0.001 of 87 gradients selects none \(k = 0\)", density=0.001),
    under_ddp("momentum itself, so it must know the optimizer", name="dgc", inner=lambda model: None),
    under_ddp(
        "follows the learning rate, so it must know",
        inner=lambda model: None,
        feedback="learning_rate",
    ),
    under_ddp(
        "learning rate, and convolution.weight is not the optimizer's",
        inner=lambda model: torch.optim.SGD(OF_OTHERS),
        feedback="learning_rate",
    ),
    under_ddp(MOMENTUM, name="dgc", inner=lambda model: torch.optim.SGD(OF_OTHERS, momentum=0.9)),
    under_ddp("steps_per_epoch=0 must be a whole number above 0", steps_per_epoch=0),
    under_ddp(
        "with skip_all_reduce_unused_params DDP hands over other buckets in each step",
        ddp=partial(DistributedDataParallel, skip_all_reduce_unused_params=True),
    ),
    under_ddp("DDP averages delay_all_reduce_named_params in a hook of its", ddp=delay),
    under_ddp(
        'optimize_ddp="python_reducer" lets DDP average each parameter by itself', ddp=reduce_by_python
    ),
    under_ddp("DDP was told to ignore scale, and averages it nevertheless", ddp=ignoring("scale")),
    under_ddp(
        "DDP was told to ignore again.weight, and averages it nevertheless", ddp=ignoring("output.weight")
    ),
    under_ddp("takes a DistributedDataParallel, and Net has no buckets", ddp=lambda model: model),
    under_ddp(
        "shards its gradients, and sparsification needs whole ones",
        make=make_sharded,
        ddp=lambda model: model,
    ),
    under_ddp(
        "ModuleList has 2 inside, to be registered one by one",
        ddp=lambda model: nn.ModuleList([*map(DistributedDataParallel, (model, net()))]),
    ),
    under_ddp(
        "has a communication hook already, and DDP takes no other",
        lambda begun: sparsify.register(begun.called, TOPK),
    ),
    under_ddp(
        "comm and group both",
        lambda begun: sparsify.register(begun.called, TOPK, comm=TorchComm(), group=dist.group.WORLD),
    ),
    under_ddp(
        NO_METHOD,
        lambda begun: sparsify.register(DistributedDataParallel(net()), cast(Any, "topk")),
    ),
    under_ddp(
        "nothing would be left to exchange after local steps; train the model",
        lambda begun: sparsify.register(DistributedDataParallel(net()), cast(Any, sparsify.sparseloco())),
    ),
    under_ddp(
        "scope='bucket' chooses the largest of several tensors",
        lambda begun: sparsify.register(DistributedDataParallel(net()), RANDOMK_OF_BUCKETS),
    ),
    under_ddp(
        "optimizer averages by itself", inner=lambda model: sparsify.distribute(sgd(model), model, TOPK)
    ),
    under_ddp(
        "these have .*float32.*float64.*; take scope='layer', which mixes",
        make=changed(lambda model: model.output.float()),
        scope="global",
    ),
    under_ddp(RATES, go_on, inner=follow_other_rates, scope="global", feedback="learning_rate"),
    under_ddp(r"GradScaler steps the optimizer.*register\(\.\.\., scaler=scaler\)", step_by_a_scaler),
    under_ddp("GradScaler steps the optimizer", step_by_a_later_scaler, inner=partial(sgd, fused=True)),
    under_ddp(MOMENTUM, bring_momentum, name="dgc"),
    under_ddp(EPOCH, go_on, density_warmup=[0.5]),
    *(
        under_ddp(sentence, act, name=name, ddp=ddp)
        for name in ("dense", "topk")
        for sentence, act, ddp in (
            (
                "weight lies in memory otherwise.*convert the model first",
                lie_otherwise,
                DistributedDataParallel,
            ),
            ("convolution.weight was frozen when `register` was called", unfreeze, freeze_after),
            (
                "convolution.weight was frozen when `register` was called",
                unfreeze,
                lambda model: DistributedDataParallel(frozen(model)),
            ),
            ("requires a gradient, but was frozen when Distributed", go_on, freeze_before),
        )
    ),
]


def live(act: Callable[[Begun], object] | None, options: dict[str, Any]) -> None:
    """Wrap a model, and make a step with the act before what averages."""
    begun = begin(**options)
    if act is None:
        return
    averages_in_backward = options.get("wrapper") == "register"
    if not averages_in_backward:
        begun.backward()
    act(begun)
    if averages_in_backward:
        begun.backward()
    begun.optimizer.step()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("row", REFUSED, ids=itemgetter(0))
def test_what_can_not_be_right_is_refused_in_a_sentence_at_once(row: Row) -> None:
    sentence, act, options = row
    with pytest.raises((ValueError, TypeError), match=sentence) as caught:
        live(act, options)
    assert len(str(caught.value)) < SHORT


@pytest.mark.usefixtures("group_of_one")
def test_a_scaler_that_is_switched_off_need_not_be_handed_over() -> None:
    begun = begin("register")
    begun.backward()
    torch.amp.GradScaler("cpu", enabled=False).step(begun.optimizer)
    assert begun.holder.steps == 1


def test_virtual_ranks_take_turns_so_that_nothing_overlaps() -> None:
    with pytest.raises(ValueError, match="virtual ranks take turns in one thread, so nothing of theirs"):
        virtual.run(2, lambda comm: live(go_on, {"comm": comm, "overlap": True}))


@pytest.mark.usefixtures("group_of_one")
def test_a_group_without_this_worker_is_refused_by_every_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ddp, sharded = net(), DistributedDataParallel(net()), make_sharded()
    mesh = init_device_mesh("cpu", (1,))
    monkeypatch.setattr(mesh, "get_coordinate", lambda: None)  # as of a mesh of other workers
    local = sparsify.localsgd(every=2)
    wrappers: list[Callable[[Any], object]] = [
        lambda group: sparsify.distribute(sgd(model), model, TOPK, group=group),
        lambda group: sparsify.distribute(sgd(model), model, local, group=group),
        lambda group: sparsify.register(ddp, TOPK, group=group),
        lambda group: sparsify.shard(sharded, sgd(sharded), TOPK, group),
        lambda group: sparsify.shard(sharded, sgd(sharded), local, group),
    ]
    outside = "rank 0 of all, is not in the group that was handed over"
    groups: dict[Any, str] = {
        dist.GroupMember.NON_GROUP_MEMBER: outside,
        mesh: outside,
        (0,): r"\(0,\) is no process group; take what torch.distributed.new",
        init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")): "hand over the one whose",
    }
    for wrap in wrappers:
        for group, sentence in groups.items():
            with pytest.raises(ValueError, match=sentence):
                wrap(group)
