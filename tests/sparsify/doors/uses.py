"""What users do with models and optimisers beside plain training, and the law that must survive it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

LR = 0.05  # of plain SGD: what was applied can be read off the weights


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


def net(seed: int = 0) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net().double()


def loss_of(called: nn.Module, rank: int, step: int) -> Tensor:
    own = torch.Generator().manual_seed(100 * step + rank)
    images = torch.randn(6, 2, 3, 3, generator=own, dtype=torch.float64)
    return nn.functional.cross_entropy(called(images), torch.arange(6) % 3)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone().contiguous() for name, p in model.named_parameters()}


class Lived(NamedTuple):
    """What one rank saw, and what became of it; by the parameter's name."""

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    seen: dict[str, Tensor]  # the sum of its gradients
    owed: dict[str, Tensor]  # its residuals


class Steps(Protocol):
    """As much of an optimiser as training needs."""

    @property
    def zero_grad(self) -> Callable[[], None]: ...

    @property
    def step(self) -> Callable[[], object]: ...


def train(
    called: nn.Module,
    model: nn.Module,
    optimiser: Steps,
    owed: Callable[[], dict[str, Tensor]],
    rank: int,
    change: Callable[[nn.Module], object] = lambda model: None,
    steps: int = 4,
) -> Lived:
    """Train, and `change` the model after half of the steps, between backward and step.

    Args:
        called: computes the forward pass: `model`, or what was wrapped around it.
        owed: the residuals by the parameter's name, shaped like it; of some it may have none.
    """
    start = weights(model)
    seen = {name: torch.zeros_like(p) for name, p in start.items()}
    for step in range(steps):
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        # Of the bare model: independent of what `.grad` holds, and of DDP's hooks.
        gradients = torch.autograd.grad(loss_of(model, rank, step), list(named.values()), allow_unused=True)
        for name, gradient in zip(named, gradients, strict=True):
            if gradient is not None:
                seen[name] += gradient.to_dense()
        optimiser.zero_grad()
        loss_of(called, rank, step).backward()
        if step == steps // 2:
            change(model)
        optimiser.step()
    return Lived(start, weights(model), seen, owed())


def check_balanced(ranks: Sequence[Lived]) -> None:
    """Replicas are equal to the bit; P times what was applied, plus what is owed, equals what was seen."""
    for name, start in ranks[0].start.items():
        end = ranks[0].end[name]
        assert all(torch.equal(rank.end[name], end) for rank in ranks), f"replicas differ in {name}"
        applied = len(ranks) * (start - end) / LR
        owed = torch.stack([rank.owed.get(name, torch.zeros_like(start)) for rank in ranks]).sum(dim=0)
        seen = torch.stack([rank.seen[name] for rank in ranks]).sum(dim=0)
        assert torch.allclose(applied + owed, seen, rtol=1e-9, atol=1e-9), f"mass of {name} is lost"


def move_weights(model: nn.Module) -> None:
    together = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(together.detach().clone(), model.parameters())


def move_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data = p.grad.data.clone()


def replace_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad.clone()


# By name: what users do to a model between two steps that must stay right.
CHANGES: Mapping[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "the same type again": lambda model: model.double(),
    "weights moved": move_weights,
    "weights shared with other processes": lambda model: model.share_memory(),
    "copied": copy.deepcopy,
    "gradients moved": move_gradients,
    "gradients replaced": replace_gradients,
    "clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
    "evaluated": lambda model: model.eval().train(),
}
