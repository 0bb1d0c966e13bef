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
from sparsify.methods._tracked import Tracked
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
    """ARC-Top-K: a sketch of the mean gradient says which rows all workers send, and an all-reduce without
    indices averages them. Chen et al. 2025, arXiv:2510.26709.

    S = mean of G V / sqrt(rank), V Gaussian and alike on all workers: an all-reduce of `rank` numbers a row.
    The rows of the largest |S| are all-reduced. Written after the abstract and a public implementation, whose
    defaults these are; that one begins with 1,000 dense steps, this one does not. Vectors, and matrices too
    narrow for a sketch, are sent whole.

    Args:
        density: share of the rows that are sent.
        rank: columns of the sketch.
        scope: what one message holds: every tensor (`layer`), the whole model (`global`), or so many MB;
            rows are chosen in each tensor.
        feedback: `ef21m`, as published: see `sparsify.methods._tracked.Tracked`; or `gradient`, the residual
            of Top-k SGD.
        eta: of `ef21m`, share of the new gradient.
    """
    rows = Sparsifier(density, ArcRows(rank), ErrorFeedback(), AllReduce(), scope)
    return Tracked(rows, eta) if feedback == "ef21m" else rows


class RowTable(NamedTuple):
    """Place of a tensor's numbers, as a matrix."""

    start: int  # in the bucket
    rows: int
    columns: int
    is_sketched: bool  # else it is sent whole

    def of(self, acc: Tensor) -> Tensor:
        """(n,) -> (rows, columns)."""
        return acc[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    def sent(self, k: int, n: int) -> int:
        """Rows to send, where k of n elements are asked for."""
        return min(self.rows, max(1, -(-k * self.rows // n))) if self.is_sketched else self.rows


@dataclass
class Sketches:
    """The draws so far, and the tables of the bucket."""

    draws: DrawCounter
    tables: list[RowTable] = field(metadata={"saved": False})


@dataclass(frozen=True)
class ArcRows(Selector):
    """The rows of each matrix whose mean over the workers is the largest, as far as a sketch tells. No host
    synchronisation.
    """

    rank: PositiveInt = 4

    @property
    def shared(self) -> bool:
        return True

    def init(self, like: Tensor, context: BucketContext) -> Sketches:
        return Sketches(DrawCounter(context.shared), self.tables(context.shapes or (tuple(like.shape),)))

    def tables(self, shapes: tuple[tuple[int, ...], ...]) -> list[RowTable]:
        """Tensors as matrices (shape[0], all the rest)."""
        found, start = list[RowTable](), 0
        for shape in shapes:
            n = torch.Size(shape).numel()
            rows, columns = (shape[0], n // shape[0]) if len(shape) > 1 and n else (1, n)
            if n:
                found.append(
                    RowTable(start, rows, columns, len(shape) > 1 and columns > self.rank and rows > 1)
                )
            start += n
        return found

    def select(self, acc: Tensor, k: int, comm: Comm, state: Sketches) -> Selection:
        draws = Generator(acc.device)
        draws.manual_seed(state.draws.next_key())
        sketched = [table for table in state.tables if table.is_sketched]
        if sketched:
            sketches = [self._sketch(table.of(acc), draws) for table in sketched]
            total = comm.all_reduce(torch.cat([sketch.view(-1) for sketch in sketches]))
            scores = iter(total.split([sketch.numel() for sketch in sketches]))
        chosen = list[Tensor]()
        for table in state.tables:
            rows = torch.arange(table.rows, device=acc.device)
            if table.is_sketched:
                score = next(scores).view(table.rows, self.rank).square().sum(dim=1)
                rows = score.topk(table.sent(k, acc.numel())).indices
            inside = rows[:, None] * table.columns + torch.arange(table.columns, device=acc.device)
            chosen.append(inside.view(-1).add_(table.start))
        return Selection(torch.cat(chosen))

    def _sketch(self, matrix: Tensor, draws: Generator) -> Tensor:
        """(rows, columns) -> (rows, rank)."""
        gaussian = torch.randn(
            matrix.shape[1], self.rank, generator=draws, device=matrix.device, dtype=matrix.dtype
        )
        sketch: Tensor = matrix @ gaussian / self.rank**0.5
        return sketch

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        rows = sum(table.rows for table in self.tables(bucket_step.shapes) if table.is_sketched)
        nbytes = rows * self.rank * accumulation_dtype(bucket_step.dtype).itemsize
        return exact_bytes(cost.all_reduce(nbytes, bucket_step.world_size)) if rows else exact_bytes()
