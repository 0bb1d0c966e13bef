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
from sparsify.select import ExactlyKSelector
from sparsify.types import BucketContext, BucketStep, CollectiveCall, Selection, index_dtype


@check_arguments
def scalecom(
    density: Density = 0.001,
    scope: Scope = "global",
    density_warmup: Sequence[Density] = (),
    beta: PositiveFraction = 1.0,
) -> Sparsifier:
    """ScaleCom: one worker's top-k is used by all, and they take turns (CLT-k). Chen et al. 2020 (NeurIPS).

    Only the leader of a step runs a top-k; it broadcasts k indices, and values are allreduced without any,
    so that bytes do not grow with the workers. It relies on residuals that resemble each other. The top-k is
    exact. Host synchronisations: none.

    Args:
        density: k/n, the share of the elements that the workers send, all of them the same ones.
        beta: of the low-pass filter on residuals, `sparsify.feedback.LowPass`. 1 is plain error feedback; the
            paper takes 0.1 to 0.3 where batch and learning rate are scaled up, which filters part of each
            gradient away for good.
    """
    return Sparsifier(density, LeaderTopK(), LowPass(beta), AllReduce(), scope, tuple(density_warmup))


@dataclass
class LeaderTurn:
    """Whose turn it is to lead."""

    workspace: Workspace = field(metadata={"saved": False})
    step: NonNegativeInt = 0


@dataclass(frozen=True)
class LeaderTopK(ExactlyKSelector):
    """CLT-k: the k largest of worker t mod P, for all."""

    shared: ClassVar[bool] = True

    def init(self, like: Tensor, context: BucketContext) -> LeaderTurn:
        return LeaderTurn(Workspace.with_kernel(like, context))

    def collective_calls(self, bucket_step: BucketStep) -> list[CollectiveCall]:
        return [CollectiveCall("broadcast", bucket_step.index_nbytes * bucket_step.k)]

    def select(self, acc: Tensor, k: int, comm: Comm, state: LeaderTurn) -> Selection:
        leader = state.step % comm.size
        state.step += 1
        dtype = index_dtype(acc.numel())
        if comm.rank == leader:
            indices = state.workspace.kernel.topk(acc, None, k).indices.to(dtype)
        else:
            indices = torch.empty(k, dtype=dtype, device=acc.device)
        comm.broadcast(indices, leader)
        return Selection(indices.long())
