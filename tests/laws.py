"""What the law tests share: a toy model whose gradients are given, on virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

import sparsify
from sparsify.aggregate import Method
from sparsify.aggregator import Aggregator
from sparsify.comm import Metered, virtual
from sparsify.timer import PhaseTimer

METHODS = sparsify.names()
SIZES = [1, 2, 3, 4, 7, 8, 16]
SCOPES = ["global", "layer", 0.0005]  # the last: buckets of 65 float64 elements
SHAPES = [(40, 5), (5,), (7, 3), (1,)]  # of the toy model's tensors: 227 elements, not divisible by most P

Make = Callable[[int, int, tuple[int, ...]], Tensor]


class Lived(NamedTuple):
    """What one rank saw in each step, and what it holds at the end."""

    gradients: list[Tensor]  # (n,) before aggregation
    updates: list[Tensor]  # (n,) after
    residual: Tensor  # (n,)
    wire_bytes: list[int]  # in each step, as the method says
    counted_bytes: list[int]  # in each step, as the communicator counted
    selected: list[int]
    host_syncs: list[int]
    bounds: tuple[int, int]  # on `selected`, of one step


def gradient(rank: int, step: int, shape: tuple[int, ...]) -> Tensor:
    own = torch.Generator().manual_seed(1000 * step + 10 * rank + len(shape))
    return torch.randn(shape, generator=own, dtype=torch.float64)


def build(name: str, density: float = 0.05, scope: str | float = "layer", **others: Any) -> Method:
    """The method, given those of the values that it has."""
    known = sparsify.defaults(name)
    wanted = {"density": density, "scope": scope, **others}
    return sparsify.build(name, **{key: value for key, value in wanted.items() if key in known})


def live(
    method: Method,
    size: int,
    steps: int = 5,
    make: Make = gradient,
    shapes: list[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float64,
    lr: float = 1.0,
    device: str = "cpu",
    select: str = "fused",
) -> list[Lived]:
    """Run the method on `size` virtual ranks over a toy model whose gradients are given."""

    def body(comm: virtual.VirtualComm) -> Lived:
        timer = PhaseTimer("serialised", comm.now)
        metered = Metered(comm, timer)
        parameters = [
            (f"p{i}", Parameter(torch.zeros(shape, dtype=dtype, device=device)))
            for i, shape in enumerate(shapes)
        ]
        aggregator = Aggregator(method, parameters, metered, timer, seed=3, select=select)
        reports, counted, before, after = [], [], [], []
        for step in range(steps):
            for _, p in parameters:
                assert p.grad is not None
                p.grad.copy_(make(comm.rank, step, tuple(p.shape)))
            before.append(aggregator.gradients.flat.clone())
            counted.append(metered.sent_bytes)
            with timer.step():
                reports.append(aggregator.aggregate(epoch=step, lr=lr))
            counted[-1] = metered.sent_bytes - counted[-1]
            after.append(aggregator.gradients.flat.clone())
        selected, wire_bytes, host_syncs = map(list, zip(*reports, strict=True))
        residuals = [method.residual(state) for state in aggregator.states]
        held = [
            torch.zeros_like(bucket.flat) if residual is None else residual
            for residual, bucket in zip(residuals, aggregator.gradients.buckets, strict=True)
        ]
        return Lived(
            before,
            after,
            torch.cat(held),
            wire_bytes,
            counted,
            selected,
            host_syncs,
            bounds_of(method, aggregator, comm.size),
        )

    return virtual.run(size, body)


def bounds_of(method: Method, aggregator: Aggregator, size: int) -> tuple[int, int]:
    from sparsify.aggregate import num_selected

    density = method.density_at(10**9)
    ns = [bucket.flat.numel() for bucket in aggregator.gradients.buckets]
    pairs = [method.bounds(n, num_selected(n, density), size) for n in ns]
    return sum(low for low, _ in pairs), sum(high for _, high in pairs)


def mass(lived: list[Lived]) -> tuple[Tensor, Tensor]:
    """(n,) all gradients that were seen; (n,) all that were applied or are held still."""
    seen = torch.stack([torch.stack(one.gradients).sum(dim=0) for one in lived]).sum(dim=0)
    applied = len(lived) * torch.stack(lived[0].updates).sum(dim=0)
    return seen, applied + torch.stack([one.residual for one in lived]).sum(dim=0)
