"""What transcriptions of papers' algorithms share: toy gradients, draws, error feedback, in numpy."""

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

SEED = 3  # of tests.sparsify.laws.live
CONTEXT = BucketContext(seed=0, rank=0, bucket=0)
CPU = torch.device("cpu")
N, SIZE, STEPS = 227, 3, 12
EXACT = 1e-12  # float64, sums of a few in another order


def heavy(rank: int, step: int, shape: tuple[int, ...] = (N,)) -> torch.Tensor:
    """Gradients, heavier in the tails than normal."""
    own = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape, generator=own, dtype=torch.float64) ** 3


def given(*values: list[float]) -> Make:
    """Every worker's gradient, the same in all steps."""
    return lambda rank, step, shape: torch.tensor(values[rank % len(values)]).double().view(shape)


def run(
    name: str, size: int = SIZE, steps: int = STEPS, make: Make = heavy, n: int = N, **choices: Any
) -> list[Lived]:
    return live(sparsify.build(name, **choices), size, steps, make, [(n,)])


def tensors_of(shapes: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], slice]]:
    """Each tensor's place in the flat gradient, where the last tensor comes first."""
    found, start = list[tuple[tuple[int, ...], slice]](), 0
    for shape in shapes[::-1]:
        found.append((shape, slice(start, start + int(np.prod(shape)))))
        start = found[-1][1].stop
    return found


def gradients_of(lived: list[Lived]) -> Array:
    """(steps, ranks, n)."""
    return np.stack([[gradient.numpy() for gradient in rank.gradients] for rank in lived], axis=1)


def top(acc: Array, k: int) -> Array:
    """The indices of the k largest magnitudes."""
    return np.argsort(-np.abs(acc), kind="stable")[:k]


def choose(selector: Any, acc: torch.Tensor, k: int, state: Any = None) -> torch.Tensor:
    """(k',) indices, by a worker alone."""
    state = selector.init(acc, CONTEXT) if state is None else state
    selection: Selection = selector.select(acc, k, ALONE, state)
    return selection.indices


def count(selector: Any, acc: torch.Tensor, k: int, state: Any = None) -> int:
    return choose(selector, acc, k, state).numel()


def select(
    selector: Any, size: int, accs: list[torch.Tensor], k: int, steps: int = 1, shapes: Any = ()
) -> tuple[list[list[list[int]]], list[Any]]:
    """What each rank selects in each step from the same `accs[rank]`; and the states at the end."""

    def body(comm: virtual.VirtualComm) -> tuple[list[list[int]], Any]:
        state = selector.init(accs[comm.rank], BucketContext(0, comm.rank, 0, shapes))
        chosen = [selector.select(accs[comm.rank], k, comm, state).indices.tolist() for _ in range(steps)]
        return chosen, state

    chosen, states = zip(*virtual.run(size, body), strict=True)
    return list(chosen), list(states)


def equal_updates(lived: list[Lived], updates: list[Array], rtol: float = EXACT, atol: float = EXACT) -> None:
    """At a tolerance for float64: of 1e-14 and 0 sums are the same, and only the division may differ."""
    for got, expected in zip(lived[0].updates, updates, strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=rtol, atol=atol)


def against(lived: list[Lived], step_of: Callable[[list[Array], int], tuple[Array, list[Array]]]) -> None:
    """`step_of` takes everybody's gradient plus residual and the step, gives the sum and the residuals."""
    residuals = [np.zeros(lived[0].gradients[0].numel()) for _ in lived]
    for t in range(len(lived[0].gradients)):
        accs = [e + one.gradients[t].numpy() for e, one in zip(residuals, lived, strict=True)]
        total, residuals = step_of(accs, t)
        np.testing.assert_allclose(lived[0].updates[t].numpy(), total / len(lived), rtol=EXACT, atol=EXACT)
    for one, residual in zip(lived, residuals, strict=True):
        np.testing.assert_allclose(one.residual.numpy(), residual, rtol=1e-10, atol=1e-10)


def follows(lived: list[Lived], choose: Chooser, beta: float = 1.0, send: Any = lambda x: x) -> None:
    """Do the updates agree with error feedback around this choice?"""

    def step_of(accs: list[Array], step: int) -> tuple[Array, list[Array]]:
        sent = np.zeros((len(accs), accs[0].size))
        for rank, indices in enumerate(choose(accs, step)):
            sent[rank, indices] = send(accs[rank][indices])
            assert lived[rank].selected[step] == len(indices)
        memory = [acc - one.gradients[step].numpy() for acc, one in zip(accs, lived, strict=True)]
        kept = [(1 - beta) * m + beta * (acc - own) for m, acc, own in zip(memory, accs, sent, strict=True)]
        return sent.sum(axis=0), kept

    against(lived, step_of)


def grads(lived: list[Lived], step: int) -> list[Array]:
    return [rank.gradients[step].numpy() for rank in lived]


def uniform(rank: int, n: int, steps: int) -> list[Array]:
    """What rank `rank` draws for its first bucket."""
    own = BucketContext(SEED, rank, 0).generator(CPU)
    return [torch.empty(n, dtype=torch.float64).uniform_(generator=own).numpy() for _ in range(steps)]


def stochastic_level(x: Array, u: Array) -> Array:
    """l = floor |x|, or l + 1 with probability |x| - l; then the sign. How u is used is ours to say."""
    level = np.floor(np.abs(x))
    p = np.abs(x) - level
    up = np.where(x >= 0, u >= 1 - p, u < p)
    rounded: Array = np.sign(x) * (level + up)
    return rounded


def next_threshold(threshold: float, r: float, rule: str) -> float:
    if r > 1.1:
        return threshold * 1.005
    if r > 0.909:
        return threshold * (1.00125 if rule == "published" or r > 1 else 0.9987)
    return threshold * 0.995


def exclusive_by_the_paper(
    grads: Array, density: float, threshold: float, rule: str, blocks: int | None
) -> tuple[list[Array], list[list[int]]]:
    """MiCRO; with `blocks`, ExDyna. Also what partitions were like in each step."""
    steps, workers, n = grads.shape
    k, e = int(density * n), np.zeros((workers, n))
    updates, seen = list[Array](), list[list[int]]()
    block = n // blocks // 32 * 32 if blocks else 1
    held = [(blocks or n) // workers + (i < (blocks or n) % workers) for i in range(workers)]
    for t in range(steps):
        sizes = [block * count for count in held]
        sizes[-1] += n - sum(sizes)
        seen.append(list(sizes))
        ends = np.cumsum(sizes)
        acc, union, loads = e + grads[t], [], [0] * workers
        for worker in range(workers):
            part = (t + worker) % workers
            a, b = ends[part] - sizes[part], ends[part]
            mine = list(a + np.flatnonzero(abs(acc[worker, a:b]) >= threshold)) or [a + t % (b - a)]
            loads[part] = len(mine)
            union += mine
        update = np.zeros(n)
        update[union] = acc[:, union].sum(0) / workers
        acc[:, union] = 0
        e, updates = acc, [*updates, update]
        threshold = next_threshold(threshold, len(union) / k, rule)
        mean, moved = sum(loads) / workers, int(block * len(union) / n)
        for i in range(workers - 1) if blocks else ():
            left, right = loads[i] / mean, loads[i + 1] / mean
            if left > 1.05 and right < 0.95238 and held[i] - 1 >= blocks / (4 * workers):
                held[i], held[i + 1] = held[i] - 1, held[i + 1] + 1
                loads[i], loads[i + 1] = loads[i] - moved, loads[i + 1] + moved
            elif left < 0.95238 and right > 1.05 and held[i + 1] - 1 >= blocks / (4 * workers):
                held[i], held[i + 1] = held[i] + 1, held[i + 1] - 1
                loads[i], loads[i + 1] = loads[i] + moved, loads[i + 1] - moved
    return updates, seen
