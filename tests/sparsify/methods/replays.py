"""Shared by transcriptions of papers' algorithms in numpy: gradients, draws, and checks against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import sparsify
from sparsify.comm import virtual
from sparsify.types import BucketContext, Selection
from tests.sparsify.laws import ALONE, Lived, Make, live

Array = np.ndarray[Any, Any]
Chooser = Callable[[list[Array], int], list[Array]]  # all workers' acc, the step -> all workers' indices
StepOf = Callable[
    [list[Array], int], tuple[Array, list[Array]]
]  # the same -> the sum, all workers' residuals

SEED = 3  # of tests.sparsify.laws.live
CONTEXT = BucketContext(seed=0, rank=0, bucket=0)
CPU = torch.device("cpu")
N = 227  # elements
SIZE = 3  # workers
STEPS = 12
EXACT = 1e-12  # float64, sums of a few in another order


def draw_heavy(rank: int, step: int, shape: tuple[int, ...] = (N,)) -> torch.Tensor:
    """Draw gradients that are heavier in the tails than normal."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64) ** 3


def repeat_gradients(*values: list[float]) -> Make:
    """Return a maker of gradients that gives every worker its own, the same in all steps."""
    return lambda rank, step, shape: torch.tensor(values[rank % len(values)]).double().view(shape)


def run(
    name: str, size: int = SIZE, steps: int = STEPS, make: Make = draw_heavy, n: int = N, **choices: Any
) -> list[Lived]:
    """Run a method on one tensor of n elements."""
    return live(sparsify.build(name, **choices), size, steps, make, [(n,)])


def split_tensors(shapes: list[tuple[int, ...]], flat: Array) -> list[tuple[tuple[int, ...], Array]]:
    """Return each tensor's shape and a view of it in the flat gradient, where the last tensor comes first."""
    ends = np.cumsum([int(np.prod(shape)) for shape in reversed(shapes)])
    return list(zip(reversed(shapes), np.split(flat, ends[:-1]), strict=True))


def gradients_in_step(lived: list[Lived], step: int) -> list[Array]:
    return [rank.gradients[step].numpy() for rank in lived]


def indices_of_largest(acc: Array, k: int) -> Array:
    return np.argsort(-np.abs(acc), kind="stable")[:k]


def select_alone(selector: Any, acc: torch.Tensor, k: int, state: Any = None) -> torch.Tensor:
    """Return the (k',) indices that a worker alone chooses."""
    if state is None:
        state = selector.init(acc, CONTEXT)
    selection: Selection = selector.select(acc, k, ALONE, state)
    return selection.indices


def count_selected(selector: Any, acc: torch.Tensor, k: int, state: Any = None) -> int:
    return select_alone(selector, acc, k, state).numel()


def select_on_ranks(
    selector: Any, accs: list[torch.Tensor], k: int, steps: int = 1, shapes: Any = ()
) -> tuple[list[list[list[int]]], list[Any]]:
    """Return what each rank selects in each step from the same `accs[rank]`; and the states at the end."""

    def body(comm: virtual.VirtualComm) -> tuple[list[list[int]], Any]:
        acc = accs[comm.rank]
        state = selector.init(acc, BucketContext(0, comm.rank, 0, shapes))
        chosen = [selector.select(acc, k, comm, state).indices.tolist() for _ in range(steps)]
        return chosen, state

    chosen, states = zip(*virtual.run(len(accs), body), strict=True)
    return list(chosen), list(states)


def check_updates(lived: list[Lived], update_of: Callable[[list[Array]], Array], tolerance: float) -> None:
    """Check each step's update against the one that `update_of` makes of all workers' gradients."""
    for step, update in enumerate(lived[0].updates):
        expected = update_of(gradients_in_step(lived, step))
        np.testing.assert_allclose(update.numpy(), expected, rtol=tolerance, atol=tolerance)


def check_steps(lived: list[Lived], step_of: StepOf, tolerance: float = EXACT) -> None:
    """Check updates and last residuals against `step_of`, which is given gradients plus residuals."""
    residuals = [np.zeros(lived[0].gradients[0].numel()) for _ in lived]
    for step, update in enumerate(lived[0].updates):
        accs = [e + g for e, g in zip(residuals, gradients_in_step(lived, step), strict=True)]
        total, residuals = step_of(accs, step)
        np.testing.assert_allclose(update.numpy(), total / len(lived), rtol=tolerance, atol=tolerance)
    for rank, residual in zip(lived, residuals, strict=True):
        np.testing.assert_allclose(
            rank.residual.numpy(), residual, rtol=100 * tolerance, atol=100 * tolerance
        )


def check_choices(lived: list[Lived], choose: Chooser, beta: float = 1.0, send: Any = lambda x: x) -> None:
    """Check updates, residuals and counts against error feedback around this choice."""

    def step_of(accs: list[Array], step: int) -> tuple[Array, list[Array]]:
        total, residuals = np.zeros(accs[0].size), []
        grads = gradients_in_step(lived, step)
        for rank, indices in enumerate(choose(accs, step)):
            sent = np.zeros_like(total)
            sent[indices] = send(accs[rank][indices])
            total += sent
            memory = accs[rank] - grads[rank]
            residuals.append((1 - beta) * memory + beta * (accs[rank] - sent))
            assert lived[rank].selected[step] == len(indices)
        return total, residuals

    check_steps(lived, step_of)


def draw_uniform(rank: int, n: int, steps: int) -> list[Array]:
    """Return what rank `rank` draws for its first bucket."""
    generator = BucketContext(SEED, rank, 0).make_generator_for_rank(CPU)
    return [torch.empty(n, dtype=torch.float64).uniform_(generator=generator).numpy() for _ in range(steps)]


def round_at_random(x: Array, u: Array) -> Array:
    """Return l = floor |x|, or l + 1 with probability |x| - l, with the sign. How u is used is ours."""
    level = np.floor(np.abs(x))
    p = np.abs(x) - level
    up = np.where(x >= 0, u >= 1 - p, u < p)
    rounded: Array = np.sign(x) * (level + up)
    return rounded
