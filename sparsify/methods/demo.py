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
from sparsify.exchange import write_scaled_sum
from sparsify.feedback import DecayedFeedback
from sparsify.kernels import Workspace
from sparsify.method import FeedbackMethod
from sparsify.methods._chunked import ChunkGather, ChunkGatherState, ChunkSearchState, ChunkTopK
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
    PredictedBytes,
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
    """DeMo: of the momentum only the largest transform coefficients are sent. Peng et al. 2024 (ICLR 2026).

    arXiv:2411.19870. A step, with the momentum d and the cosine transform DCT
    of each chunk:

    1. d <- decay d + g.
    2. c = DCT(d); S = the k largest |c| of each chunk.
    3. c[S] is all-gathered.
    4. d <- d - DCT^-1(c[S]).
    5. The update is the sign of DCT^-1(mean over the workers that sent a coefficient).

    The user's optimizer is SGD without momentum, at the learning rate of a sign. In the published code the
    rate is inside of d, which differs only while the rate changes. That code sends int64 and fp32, 12 bytes a
    coefficient; here places take 12 bits. Memory: two (n,) buffers besides d.

    Args:
        density: k/n of each chunk: 32 of 4096, as in the published configuration. Lower: fewer bytes, more
            error.
        decay: beta, share of the momentum that a step keeps. Lower: a shorter memory.
        sign: False: the update is the mean itself.
        code: how coefficients travel, see `sparsify.methods._chunked.ChunkGather`.
        average: for each coefficient over its `senders`, as published; or over all `workers`.
        side: the most that a side of a chunk may have.
        scope: what one message holds: every tensor (`layer`), the whole model (`global`), or a size in MB.
    """
    return DeMo(
        density, ChunkTopK(side), DecayedFeedback(decay), ChunkGather(code, average, False, side), scope, sign
    )


@dataclass
class DeMoState:
    """The state of each part, and buffers."""

    select: ChunkSearchState
    feedback: Any
    exchange: ChunkGatherState
    workspace: Workspace = field(metadata={"saved": False})


@dataclass(frozen=True)
class DeMo(FeedbackMethod):
    """A method that selects and exchanges coefficients of the cosine transform of its momentum, in chunks."""

    density: Density
    select: ChunkTopK
    feedback: DecayedFeedback
    exchange: ChunkGather
    scope: Scope = "layer"
    sign: bool = True

    def density_at(self, epoch: int) -> float:
        return self.density

    def init(self, like: Tensor, context: BucketContext) -> DeMoState:
        return DeMoState(
            self.select.init(like, context),
            self.feedback.init(like),
            self.exchange.init(like, context),
            Workspace(like),
        )

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: DeMoState, comm: Comm, timer: PhaseTimer
    ) -> int:
        n = grad.numel()
        k = num_selected(n, step.step_density)
        work = state.workspace.buffer("work")
        out = state.workspace.buffer("out")
        layout = state.exchange.layout
        with timer.phase("select"):
            # 1. Accumulate the momentum.
            acc = self.feedback.accumulate_in_gradient_units(grad, step.lr, state.feedback)
            # 2. Select the largest coefficients of each chunk.
            coefficients = cosine_transform(acc, work, layout)
            selected = self.select.accumulate_and_select(coefficients, None, k, comm, state.select)
            selection = selected.gather_from(coefficients)
        with timer.phase("exchange"):
            # 3. Exchange them.
            delivery = self.exchange.exchange(selection, n, k, comm, state.exchange)
        with timer.phase("select"):
            # 4. Take what was sent out of the momentum.
            write_scaled_sum(delivery.own_parts, 1, work, None)
            acc.sub_(cosine_transform(work, out, layout, inverse=True))
        with timer.phase("scatter"):
            # 5. The update is the sign of the average.
            write_scaled_sum(delivery.sum_parts, 1 / comm.size, work, None)
            update = cosine_transform(work, out, layout, inverse=True)
            grad.copy_(update.sign_() if self.sign else update)
        return selection.indices.numel()

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        return self.select.predict_bytes(bucket_step) + self.exchange.predict_bytes(bucket_step)

    def broken_laws(self) -> dict[str, str]:
        broken = self.exchange.broken_laws() | self.feedback.broken_laws()
        if self.sign:
            reason = "the update is the sign of the average"
            broken |= {NOTHING_IS_LOST: reason, DENSE_AT_DENSITY_1: reason}
        return broken


def cosine_transform(values: Tensor, out: Tensor, layout: ChunkLayout, inverse: bool = False) -> Tensor:
    """Write the orthonormal cosine transform of every chunk of values (n,), or its inverse, into out (n,).

    It has two dimensions where chunks are rectangles, one where they are runs. Some rows of chunks are
    transformed at a time, so that nothing of size n is made on the way.
    """
    for grid in layout.grids:
        down = make_dct_matrix(grid.height, values.dtype, values.device)
        across = make_dct_matrix(grid.width, values.dtype, values.device)
        if inverse:
            down = down.T
            across = across.T
        source = grid.view_chunks(values)
        target = grid.view_chunks(out)
        num_rows = max(1, chunks.BATCH_NUMEL // (8 * grid.height * grid.columns))
        for row in range(0, grid.chunks_down, num_rows):
            target[row : row + num_rows].copy_(down @ source[row : row + num_rows] @ across.T)
    return out


@cache
def make_dct_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix (size, size) whose rows are the vectors of DCT-II, of length 1."""
    positions = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * (positions + 0.5) * positions[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device, dtype)
