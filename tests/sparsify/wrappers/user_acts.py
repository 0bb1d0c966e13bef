"""Acts of users while they train, as data, with each wrapper; and the laws that must survive them."""

from __future__ import annotations

import copy
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import sparsify
from sparsify.comm import Comm
from sparsify.core.gradients import gradient_strides
from tests.sparsify import laws

LR = 0.05  # of plain SGD: what was applied can be read off the weights
MANY_BUCKETS = 0.0001  # MB: of the smallest model three
DISTRIBUTE = ("distribute", "distribute, overlapped")
REGISTER = ("register", "register, overlapped")
WRAPPERS = (*DISTRIBUTE, *REGISTER, "shard", "local steps")
WHOLE = (*DISTRIBUTE, *REGISTER, "local steps")  # each worker has the whole model
AVERAGING = WRAPPERS[:-1]  # in every step
PART = "PART_OF_ACTS"  # of the environment
NUM_PARTS = 8
SCOPES = ("layer", "bucket", "global", MANY_BUCKETS)
Loss = Callable[[nn.Module, int, int], Tensor]


# --- models


class Net(nn.Module):
    """A convolution, so that memory formats matter, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 2)
        self.output = nn.Linear(16, 3)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.output(self.convolution(images).tanh().flatten(1))
        return scores


def seeded(kind: Callable[[], nn.Module], seed: int = 0) -> Any:
    """Return a model in double precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind().double()


def net(seed: int = 0) -> Any:
    return seeded(Net, seed)


def loss_of(called: Callable[[Tensor], Any], rank: int, step: int) -> Tensor:
    own = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(6, 2, 3, 3, generator=own, dtype=torch.float64)
    return nn.functional.cross_entropy(called(images), torch.arange(6) % 3)


def loss_in_float32(called: Callable[[Tensor], Any], rank: int, step: int) -> Tensor:
    return loss_of(lambda images: called(images.float()), rank, step)


class Heads(Net):
    """A model with a second head, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(16, 3)
        self.third = nn.Linear(16, 3)

    def forward(self, images: Tensor, head: str = "output") -> Tensor:
        scores: Tensor = self.get_submodule(head)(self.convolution(images).tanh().flatten(1))
        return scores


def loss_of_heads(called: Callable[..., Any], rank: int, step: int) -> Tensor:
    """Use the second head on all workers, on one, or on none, in turns."""
    head = "second" if rank < 2 - step % 3 else "output"
    return loss_of(partial(called, head=head), rank, step)


class Words(Net):
    """A model with an embedding, whose gradient is sparse: each worker has other words in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 3, sparse=True)

    def forward(self, images: Tensor) -> Tensor:
        said = (images.abs().sum(dim=(1, 2, 3)) * 10).long() % 50
        scores: Tensor = super().forward(images) + self.words(said)
        return scores


class Between(Net):
    """A model with something between its two layers."""

    def between(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.convolution(images).tanh().flatten(1)
        scores: Tensor = self.output(self.between(hidden))
        return scores


class Complex(Between):
    """A model with complex parameters, and a vector without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(16, 16, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.zeros(0))

    def between(self, hidden: Tensor) -> Tensor:
        return (hidden.to(self.turn.dtype) @ self.turn).abs() + self.nothing.sum()


class WithExtraState(nn.Linear):
    """A layer that saves more than tensors."""

    def get_extra_state(self) -> Any:
        return {"some": "thing"}

    def set_extra_state(self, state: Any) -> None: ...


class Tied(Between):
    """A model with tied, parametrised and frozen weights, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = WithExtraState(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.frozen = nn.Linear(16, 16)
        self.frozen.weight.requires_grad_(False)

    def between(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.frozen(self.normed(self.second(self.first(hidden).tanh())))
        return mixed


class Strided(Between):
    """A model whose parameters have gaps, with buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.pruned = nn.Parameter(torch.randn(16, 32).double()[:, ::2])  # every second column is gone
        buffers = {
            "gaps": torch.randn(16, 2).double()[:, 0],
            "expanded": torch.randn(1).double().expand(16),
            "hidden": torch.randn(16),
            "empty": torch.zeros(0),
            "mask": torch.rand(16) > 0.5,
            "number": torch.randint(9, ()),
        }
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer, persistent=name != "hidden")

    def between(self, hidden: Tensor) -> Tensor:
        moved = hidden + sum(buffer.sum() for buffer in self.buffers())
        return moved @ self.pruned


class Mean(torch.autograd.Function):
    """The identity, whose gradient is averaged over the workers at once, in the default group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        mean = grad / dist.get_world_size()
        for _ in range(20):  # as long as others may be on their way
            average = mean.clone()
            dist.all_reduce(average)
        return average


class Meeting(Between):
    """A model in whose backward pass the workers meet, as in one that is spread over them."""

    def between(self, hidden: Tensor) -> Tensor:
        met: Tensor = Mean.apply(hidden)
        return met


# --- a training


def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, or of all of one that is sharded."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone().contiguous()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


class Lived(NamedTuple):
    """History of one worker: what it saw, and what became of that, by the parameter's name."""

    start: dict[str, Tensor]
    end: dict[str, Tensor]  # in units of LR, where a parameter's rate is another
    seen: dict[str, Tensor]  # the sum of its gradients
    owed: dict[str, Tensor]  # its residuals
    buffers: dict[str, Tensor]
    report: dict[str, Tensor]


@cache
def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    """Return a mesh, made once, for each has process groups of its own."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


class Training:
    """A model that one wrapper trains, and what this worker sees."""

    def __init__(self, act: Act, wrapper: str, rank: int, shards: int = 1) -> None:
        self.act = act
        self.wrapper = wrapper
        self.rank = rank
        self.shards = shards
        self.overlaps = wrapper.endswith("overlapped")
        self.scaler = None
        if act.is_scaled:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        self.model = seeded(act.kind, rank // shards).to(act.dtype)  # that of rank 0 is what all begin with
        self.bare = self.model  # computes the same gradients, and nobody averages them
        self.called = self.model
        if wrapper in REGISTER:
            self.called = DistributedDataParallel(self.model, bucket_cap_mb=MANY_BUCKETS, **act.of_ddp)
        if wrapper == "shard":
            self.bare = copy.deepcopy(self.model)
            mesh = mesh_of(dist.get_world_size() // shards, shards)
            units = self.model.blocks if hasattr(self.model, "blocks") else [self.model.convolution]
            for unit in units:
                fully_shard(unit, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        names = [name for name, _ in self.model.named_parameters()]
        self.rates = {name: act.rates.get(name.partition(".")[0], LR) for name in names}
        parts = act.parts or ("",)
        inners = [self.optimizer_of(part) for part in parts]
        with act.mode():
            self.holders = [self.wrap(inner) for inner in inners]
        self.start = weights(self.model)
        self.seen = {name: torch.zeros_like(p) for name, p in self.start.items()}

    def optimizer_of(self, part: str) -> torch.optim.Optimizer:
        """Return an optimizer of a part of the model, with a rate of each tensor's own."""
        groups = [
            {"params": [p], "lr": self.rates[name]}
            for name, p in self.model.named_parameters()
            if name.startswith(part)
        ]
        decay = 0.01 if self.act.momentum else 0.0
        return torch.optim.SGD(groups, lr=LR, momentum=self.act.momentum, weight_decay=decay)

    def wrap(self, inner: torch.optim.Optimizer) -> Any:
        """Return what the wrapper returns."""
        if self.wrapper == "local steps":
            return sparsify.distribute(inner, self.model, sparsify.localsgd(every=1))
        method = laws.build(self.act.method, **{"density": 0.1, **self.act.choices})
        if self.wrapper == "shard":
            return sparsify.shard(self.model, inner, method, **self.act.options)
        options = {"overlap": self.overlaps, "scaler": self.scaler, **self.act.options}
        if self.wrapper in DISTRIBUTE:
            return sparsify.distribute(inner, self.model, method, **options)
        return sparsify.register(self.called, method, inner, **options)

    @property
    def optimizers(self) -> list[Any]:
        """Return what the loop steps."""
        is_hook = self.wrapper in (*REGISTER, "shard")
        return [holder.optimizer if is_hook else holder for holder in self.holders]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def shares(self) -> dict[str, float]:
        """Return each parameter's rate of now, in units of that which it began with."""
        groups = zip(self.rates.items(), self.optimizers[0].param_groups, strict=True)
        return {name: float(group["lr"]) / rate for (name, rate), group in groups}

    def see(self, step: int, shares: Mapping[str, float] | None = None) -> None:
        """Note this worker's gradients of the bare model, whatever `.grad` holds; or shares of them."""
        if self.bare is not self.model:
            for own, p in zip(self.bare.parameters(), self.model.parameters(), strict=True):
                own.data.copy_(whole(p))
        trained = {name: p for name, p in self.bare.named_parameters() if p.requires_grad}
        loss = self.act.loss(self.bare, self.rank, step)
        gradients = torch.autograd.grad(
            loss, list(trained.values()), allow_unused=True, materialize_grads=True
        )
        for name, gradient in zip(trained, gradients, strict=True):
            self.seen[name] += (shares or {}).get(name, 1.0) * gradient.to_dense()

    def loss(self, step: int) -> Tensor:
        loss = self.act.loss(self.called, self.rank, step)
        return self.scaler.scale(loss) if self.scaler else loss

    def backward(self, step: int, shares: Mapping[str, float] | None = None, is_seen: bool = True) -> None:
        if is_seen:
            self.see(step, shares)
        self.loss(step).backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            if self.scaler:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler:
            self.scaler.update()

    def advance(self, step: int) -> None:
        """Make a whole step, without noting its gradients."""
        self.zero_grad()
        self.loss(step).backward()
        self.step()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate, in the words of the wrapper."""
        told: AbstractContextManager[Any] = nullcontext()
        if self.wrapper in DISTRIBUTE:
            told = self.holders[0].no_sync()
        if self.wrapper in REGISTER:
            told = self.called.no_sync()
        if self.wrapper == "shard":
            self.model.set_requires_gradient_sync(False)
        with told:
            yield
        if self.wrapper == "shard":
            self.model.set_requires_gradient_sync(True)

    def owed(self) -> dict[str, Tensor]:
        """Return this worker's residuals, shaped like the parameters."""
        found = dict[str, Tensor]()
        residuals = dict[str, Tensor]()
        for holder in self.holders:
            if self.wrapper != "local steps":
                residuals |= holder.engine.residuals()
        for name, p in self.model.named_parameters():
            if name not in residuals:
                continue
            residual = residuals[name].detach()
            if p.is_complex():
                residual = torch.view_as_complex(residual.view(-1, 2))
            if isinstance(p, DTensor):
                local = p.to_local()
                own = residual[: local.numel()].view(local.shape)  # without what torch pads it with
                residual = whole(
                    DTensor.from_local(own, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
                )
            found[name] = residual.as_strided(p.shape, gradient_strides(p)).clone().contiguous()
        return found

    def lived(self) -> Lived:
        end = {
            name: self.start[name] + LR / self.rates[name] * (p - self.start[name])
            for name, p in weights(self.model).items()
        }
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        owed = self.owed()
        if self.act.choices.get("feedback") == "learning_rate":
            shares = self.shares()
            owed = {name: shares[name] * residual for name, residual in owed.items()}
        return Lived(self.start, end, self.seen, owed, buffers, self.report())

    def report(self) -> dict[str, Tensor]:
        """Return how many elements were sent in the last step, of how many; and in how many bytes."""
        reports = [getattr(holder, "last_report", None) for holder in self.holders]
        known = [report for report in reports if report is not None]
        sent = torch.tensor([report[:2] for report in known])
        return {"sent": sent, "bytes": torch.tensor([report.wire_bytes for report in known])}


def check_balanced(ranks: Sequence[Lived]) -> None:
    """Check that replicas are equal to the bit, and that P times the applied and the owed make the seen."""
    check_equal(ranks)
    for name, start in ranks[0].start.items():
        applied = len(ranks) * (start - ranks[0].end[name]) / LR
        owed = torch.stack([rank.owed.get(name, torch.zeros_like(start)) for rank in ranks]).sum(dim=0)
        seen = torch.stack([rank.seen[name] for rank in ranks]).sum(dim=0)
        assert torch.allclose(applied + owed, seen, rtol=1e-9, atol=1e-9), f"mass of {name} is lost"


def check_equal(ranks: Sequence[Lived]) -> None:
    """Check that all replicas are equal to the bit."""
    for rank in ranks:
        for part in ("end", "buffers"):
            for name, tensor in getattr(ranks[0], part).items():
                assert torch.equal(getattr(rank, part)[name], tensor), f"replicas differ in {name}"


# --- what users do to a model between backward and step


def move_weights(model: nn.Module) -> None:
    flat = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(flat.detach().clone(), model.parameters())


def move_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data = p.grad.data.clone()


def replace_gradients(model: nn.Module) -> None:
    """Put copies in their places, of which some lie otherwise than their parameters."""
    for p in model.parameters():
        if p.grad is not None:
            lies = torch.channels_last if p.dim() == 4 else torch.contiguous_format
            p.grad = p.grad.clone(memory_format=lies)


CHANGES: Mapping[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "weights moved": move_weights,
    "copied": copy.deepcopy,
    "evaluated": lambda model: model.eval().train(),
}
# What asks gradients for anything comes after averaging.
CHANGES_OF_AVERAGES: Mapping[str, Callable[[nn.Module], object]] = {
    "the same type again": lambda model: model.double(),
    "weights shared with other processes": lambda model: model.share_memory(),
    "gradients moved": move_gradients,
    "gradients replaced": replace_gradients,
    "gradients clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
}


# --- acts


def train(
    training: Training, change: Callable[[nn.Module], object] = CHANGES["nothing"], steps: int = 4
) -> None:
    """Train, and change the model after half of the steps, between backward and step."""
    for step in range(steps):
        training.zero_grad()
        training.backward(step)
        if step == steps // 2:
            if training.wrapper == DISTRIBUTE[1] and change in CHANGES_OF_AVERAGES.values():
                training.holders[0].aggregate()
            change(training.model)
        training.step()
        for holder in training.holders if training.wrapper != "local steps" else ():
            assert holder.steps == step + 1
            assert holder.last_report.density == holder.last_report.sent_density <= 1


def accumulate(training: Training, tells: bool = True, ends: bool = True) -> None:
    """Run two backward passes a step, of which the wrapper is told, or not.

    With `ends` False, it is told that none is the last.
    """
    for step in range(4):
        training.zero_grad()
        with training.no_sync() if tells else nullcontext():
            training.backward(2 * step)
            if not ends:
                training.backward(2 * step + 1)
        if ends:
            training.backward(2 * step + 1)
        training.step()


def toggle(training: Training) -> None:
    """Accumulate as nanoGPT's script tells DDP."""
    for step in range(4):
        training.zero_grad()
        for part in range(2):
            training.called.require_backward_grad_sync = part == 1
            training.backward(2 * step + part)
        training.step()


def join(training: Training) -> None:
    """Give the second worker fewer batches."""
    with training.called.join():
        train(training, steps=5 - 2 * training.rank)


def scale(training: Training, recipe: str = "") -> None:
    """Double the scale in each step, and halve it after the third one, in which one worker overflows.

    The overflow is in the last bucket, long after the first one was full.
    """
    scaler = training.scaler
    assert scaler is not None
    step = 0
    training.model.convolution.weight.register_hook(
        lambda grad: grad * torch.inf if training.rank == 1 and step == 2 else grad
    )
    (optimizer,) = training.optimizers
    for step in range(5):
        training.zero_grad()
        training.backward(step, is_seen=step != 2)
        if "unscaled" in recipe:
            scaler.unscale_(optimizer)
        if "averaged" in recipe:
            optimizer.aggregate()
        if "told" in recipe:
            report = optimizer.aggregate(scaler.get_scale())
            assert (report is None) is (step == 2)
            replace_gradients(training.model)
        if "unscaled" in recipe:
            nn.utils.clip_grad_norm_(training.model.parameters(), 1e9)
        training.step()
        is_skipped = training.holders[0].last_report is None
        assert is_skipped is (step == 2) or training.act.method == "dense"
    assert scaler.get_scale() == 4.0 * 2**4 / 2


FACTORS = (0.0, 0.5, 1.0, 0.25, 2.0, 1.0)
SCHEDULES: Mapping[str, Callable[[torch.optim.Optimizer], Any]] = {
    "factors": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda at: FACTORS[at]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, 9, cycle_momentum=False),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "plateaus": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
}


def follow(training: Training, schedule: str) -> None:
    """Follow a schedule of each tensor's own rate, with feedback in the learning-rate domain."""
    (optimizer,) = training.optimizers
    scheduler = SCHEDULES[schedule](optimizer)
    for step in range(len(FACTORS)):
        if step:
            scheduler.step(*([1.0] if schedule == "plateaus" else []))
        training.zero_grad()
        training.backward(step, training.shares())
        training.step()


def clear_by_the_model(training: Training) -> None:
    """Take the gradients away by the model's own zero_grad."""
    for step in range(4):
        training.model.zero_grad()
        training.backward(step)
        training.step()


def teach_two(training: Training) -> None:
    """Teach two models by one loss, whose gradients come in turns."""
    both = (training, Training(training.act, training.wrapper, training.rank))
    for step in range(4):
        for one in both:
            one.zero_grad()
            one.see(step)
        torch.stack([one.loss(step) for one in both]).sum().backward()
        for one in both:
            one.step()
    first, second = (weights(one.model) for one in both)
    assert all(map(torch.equal, first.values(), second.values()))


def skip(training: Training, where: str) -> None:
    """Leave two batches out that fail on worker 1, or everywhere.

    What was on its way was seen; of the others all, and of all what had accumulated before.
    """
    model = training.model
    (optimizer,) = training.optimizers
    fails = False

    def fail(grad: Tensor) -> None:
        if fails:
            raise MemoryError

    model.convolution.weight.register_hook(fail)  # the output layer's gradients have come by then
    for step in range(5):
        fails = False
        before = {name: seen.clone() for name, seen in training.seen.items()}
        training.zero_grad()
        with training.no_sync():
            training.backward(50 + step)
        training.see(step)
        fails = step in (1, 2) and (training.rank == 1 or where.startswith("everywhere"))
        try:
            if fails and where == "in forward":
                raise MemoryError
            training.loss(step).backward()
            training.step()
        except MemoryError:
            begun = len(optimizer._overlap.background.futures) if training.overlaps else 0
            assert bool(begun) is (training.overlaps and where != "in forward")
            sent = {name for bucket in optimizer.aggregator.buckets[:begun] for name in bucket.names}
            if "cleared" in where:
                model.zero_grad()
            optimizer.skip()
            training.seen |= {name: seen for name, seen in before.items() if name not in sent}


def leave_out(training: Training) -> None:
    """Average in every step, and make all steps but one."""
    (optimizer,) = training.optimizers
    for step in range(4):
        training.zero_grad()
        training.backward(step)
        optimizer.aggregate()
        if step != 1:
            optimizer.step()


def frozen_net() -> Net:
    model = Net()
    model.convolution.requires_grad_(False)
    return model


def switch(training: Training, trains: bool) -> None:
    """Wrap a second time, to train what was frozen before, or to freeze what was trained.

    For frozen parameters the older wrapper, which is there still, has left a gradient.
    """
    layer = training.model.convolution
    older = training.holders
    train(training, steps=2)
    before = layer.weight.clone()
    layer.requires_grad_(trains)
    training.holders = [training.wrap(older[0].inner_optimizer)]
    train(training, steps=2)
    assert torch.equal(before, layer.weight) is not trains


def resume(training: Training) -> None:
    """Train half of the steps, and the other half by another training.

    The second half overlaps if the first did not, or the other way round.
    """
    act = training.act
    wrapper = training.wrapper
    if act.scope == "layer" and wrapper in (*DISTRIBUTE, *REGISTER):
        wrapper, is_overlapped, _ = wrapper.partition(", overlapped")
        wrapper += "" if is_overlapped else ", overlapped"
    first = Training(act, wrapper, training.rank, training.shards)
    train(first, steps=2)
    training.model.load_state_dict(first.model.state_dict())
    (saving,) = first.optimizers if wrapper == "shard" else first.holders
    (loading,) = training.optimizers if wrapper == "shard" else training.holders
    loading.load_state_dict(copy.deepcopy(saving.state_dict()))
    training.start = first.start
    training.seen = first.seen
    for step in (2, 3):
        training.zero_grad()
        training.backward(step)
        training.step()


def step_by_closure(training: Training) -> None:
    """Hand over each step as a closure, as some trainers do."""
    (optimizer,) = training.optimizers
    losses = list[Tensor]()

    def closure() -> Tensor:
        training.zero_grad()
        training.see(len(losses))
        losses.append(training.loss(len(losses)))
        losses[-1].backward()
        return losses[-1]

    for step in range(4):
        with torch.no_grad():
            assert optimizer.step(closure) is losses[step]
    assert len(losses) == 4


@dataclass(frozen=True)
class Act:
    """Act of a user on a model while it is trained, and the wrappers with which that can be done."""

    do: Callable[[Training], object] = train
    kind: Callable[[], nn.Module] = Net
    loss: Loss = loss_of
    dtype: torch.dtype = torch.float64
    mode: Callable[[], AbstractContextManager[Any]] = nullcontext  # in which it is wrapped
    method: str = "topk"
    choices: Mapping[str, Any] = field(default_factory=dict)  # of the method
    options: Mapping[str, Any] = field(default_factory=dict)  # of the wrapper
    of_ddp: Mapping[str, Any] = field(default_factory=dict)
    wrappers: Sequence[str] = WRAPPERS
    scopes: Sequence[str | float] = ("layer",)
    rates: Mapping[str, float] = field(default_factory=dict)  # by the name of a layer, where it is not LR
    momentum: float = 0.0
    parts: Sequence[str] = ()  # each has an optimizer of its own
    is_scaled: bool = False
    keeps_mass: bool = True

    @property
    def scope(self) -> str | float:
        scope: str | float = self.choices.get("scope", "layer")
        return scope

    def in_scope(self, scope: str | float) -> Act:
        """Return the act with a method of this scope, by the wrappers that take it."""
        taking: dict[str | float, Sequence[str]] = {
            "layer": WRAPPERS,
            "bucket": (*REGISTER, "shard"),
            "global": (DISTRIBUTE[0], REGISTER[0]),
            MANY_BUCKETS: (*DISTRIBUTE, REGISTER[0], "shard"),
        }
        taken_by = taking[scope]
        wrappers = [wrapper for wrapper in self.wrappers if wrapper in taken_by]
        return replace(self, choices={**self.choices, "scope": scope}, wrappers=wrappers)


UNUSED = Act(
    kind=Heads, loss=loss_of_heads, of_ddp={"find_unused_parameters": True}, scopes=SCOPES, wrappers=WHOLE
)
SCALED = Act(scale, is_scaled=True, wrappers=(DISTRIBUTE[0], REGISTER[0]))
SPARSE = Act(kind=Words, wrappers=(*DISTRIBUTE, *REGISTER), scopes=SCOPES)
SINGLE = Act(loss=loss_in_float32, dtype=torch.float32, keeps_mass=False, wrappers=AVERAGING, scopes=SCOPES)
FAILURES = ("in forward", "in backward", "in backward, and the model is cleared", "everywhere in backward")
ACTS: dict[str, Act] = {
    **{
        name: Act(partial(train, change=change), wrappers=WRAPPERS if "grad" in name else WHOLE)
        for name, change in {**CHANGES, **CHANGES_OF_AVERAGES}.items()
    },
    "nothing": Act(scopes=SCOPES),
    "dense, longer": Act(method="dense"),
    "with momentum": Act(momentum=0.5, keeps_mass=False),
    "unchecked": Act(options={"check": False}, wrappers=AVERAGING),
    "debug": Act(options={"debug": True}, wrappers=AVERAGING),
    "warm-up": Act(
        choices={"density_warmup": [1.0, 0.5]}, options={"steps_per_epoch": 2}, wrappers=AVERAGING
    ),
    "bucket views": Act(of_ddp={"gradient_as_bucket_view": True}, wrappers=REGISTER),
    "static graph": Act(of_ddp={"static_graph": True}, wrappers=REGISTER),
    "unused": UNUSED,
    "unused, with momentum": replace(
        UNUSED, momentum=0.5, keeps_mass=False, wrappers=DISTRIBUTE, scopes=("layer", MANY_BUCKETS)
    ),
    "unused, bucket views": replace(
        UNUSED, of_ddp={**UNUSED.of_ddp, "gradient_as_bucket_view": True}, wrappers=REGISTER
    ),
    "unused, accumulated": replace(UNUSED, do=accumulate),
    "unused, unchecked": replace(UNUSED, options={"check": False}, scopes=("layer",)),
    "sparse gradients": SPARSE,
    "sparse gradients, dense": replace(SPARSE, method="dense", scopes=("layer",)),
    "sparse gradients, scaled": replace(SCALED, kind=Words, scopes=SCOPES),
    "complex": Act(kind=Complex, scopes=SCOPES, wrappers=WHOLE),
    "complex, adacomp": Act(kind=Complex, method="adacomp", wrappers=WHOLE),
    "tied": Act(kind=Tied),
    "strided": Act(kind=Strided, wrappers=DISTRIBUTE),
    "a collective of the model's own": Act(kind=Meeting, scopes=SCOPES, wrappers=AVERAGING),
    "accumulated": Act(accumulate, scopes=SCOPES),
    "accumulated, not told": Act(
        partial(accumulate, tells=False), wrappers=(DISTRIBUTE[0], *REGISTER, "local steps")
    ),
    "accumulated, none is the last": Act(partial(accumulate, ends=False), wrappers=DISTRIBUTE),
    "accumulated by a switch": Act(toggle, wrappers=REGISTER),
    "joined": Act(join, wrappers=REGISTER, scopes=SCOPES),
    "two models": Act(teach_two, wrappers=(*DISTRIBUTE, *REGISTER), scopes=SCOPES),
    "two optimizers": Act(parts=("convolution", "output"), wrappers=(*DISTRIBUTE, "local steps")),
    "scaled": replace(SCALED, scopes=SCOPES),
    "scaled, unscaled": replace(SCALED, do=partial(scale, recipe="unscaled")),
    "scaled, averaged": replace(SCALED, do=partial(scale, recipe="averaged"), wrappers=DISTRIBUTE[:1]),
    "scaled, unscaled and averaged": replace(
        SCALED, do=partial(scale, recipe="unscaled, averaged"), wrappers=DISTRIBUTE[:1]
    ),
    "scaled, dense": replace(SCALED, method="dense"),
    "scaled, unchecked": replace(SCALED, options={"check": False}),
    "scaled, told": replace(
        SCALED, do=partial(scale, recipe="told"), options={"scaler": None}, wrappers=DISTRIBUTE[:1]
    ),
    "a scaler that is switched off": Act(
        options={"scaler": torch.amp.GradScaler("cpu", enabled=False)}, wrappers=(*DISTRIBUTE, *REGISTER)
    ),
    **{
        f"scheduled: {schedule}": Act(
            partial(follow, schedule=schedule),
            choices={"feedback": "learning_rate"},
            rates={"output": 0.01, "convolution": 0.2},
            wrappers=AVERAGING if schedule == "factors" else (DISTRIBUTE[0], REGISTER[0]),
        )
        for schedule in SCHEDULES
    },
    "cleared by the model": Act(clear_by_the_model),
    **{f"skipped {where}": Act(partial(skip, where=where), wrappers=DISTRIBUTE) for where in FAILURES},
    "left out": Act(leave_out, keeps_mass=False, wrappers=DISTRIBUTE),
    "unfrozen": Act(partial(switch, trains=True), kind=frozen_net, keeps_mass=False, wrappers=DISTRIBUTE),
    "frozen": Act(partial(switch, trains=False), keeps_mass=False, wrappers=DISTRIBUTE),
    "in float32": SINGLE,
    "in float32, by torch": replace(SINGLE, options={"select": "torch"}),
    "resumed": Act(resume, scopes=SCOPES),
    "by closures": Act(step_by_closure, wrappers=(*DISTRIBUTE, "local steps")),
}


def act_of_method(name: str, scope: str | float, **choices: Any) -> Act:
    """Return a short training with a method, one tensor after the other, and in another scope."""
    waits = laws.build(name, **choices).needs_pass_over_all_gradients
    wrappers = (DISTRIBUTE[0], REGISTER[0]) if waits else (*DISTRIBUTE, *REGISTER)
    return Act(
        partial(train, steps=3), method=name, choices=choices, wrappers=wrappers, scopes=("layer", scope)
    )


METHODS = {name: act_of_method(name, SCOPES[2 + number % 2]) for number, name in enumerate(laws.METHODS)}
METHODS["clipped dgc"] = act_of_method("dgc", "global", momentum=0.5, clip_norm=0.1)


def live(act: Act, wrapper: str, rank: int, shards: int = 1) -> Lived:
    """Do it with one wrapper."""
    training = Training(act, wrapper, rank, shards)
    act.do(training)
    return training.lived()


def trainings() -> Iterator[tuple[str, str | float, str, Act]]:
    """Return each act with each scope and wrapper that can do it."""
    for name, act in (*ACTS.items(), *METHODS.items()):
        for scope in act.scopes:
            scoped = act.in_scope(scope)
            for wrapper in scoped.wrappers:
                yield name, scope, wrapper, scoped


def part_of(name: str) -> int:
    """Return the part of all trainings in which an act or a method is: they run part by part."""
    names = [*ACTS, *METHODS]
    return names.index(name) * NUM_PARTS // len(names)


def acts_of_part(comm: Comm, now: Callable[[], float]) -> dict[str, Any]:
    """Return what this worker lived through, or the error that ended it, by act, scope and wrapper.

    The environment tells which part of all trainings.
    """
    torch.set_num_threads(1)
    part = int(os.environ[PART])
    found = dict[str, Any]()
    for name, scope, wrapper, act in trainings():
        if part_of(name) != part:
            continue
        try:
            lived: Any = tuple(live(act, wrapper, comm.rank))
        except Exception:
            lived = traceback.format_exc()
        found[f"{name}|{scope}|{wrapper}"] = lived
    return found
