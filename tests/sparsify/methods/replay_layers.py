"""Gradients of a toy model, tensor by tensor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.sparsify.laws import Lived

Array = NDArray[np.float64]


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
