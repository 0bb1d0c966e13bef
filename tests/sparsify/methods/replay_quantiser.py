"""What quantisers draw and round, replayed in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sparsify.types import BucketContext
from tests.sparsify.laws import Lived, Make

Array = NDArray[Any]
CPU = torch.device("cpu")


SEED = 3  # of tests.sparsify.laws.live


SHAPES = [(40, 5), (5,), (7, 3), (1,)]


def grads(lived: list[Lived], step: int) -> list[Array]:
    return [rank.gradients[step].numpy() for rank in lived]


def given(*values: list[float]) -> Make:
    """Every worker's gradient, the same in all steps."""
    return lambda rank, step, shape: torch.tensor(values[rank % len(values)]).double().view(shape)


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
