"""Uses of sharded models, each with a method between the replicas; and the same by torch alone."""

from __future__ import annotations

import copy
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.utils.checkpoint import checkpoint

import sparsify
from sparsify.comm import Comm
from sparsify.comm.torch import TorchComm
from sparsify.local.strategy import LocalSteps
from tests.sparsify import laws
from tests.sparsify.local import uses_guards
from tests.sparsify.worker_functions import words_of
from tests.sparsify.wrappers.user_acts import Act, Training, live, mesh_of, seeded, whole

GRIDS = [(2, 2), (2, 3), (3, 2)]  # replicas, shards
KINDS_OF_MESH = ("both", "shards")  # of replicas and shards, or of shards alone
# But for what torch itself refuses, or does not do.
NOT_OF_SHARDS = ("converted", "given other memory", "laid out otherwise")
REFUSED_OF_SHARDS = [case for case in uses_guards.REFUSED if case not in NOT_OF_SHARDS]
NAMES = ("replicate", "shard")
STEPS = 3


class Blocks(nn.Module):
    """An embedding whose weights are the last layer's as well, and blocks whose sizes no grid divides."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 5)
        self.checkpoints = checkpoints
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5, bias=False)) for _ in range(2)
        )
        self.scale = nn.Parameter(torch.ones(1))  # on some workers there is nothing of it
        self.output = nn.Linear(5, 11, bias=False)
        self.output.weight = self.words.weight
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.words(words)
        for block in self.blocks:
            inner: Any = checkpoint(block, hidden, use_reentrant=False) if self.checkpoints else block(hidden)
            hidden = hidden + inner * self.scale
        scores: Tensor = self.output(hidden)
        return scores


def loss_of(model: nn.Module, rank: int, step: int, part: int = 0) -> Tensor:
    own = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    words = torch.randint(11, (6, 4), generator=own)
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(1, 1).flatten())


def blocks(seed: int = 0, **options: Any) -> Any:
    return seeded(partial(Blocks, **options), seed).float()


def sharded(model: Any, mesh: DeviceMesh, **options: Any) -> Any:
    """Make a unit of each block, and one of what is left."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def weights(model: nn.Module) -> Tensor:
    """Return all of them, whole, one after the other."""
    return torch.cat([whole(p).flatten().float() for p in model.parameters()])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def mesh_and_replicas(mesh: DeviceMesh, kind: str) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh to shard a model on, and what is handed over as replicas."""
    return (mesh, None) if kind == "both" else (mesh["shard"], mesh["replicate"])


Train = Callable[[Any, torch.optim.Optimizer], object]


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()


def in_microbatches(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Run two backward passes a step; the first one reduces nothing between replicas."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            model.set_requires_all_reduce(part == 1)
            (loss_of(model, dist.get_rank(), step, part) / 2).backward()
        optimizer.step()


def divided(factor: float, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Divide sums over all workers by a number of one's own (of tokens, perhaps)."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    plainly(model, optimizer)


def compiled(model: Any, optimizer: torch.optim.Optimizer) -> None:
    for block in model.blocks:
        block.compile(backend="eager")
    plainly(model, optimizer)


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
HALF_SUMS = MixedPrecisionPolicy(reduce_dtype=torch.float16)
SINGLE_SUMS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Way(NamedTuple):
    """Way to train a sharded model, with a method that leaves every average as it is, or by torch alone."""

    train: Train = plainly
    of_model: Mapping[str, Any] = {}
    of_shards: Mapping[str, Any] = {}


WAYS: dict[str, Way] = {
    "plainly": Way(),
    "in bfloat16": Way(of_shards={"mp_policy": BFLOAT16}),
    "reduced within": Way(in_microbatches),
    "checkpointed": Way(of_model={"checkpoints": True}),
    "compiled": Way(compiled),
    "divided by 1": Way(partial(divided, 1.0)),
    "divided by 8": Way(partial(divided, 8.0)),
    "kept whole": Way(of_shards={"reshard_after_forward": False}),
    "summed in half precision": Way(of_shards={"mp_policy": HALF_SUMS}),
    "summed in single precision": Way(of_shards={"mp_policy": SINGLE_SUMS}),
}
WHOLE: dict[str, tuple[str, str | float]] = {
    "dense": ("dense", "layer"),
    "topk bucket": ("topk", "bucket"),
    "topk layer": ("topk", "layer"),
    "topk 25": ("topk", 25.0),
    "gtopk layer": ("gtopk", "layer"),
}


def ends(mesh: DeviceMesh) -> dict[str, dict[str, Tensor]]:
    """Return weights at the end of each way, by torch, and with each of WHOLE.

    On the first grid all ways are tried, on both kinds of mesh.
    """
    found = dict[str, dict[str, Tensor]]()
    for way, (train, of_model, of_shards) in [*WAYS.items()][: None if mesh.shape == GRIDS[0] else 2]:
        model = sharded(blocks(**of_model), mesh, **of_shards)
        train(model, optimizer_of(model))
        found[way] = {"torch": weights(model)}
        is_whole = way == "plainly" and mesh.shape == GRIDS[0]
        for name, (method, scope) in [*WHOLE.items()][: None if is_whole else 2]:
            tells_kinds_apart = is_whole or "divided" in way
            for kind in KINDS_OF_MESH if tells_kinds_apart else KINDS_OF_MESH[:1]:
                own, replicas = mesh_and_replicas(mesh, kind)
                # The first replica's weights are what all begin with.
                model = sharded(blocks(mesh.get_local_rank("replicate"), **of_model), own, **of_shards)
                optimizer = optimizer_of(model)
                built = laws.build(method, 1.0, scope)
                hook = sparsify.shard(model, optimizer, built, replicas, debug=True)
                train(model, optimizer)
                found[way][f"{name}, {kind}"] = weights(model)
                assert hook.steps == STEPS
    return found


SPARSE: dict[str, dict[str, Any]] = {
    "topk": {"scope": "bucket"},
    "gtopk": {},
    "oktopk": {},
    "topk layer": {},
    "topk MB": {"scope": 0.0002},
    "randomk": {"feedback": "gradient"},
    "gaussiank": {},
    "efsignsgd": {},
}


def act_of(name: str, **choices: Any) -> Act:
    """Return an act of users with one of the methods."""
    momentum = 0.0 if name == "dgc" else 0.9  # of the optimizer; dgc has its own
    return Act(kind=Blocks, loss=loss_of, method=name, choices={"density": 0.2, **choices}, momentum=momentum)


def sparse(mesh: DeviceMesh, rank: int) -> dict[str, tuple[dict[str, Tensor], ...]]:
    """Return what this worker lived through with sparse methods; see `user_acts`."""
    found = {}
    for name, choices in [*SPARSE.items()][: None if mesh.shape == GRIDS[0] else 3]:
        act = replace(act_of(name.partition(" ")[0], **choices), momentum=0.0)
        found[name] = tuple(live(act, "shard", rank, mesh.shape[1]))
    return found


# --- saved

RESUMED: dict[str, dict[str, Any]] = {
    "topk": {},
    "dgc": {"clip_norm": None, "momentum": 0.9},
    "randomk": {"feedback": "gradient"},
    "powersgd": {"rank": 2},
    "stable_topk": {},
    "qsgd": {},
    "hardthreshold": {},
}


def state_of(training: Training) -> dict[str, Any]:
    """Return what `torch.distributed.checkpoint` saves of it, and loads into."""
    (optimizer,) = training.optimizers
    model = training.model
    return {"model": get_model_state_dict(model), "own": get_optimizer_state_dict(model, optimizer)}


def resumed(mesh: DeviceMesh, rank: int, folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return where a training ends that was not interrupted, and one that was half-way."""
    found = {}
    for name, choices in RESUMED.items():
        straight, again = (Training(act_of(name, **choices), "shard", rank, mesh.shape[1]) for _ in range(2))
        for step in range(2):
            straight.advance(step)
        state_dict_saver.save(state_of(straight), checkpoint_id=folder / name)
        state = state_of(again)
        state_dict_loader.load(state, checkpoint_id=folder / name)
        set_model_state_dict(again.model, state["model"])
        set_optimizer_state_dict(again.model, again.optimizers[0], optim_state_dict=state["own"])
        assert again.holders[0].steps == 2
        for training in (straight, again):
            training.advance(2)
        found[name] = (weights(straight.model), weights(again.model))
    return found


# --- within a replica


def rounded(mesh: DeviceMesh, rank: int) -> dict[str, Tensor]:
    """Return gradients reduced within replicas by `qgz`, beside torch's; and bytes."""
    found = dict[str, Tensor]()
    for name in ("plain", "rounded"):
        model = sharded(blocks(), mesh)
        if name == "rounded":
            within = sparsify.qgz(bits=8, block=64)
            hook = sparsify.shard(model, optimizer_of(model), sparsify.dense(), within=within)
        loss_of(model, rank, 0).backward()
        found[name] = torch.cat([whole(p.grad).flatten() for p in model.parameters()])
    assert hook.scatter is not None
    found["bytes"] = torch.tensor(hook.scatter.sent_bytes)
    found["sizes"] = torch.tensor([sum(unit.sizes) for unit in hook.units])
    return found


# --- local steps

SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
LOCALLY: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "localsgd": SGD,
    "diloco": SGD,
    "muloco": partial(torch.optim.Muon, lr=0.02),  # which computes with whole matrices
}


def average_within(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average the gradients of whole models within each replica."""
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad, group=mesh["shard"].get_group())
        p.grad.div_(mesh["shard"].size())


def locally(mesh: DeviceMesh, rank: int) -> dict[str, Tensor]:
    """Return where local steps of sharded replicas end, by strategy and kind of mesh.

    Also where those of whole models end, each with its replica's gradients.
    """
    found = {}
    for name in LOCALLY:
        for kind in (*KINDS_OF_MESH, "whole"):
            found[f"{name}, {kind}"] = trained_locally(mesh, rank, name, kind)
    return found


def trained_locally(mesh: DeviceMesh, rank: int, name: str, kind: str) -> Tensor:
    """Return the weights in the middle of a round.

    Each layer has an optimizer, which has made a step before it is wrapped; one of them is wrapped anew
    later, in a round of the other. Shards have a GradScaler.
    """
    strategy = sparsify.build(name, every=2)
    model: Any = seeded(
        lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 5, bias=False))
    )
    own, replicas = mesh_and_replicas(mesh, kind)
    replicated = TorchComm(mesh["replicate"].get_group())
    for module in (model[0], model) if kind != "whole" else ():
        fully_shard(module, mesh=own)

    def wrap_one(inner: torch.optim.Optimizer) -> Any:
        if kind == "whole":
            return sparsify.distribute(inner, model, strategy, replicated)
        return sparsify.shard(model, inner, strategy, replicas)

    inners = [LOCALLY[name](layer.parameters()) for layer in (model[0], model[2])]
    optimizers: list[Any] = inners
    scaler = torch.amp.GradScaler("cpu", enabled=kind != "whole")
    for step in range(8):
        if step == 1:
            optimizers = [wrap_one(inner) for inner in inners]
        if step == 6:
            optimizers[-1] = wrap_one(inners[-1])
        # Of the step before wrapping, that of all workers is the same.
        images = torch.Generator().manual_seed(10 * step + (rank if step else 0))
        model.zero_grad()
        outputs = model(torch.randn(5, 6, generator=images, dtype=torch.float64))
        scaler.scale(outputs.square().mean()).backward()
        if kind == "whole":
            average_within(model, mesh)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return weights(model)


def resumed_locally(mesh: DeviceMesh) -> tuple[Tensor, Tensor, Tensor]:
    """Return sparse local steps after two rounds, and in the middle of the next, straight on and resumed.

    Some workers have nothing of the model in places.
    """
    strategy = sparsify.build("sparseloco", every=2, density=0.2)
    model, other = (sharded(blocks(), mesh) for _ in range(2))
    optimizer, again = (sparsify.shard(part, optimizer_of(part), strategy) for part in (model, other))
    plainly(model, optimizer, range(4))
    after_two_rounds = weights(model)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plainly(model, optimizer, range(4, 5))
    plainly(other, again, range(4, 5))
    return after_two_rounds, weights(model), weights(other)


def wrap(mesh: DeviceMesh, kind: str, reshards: bool, strategy: LocalSteps) -> uses_guards.Wrapped:
    """Wrap a model of two units whose outermost one, with parameters of its own, torch keeps gathered."""
    model = uses_guards.net()
    own, replicas = mesh_and_replicas(mesh, kind)
    fully_shard(model.body, mesh=own, reshard_after_forward=reshards)
    fully_shard(model, mesh=own, reshard_after_forward=reshards)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return uses_guards.Wrapped(model, inner, sparsify.shard(model, inner, strategy, replicas))


def guarded(mesh: DeviceMesh, rank: int) -> dict[str, Any]:
    """Return what is said of each change between local steps that must be refused, by the kind of mesh.

    Also return where trainings end with those changes that change nothing.
    """
    found = dict[str, Any]()
    refused = {case: uses_guards.REFUSED[case][0] for case in REFUSED_OF_SHARDS}
    for kind in KINDS_OF_MESH:
        make = partial(wrap, mesh, kind, True)
        for case, act in {**refused, "read in place": read_others_in_place}.items():
            found[f"{case}, {kind}"] = uses_guards.told(make, rank, act)
        make = partial(wrap, mesh, kind, kind == "shards")  # with and without gathering anew
        for case, act in uses_guards.NEUTRAL.items():
            found[f"{case}, {kind}"] = uses_guards.lived(make, rank, act)
    return found


def read_others_in_place(wrapped: uses_guards.Wrapped) -> None:
    """Read as `torch.distributed.checkpoint.load` does: into the tensors that a state has."""
    with shared_folder() as folder:
        others = {name: torch.zeros_like(p) for name, p in wrapped.model.state_dict().items()}
        state_dict_saver.save(others, checkpoint_id=folder)
        state_dict_loader.load(wrapped.model.state_dict(), checkpoint_id=folder)


# --- refused

TOPK = laws.build("topk", 0.2)


class Grid(NamedTuple):
    """Workers, and how they are called to do what is refused."""

    mesh: DeviceMesh
    rank: int

    def shard(self, method: Any = TOPK, own: DeviceMesh | None = None, **options: Any) -> Any:
        """Shard a model, and return it with its optimizer."""
        model = sharded(blocks(), own or self.mesh)
        optimizer = optimizer_of(model)
        sparsify.shard(model, optimizer, method, **options)
        return model, optimizer

    def lose(self, model: nn.Module) -> Tensor:
        return loss_of(model, self.rank, 0)

    def backward(self, change: Callable[[Any], object] = lambda model: None) -> torch.optim.Optimizer:
        """Change a sharded model, and compute its gradients."""
        model, optimizer = self.shard()
        change(model)
        self.lose(model).backward()
        stepping: torch.optim.Optimizer = optimizer
        return stepping

    def state_of(self, method: Any = TOPK) -> Any:
        """Return the optimizer's state after a step."""
        model, optimizer = self.shard(method)
        plainly(model, optimizer, range(1))
        return optimizer.state_dict()


def hook_before(grid: Grid) -> None:
    model = sharded(blocks(), grid.mesh["shard"])
    model.set_all_reduce_hook(lambda grad: None)
    sparsify.shard(model, optimizer_of(model), TOPK, grid.mesh["replicate"])


def shard_twice(grid: Grid) -> None:
    sparsify.shard(*grid.shard(), TOPK)


def shard_on_two_meshes(grid: Grid) -> None:
    model = blocks()
    fully_shard(model.blocks[0], mesh=grid.mesh["shard"])
    fully_shard(model, mesh=grid.mesh["replicate"])
    sparsify.shard(model, optimizer_of(model), TOPK, grid.mesh["replicate"])


def shard_a_part(grid: Grid) -> None:
    model = blocks()
    fully_shard(model.blocks[0], mesh=grid.mesh)
    sparsify.shard(model, optimizer_of(model), TOPK)


def overflow(grid: Grid) -> None:
    model, _ = grid.shard()
    (grid.lose(model) * (torch.nan if grid.rank == 1 else 1.0)).backward()


def scale(grid: Grid) -> None:
    scaler = torch.amp.GradScaler("cpu")  # a later one leaves no trace
    model, optimizer = grid.shard()
    scaler.scale(grid.lose(model)).backward()
    scaler.step(optimizer)


def unfreeze_later(grid: Grid) -> None:
    model = blocks()
    model.blocks[0].requires_grad_(False)
    sharded(model, grid.mesh)
    sparsify.shard(model, optimizer_of(model), TOPK)
    model.blocks[0].requires_grad_(True)
    grid.lose(model).backward()


class OwnReduceScatter(DefaultReduceScatter):
    """A reduce-scatter of the user's."""


def scatter_before(grid: Grid) -> None:
    model = sharded(blocks(), grid.mesh)
    model.set_custom_reduce_scatter(OwnReduceScatter())
    sparsify.shard(model, optimizer_of(model), TOPK, within=sparsify.qgz(bits=8))


def scatter_later(grid: Grid) -> None:
    model, _ = grid.shard(within=sparsify.qgz(bits=8))
    model.set_custom_reduce_scatter(OwnReduceScatter())
    grid.lose(model).backward()


def skip_on_one_replica(is_reduced: bool, grid: Grid) -> None:
    """Leave a block out on one of two replicas, whose next block has the same size."""
    model, _ = grid.shard()
    if is_reduced:
        model.set_reduce_scatter_unused_params(True)
    if grid.mesh.get_local_rank("replicate") == 1:
        model.blocks[1].forward = torch.zeros_like
    grid.lose(model).backward()


def load_before(grid: Grid) -> None:
    model = sharded(blocks(), grid.mesh)
    inner = optimizer_of(model)
    inner.load_state_dict(grid.state_of())
    sparsify.shard(model, inner, TOPK)


def flatten(grid: Grid) -> None:
    model, optimizer = grid.shard()
    plainly(model, optimizer, range(1))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state, options=options)


def wrap_half(grid: Grid) -> None:
    model = uses_guards.net()
    fully_shard(model, mesh=grid.mesh)
    inner = torch.optim.SGD(model.body.parameters(), lr=0.1)
    sparsify.shard(model, inner, sparsify.diloco(every=2)).step()


def unfreeze_locally(grid: Grid) -> None:
    model = uses_guards.net()
    fully_shard(model, mesh=grid.mesh)
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    wrapped = sparsify.shard(model, inner, sparsify.diloco(every=2))
    model.frozen.requires_grad_(True)
    wrapped.step()


def spoil(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Put a NaN into the parameters, as a step does whose gradient has one."""
    optimizer.param_groups[0]["params"][0].to_local().detach().fill_(torch.nan)


def overflow_locally(grid: Grid) -> None:
    wrapped = wrap(grid.mesh, "both", True, sparsify.localsgd(every=1))
    if grid.rank == 3:
        wrapped.inner.register_step_post_hook(spoil)
    uses_guards.step(wrapped, 0, grid.rank)


def hook_later_locally(grid: Grid) -> None:
    model: Any = uses_guards.net()
    whole = fully_shard(model, mesh=grid.mesh)
    wrapped = sparsify.shard(model, optimizer_of(model), sparsify.diloco(every=2))
    whole.set_all_reduce_hook(lambda grad: None)
    wrapped.step()


def load_of_another_shard(grid: Grid) -> None:
    wrapped = wrap(grid.mesh, "both", True, sparsify.diloco(every=2))
    own = wrapped.optimizer.state_dict()
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, own["local"])
    wrapped.optimizer.load_state_dict({**own, "local": states[grid.rank ^ 1]})


def leave_nothing_to_some(grid: Grid) -> None:
    model = nn.Linear(5, 1, bias=False)
    fully_shard(model, mesh=grid.mesh)
    sparsify.shard(model, optimizer_of(model), sparsify.diloco(every=2))


class Averaged(torch.optim.SGD):
    """Keeps averages beside the parameters, as optimizers without schedules do."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def keep_averages_locally(grid: Grid) -> None:
    model = sharded(blocks(), grid.mesh)
    sparsify.shard(model, Averaged(model.parameters(), lr=0.1), sparsify.diloco(every=2))


Refusal = tuple[Callable[[Grid], object], str]
OTHER_UNIT = "workers came to different units in this backward pass (this one to blocks."
REFUSED: dict[str, Refusal] = {
    "a plain model": (
        lambda grid: sparsify.shard(blocks(), optimizer_of(blocks()), TOPK),
        "shard takes a model that is sharded, and this Blocks is not; call torch.distr",
    ),
    "no replicas": (
        lambda grid: grid.shard(own=grid.mesh["shard"]),
        "says nothing of replicas; hand over the other one: sparsify.shard(..., replicas=",
    ),
    "the shards as replicas": (
        lambda grid: grid.shard(own=grid.mesh["shard"], replicas=grid.mesh["shard"]),
        "who share a replica, are among them; hand over the other dimension",
    ),
    "both dimensions": (
        lambda grid: grid.shard(own=grid.mesh["shard"], replicas=grid.mesh),
        "has a group for each of its 2 dimensions; hand over the one whose",
    ),
    "global": (
        lambda grid: grid.shard(sparsify.topk(density=0.2)),
        "scope='global' chooses from the gradient of the whole model, and FSDP reduces it unit by unit",
    ),
    "clipped": (
        lambda grid: grid.shard(laws.build("dgc", clip_norm=1.0, momentum=0.0)),
        "clip_norm needs the norm of the whole gradient",
    ),
    "momentum twice": (
        lambda grid: grid.shard(laws.build("dgc", momentum=0.9)),
        "the method applies momentum itself, and the optimizer has 0.9 too",
    ),
    "within": (
        lambda grid: grid.shard(within=TOPK),
        "has no reduce-scatter; within a replica take sparsify.qgz(bits=8)",
    ),
    "no method": (lambda grid: grid.shard("topk"), "'topk' is not a method; build one"),
    "hooked": (hook_before, "the whole model has an all-reduce hook already, and takes no other"),
    "twice": (shard_twice, "sparsify.shard was called for this model already; go on with what that returned"),
    "two meshes": (shard_on_two_meshes, "shard exchanges all units between the same replicas"),
    "partly": (
        shard_a_part,
        "is trained and in no unit, so that nobody would average it; call fully_shard on the",
    ),
    "before sharding": (
        lambda grid: sparsify.shard(sharded(blocks(), grid.mesh), optimizer_of(blocks()), TOPK),
        "is not the optimizer's, with whose state its residual is saved; make one optimizer",
    ),
    "differently": (
        lambda grid: grid.shard(laws.build("topk", 0.1 * (1 + grid.rank % 2))),
        "WorkerMismatch: the workers disagree on method: ranks [0, 2] have ",
    ),
    "NaN": (
        overflow,
        "NonFiniteShardError: rank 0, step 0: the gradient of blocks.1 has a NaN or Inf; it reached no",
    ),
    "scaled": (scale, "a GradScaler steps the optimizer, so residuals would hold gradients of different sc"),
    "own scatter": (
        scatter_before,
        "has a reduce-scatter of its own (set_custom_reduce_scatter), and within=",
    ),
    "own scatter, later": (scatter_later, "the whole model was given another reduce-scatter after sparsify."),
    "skipped by some": (partial(skip_on_one_replica, False), OTHER_UNIT),
    "skipped by some, reduced": (partial(skip_on_one_replica, True), OTHER_UNIT),
    "several, local": (
        lambda grid: sparsify.shard(sharded(blocks(), grid.mesh), cast(Any, []), sparsify.diloco(every=2)),
        "with local steps each optimizer is wrapped by a call of its own",
    ),
    "halfway": (lambda grid: grid.backward().state_dict(), "state_dict() came between backward and step"),
    "frozen later": (
        lambda grid: grid.backward(lambda model: model.scale.requires_grad_(False)),
        "a parameter was not used in this step, or frozen or unfrozen since",
    ),
    "unfrozen": (
        unfreeze_later,
        "blocks.0.0.weight was frozen when sparsify.shard was called, and is trained now",
    ),
    "hooked later": (
        lambda grid: grid.backward(lambda model: model.set_all_reduce_hook(lambda grad: None)),
        "the whole model was given another all-reduce hook after sparsify.shard",
    ),
    "hooked later, local": (
        hook_later_locally,
        "the whole model was given another all-reduce hook after sparsify.shard",
    ),
    "averages, local": (keep_averages_locally, "Averaged has the modes train and eval, so it keeps weights"),
    "half wrapped": (wrap_half, "output.weight is trained, and no optimizer of local steps has it"),
    "unfrozen, local": (unfreeze_locally, "frozen.weight is trained, and no optimizer of local steps has it"),
    "NaN, local": (
        overflow_locally,
        "NonFiniteDriftError: rank 3, round 0: body.weight has a NaN or Inf after the local steps",
    ),
    "of another shard": (load_of_another_shard, "and this is rank"),
    "nothing on some": (
        leave_nothing_to_some,
        "ranks [1, 3] have no: there is nothing to aggregate: all parameters are empty",
    ),
    "flattened": (
        flatten,
        "With flatten_optimizer_state_dict=True torch reads back only what the optimizer itself",
    ),
    "of another method": (
        lambda grid: grid.shard()[1].load_state_dict(grid.state_of(laws.build("topk", 0.5))),
        "the saved state is of another method, or of a model with other units",
    ),
    "loaded before": (load_before, "residuals that would be lost; load it after sparsify.shard"),
}


GROUPS = (("ends",), ("sparse", "rounded", "locally", "resumed locally", "resumed"), ("refused", "guarded"))
GROUP = "GROUP_OF_USES"  # of the environment: which of these


def uses_of_group(comm: Comm, now: Callable[[], float]) -> dict[str, Any]:
    """Return a group of parts, on all grids of this many workers, by grid and part."""
    torch.set_num_threads(1)
    rank = comm.rank
    names = GROUPS[int(os.environ[GROUP])]
    found = dict[str, Any]()
    for grid in GRIDS:
        if math.prod(grid) != comm.size:
            continue
        mesh = mesh_of(*grid)
        parts: dict[str, Callable[[], Any]] = {
            "ends": partial(ends, mesh),
            "sparse": partial(sparse, mesh, rank),
            "rounded": partial(rounded, mesh, rank),
            "locally": partial(locally, mesh, rank),
            "resumed locally": partial(resumed_locally, mesh),
        }
        if grid == GRIDS[0]:
            parts["resumed"] = partial(resumed_in_a_shared_folder, mesh, rank)
            parts["refused"] = partial(refusals, mesh, rank)
            parts["guarded"] = partial(guarded, mesh, rank)
        found[str(grid)] = {name: part() for name, part in parts.items() if name in names}
    return found


def refusals(mesh: DeviceMesh, rank: int) -> dict[str, str]:
    """Return what each act that is refused was told."""
    return {case: words_of(partial(act, Grid(mesh, rank))) for case, (act, _) in REFUSED.items()}


def resumed_in_a_shared_folder(mesh: DeviceMesh, rank: int) -> Any:
    with shared_folder() as folder:
        return resumed(mesh, rank, folder)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Give all workers one folder."""
    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [own]
        dist.broadcast_object_list(folders)
        yield Path(folders[0])
        dist.barrier()
