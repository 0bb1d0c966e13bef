from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from sparsify import cost
from sparsify.comm import Comm
from sparsify.exchange import AllReduce
from sparsify.feedback import ErrorFeedback
from sparsify.method import Method, Sparsifier
from sparsify.methods._ef21 import EF21
from sparsify.ranges import Density, PositiveFraction, PositiveInt, Scope, check_arguments
from sparsify.select import DrawCounter, Selector
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
    """ARC-Top-K: a sketch of the mean gradient says which rows are all-reduced, without indices.

    Chen et al. 2025, arXiv:2510.26709. A step, of the gradient G of a matrix:

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
        eta: of `ef21m`, the share of the new gradient.
    """
    rows = Sparsifier(density, SketchedRowTopK(rank), ErrorFeedback(), AllReduce(), scope)
    return EF21(rows, eta) if feedback == "ef21m" else rows


class MatrixSlice(NamedTuple):
    """The stretch of a bucket that one tensor takes, as a matrix."""

    start: int  # in the bucket
    rows: int
    columns: int
    is_sketched: bool  # else it is sent whole

    def view_matrix(self, acc: Tensor) -> Tensor:
        """View the matrix in a bucket (n,) as (rows, columns)."""
        return acc[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    def num_sent_rows(self, k: int, n: int) -> int:
        """Return how many rows to send, where k of n elements are asked for."""
        return min(self.rows, max(1, -(-k * self.rows // n))) if self.is_sketched else self.rows


@dataclass
class SketchState:
    """The draws so far, and the matrices of the bucket."""

    draws: DrawCounter
    matrices: list[MatrixSlice] = field(metadata={"saved": False})


@dataclass(frozen=True)
class SketchedRowTopK(Selector):
    """A selector of the rows of each matrix whose mean over the workers is the largest, by a sketch.

    No host synchronisation.
    """

    rank: PositiveInt = 4

    @property
    def shared(self) -> bool:
        return True

    def init(self, like: Tensor, context: BucketContext) -> SketchState:
        matrices = self.make_matrix_slices(context.shapes or (tuple(like.shape),))
        return SketchState(DrawCounter(context.shared), matrices)

    def make_matrix_slices(self, shapes: tuple[tuple[int, ...], ...]) -> list[MatrixSlice]:
        """Cut a bucket into its tensors, as matrices (shape[0], all the rest)."""
        slices = list[MatrixSlice]()
        start = 0
        for shape in shapes:
            n = torch.Size(shape).numel()
            if n:
                rows = shape[0] if len(shape) > 1 else 1
                columns = n // rows
                slices.append(MatrixSlice(start, rows, columns, rows > 1 and columns > self.rank))
            start += n
        return slices

    def select(self, acc: Tensor, k: int, comm: Comm, state: SketchState) -> Selection:
        # 1. Sketch: the mean of G V, up to a factor.
        draws = Generator(acc.device)
        draws.manual_seed(state.draws.next_key())
        sketches = [
            self._sketch(matrix.view_matrix(acc), draws) for matrix in state.matrices if matrix.is_sketched
        ]
        if sketches:
            total = comm.all_reduce(torch.cat([sketch.view(-1) for sketch in sketches]))
            sums = iter(total.split([sketch.numel() for sketch in sketches]))
        # 2. Choose the rows of the largest norms.
        indices = list[Tensor]()
        for matrix in state.matrices:
            rows = torch.arange(matrix.rows, device=acc.device)
            if matrix.is_sketched:
                scores = next(sums).view(matrix.rows, self.rank).square().sum(dim=1)
                rows = scores.topk(matrix.num_sent_rows(k, acc.numel())).indices
            inside = rows[:, None] * matrix.columns + torch.arange(matrix.columns, device=acc.device)
            indices.append(inside.view(-1).add_(matrix.start))
        return Selection(torch.cat(indices))

    def _sketch(self, matrix: Tensor, draws: Generator) -> Tensor:
        """Return the sketch (rows, rank) of a matrix (rows, columns)."""
        gaussian = torch.randn(
            matrix.shape[1], self.rank, generator=draws, device=matrix.device, dtype=matrix.dtype
        )
        sketch: Tensor = matrix @ gaussian / self.rank**0.5
        return sketch

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        matrices = self.make_matrix_slices(bucket_step.shapes)
        rows = sum(matrix.rows for matrix in matrices if matrix.is_sketched)
        nbytes = rows * self.rank * accumulation_dtype(bucket_step.dtype).itemsize
        return exact_bytes(cost.all_reduce(nbytes, bucket_step.world_size))
