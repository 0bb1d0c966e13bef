"""What users do with sharded models, each with a method between the replicas; and the same by torch alone."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import sparsify
from sparsify.comm.torch import TorchComm
from sparsify.doors.engine import NonFinite, StepReport
from sparsify.doors.sharded.hook import ShardHook
from sparsify.local.strategy import Local
from sparsify.method import Step
from tests.sparsify.local import uses_guards

GRIDS = [(2, 2), (2, 3), (3, 2)]  # replicas, shards
KINDS_OF_MESH = ("both", "shards")
# But for what torch itself refuses, or does not do.
REFUSED_OF_SHARDS = [case for case in uses_guards.REFUSED if case not in ("converted", "given other memory")]
NAMES = ("replicate", "shard")
STEPS = 3
TWO_ROUNDS, ONE_MORE = range(4), range(4, 5)  # of local steps


class Blocks(nn.Module):
    """An embedding whose weights are the last layer's as well, and blocks whose sizes no grid divides."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.words, self.checkpoints = nn.Embedding(11, 5), checkpoints
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5, bias=False)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(1))  # on some workers there is nothing of it
        self.output = nn.Linear(5, 11, bias=False)
        self.output.weight = self.words.weight
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.words(words)
        for block in self.blocks:
            inner = checkpoint(block, hidden, use_reentrant=False) if self.checkpoints else block(hidden)
            hidden = hidden + cast(Tensor, inner) * self.scale
        scores: Tensor = self.output(hidden)
        return scores


def blocks(seed: int = 0, **options: Any) -> Blocks:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Blocks(**options)


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Each block is a unit, and what is left."""
    for block in cast(Any, model).blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def loss_of(model: nn.Module, step: int, part: int = 0) -> Tensor:
    own = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + part)
    words = torch.randint(11, (6, 4), generator=own)
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


def weights(model: nn.Module) -> Tensor:
    """All of them, whole, one after the other."""
    return torch.cat([cast(Any, p.detach()).full_tensor().flatten().float() for p in model.parameters()])


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


Train = Callable[[nn.Module, torch.optim.Optimizer], object]


def plainly(
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    steps: range = range(STEPS),
    max_norm: float = math.inf,
) -> None:
    for step in steps:
        optimiser.zero_grad()
        loss_of(model, step).backward()
        if max_norm < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimiser.step()


def in_microbatches(switch: str, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Two backward passes a step; the first one reduces nothing, or not between replicas."""
    for step in range(STEPS):
        optimiser.zero_grad()
        for part in range(2):
            getattr(model, switch)(part == 1)
            (loss_of(model, step, part) / 2).backward()
        optimiser.step()


def divided(factor: float, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Sums over all workers, divided by a number of one's own (of tokens, perhaps)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    plainly(model, optimiser)


def evaluated_between(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """With forward passes without backward, after which the outermost unit stays gathered."""
    for step in range(STEPS):
        with torch.no_grad():
            loss_of(model, 0)
        plainly(model, optimiser, range(step, step + 1))


def compiled(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    for block in cast(Any, model).blocks:
        block.compile(backend="eager")
    plainly(model, optimiser)


# What is trained, and how: by torch alone, and with a method that leaves every average as it is.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], Train]] = {
    "plainly": ({}, {}, plainly),
    "clipped": ({}, {}, partial(plainly, max_norm=0.05)),
    "in microbatches": ({}, {}, partial(in_microbatches, "set_requires_gradient_sync")),
    "reduced within": ({}, {}, partial(in_microbatches, "set_requires_all_reduce")),
    "checkpointed": ({"checkpoints": True}, {}, plainly),
    "compiled": ({}, {}, compiled),
    "divided by 1": ({}, {}, partial(divided, 1.0)),
    "divided by 8": ({}, {}, partial(divided, 8.0)),
    "evaluated between": ({}, {}, evaluated_between),
    "kept whole": ({}, {"reshard_after_forward": False}, plainly),
    "in bfloat16": ({}, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}, plainly),
    "summed in single precision": (
        {},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        plainly,
    ),
}  # fmt: skip
EVERYWHERE = ("plainly", "in bfloat16")  # on all grids; the others on the first one
WHOLE: dict[str, dict[str, Any]] = {
    "dense": {},
    "topk layer": {"density": 1.0, "scope": "layer"},
    "topk bucket": {"density": 1.0, "scope": "bucket"},
    "topk 25": {"density": 1.0, "scope": 25.0},
    "gtopk layer": {"density": 1.0, "scope": "layer"},
}


def kinds_in(way: str, grid: tuple[int, ...]) -> list[str]:
    """Meshes that the model is sharded on: of replicas and shards, or of shards alone."""
    return ["both", "shards"] if way == "plainly" and grid == GRIDS[0] else ["both"]


def ways_on(grid: tuple[int, ...]) -> list[str]:
    return [way for way in WAYS if way in EVERYWHERE or grid == GRIDS[0]]


def whole_in(way: str, grid: tuple[int, ...]) -> list[str]:
    """Methods that are tried in a way."""
    return [*WHOLE] if way == "plainly" and grid == GRIDS[0] else ["dense", "topk bucket"]


def ends(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Weights at the end of each way: by HSDP, and with each of WHOLE, on both kinds of mesh."""
    found = dict[str, Tensor]()
    for way in ways_on(mesh.shape):
        of_model, of_shards, train = WAYS[way]
        model = sharded(blocks(**of_model), mesh, **of_shards)
        train(model, optimiser_of(model))
        found[f"{way}, by torch"] = weights(model)
        for name, options in WHOLE.items():
            if name not in whole_in(way, mesh.shape):
                continue
            method = sparsify.build(name.split()[0], **options)
            for kind in kinds_in(way, mesh.shape):
                own = mesh if kind == "both" else mesh["shard"]
                # The first replica's weights are what all begin with.
                seed = mesh.get_local_rank("replicate")
                model = sharded(blocks(seed, **of_model), own, **of_shards)
                optimiser = optimiser_of(model)
                replicas = None if kind == "both" else mesh["replicate"]
                hook = sparsify.shard(model, optimiser, method, replicas, debug=True)
                train(model, optimiser)
                found[f"{way}, {name}, {kind}"] = weights(model)
                assert hook.steps == STEPS
    return found


SPARSE: dict[str, dict[str, Any]] = {
    "topk layer": {"density": 0.2, "scope": "layer"},
    "topk bucket": {"density": 0.2, "scope": "bucket"},
    "topk MB": {"density": 0.2, "scope": 0.0002},
    "randomk layer": {"density": 0.2, "scope": "layer", "feedback": "gradient"},
    "gtopk layer": {"density": 0.2, "scope": "layer"},
    "oktopk layer": {"density": 0.2, "scope": "layer"},
    "gaussiank layer": {"density": 0.2, "scope": "layer"},
    "efsignsgd layer": {"scope": "layer"},
}


def sparse_on(grid: tuple[int, ...]) -> list[str]:
    """Methods that are tried on a grid."""
    return [*SPARSE] if grid == GRIDS[0] else ["topk bucket", "gtopk layer", "oktopk layer"]


class Account:
    """What went into the exchange of each bucket and came out, and its bytes."""

    def __init__(self, hook: ShardHook) -> None:
        self.hook, self.original = hook, hook.engine.average
        self.seen = [torch.zeros(bucket.flat.numel()) for bucket in hook.engine.buckets]
        self.got = [seen.clone() for seen in self.seen]
        cast(Any, hook.engine).average = self.average

    def average(self, ats: list[int], grads: list[Tensor], steps: list[Step]) -> StepReport:
        sizes = [self.hook.engine.sizes[at] for at in ats]
        for at, own in zip(ats, grads[0].split(sizes), strict=True):
            self.seen[at] += own
        report = self.original(ats, grads, steps)
        for at, own in zip(ats, grads[0].split(sizes), strict=True):
            self.got[at] += own
        return report


def account(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Of each of SPARSE: weights, what its buckets saw, got and owe, and the bytes of a step."""
    found = dict[str, Tensor]()
    for name in sparse_on(mesh.shape):
        options = SPARSE[name]
        model = sharded(blocks(), mesh["shard"])
        optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
        method = sparsify.build(name.split()[0], **options)
        hook = sparsify.shard(model, optimiser, method, mesh["replicate"])
        kept = Account(hook)
        plainly(model, optimiser)
        residuals = [method.residual(state) for state in hook.engine.states]
        owed = torch.cat([cast(Tensor, residual) for residual in residuals])
        found[f"{name}: weights"] = weights(model)
        found[f"{name}: seen"], found[f"{name}: got"] = torch.cat(kept.seen), torch.cat(kept.got)
        found[f"{name}: owed"] = owed
        report = cast(StepReport, hook.last_report)
        found[f"{name}: bytes"] = torch.tensor([report.wire_bytes, report.selected, report.num_elements])
    return found


class Constant(nn.Module):
    """Whose loss has the gradient `value` everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(7, 3))

    def forward(self, value: Tensor) -> Tensor:
        return (self.weight * value).sum()


def means(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Gradients where worker r's are r + 1 everywhere, by the type in which they are reduced."""
    found = dict[str, Tensor]()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for name, options in [*WHOLE.items()][:3]:
            model = Constant()
            fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
            optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
            sparsify.shard(model, optimiser, sparsify.build(name.split()[0], **options))
            model(torch.tensor(dist.get_rank() + 1.0)).backward()
            found[f"{name}, {dtype}"] = cast(Any, model.weight.grad).full_tensor()
    return found


# --- saved

RESUMED: dict[str, dict[str, Any]] = {
    "topk layer": {"density": 0.2, "scope": "layer"},
    "dgc layer": {"density": 0.2, "scope": "layer", "clip_norm": None, "momentum": 0.9},
    "randomk layer": {"density": 0.2, "scope": "layer", "feedback": "gradient"},
    "powersgd layer": {"rank": 2, "scope": "layer"},
    "stable_topk layer": {"density": 0.2, "scope": "layer"},
    "qsgd layer": {"scope": "layer"},
    "hardthreshold layer": {"density": 0.2, "scope": "layer"},
}
KINDS = ("checkpoint", "file")


def begun(name: str, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer, ShardHook]:
    model = sharded(blocks(), mesh)
    momentum = 0.0 if name.startswith("dgc") else 0.9  # it has its own
    optimiser = torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum)
    return (
        model,
        optimiser,
        sparsify.shard(model, optimiser, sparsify.build(name.split()[0], **RESUMED[name])),
    )


def resumed(mesh: DeviceMesh, folder: Path) -> dict[str, Tensor]:
    """Where a training ends that was interrupted half-way, and one that was not."""
    found = dict[str, Tensor]()
    for name in RESUMED:
        model, optimiser, _ = begun(name, mesh)
        plainly(model, optimiser, range(2))
        at = folder / name.replace(" ", "_")
        state_dict_saver.save(
            {"model": get_model_state_dict(model), "optimiser": get_optimizer_state_dict(model, optimiser)},
            checkpoint_id=at,
        )
        torch.save([model.state_dict(), optimiser.state_dict()], f"{at}.{dist.get_rank()}.pt")
        plainly(model, optimiser, range(2, STEPS))
        found[name] = weights(model)
        for kind in KINDS:
            model, optimiser, hook = begun(name, mesh)
            if kind == "checkpoint":
                own = get_optimizer_state_dict(model, optimiser)
                state: dict[str, Any] = {"model": get_model_state_dict(model), "optimiser": own}
                state_dict_loader.load(state, checkpoint_id=at)
                set_model_state_dict(model, state["model"])
                set_optimizer_state_dict(model, optimiser, optim_state_dict=state["optimiser"])
            else:
                of_model, of_optimiser = torch.load(f"{at}.{dist.get_rank()}.pt", weights_only=False)
                model.load_state_dict(of_model)
                optimiser.load_state_dict(of_optimiser)
            assert hook.steps == 2
            plainly(model, optimiser, range(2, STEPS))
            found[f"{name}, {kind}"] = weights(model)
    return found


# --- within a replica


def rounded(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Gradients reduced within replicas by `qgz`, beside torch's; and bytes."""
    model = sharded(blocks(), mesh)
    optimiser = optimiser_of(model)
    loss_of(model, 0).backward()
    plain = torch.cat([cast(Any, p.grad).full_tensor().flatten() for p in model.parameters()])
    model = sharded(blocks(), mesh)
    optimiser = optimiser_of(model)
    hook = sparsify.shard(model, optimiser, sparsify.dense(), within=sparsify.qgz(bits=8, block=64))
    loss_of(model, 0).backward()
    found = torch.cat([cast(Any, p.grad).full_tensor().flatten() for p in model.parameters()])
    assert hook.scatter is not None
    sizes = torch.tensor([sum(unit.sizes) for unit in hook.units])
    return {"plain": plain, "rounded": found, "bytes": torch.tensor(hook.scatter.sent_bytes), "sizes": sizes}


# --- local steps


def locally(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Where local steps of sharded replicas end; and those of whole models, each with its replica's
    gradients, in double precision.
    """
    found = dict[str, Tensor]()
    rows = mesh["shard"].get_group()
    for name in ("localsgd", "diloco"):
        strategy = sparsify.build(name, every=2)
        for kind in ("both", "shards"):
            model = sharded(blocks().double(), mesh if kind == "both" else mesh["shard"])
            replicas = None if kind == "both" else mesh["replicate"]
            optimiser = sparsify.shard(model, optimiser_of(model), strategy, replicas)
            plainly(model, optimiser, TWO_ROUNDS)
            found[f"{name}, {kind}"] = weights(model)
        whole = blocks().double()
        inner = optimiser_of(whole)
        optimiser = sparsify.distribute(inner, whole, strategy, TorchComm(mesh["replicate"].get_group()))
        for step in TWO_ROUNDS:
            optimiser.zero_grad()
            loss_of(whole, step).backward()
            for p in whole.parameters():
                dist.all_reduce(cast(Tensor, p.grad), group=rows)
                cast(Tensor, p.grad).div_(mesh["shard"].size())
            optimiser.step()
        found[f"{name}, whole"] = torch.cat([p.detach().flatten().float() for p in whole.parameters()])
    model = sharded(blocks(), mesh)
    optimiser = sparsify.shard(model, optimiser_of(model), sparsify.build("sparseloco", every=2, density=0.2))
    plainly(model, optimiser, TWO_ROUNDS)
    found["sparseloco"] = weights(model)
    saved = copy.deepcopy(optimiser.state_dict())
    plainly(model, optimiser, ONE_MORE)
    other = sharded(blocks(), mesh)
    again = sparsify.shard(other, optimiser_of(other), sparsify.build("sparseloco", every=2, density=0.2))
    again.load_state_dict(saved)
    plainly(other, again, ONE_MORE)
    found["sparseloco, on"], found["sparseloco, resumed"] = weights(model), weights(other)
    for way, train in (("averaged", plainly), ("divided", partial(divided, 2.0))):
        for by in ("torch", "local steps"):
            model = sharded(blocks().double(), mesh)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.2)
            if by == "local steps":
                optimiser = sparsify.shard(model, optimiser, sparsify.localsgd(every=1))
            train(model, optimiser)
            found[f"{way} by {by}"] = weights(model)
    return found


def wrap(mesh: DeviceMesh, kind: str, reshards: bool, strategy: Local) -> uses_guards.Wrapped:
    """A model of two units whose outermost one, which has parameters of its own, torch keeps gathered."""
    model = uses_guards.net()
    own = mesh if kind == "both" else mesh["shard"]
    fully_shard(model.body, mesh=own, reshard_after_forward=reshards)
    fully_shard(model, mesh=own, reshard_after_forward=reshards)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = None if kind == "both" else mesh["replicate"]
    return uses_guards.Wrapped(model, inner, sparsify.shard(model, inner, strategy, replicas))


def guarded(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return what is said of each change between local steps that must be refused, and where trainings end
    with those that change nothing.
    """
    found = dict[str, Tensor]()
    rank = dist.get_rank()
    for kind in KINDS_OF_MESH:
        make = partial(wrap, mesh, kind, True)
        said = {
            case: uses_guards.told(make, rank, uses_guards.REFUSED[case][0]) for case in REFUSED_OF_SHARDS
        }
        said["read in place"] = uses_guards.told(make, rank, read_others_in_place)
        found |= {f"refused, {kind}: {case}": words for case, words in as_text(said).items()}
        for reshards in (True, False):
            make = partial(wrap, mesh, kind, reshards)
            for case, act in uses_guards.NEUTRAL.items():
                found[f"end, {kind}, {reshards}: {case}"] = uses_guards.lived(make, rank, act)
    return found


def read_others_in_place(wrapped: uses_guards.Wrapped) -> None:
    """As `torch.distributed.checkpoint.load` does: into the tensors that a state has."""
    with shared_folder() as folder:
        others = {name: torch.zeros_like(p) for name, p in wrapped.model.state_dict().items()}
        state_dict_saver.save(others, checkpoint_id=folder)
        state_dict_loader.load(wrapped.model.state_dict(), checkpoint_id=folder)


def spoil(optimiser: torch.optim.Optimizer, *_: Any) -> None:
    """Put a NaN into the parameters, as a step does whose gradient has one."""
    p = optimiser.param_groups[0]["params"][0]
    p.to_local().detach().fill_(torch.nan)


def by_two_optimisers(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Where local steps end whose layers have an optimizer each, and where those of one for all do; each with
    a third optimizer in the place of the last one after some rounds.
    """
    found = dict[str, Tensor]()
    for kind in KINDS_OF_MESH:
        for way in ("one", "two"):
            model = uses_guards.net()
            fully_shard(model, mesh=mesh if kind == "both" else mesh["shard"])
            replicas = None if kind == "both" else mesh["replicate"]
            parts = [model] if way == "one" else [model.body, model.output]
            inners = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
            optimisers = [
                sparsify.shard(model, inner, sparsify.localsgd(every=2), replicas) for inner in inners
            ]
            for number in range(7):
                if number == 4:
                    inner = optimisers[-1].optimiser
                    optimisers[-1] = sparsify.shard(model, inner, sparsify.localsgd(every=2), replicas)
                draws = torch.Generator().manual_seed(100 * number + dist.get_rank())
                model.zero_grad()
                model(torch.randn(8, 6, generator=draws)).square().mean().backward()
                for optimiser in optimisers:
                    optimiser.step()
            with optimisers[0].at_anchor():
                found[f"{kind}, {way}"] = weights(model)
    return found


def orthogonally(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Where local steps of Muon end, which computes with whole matrices: of shards, and of whole replicas.
    The optimizer has made a step before, and shards have a GradScaler.
    """
    found = dict[str, Tensor]()
    rows = mesh["shard"].get_group()
    for kind in (*KINDS_OF_MESH, "whole"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
        scaler = torch.amp.GradScaler("cpu", enabled=kind != "whole")
        own = mesh if kind == "both" else mesh["shard"]
        for module in (model[0], model) if kind != "whole" else ():
            fully_shard(module, mesh=own)
        inner = torch.optim.Muon(model.parameters(), lr=0.02)
        optimiser: Any = inner
        for step in range(6):
            if step == 1:
                muloco = sparsify.muloco(every=2)
                if kind == "whole":
                    group = TorchComm(mesh["replicate"].get_group())
                    optimiser = sparsify.distribute(inner, model, muloco, group)
                else:
                    replicas = None if kind == "both" else mesh["replicate"]
                    optimiser = sparsify.shard(model, inner, muloco, replicas)
            # Of the step before wrapping, that of all workers is the same.
            rank = 0 if step == 0 else dist.get_rank()
            images = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            optimiser.zero_grad()
            scaler.scale(model(images).square().mean()).backward()
            for p in model.parameters() if kind == "whole" else ():
                dist.all_reduce(cast(Tensor, p.grad), group=rows)
                cast(Tensor, p.grad).div_(mesh["shard"].size())
            scaler.step(optimiser)
            scaler.update()
        whole = [cast(Any, p).full_tensor() if kind != "whole" else p for p in model.parameters()]
        found[kind] = torch.cat([p.detach().flatten() for p in whole])
    return found


# --- refused


def told(act: Callable[[], object]) -> str:
    """The sentence with which it is refused."""
    try:
        act()
    except (ValueError, NonFinite, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """What can't be, and what is said."""
    topk = sparsify.build("topk", density=0.2, scope="layer")

    def made(method: Any = topk, own: DeviceMesh | None = None, **options: Any) -> object:
        model = sharded(blocks(), own or mesh)
        return sparsify.shard(model, optimiser_of(model), method, **options)

    def hooked() -> object:
        model = sharded(blocks(), mesh["shard"])
        cast(Any, model).set_all_reduce_hook(lambda grad: None)
        return sparsify.shard(model, optimiser_of(model), topk, mesh["replicate"])

    def twice() -> object:
        model = sharded(blocks(), mesh)
        optimiser = optimiser_of(model)
        sparsify.shard(model, optimiser, topk)
        return sparsify.shard(model, optimiser, topk)

    def on_two_meshes() -> object:
        model = blocks()
        fully_shard(model.blocks[0], mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["replicate"])
        return sparsify.shard(model, optimiser_of(model), topk, mesh["replicate"])

    def partly() -> object:
        model = blocks()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return sparsify.shard(model, optimiser_of(model), topk)

    def before_sharding() -> object:
        model = blocks()
        optimiser = optimiser_of(model)
        return sparsify.shard(sharded(model, mesh), optimiser, topk)

    def differently() -> object:
        return made(sparsify.build("topk", density=0.1 * (1 + dist.get_rank() % 2), scope="layer"))

    def with_nan() -> None:
        model = sharded(blocks(), mesh)
        sparsify.shard(model, optimiser_of(model), topk)
        (loss_of(model, 0) * (torch.nan if dist.get_rank() == 1 else 1.0)).backward()

    def scaled() -> None:
        model, scaler = sharded(blocks(), mesh), torch.amp.GradScaler("cpu")
        optimiser = optimiser_of(model)
        sparsify.shard(model, optimiser, topk)
        scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimiser)

    def halfway() -> None:
        model = sharded(blocks(), mesh)
        optimiser = optimiser_of(model)
        sparsify.shard(model, optimiser, topk)
        loss_of(model, 0).backward()
        optimiser.state_dict()

    def frozen_later() -> None:
        model = sharded(blocks(), mesh)
        sparsify.shard(model, optimiser_of(model), topk)
        model.scale.requires_grad_(False)
        loss_of(model, 0).backward()

    def of_none() -> None:
        model = sharded(blocks(), mesh)
        optimiser = optimiser_of(model)
        sparsify.shard(model, optimiser, topk)
        plain = sharded(blocks(), mesh)
        inner = optimiser_of(plain)
        plainly(plain, inner, range(1))
        optimiser.load_state_dict(inner.state_dict())

    def of_another_method() -> None:
        model = sharded(blocks(), mesh)
        optimiser = optimiser_of(model)
        sparsify.shard(model, optimiser, sparsify.build("topk", density=0.5, scope="layer"))
        plainly(model, optimiser, range(1))
        other = sharded(blocks(), mesh)
        inner = optimiser_of(other)
        sparsify.shard(other, inner, topk)
        inner.load_state_dict(optimiser.state_dict())

    def loaded_before() -> None:
        model = sharded(blocks(), mesh)
        optimiser = optimiser_of(model)
        sparsify.shard(model, optimiser, topk)
        plainly(model, optimiser, range(1))
        other = sharded(blocks(), mesh)
        inner = optimiser_of(other)
        inner.load_state_dict(optimiser.state_dict())
        sparsify.shard(other, inner, topk)

    def unfrozen() -> None:
        model = blocks()
        model.blocks[0].requires_grad_(False)
        sharded(model, mesh)
        sparsify.shard(model, optimiser_of(model), topk)
        model.blocks[0].requires_grad_(True)
        loss_of(model, 0).backward()

    def hooked_later() -> None:
        model = sharded(blocks(), mesh)
        sparsify.shard(model, optimiser_of(model), topk)
        cast(Any, model).set_all_reduce_hook(lambda grad: None)
        loss_of(model, 0).backward()

    def half_wrapped() -> None:
        model = uses_guards.net()
        fully_shard(model, mesh=mesh)
        inner = torch.optim.SGD(model.body.parameters(), lr=0.1)
        optimiser = sparsify.shard(model, inner, sparsify.diloco(every=2))
        optimiser.step()

    def with_nan_locally() -> None:
        wrapped = wrap(mesh, "both", True, sparsify.localsgd(every=1))
        if dist.get_rank() == 3:
            wrapped.inner.register_step_post_hook(spoil)
        uses_guards.step(wrapped, 0, dist.get_rank())

    def of_another_shard() -> None:
        wrapped = wrap(mesh, "both", True, sparsify.diloco(every=2))
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, wrapped.optimiser.state_dict()["local"])
        own = wrapped.optimiser.state_dict()
        wrapped.optimiser.load_state_dict({**own, "local": states[dist.get_rank() ^ 1]})

    def nothing_on_some() -> object:
        model = nn.Linear(5, 1, bias=False)
        fully_shard(model, mesh=mesh)
        return sparsify.shard(model, optimiser_of(model), sparsify.diloco(every=2))

    def flattened() -> None:
        model = sharded(blocks(), mesh)
        optimiser = optimiser_of(model)
        sparsify.shard(model, optimiser, topk)
        plainly(model, optimiser, range(1))
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = get_optimizer_state_dict(model, optimiser, options=options)
        set_optimizer_state_dict(model, optimiser, optim_state_dict=state, options=options)

    plain = blocks()
    cases: dict[str, Callable[[], object]] = {
        "a plain model": lambda: sparsify.shard(plain, optimiser_of(plain), topk),
        "no replicas": partial(made, own=mesh["shard"]),
        "the shards as replicas": partial(made, own=mesh["shard"], replicas=mesh["shard"]),
        "both dimensions": partial(made, own=mesh["shard"], replicas=mesh),
        "global": lambda: made(sparsify.build("topk", density=0.2)),
        "clipped": lambda: made(
            sparsify.build("dgc", density=0.2, scope="layer", clip_norm=1.0, momentum=0.0)
        ),
        "momentum twice": lambda: made(sparsify.build("dgc", density=0.2, scope="layer", momentum=0.9)),
        "within": lambda: made(within=topk),
        "no method": lambda: made("topk"),
        "hooked": hooked,
        "twice": twice,
        "two meshes": on_two_meshes,
        "partly": partly,
        "before sharding": before_sharding,
        "differently": differently,
        "NaN": with_nan,
        "scaled": scaled,
        "halfway": halfway,
        "frozen later": frozen_later,
        "unfrozen": unfrozen,
        "hooked later": hooked_later,
        "half wrapped": half_wrapped,
        "NaN, local": with_nan_locally,
        "of another shard": of_another_shard,
        "nothing on some": nothing_on_some,
        "flattened": flattened,
        "of none": of_none,
        "of another method": of_another_method,
        "loaded before": loaded_before,
    }
    return {case: told(act) for case, act in cases.items()}


def as_text(told: Mapping[str, str]) -> dict[str, Tensor]:
    return {case: torch.tensor(list(words.encode()), dtype=torch.uint8) for case, words in told.items()}


def all_uses(size: int) -> dict[str, Tensor]:
    """Everything, on all grids of this many workers."""
    torch.set_num_threads(1)
    found = dict[str, Tensor]()
    for grid in GRIDS:
        if math.prod(grid) != size:
            continue
        mesh, at = init_device_mesh("cpu", grid, mesh_dim_names=NAMES), f"{grid}: "
        parts = {"ends": ends(mesh), "account": account(mesh), "means": means(mesh), "rounded": rounded(mesh)}
        parts["locally"] = locally(mesh)
        if grid == GRIDS[0]:
            with shared_folder() as folder:
                parts["resumed"] = resumed(mesh, folder)
            parts["refusals"] = as_text(refusals(mesh))
            parts["guarded"], parts["orthogonally"] = guarded(mesh), orthogonally(mesh)
            parts["by two optimisers"] = by_two_optimisers(mesh)
        found |= {
            f"{at}{part}: {name}": tensor for part, own in parts.items() for name, tensor in own.items()
        }
    return found


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One folder of all workers."""
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [own]
        dist.broadcast_object_list(folders)
        yield Path(folders[0])
        dist.barrier()
