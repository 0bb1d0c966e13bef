"""What users do with DistributedDataParallel, each with a method in its hook; `uses` has the law."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsify
from sparsify.doors.ddp import DDPHook
from tests.conftest import there
from tests.sparsify.doors import uses
from tests.sparsify.doors.uses import CHANGES, LR, Lived, Net

MANY_BUCKETS = 0.0001  # MB: of the smallest model three
Loss = Callable[[nn.Module, int, int], Tensor]


class Heads(Net):
    """With a second head, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.third = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, images: Tensor, head: str = "output") -> Tensor:
        scores: Tensor = self.get_submodule(head)(self.convolution(images).tanh().flatten(1))
        return scores


def loss_of_heads(called: nn.Module, rank: int, step: int) -> Tensor:
    """Steps use the second head on all workers, on one, or on none."""
    is_second = rank < 2 - step % 3
    return uses.loss_of(
        cast(nn.Module, partial(called, head="second" if is_second else "output")), rank, step
    )


class Words(Net):
    """With an embedding, whose gradient is sparse: each worker has other words in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 3, sparse=True)

    def forward(self, images: Tensor) -> Tensor:
        said = (images.abs().sum(dim=(1, 2, 3)) * 10).long() % 50
        scores: Tensor = super().forward(images) + self.words(said)
        return scores


class Turning(Net):
    """With complex parameters, and a vector without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(16, 16, dtype=torch.complex128))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.convolution(images).tanh().flatten(1)
        scores: Tensor = self.output((hidden.to(self.turn.dtype) @ self.turn).abs()) + self.nothing.sum()
        return scores


class Mean(torch.autograd.Function):
    """The identity, whose gradient is averaged over the workers at once, in the default group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        mean = grad / dist.get_world_size()
        for _ in range(20):  # as long as others may be on their way
            dist.all_reduce(together := mean.clone())
        return together


class Meeting(Net):
    """The workers meet in its backward pass, as in that of a model that is spread over them."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.convolution(images).tanh().flatten(1)
        scores: Tensor = self.output(Mean.apply(hidden))
        return scores


class Training:
    """A model under DDP, with a method in its hook, and what this worker sees."""

    def __init__(
        self, rank: int, kind: type[Net] = Net, loss: Loss = uses.loss_of, method: str = "topk",
        choices: Mapping[str, Any] | None = None, lrs: Mapping[str, float] | None = None,
        scaler: torch.amp.GradScaler | None = None, group: dist.ProcessGroup | None = None,
        check: bool = True, overlap: bool = False, own_group: dist.ProcessGroup | None = None, **options: Any,
    ) -> None:  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = kind().double()
        self.rank, self.loss, self.scaler = rank, loss, scaler
        self.ddp = DistributedDataParallel(
            self.model, process_group=group, bucket_cap_mb=MANY_BUCKETS, **options
        )
        self.lrs = {
            name: (lrs or {}).get(name.partition(".")[0], LR) for name, _ in self.model.named_parameters()
        }
        self.optimiser = torch.optim.SGD(
            [{"params": [p], "lr": self.lrs[name]} for name, p in self.model.named_parameters()]
        )
        sparse = {"density": 0.1, "scope": "layer"} if method == "topk" else {}
        built = sparsify.build(method, **{**sparse, **(choices or {})})
        self.hook: DDPHook = sparsify.register(
            self.ddp, built, self.optimiser, check=check, scaler=scaler, overlap=overlap, group=own_group
        )
        self.start = uses.weights(self.model)
        self.seen = {name: torch.zeros_like(p) for name, p in self.start.items()}

    def see(self, step: int) -> None:
        """Of the bare model: independent of what `.grad` holds, and of DDP."""
        named = dict(self.model.named_parameters())
        loss = self.loss(self.model, self.rank, step)
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
        for name, gradient in zip(named, gradients, strict=True):
            self.seen[name] += gradient.to_dense()

    def backward(self, step: int, is_seen: bool = True) -> None:
        if is_seen:
            self.see(step)
        loss = self.loss(self.ddp, self.rank, step)
        (self.scaler.scale(loss) if self.scaler else loss).backward()

    def step(self) -> None:
        if self.scaler:
            self.scaler.step(self.optimiser)
            self.scaler.update()
        else:
            self.optimiser.step()

    def lived(self) -> Lived:
        """In units of LR, where a parameter's rate is another."""
        owed, residuals = {}, self.hook.engine.residuals()
        for name, p in self.model.named_parameters():
            residual = residuals.get(name)
            if residual is None:
                owed[name] = torch.zeros_like(p)
            else:
                residual = torch.view_as_complex(residual.view(-1, 2)) if p.is_complex() else residual
                owed[name] = residual.view(p.shape).detach().clone()
        moved = {
            name: LR / self.lrs[name] * (p - self.start[name]) for name, p in uses.weights(self.model).items()
        }
        end = {name: self.start[name] + moved[name] for name in moved}
        return Lived(self.start, end, self.seen, owed)


def plain(rank: int, steps: int = 6, **how: Any) -> Lived:
    training = Training(rank, **how)
    for step in range(steps):
        training.optimiser.zero_grad()
        training.backward(step)
        training.step()
        assert there(training.hook.last_report).selected > 0
    assert training.hook.steps == steps
    return training.lived()


def changed(rank: int, change: Callable[[nn.Module], object], **how: Any) -> Lived:
    training = Training(rank, **how)

    def owed() -> dict[str, Tensor]:
        return training.lived().owed

    return uses.train(training.ddp, training.model, training.optimiser, owed, rank, change)


def accumulated(rank: int, syncs: bool, **how: Any) -> Lived:
    """Two backward passes a step, of which DDP is told, or not."""
    training = Training(rank, **how)
    for step in range(4):
        training.optimiser.zero_grad()
        with nullcontext() if syncs else training.ddp.no_sync():
            training.backward(2 * step)
        training.backward(2 * step + 1)
        training.step()
    return training.lived()


def toggled(rank: int, **how: Any) -> Lived:
    """The same as nanoGPT's script tells DDP."""
    training = Training(rank, **how)
    for step in range(4):
        training.optimiser.zero_grad()
        for part in range(2):
            training.ddp.require_backward_grad_sync = part == 1
            training.backward(2 * step + part)
        training.step()
    return training.lived()


def joined(rank: int, **how: Any) -> Lived:
    """The second worker has fewer batches."""
    training = Training(rank, **how)
    with training.ddp.join():
        for step in range(5 - 2 * rank):
            training.optimiser.zero_grad()
            training.backward(step)
            training.step()
    return training.lived()


def scaled(rank: int, unscales: bool = False, **how: Any) -> Lived:
    """The scale doubles in each step and halves after the third one, in which a worker overflows. The last
    bucket does so, long after the first one was full.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    training = Training(rank, scaler=scaler, **how)
    at = 0
    training.model.convolution.weight.register_hook(
        lambda grad: grad * torch.inf if rank == 1 and at == 2 else grad
    )
    for at in range(5):
        training.optimiser.zero_grad()
        training.backward(at, is_seen=at != 2)
        if unscales:
            scaler.unscale_(training.optimiser)
            nn.utils.clip_grad_norm_(training.model.parameters(), 1e9)
        training.step()
        assert (training.hook.last_report is None) is (at == 2 and how.get("method") != "dense")
    assert scaler.get_scale() == 4.0 * 2**4 / 2
    return training.lived()


def scheduled(rank: int, **how: Any) -> Lived:
    """Feedback in the learning-rate domain; groups of other rates, which begin at 0 and end as they were."""
    rates = {"output": 0.01, "convolution": 0.2}
    training = Training(rank, choices={"feedback": "learning_rate"}, lrs=rates, **how)
    for step, factor in enumerate((0.0, 0.5, 1.0, 0.25, 2.0, 1.0)):
        for group, lr in zip(training.optimiser.param_groups, training.lrs.values(), strict=True):
            group["lr"] = factor * lr
        seen = {name: sum_.clone() for name, sum_ in training.seen.items()}
        training.optimiser.zero_grad()
        training.backward(step)
        training.step()
        training.seen = {name: seen[name].lerp(sum_, factor) for name, sum_ in training.seen.items()}
    return training.lived()


def alone(rank: int, **how: Any) -> Lived:
    """In a process group of its own; the default one has others."""
    groups = [dist.new_group([other]) for other in range(dist.get_world_size())]
    ddp = DistributedDataParallel(uses.net(), process_group=groups[rank])
    with pytest.raises(ValueError, match=rf"alike on the workers \[{rank}\], so they must average together"):
        sparsify.register(ddp, sparsify.build("dense"), group=dist.group.WORLD)
    if how.get("overlap") and how.get("method") != "dense":
        with pytest.raises(ValueError, match=rf"\[{rank}\] is DDP's own; make another one of them"):
            plain(rank, group=groups[rank], **how)
        own = [dist.new_group([other]) for other in range(dist.get_world_size())]
        how["own_group"] = own[rank]
    return plain(rank, group=groups[rank], **how)


def two_models(rank: int, **how: Any) -> Lived:
    """Taught by one loss, whose gradients come in turns."""
    trainings = Training(rank, **how), Training(rank, **how)
    for step in range(4):
        for training in trainings:
            training.optimiser.zero_grad()
            training.see(step)
        sum((training.loss(training.ddp, rank, step) for training in trainings), torch.zeros(())).backward()
        for training in trainings:
            training.step()
    first, second = (training.lived() for training in trainings)
    assert all(torch.equal(first.end[name], second.end[name]) for name in first.end)
    return first


# By name: what must stay right. All workers together, but for what begins with "alone".
USES: dict[str, Callable[..., Lived]] = {
    **{name: partial(changed, change=change) for name, change in CHANGES.items() if name != "channels last"},
    "dense": partial(plain, method="dense"),
    "bucket views": partial(plain, gradient_as_bucket_view=True),
    "static graph": partial(plain, static_graph=True),
    "unused": partial(plain, kind=Heads, loss=loss_of_heads, find_unused_parameters=True),
    "unused, bucket views": partial(
        plain, kind=Heads, loss=loss_of_heads, find_unused_parameters=True, gradient_as_bucket_view=True
    ),
    "unused, zeroed": partial(
        accumulated, syncs=False, kind=Heads, loss=loss_of_heads, find_unused_parameters=True
    ),
    "unused, unchecked": partial(
        plain, kind=Heads, loss=loss_of_heads, find_unused_parameters=True, check=False
    ),
    "sparse gradients": partial(plain, kind=Words),
    "sparse gradients, dense": partial(plain, kind=Words, method="dense"),
    "sparse gradients, scaler": partial(scaled, kind=Words),
    "complex": partial(plain, kind=Turning),
    "complex, adacomp, nothing": partial(plain, kind=Turning, method="adacomp"),
    "no_sync": partial(accumulated, syncs=False),
    "toggled": toggled,
    "twice": partial(accumulated, syncs=True),
    "join": joined,
    "two models": two_models,
    "a collective of the model's own": partial(plain, kind=Meeting),
    "scaler": scaled,
    "scaler, unscaled": partial(scaled, unscales=True),
    "scaler, dense": partial(scaled, method="dense"),
    "rates by group": scheduled,
    "alone": alone,
    "alone, dense": partial(alone, method="dense"),
}


# Those whose methods choose the largest of each of DDP's buckets.
for name in [name for name in USES if not any(p in name for p in ("dense", "adacomp", "rates by group"))]:
    USES[f"{name}, bucket"] = partial(USES[name], choices={"scope": "bucket", "density": 0.1})
# Those that may overlap; the end must be the same to the bit.
OVERLAPPED = [name for name in USES if "scaler" not in name]
# The same with buckets of several tensors: all, and so many MB. One bucket has one learning rate.
SEVERAL = [name for name in USES if not any(part in name for part in ("dense", ", bucket", "rates by group"))]
for name in SEVERAL:
    for scope in ("global", MANY_BUCKETS):
        choices = {"scope": scope, **({} if "adacomp" in name else {"density": 0.1})}
        USES[f"{name}, {scope}"] = partial(USES[name], choices=choices)


def flattened(name: str, lived: Lived) -> dict[str, Tensor]:
    return {f"{name}|{at}|{p}": tensor for at, part in enumerate(lived) for p, tensor in part.items()}


def found_in(name: str, found: Mapping[str, Tensor]) -> Lived:
    """The inverse."""
    parts: list[dict[str, Tensor]] = [{}, {}, {}, {}]
    for key, tensor in found.items():
        use, _, rest = key.partition("|")
        if use == name:
            at, _, p = rest.partition("|")
            parts[int(at)][p] = tensor
    return Lived(*parts)
