"""Exclusive choices, replayed in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparsify.comm import virtual
from sparsify.types import BucketContext
from tests.sparsify.methods.replay_layers import Array

SHAPES = [(40, 5), (5,), (7, 3), (1,)]


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


def check(lived: Any, updates: list[Array]) -> None:
    """Float64; the same sums in the same order, so that only the division may round differently."""
    for got, expected in zip(lived[0].updates, updates, strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-14, atol=0)


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
