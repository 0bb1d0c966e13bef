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
    SparseVector,
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
    """PowerSGD: every matrix by one warm-started step of power iteration. Vogels et al. 2019 (NeurIPS).

    arXiv:1905.13727. Algorithm 1, for every matrix M of the bucket, with the Q of the step before:

    1. P <- M Q
    2. All-reduce P.
    3. Orthogonalise the columns of P.
    4. Q <- M^T P
    5. All-reduce Q, and divide it by the number of workers.
    6. The update is P Q^T.

    M is the gradient plus the residual, and the residual becomes M - P Q^T (algorithm 2).

    Two all-reduces per bucket; the tensors that are not compressed travel in the first. A tensor is the
    matrix (shape[0], all the rest), in the order of its memory. Half-precision gradients are multiplied in
    fp32. Every step compresses (torch's hook: from step 1000, epfml/powersgd: 100). The method itself needs
    no host synchronisation. Memory: the residual, P and Q.

    Orthogonalised by Householder QR, not by Gram-Schmidt as published: a matrix of zeros or of a lower rank
    still gives an orthonormal P. With Gram-Schmidt it gives NaN, or with an epsilon zeros, from which Q never
    recovers. All workers compute P from the same bits; they must run on devices of the same kind.

    Args:
        scope: what one message holds: the whole model (`global`), every tensor (`layer`), or a size in MB.
        rank: columns of P and Q: 2, as in most of the paper (it has 1, 2 and 4; torch's hook 1). Lower: fewer
            bytes, more error.
        min_compression_rate: tensors with fewer than two dimensions, and those that would not get smaller by
            more than this factor, are averaged as they are: 2, as torch's hook. Lower: fewer bytes, more
            error. The paper compresses every matrix; 1 does so where that saves anything.
        feedback: `gradient`, as published: e <- M - P Q^T, where P Q^T is the average over the workers, as in
            the paper's code and torch's hook; the errors of all workers then add up to what is missing.
            `learning_rate` or `none`, see topk.
    """
    return PowerSGD(rank, min_compression_rate, feedbacks.FEEDBACKS[feedback], scope)


class MatrixLayout(NamedTuple):
    """The shape of a tensor as a matrix, and its places in the bucket and in both messages."""

    rows: int
    columns: int
    rank: int  # 0: not compressed
    start: int  # in the bucket
    p_start: int  # of P, or of an uncompressed matrix itself, in the first message
    q_start: int  # of Q, in the second message

    @property
    def p_columns(self) -> int:
        """The number of columns that travel in the first message."""
        return self.rank or self.columns

    def view_matrix(self, bucket: Tensor) -> Tensor:
        """Return the matrix (rows, columns) as a view of the bucket (n,)."""
        return view_at(bucket, self.start, self.rows, self.columns)

    def view_p(self, first_message: Tensor) -> Tensor:
        """Return P (rows, rank), or an uncompressed (rows, columns), as a view of the first message."""
        return view_at(first_message, self.p_start, self.rows, self.p_columns)

    def view_q(self, second_message: Tensor) -> Tensor:
        """Return Q (columns, rank) as a view of the second message."""
        return view_at(second_message, self.q_start, self.columns, self.rank)


def view_at(tensor: Tensor, start: int, rows: int, columns: int) -> Tensor:
    """Return (rows, columns), a view of the elements from `start` on."""
    return tensor[start : start + rows * columns].view(rows, columns)


def message_lengths(matrices: list[MatrixLayout]) -> tuple[int, int]:
    """Return the number of elements of the first message and of the second."""
    first = sum(matrix.rows * matrix.p_columns for matrix in matrices)
    second = sum(matrix.columns * matrix.rank for matrix in matrices)
    return first, second


@dataclass
class PowerSGDState:
    """All Q of the step before, the residual, and buffers."""

    second: Tensor  # the second message: all Q
    feedback: Any
    matrices: list[MatrixLayout] = field(metadata={"saved": False})
    first: Tensor = field(metadata={"saved": False})  # the first message: all P and uncompressed tensors
    update: Tensor | None = field(metadata={"saved": False})  # (n,) fp32, for half-precision gradients


@dataclass(frozen=True)
class PowerSGD(FeedbackMethod):
    """A method that averages low-rank approximations of all matrices of a bucket."""

    rank: PositiveInt
    min_compression_rate: FloatAtLeast1
    feedback: Feedback
    scope: Scope = "global"

    def init(self, like: Tensor, context: BucketContext) -> PowerSGDState:
        dtype = accumulation_dtype(like.dtype)
        matrices = self.lay_out_matrices(context.shapes)
        first_length, second_length = message_lengths(matrices)
        # The first Q is drawn on the host, so that it is equal on all devices.
        generator = context.shared.make_generator(torch.device("cpu"))
        first_q = torch.randn(second_length, generator=generator, dtype=dtype)
        return PowerSGDState(
            first_q.to(like.device),
            self.feedback.init(like),
            matrices,
            torch.empty(first_length, dtype=dtype, device=like.device),
            None if dtype == like.dtype else torch.empty_like(like, dtype=dtype),
        )

    def lay_out_matrices(self, shapes: tuple[tuple[int, ...], ...]) -> list[MatrixLayout]:
        """Return the layout of each tensor of a bucket, given their shapes."""
        matrices = []
        start = p_start = q_start = 0
        for shape in shapes:
            numel = torch.Size(shape).numel()
            rows, columns, rank = numel, 1, 0
            if len(shape) > 1 and numel:
                rows, columns = shape[0], numel // shape[0]
                rank = min(self.rank, rows, columns)
                if rank * (rows + columns) * self.min_compression_rate >= numel:
                    rank = 0
            matrix = MatrixLayout(rows, columns, rank, start, p_start, q_start)
            matrices.append(matrix)
            start += numel
            p_start += rows * matrix.p_columns
            q_start += columns * rank
        return matrices

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: PowerSGDState, comm: Comm, timer: PhaseTimer
    ) -> int:
        compressed = [matrix for matrix in state.matrices if matrix.rank]
        uncompressed = [matrix for matrix in state.matrices if not matrix.rank]
        first, second = state.first, state.second
        update = grad if state.update is None else state.update  # it is written after the gradient was read
        with timer.phase("select"):
            acc = self.feedback.accumulate(grad, step.lr, state.feedback)
            for matrix in compressed:  # 1.
                torch.mm(matrix.view_matrix(acc), matrix.view_q(second), out=matrix.view_p(first))
            for matrix in uncompressed:
                matrix.view_p(first).copy_(matrix.view_matrix(acc))
        with timer.phase("exchange"):
            comm.all_reduce(first)  # 2.
        with timer.phase("select"):
            for matrix in compressed:
                p = matrix.view_p(first)
                p.copy_(torch.linalg.qr(p).Q)  # 3.
                torch.mm(matrix.view_matrix(acc).T, p, out=matrix.view_q(second))  # 4.
        with timer.phase("exchange"):
            if compressed:
                comm.all_reduce(second).div_(comm.size)  # 5.
        with timer.phase("select"):
            for matrix in compressed:  # 6.
                torch.mm(matrix.view_p(first), matrix.view_q(second).T, out=matrix.view_matrix(update))
            for matrix in uncompressed:
                torch.div(matrix.view_p(first), comm.size, out=matrix.view_matrix(update))
            # An uncompressed tensor is delivered whole. Of a compressed one the workers' average is.
            delivered = list[SparseVector | DenseSlice]()
            for matrix in state.matrices:
                source = update if matrix.rank else acc
                delivered.append(DenseSlice(matrix.start, matrix.view_matrix(source).view(-1)))
            self.feedback.retain_undelivered(Delivery([], delivered), state.feedback)
        with timer.phase("scatter"):
            if update is not grad:
                grad.copy_(update)
        return grad.numel()

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        lengths = message_lengths(self.lay_out_matrices(bucket_step.shapes))
        itemsize, world_size = bucket_step.value_dtype.itemsize, bucket_step.world_size
        return exact_bytes(*(cost.all_reduce(itemsize * length, world_size) for length in lengths))

    def broken_laws(self) -> dict[str, str]:
        approximated = {DENSE_AT_DENSITY_1: "every matrix is approximated at a low rank"}
        return approximated | self.feedback.broken_laws()
