"""The tensors of a bucket as matrices."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsify.types import tensor_sizes


def matrix_shapes(shapes: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return (rows, columns) of each tensor with elements: shape[0] and all the rest; a vector is a row."""
    return [
        (shape[0], size // shape[0]) if len(shape) > 1 else (1, size)
        for shape, size in zip(shapes, tensor_sizes(shapes), strict=True)
        if size
    ]


def view_matrices(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """View matrices (rows, columns) that follow each other in a tensor (n,)."""
    parts = flat.split(tensor_sizes(shapes))
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
