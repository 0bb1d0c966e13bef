"""Error feedback around a choice, replayed in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import sparsify
from sparsify.types import BucketContext, Selection
from tests.sparsify.laws import ALONE, Lived, live

CONTEXT = BucketContext(seed=0, rank=0, bucket=0)


N, SIZE, STEPS = 227, 3, 12


EXACT = 1e-12  # float64, sums of three in another order


Array = np.ndarray[Any, Any]


Chooser = Callable[[list[Array], int], list[Array]]  # all workers' acc, the step -> all workers' indices


def choose(selector: Any, acc: torch.Tensor, k: int, state: Any = None) -> torch.Tensor:
    """(k',) indices, by a worker alone."""
    state = selector.init(acc, CONTEXT) if state is None else state
    selection: Selection = selector.select(acc, k, ALONE, state)
    return selection.indices


def count(selector: Any, acc: torch.Tensor, k: int, state: Any = None) -> int:
    return choose(selector, acc, k, state).numel()


def run(name: str, density: float, make: Any = None, **others: Any) -> list[Lived]:
    method = sparsify.build(name, density=density, **others)
    make = make or (lambda rank, step, shape: heavy(rank, step))
    return live(method, SIZE, STEPS, make, [(N,)])


def heavy(rank: int, step: int) -> torch.Tensor:
    """(N,) gradients, heavier in the tails than normal."""
    own = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(N, generator=own, dtype=torch.float64) ** 3


def follows(lived: list[Lived], choose: Chooser, beta: float = 1.0, send: Any = lambda x: x) -> None:
    """Do the updates agree with error feedback around this choice?"""
    memory = [np.zeros(N) for _ in lived]
    for step in range(STEPS):
        acc = [m + one.gradients[step].numpy() for m, one in zip(memory, lived, strict=True)]
        total = np.zeros(N)
        chosen = choose(acc, step)
        for rank, indices in enumerate(chosen):
            sent = np.zeros(N)
            sent[indices] = send(acc[rank][indices])
            total += sent
            memory[rank] = (1 - beta) * memory[rank] + beta * (acc[rank] - sent)
            assert lived[rank].selected[step] == len(indices)
        np.testing.assert_allclose(lived[0].updates[step].numpy(), total / len(lived), rtol=EXACT, atol=EXACT)
    for one, m in zip(lived, memory, strict=True):
        np.testing.assert_allclose(one.residual.numpy(), m, rtol=1e-10, atol=1e-10)


def top(acc: Array, k: int) -> Array:
    return np.argsort(-np.abs(acc), kind="stable")[:k]
