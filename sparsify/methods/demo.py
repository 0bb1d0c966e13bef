from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.core import chunks
from sparsify.core.chunks import ChunkLayout
from sparsify.core.timer import PhaseTimer
from sparsify.feedback import DecayedFeedback
from sparsify.kernels import Workspace
from sparsify.method import FeedbackMethod
from sparsify.methods._chunked import ChunkGather, ChunkTopK
from sparsify.ranges import (
    AverageOver,
    ChunkSide,
    CodeName,
    Density,
    PositiveFraction,
    Scope,
    check_arguments,
)
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    NOTHING_IS_LOST,
    BucketContext,
    BucketStep,
    DenseSlice,
    PredictedBytes,
    SparseVector,
    StepSettings,
    num_selected,
)


@check_arguments
def demo(
    density: Density = 1 / 128,
    decay: PositiveFraction = 0.999,
    sign: bool = True,
    code: CodeName = "as_is",
    average: AverageOver = "senders",
    side: ChunkSide = 64,
    scope: Scope = "layer",
) -> DeMo:
    """DeMo: momentum that is never exchanged; each step sends the largest coefficients of its cosine
    transform, chunk by chunk, and steps by the sign. Peng et al. 2024 (ICLR 2026), arXiv:2411.19870.

    d <- decay d + g; c = DCT(d) in chunks; S = Top-k of |c| in each; d <- d - DCT^-1(c[S]); u = sign of
    DCT^-1(mean over those who sent a coefficient). The user's optimizer is SGD without momentum, at the rate
    of a sign. Theirs puts the rate inside of d, where it matters only while it changes. Their code sends
    int64 and fp32, 12 bytes a coefficient; here places take 12 bits. Besides d two (n,) buffers.

    Args:
        density: k/n of each chunk: 32 of 4096, as in their configuration.
        decay: beta, share of the momentum that a step keeps.
        sign: False: the update is the mean itself.
        code: how coefficients travel, see `sparsify.methods._chunked.ChunkGather`.
        average: for each coefficient over its `senders`, as published; or over all `workers`.
        side: the most that a side of a chunk may have.
        scope: what one message holds: every tensor (`layer`), the whole model (`global`), or so many MB.
    """
    return DeMo(
        density, ChunkTopK(side), DecayedFeedback(decay), ChunkGather(code, average, False, side), scope, sign
    )


@dataclass
class Coefficients:
    """State of the parts, and buffers."""

    select: Any
    feedback: Any
    exchange: Any
    tiles: ChunkLayout = field(metadata={"saved": False})
    workspace: Workspace = field(metadata={"saved": False})


@dataclass(frozen=True)
class DeMo(FeedbackMethod):
    """Top-k of a transform, in chunks."""

    density: Density
    select: ChunkTopK
    feedback: DecayedFeedback
    exchange: ChunkGather
    scope: Scope = "layer"
    sign: bool = True

    def density_at(self, epoch: int) -> float:
        return self.density

    def init(self, like: Tensor, context: BucketContext) -> Coefficients:
        tiles = ChunkLayout(context.shapes or (tuple(like.shape),), self.select.side, like.device)
        return Coefficients(
            self.select.init(like, context),
            self.feedback.init(like),
            self.exchange.init(like, context),
            tiles,
            Workspace(like),
        )

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: Coefficients, comm: Comm, timer: PhaseTimer
    ) -> int:
        n, k = grad.numel(), num_selected(grad.numel(), step.step_density)
        work, room = state.workspace.buffer("work"), state.workspace.buffer("room")
        with timer.phase("select"):
            acc = self.feedback.accumulate(grad, step.lr, state.feedback)
            transform(acc, work, state.tiles)
            part = self.select.accumulate_and_select(work, None, k, comm, state.select).gather_from(work)
        with timer.phase("exchange"):
            delivery = self.exchange.exchange(part, n, k, comm, state.exchange)
        with timer.phase("select"):
            acc.sub_(transform(spread(delivery.delivered, work, 1.0), room, state.tiles, back=True))
        with timer.phase("scatter"):
            mean = transform(spread(delivery.total, work, 1 / comm.size), room, state.tiles, back=True)
            grad.copy_(mean.sign_() if self.sign else mean)
        return part.indices.numel()

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        return self.select.predict_bytes(bucket_step) + self.exchange.predict_bytes(bucket_step)

    def broken_laws(self) -> dict[str, str]:
        broken = self.exchange.broken_laws() | self.feedback.broken_laws()
        if self.sign:
            signs = "the update is the sign of the average"
            broken |= {NOTHING_IS_LOST: signs, DENSE_AT_DENSITY_1: signs}
        return broken


def spread(parts: list[SparseVector | DenseSlice], into: Tensor, scale: float) -> Tensor:
    """Scale x the sum of the parts, in their order, in `into` (n,)."""
    into.zero_()
    for part in parts:
        part.add_to(into, alpha=scale)
    return into


def transform(values: Tensor, out: Tensor, tiles: ChunkLayout, back: bool = False) -> Tensor:
    """(n,) -> (n,): the orthonormal cosine transform of every chunk, or its inverse; in two dimensions of
    tiles, in one of runs. Some rows of chunks at a time, so that nothing of size n is made on the way.
    """
    for grid in tiles.grids:
        down, across = (cosines(side, values.dtype, values.device) for side in (grid.height, grid.width))
        if back:
            down, across = down.T, across.T
        tiles_of, into = grid.view_chunks(values), grid.view_chunks(out)
        rows = max(1, chunks.BATCH_NUMEL // (8 * grid.height * grid.columns))
        for at in range(0, grid.chunks_down, rows):
            into[at : at + rows].copy_(down @ tiles_of[at : at + rows] @ across.T)
    return out


@cache
def cosines(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(size, size): rows are the vectors of DCT-II, of length 1."""
    at = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (at + 0.5) * at[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device, dtype)
