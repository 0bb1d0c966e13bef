from __future__ import annotations

from collections.abc import Sequence
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
from sparsify.methods._matrices import matrix_shapes, view_matrices
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
    tensor_sizes,
)


@check_arguments
def powersgd(
    scope: Scope = "global",
    rank: PositiveInt = 2,
    min_compression_rate: FloatAtLeast1 = 2.0,
    feedback: FeedbackName = "gradient",
) -> PowerSGD:
    """PowerSGD: every matrix by one step of power iteration. Vogels et al. 2019 (NeurIPS), algorithms 1, 2.

    arXiv:1905.13727. Algorithm 1, warm-started, for every matrix M of the bucket, with the Q of the step
    before:

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


class MatrixPlan(NamedTuple):
    """The shapes of all matrices M of a bucket, and of the P and Q of each, in the same order."""

    m: list[tuple[int, int]]
    p: list[tuple[int, int]]  # (rows, rank); (rows, columns) where M is not compressed, and travels itself
    q: list[tuple[int, int]]  # (columns, rank); (columns, 0) where M is not compressed


@dataclass
class PowerSGDState:
    """All Q of the step before, the residual, and buffers."""

    second: Tensor  # the second message: all Q
    feedback: Any
    plan: MatrixPlan = field(metadata={"saved": False})
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
        plan = self.plan_matrices(context.shapes)
        # The first Q is drawn on the host, so that it is equal on all devices.
        generator = context.without_rank.make_generator_for_rank(torch.device("cpu"))
        first_q = torch.randn(sum(tensor_sizes(plan.q)), generator=generator, dtype=dtype)
        return PowerSGDState(
            first_q.to(like.device),
            self.feedback.init(like),
            plan,
            torch.empty(sum(tensor_sizes(plan.p)), dtype=dtype, device=like.device),
            None if dtype == like.dtype else torch.empty_like(like, dtype=dtype),
        )

    def plan_matrices(self, shapes: Sequence[Sequence[int]]) -> MatrixPlan:
        """Choose what each tensor of a bucket is compressed to, given the shapes of all."""
        plan = MatrixPlan(matrix_shapes(shapes), [], [])
        for rows, columns in plan.m:
            rank = min(self.rank, rows, columns)
            if rank * (rows + columns) * self.min_compression_rate >= rows * columns:
                rank = 0
            plan.p.append((rows, rank or columns))
            plan.q.append((columns, rank))
        return plan

    def aggregate(
        self, grad: Tensor, step: StepSettings, state: PowerSGDState, comm: Comm, timer: PhaseTimer
    ) -> int:
        plan = state.plan
        is_compressed = [rank > 0 for _, rank in plan.q]
        update = grad if state.update is None else state.update  # it is written after the gradient was read
        with timer.phase("select"):
            acc = self.feedback.accumulate_in_gradient_units(grad, step.lr, state.feedback)
            views = (
                view_matrices(acc, plan.m),
                view_matrices(state.first, plan.p),
                view_matrices(state.second, plan.q),
                view_matrices(update, plan.m),
            )
            matrices = list(zip(is_compressed, *views, strict=True))
            for compresses, m, p, q, _ in matrices:
                if compresses:
                    torch.mm(m, q, out=p)  # 1.
                else:
                    p.copy_(m)
        with timer.phase("exchange"):
            comm.all_reduce(state.first)  # 2.
        with timer.phase("select"):
            for compresses, m, p, q, _ in matrices:
                if compresses:
                    p.copy_(torch.linalg.qr(p).Q)  # 3.
                    torch.mm(m.T, p, out=q)  # 4.
        with timer.phase("exchange"):
            if any(is_compressed):
                comm.all_reduce(state.second).div_(comm.size)  # 5.
        with timer.phase("select"):
            # An uncompressed tensor is delivered whole. Of a compressed one the workers' average is.
            delivered = list[SparseVector | DenseSlice]()
            start = 0
            for compresses, m, p, q, average in matrices:
                if compresses:
                    torch.mm(p, q.T, out=average)  # 6.
                else:
                    torch.div(p, comm.size, out=average)
                delivered.append(DenseSlice(start, (average if compresses else m).view(-1)))
                start += m.numel()
            self.feedback.retain_undelivered(Delivery([], delivered), state.feedback)
        with timer.phase("scatter"):
            if update is not grad:
                grad.copy_(update)
        return grad.numel()

    def predict_bytes(self, bucket_step: BucketStep) -> PredictedBytes:
        _, *messages = self.plan_matrices(bucket_step.shapes)
        lengths = [sum(tensor_sizes(shapes)) for shapes in messages]
        itemsize = bucket_step.value_dtype.itemsize
        return exact_bytes(*(cost.all_reduce(itemsize * n, bucket_step.world_size) for n in lengths))

    def broken_laws(self) -> dict[str, str]:
        approximated = {DENSE_AT_DENSITY_1: "every matrix is approximated at a low rank"}
        return approximated | self.feedback.broken_laws()
