from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from sparsify import cost
from sparsify.comm import Comm
from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.method import Method, Sparsifier
from sparsify.methods._ef21 import EF21
from sparsify.methods._matrices import matrix_shapes, view_matrices
from sparsify.ranges import Density, PositiveFraction, PositiveInt, Scope, check_arguments
from sparsify.select import RandomKeyStream, Selector
from sparsify.types import (
    BucketContext,
    BucketStep,
    PredictedBytes,
    Selection,
    accumulation_dtype,
    exact_bytes,
)


@check_arguments
def arctopk(
    density: Density = 0.2,
    rank: PositiveInt = 4,
    scope: Scope = "layer",
    feedback: Literal["ef21m", "gradient"] = "ef21m",
    eta: PositiveFraction = 0.1,
) -> Method:
    """ARC-Top-K: a sketch of the mean gradient says which rows are all-reduced. Chen et al. 2025 (arXiv).

    arXiv:2510.26709. No indices are sent. A step, of the gradient G of a matrix:

    1. S = mean over the workers of G V / sqrt(rank), where V is Gaussian and equal on all workers. This
       sketch is an all-reduce of `rank` numbers a row.
    2. All workers choose the rows of the largest |S|.
    3. An all-reduce averages these rows.

    Written after the abstract and a public implementation, whose defaults these are. That implementation
    begins with 1,000 dense steps; this method does not. Vectors, and matrices too narrow for a sketch, are
    sent whole.

    Args:
        density: share of the rows that are sent. Lower: fewer bytes, more error.
        rank: columns of the sketch. Higher: a better choice of rows, more bytes for the sketch.
        scope: what one message holds: every tensor (`layer`), the whole model (`global`), or a size in MB.
            Rows are chosen in each tensor.
        feedback: `ef21m`, as published: see `sparsify.methods._ef21.EF21`; or `gradient`, the residual of
            Top-k SGD.
        eta: of `ef21m`, the share of the new gradient. Lower: less noise, more delay.
    """
    rows = Sparsifier(density, SketchedRowTopK(rank), ErrorFeedback(), AllReduce(), scope)
    return EF21(rows, eta) if feedback == "ef21m" else rows


@dataclass
class SketchState:
    """The draws so far, and the shapes of the bucket's matrices."""

    draws: RandomKeyStream
    shapes: list[tuple[int, int]] = field(metadata={"saved": False})  # (rows, columns)


@dataclass(frozen=True)
class SketchedRowTopK(Selector):
    """A selector of the rows of each matrix whose mean over the workers is the largest, by a sketch.

    No host synchronisation.
    """

    rank: PositiveInt = 4
    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> SketchState:
        shapes = matrix_shapes(context.shapes or (tuple(like.shape),))
        return SketchState(RandomKeyStream(context.without_rank), shapes)

    def is_sketched(self, rows: int, columns: int) -> bool:
        """Return True for matrices of which rows are chosen by a sketch, not sent whole."""
        return rows > 1 and columns > self.rank

    def select(self, acc: Tensor, k: int, comm: Comm, state: SketchState) -> Selection:
        # 1. Sketch: the mean of G V, up to a factor.
        draws = Generator(acc.device).manual_seed(state.draws.next_key())
        matrices = view_matrices(acc, state.shapes)
        sketches = [self._sketch(matrix, draws) for matrix in matrices if self.is_sketched(*matrix.shape)]
        if sketches:
            scores = comm.all_reduce(torch.cat(sketches)).square().sum(dim=1)
            scores_by_sketch = iter(scores.split([len(sketch) for sketch in sketches]))
        # 2. Choose the rows of the largest norms.
        indices = list[Tensor]()
        start = 0
        for rows, columns in state.shapes:
            chosen = torch.arange(rows, device=acc.device)
            if self.is_sketched(rows, columns):
                chosen = next(scores_by_sketch).topk(-(-k * rows // acc.numel())).indices
            inside = chosen[:, None] * columns + torch.arange(columns, device=acc.device)
            indices.append(inside.view(-1).add_(start))
            start += rows * columns
        return Selection(torch.cat(indices))

    def _sketch(self, matrix: Tensor, draws: Generator) -> Tensor:
        """Return the sketch (rows, rank) of a matrix (rows, columns)."""
        gaussian = torch.randn(
            matrix.shape[1], self.rank, generator=draws, device=matrix.device, dtype=matrix.dtype
        )
        sketch: Tensor = matrix @ gaussian / self.rank**0.5
        return sketch

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        shapes = matrix_shapes(bucket_step.shapes)
        num_rows = sum(rows for rows, columns in shapes if self.is_sketched(rows, columns))
        nbytes = num_rows * self.rank * accumulation_dtype(bucket_step.dtype).itemsize
        return exact_bytes(cost.all_reduce(nbytes, bucket_step.world_size))
