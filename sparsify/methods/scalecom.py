from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparsify.comm import Comm
from sparsify.exchange import AllReduce
from sparsify.feedback import LowPass
from sparsify.kernels import Workspace
from sparsify.method import Sparsifier
from sparsify.ranges import Density, NonNegativeInt, PositiveFraction, Scope, check_arguments
from sparsify.select import FixedCountSelector
from sparsify.types import BucketContext, BucketStep, CollectiveCall, Selection, index_dtype


@check_arguments
def scalecom(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    beta: PositiveFraction = 1.0,
) -> Sparsifier:
    """ScaleCom: one worker's top-k is used by all, and they take turns (CLT-k). Chen et al. 2020 (NeurIPS).

    A step on worker r of P, with the residual e:

    1. acc = e + gradient
    2. The leader of step t, worker t mod P, chooses its k largest and broadcasts their indices (CLT-k).
    3. An all-reduce averages the values at these indices.
    4. e <- (1 - beta) e + beta (acc - the values of acc that were sent)

    As all workers send the same elements, the bytes of a worker do not grow with the number of workers. The
    method relies on residuals that resemble each other. The top-k is exact. No host synchronisation.

    Args:
        density: k/n, the share of the elements that all workers send. Lower: fewer bytes, more error.
        beta: weight of the new errors in the residual (`sparsify.feedback.LowPass`). 1 is plain error
            feedback. The paper takes 0.1 to 0.3 where batch and learning rate are scaled up; then part of
            each gradient is lost for good.
    """
    return Sparsifier(density, LeaderTopK(), LowPass(beta), AllReduce(), scope, tuple(density_warmup))


@dataclass
class LeaderRotation:
    """The number of the step, from which the leader follows."""

    workspace: Workspace = field(metadata={"saved": False})
    step: NonNegativeInt = 0


@dataclass(frozen=True)
class LeaderTopK(FixedCountSelector):
    """A selector of the k largest elements of one worker, for all workers (CLT-k)."""

    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> LeaderRotation:
        return LeaderRotation(Workspace.with_kernel(like, context))

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        return [CollectiveCall("broadcast", bucket_step.index_nbytes * bucket_step.k)]

    def select(self, acc: Tensor, k: int, comm: Comm, state: LeaderRotation) -> Selection:
        leader = state.step % comm.size
        state.step += 1
        dtype = index_dtype(acc.numel())
        if comm.rank == leader:  # 2.
            indices = state.workspace.kernel.topk(acc, None, k).indices.to(dtype)
        else:
            indices = torch.empty(k, dtype=dtype, device=acc.device)
        comm.broadcast(indices, leader)
        return Selection(indices.long())
