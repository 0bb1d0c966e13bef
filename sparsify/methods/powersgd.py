from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsify import cost
from sparsify import feedback as feedbacks
from sparsify.comm import Comm
from sparsify.core.timer import PhaseTimer
from sparsify.feedback import Feedback
from sparsify.method import FeedbackMethod
from sparsify.ranges import FeedbackName, FloatAtLeast1, PositiveInt, Scope, check_arguments
from sparsify.types import (
    DENSE_AT_DENSITY_1,
    BucketContext,
    BucketStep,
    Delivery,
    DenseSlice,
    PredictedBytes,
    StepSettings,
    accumulation_dtype,
    exact_bytes,
)


@check_arguments
def powersgd(
    scope: Scope = "global",
    rank: PositiveInt = 2,
    min_compression_rate: FloatAtLeast1 = 2.0,
    feedback: FeedbackName = "gradient",
) -> PowerSGD:
    """PowerSGD: every matrix by one warm-started step of power iteration. Vogels et al. 2019 (NeurIPS),
    arXiv:1905.13727, algorithms 1 and 2.

    P = M Q, summed; orthogonalised; Q = M^T P, averaged; the update is P Q^T. Two allreduces for each bucket;
    the tensors that are not compressed travel along with the first, as they are. A tensor is the matrix
    (shape[0], all the rest), in the order of its memory. Half-precision gradients are multiplied in fp32.
    Compressed from the first step on (torch's hook: from step 1000, epfml/powersgd: 100). No host
    synchronisation of our own. Besides the bucket the residual, and P and Q.

    Orthogonalised by Householder QR, not by Gram-Schmidt as published: a matrix of zeros or of a lower rank
    still gives an orthonormal P. With Gram-Schmidt it gives NaN, or with an epsilon zeros, from which Q never
    recovers. All workers compute P from the same bits; they must run on devices of the same kind.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or so many MB.
        rank: columns of P and Q: 2, as in most of the paper (it has 1, 2 and 4; torch's hook 1).
        min_compression_rate: tensors with fewer than two dimensions, and those that would not get smaller by
            more than this, are averaged as they are: 2, as torch's hook. The paper compresses every matrix; 1
            does so where it saves anything.
        feedback: `gradient`, as published: e <- M - P Q^T, where P Q^T is the average over the workers, as in
            the paper's code and torch's hook; the errors of all workers then add up to what is missing.
            `learning_rate` or `none`, see topk.
    """
    return PowerSGD(rank, min_compression_rate, feedbacks.build_feedback(feedback), scope)


class MatrixLayout(NamedTuple):
    """Place of a tensor's numbers."""

    rows: int
    columns: int
    rank: int  # 0: sent as it is
    start: int  # in the bucket
    p: int  # where its P (or itself) starts in the first message
    q: int  # where its Q starts in the second

    def view_matrix(self, bucket: Tensor) -> Tensor:
        """(n,) -> (rows, columns)."""
        return bucket[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    def view_p(self, first: Tensor) -> Tensor:
        """(rows, rank), or (rows, columns) as it is."""
        width = self.rank or self.columns
        return first[self.p : self.p + self.rows * width].view(self.rows, width)

    def view_q(self, second: Tensor) -> Tensor:
        """(columns, rank)."""
        return second[self.q : self.q + self.columns * self.rank].view(self.columns, self.rank)


@dataclass
class PowerSGDState:
    """State between steps, and buffers."""

    second: Tensor  # all Q
    feedback: Any
    matrices: list[MatrixLayout] = field(metadata={"saved": False})
    first: Tensor = field(metadata={"saved": False})  # all P, and what is sent as it is
    update: Tensor | None = field(metadata={"saved": False})  # (n,), of half-precision gradients


@dataclass(frozen=True)
class PowerSGD(FeedbackMethod):
    """Low-rank approximations of all matrices of a bucket."""

    rank: PositiveInt
    min_compression_rate: FloatAtLeast1
    feedback: Feedback
    scope: Scope = "global"

    def init(self, like: Tensor, context: BucketContext) -> PowerSGDState:
        dtype = accumulation_dtype(like.dtype)
        matrices = self.matrices(context.shapes)
        first = sum(m.rows * (m.rank or m.columns) for m in matrices)
        # Drawn on the host, so that it is the same on all devices.
        own = context.shared.make_generator(torch.device("cpu"))
        second = torch.randn(sum(m.columns * m.rank for m in matrices), generator=own, dtype=dtype)
        return PowerSGDState(
            second.to(like.device),
            self.feedback.init(like),
            matrices,
            torch.empty(first, dtype=dtype, device=like.device),
            None if dtype == like.dtype else torch.empty_like(like, dtype=dtype),
        )

    def matrices(self, shapes: tuple[tuple[int, ...], ...]) -> list[MatrixLayout]:
        """Places of the tensors, each as a matrix."""
        found = []
        start = p = q = 0
        for shape in shapes:
            size = torch.Size(shape).numel()
            rows, columns = (shape[0], size // shape[0]) if len(shape) > 1 and size else (size, 1)
            rank = min(self.rank, rows, columns)
            pays = rank * (rows + columns) * self.min_compression_rate < size
            matrix = MatrixLayout(rows, columns, rank if len(shape) > 1 and pays else 0, start, p, q)
            found.append(matrix)
            start, p, q = start + size, p + rows * (matrix.rank or columns), q + columns * matrix.rank
        return found

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: PowerSGDState, comm: Comm, timer: PhaseTimer
    ) -> int:
        """Algorithm 1, for all matrices at once."""
        compressed = [m for m in state.matrices if m.rank]
        dense = [m for m in state.matrices if not m.rank]
        first, second = state.first, state.second
        update = grad if state.update is None else state.update  # by then the gradient has been read
        with timer.phase("select"):
            acc = self.feedback.accumulate(grad, step.lr, state.feedback)
            for m in compressed:
                torch.mm(m.view_matrix(acc), m.view_q(second), out=m.view_p(first))
            for m in dense:
                m.view_p(first).copy_(m.view_matrix(acc))
        with timer.phase("exchange"):
            comm.all_reduce(first)
        with timer.phase("select"):
            for m in compressed:
                p = m.view_p(first)
                p.copy_(torch.linalg.qr(p).Q)
                torch.mm(m.view_matrix(acc).T, p, out=m.view_q(second))
        with timer.phase("exchange"):
            if compressed:
                comm.all_reduce(second).div_(comm.size)
        with timer.phase("select"):
            for m in compressed:
                torch.mm(m.view_p(first), m.view_q(second).T, out=m.view_matrix(update))
            for m in dense:
                torch.div(m.view_p(first), comm.size, out=m.view_matrix(update))
            # What is sent as it is, is delivered whole; of a matrix, the workers' average is.
            delivered = [
                DenseSlice(m.start, (m.view_matrix(update) if m.rank else m.view_matrix(acc)).view(-1)) for m in state.matrices
            ]
            self.feedback.retain_undelivered(Delivery([], [*delivered]), state.feedback)
        with timer.phase("scatter"):
            if update is not grad:
                grad.copy_(update)
        return grad.numel()

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        """P with what is not compressed, then Q."""
        matrices = self.matrices(bucket_step.shapes)
        first = sum(m.rows * (m.rank or m.columns) for m in matrices)
        second = sum(m.columns * m.rank for m in matrices)
        value = bucket_step.value_dtype.itemsize
        return exact_bytes(
            cost.all_reduce(value * first, bucket_step.world_size),
            cost.all_reduce(value * second, bucket_step.world_size),
        )

    def broken_laws(self) -> dict[str, str]:
        approximated = {DENSE_AT_DENSITY_1: "every matrix is approximated at a low rank"}
        return approximated | self.feedback.broken_laws()
