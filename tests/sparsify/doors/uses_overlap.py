"""What users do with `distribute`, each with overlap and without: the end must be the same to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import sparsify
from sparsify.doors.optimiser import DistributedOptimiser
from tests.conftest import there
from tests.sparsify import laws
from tests.sparsify.doors import uses
from tests.sparsify.doors.uses import CHANGES, LR, loss_of
from tests.sparsify.doors.uses_ddp import Heads, Meeting, loss_of_heads

# What asks gradients for anything while they are on their way is refused: see tests of the refusals.
LATER = (
    "gradients moved", "gradients replaced", "clipped", "weights shared with other processes",
    "the same type again",
)  # fmt: skip
METHODS = [name for name in laws.METHODS if not laws.build(name).needs_whole_gradient]
Found = dict[str, Tensor]


class Training:
    """A model, and the optimiser that averages."""

    def __init__(
        self, overlap: bool, method: str = "topk", kind: type[nn.Module] = uses.Net,
        loss: Callable[[nn.Module, int, int], Tensor] = loss_of, choices: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = kind().double()
        self.loss = loss
        groups = [{"params": [p], "lr": LR * (1 + at)} for at, p in enumerate(self.model.parameters())]
        built = laws.build(method, density=0.1, **(choices or {}))
        momentum = 0.0 if built.momentum_inside else 0.5
        inner = torch.optim.SGD(groups, momentum=momentum, weight_decay=0.01)
        self.optimiser = DistributedOptimiser(inner, self.model, built, overlap=overlap, **options)

    def backward(self, rank: int, step: int) -> None:
        self.loss(self.model, rank, step).backward()

    def found(self) -> Found:
        """Weights, residuals by bucket, and how many elements were sent of how many: in fewer messages where
        nothing overlaps, but the same ones.
        """
        aggregator = self.optimiser.aggregator
        residuals = [aggregator.method.residual(state) for state in aggregator.states]
        owed = {f"owed {at}": owed.clone() for at, owed in enumerate(residuals) if owed is not None}
        return {
            **uses.weights(self.model),
            **owed,
            "report": torch.tensor(there(self.optimiser.last_report)[:2]),
        }


def plain(rank: int, overlap: bool, steps: int = 4, **how: Any) -> Found:
    training = Training(overlap, **how)
    for step in range(steps):
        training.optimiser.zero_grad()
        training.backward(rank, step)
        training.optimiser.step()
    return training.found()


def cleared_to_none(rank: int, overlap: bool) -> Found:
    training = Training(overlap)
    for step in range(4):
        training.model.zero_grad()
        training.backward(rank, step)
        training.optimiser.step()
    return training.found()


def changed(rank: int, overlap: bool, change: str) -> Found:
    """After averaging, where that would change gradients."""
    training = Training(overlap)
    for step in range(4):
        training.optimiser.zero_grad()
        training.backward(rank, step)
        if change in LATER:
            training.optimiser.aggregate()
        CHANGES[change](training.model)
        training.optimiser.step()
    return training.found()


def accumulated(rank: int, overlap: bool, **how: Any) -> Found:
    """Three backward passes a step; the last step has none outside of `no_sync`."""
    training = Training(overlap, **how)
    for step in range(4):
        training.optimiser.zero_grad()
        with training.optimiser.no_sync():
            training.backward(rank, 3 * step)
            training.backward(rank, 3 * step + 1)
        if step < 3:
            training.backward(rank, 3 * step + 2)
        training.optimiser.step()
    return training.found()


def scheduled(rank: int, overlap: bool) -> Found:
    """Feedback in the learning-rate domain: each parameter's rate goes its own way."""
    training = Training(overlap, choices={"feedback": "learning_rate"})
    for step in range(4):
        for at, group in enumerate(training.optimiser.param_groups):
            group["lr"] = LR * ((step + at) % 3)
        training.optimiser.zero_grad()
        training.backward(rank, step)
        training.optimiser.step()
    return training.found()


def left_out(rank: int, overlap: bool) -> Found:
    """A step after averaging."""
    training = Training(overlap)
    for step in range(4):
        training.optimiser.zero_grad()
        training.backward(rank, step)
        training.optimiser.aggregate()
        if step != 1:
            training.optimiser.step()
    return training.found()


def wrapped_anew(rank: int, overlap: bool) -> Found:
    training = Training(overlap)
    for step in range(4):
        if step == 2:
            older = training.optimiser  # it is there still, and takes no notice
            training.optimiser = DistributedOptimiser(
                older.optimiser, training.model, older.aggregator.method, overlap=overlap
            )
        training.optimiser.zero_grad()
        training.backward(rank, step)
        training.optimiser.step()
    return training.found()


def two_optimisers(rank: int, overlap: bool) -> Found:
    """Of one model, each with parameters of its own, stepped in turns."""
    model = uses.net()
    optimisers = [
        sparsify.distribute(
            torch.optim.SGD(part.parameters(), lr=LR), model, laws.build("topk", 0.1), overlap=overlap
        )
        for part in (model.convolution, model.output)
    ]
    for step in range(4):
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss_of(model, rank, step).backward()
        for optimiser in optimisers:
            optimiser.step()
    return uses.weights(model)


def resumed(rank: int, overlap: bool) -> Found:
    """A state that was saved without overlap is one with it, and the other way round."""
    first, second = Training(not overlap), Training(overlap)
    first.backward(rank, 0)
    first.optimiser.step()
    second.model.load_state_dict(first.model.state_dict())
    second.optimiser.load_state_dict(first.optimiser.state_dict())
    for step in (1, 2):
        second.optimiser.zero_grad()
        second.backward(rank, step)
        second.optimiser.step()
    return second.found()


USES: dict[str, Callable[[int, bool], Found]] = {
    **{f"method {name}": partial(plain, method=name, steps=3) for name in METHODS},
    **{f"{change}": partial(changed, change=change) for change in CHANGES},
    "cleared to None": cleared_to_none,
    "MB": partial(plain, choices={"scope": 0.0005}),
    "scheduled": scheduled,
    "warm-up": partial(plain, choices={"density_warmup": [1.0, 0.5]}, steps_per_epoch=2),
    "debug": partial(plain, debug=True),
    "unchecked": partial(plain, check=False),
    "accumulated": accumulated,
    "unused": partial(plain, kind=Heads, loss=loss_of_heads),
    "unused, accumulated": partial(accumulated, kind=Heads, loss=loss_of_heads),
    "unused, unchecked": partial(plain, kind=Heads, loss=loss_of_heads, check=False),
    "a collective of the model's own": partial(plain, kind=Meeting),
    "left out": left_out,
    "wrapped anew": wrapped_anew,
    "two optimisers": two_optimisers,
    "resumed": resumed,
}


# Where a batch fails that is skipped, on worker 1.
FAILURES = ("in forward", "in backward", "in backward, and the model is cleared", "everywhere in backward")


def skipped(rank: int, overlap: bool, where: str) -> uses.Lived:
    """Of a batch that fails, what was on its way already was seen; of the others all."""
    model, fails = uses.net(), False

    def fail(grad: Tensor) -> None:
        if fails:
            raise MemoryError

    model.convolution.weight.register_hook(fail)  # the output layer's gradients have come by then
    inner = torch.optim.SGD(model.parameters(), lr=LR)
    optimiser = DistributedOptimiser(inner, model, laws.build("topk", density=0.1), overlap=overlap)
    buckets, start = optimiser.aggregator.buckets, uses.weights(model)
    seen = {name: torch.zeros_like(p) for name, p in start.items()}
    for step in range(5):
        named, sent, fails = dict(model.named_parameters()), set(start), False
        both = loss_of(model, rank, step) + loss_of(model, rank, 50 + step)
        gradients = torch.autograd.grad(both, list(named.values()))
        optimiser.zero_grad()
        with optimiser.no_sync():
            loss_of(model, rank, 50 + step).backward()
        fails = step in (1, 2) and (rank == 1 or where.startswith("everywhere"))
        try:
            if fails and where == "in forward":
                raise MemoryError
            loss_of(model, rank, step).backward()
            optimiser.step()
        except MemoryError:
            begun = len(optimiser._overlap.background.futures) if optimiser._overlap else 0
            assert bool(begun) is (overlap and where != "in forward")
            sent = {name for bucket in buckets[:begun] for name in bucket.names}
            if "cleared" in where:
                model.zero_grad()
            optimiser.skip()
        for name, gradient in zip(named, gradients, strict=True):
            seen[name] += gradient * (name in sent)
    states, method = optimiser.aggregator.states, optimiser.aggregator.method
    owed = {
        bucket.names[0]: there(method.residual(state)).view_as(start[bucket.names[0]])
        for bucket, state in zip(buckets, states, strict=True)
    }
    return uses.Lived(start, uses.weights(model), seen, owed)
