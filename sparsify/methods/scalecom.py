from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsify import cost
from sparsify.aggregate import Sparsifier
from sparsify.comm import Comm
from sparsify.exchange import AllReduce
from sparsify.feedback import LowPass
from sparsify.kernels import Search, kernel
from sparsify.parts import Place, Selection
from sparsify.select import ExactlyK


def scalecom(
    density: float = 0.001,
    scope: str | float = "global",
    density_warmup: Sequence[float] = (),
    beta: float = 1.0,
) -> Sparsifier:
    """ScaleCom: in turn one worker's top-k is everybody's (CLT-k). Chen et al. 2020 (NeurIPS).

    Only the leader of a step runs a top-k; it broadcasts k indices, and values are allreduced without any,
    so that bytes do not grow with the workers. It relies on residuals that resemble each other. The top-k is
    exact. Host synchronisations: none.

    Args:
        beta: of the low-pass filter on residuals, `sparsify.feedback.LowPass`. 1 is plain error feedback;
            the paper takes 0.1 to 0.3 where batch and learning rate are scaled up, which filters part of each
            gradient away for good.
    """
    return Sparsifier(density, LeaderTopK(), LowPass(beta), AllReduce(), scope, tuple(density_warmup))


@dataclass
class Turn:
    """Whose turn it is."""

    search: Search
    step: int = 0


@dataclass(frozen=True)
class LeaderTopK(ExactlyK):
    """CLT-k: the k largest of worker t mod P, for all."""

    shared: ClassVar[bool] = True

    def init(self, like: Tensor, place: Place) -> Turn:
        return Turn(Search(kernel(like, place.select)))

    def select(self, acc: Tensor, k: int, comm: Comm, state: Turn) -> Selection:
        leader = state.step % comm.size
        state.step += 1
        kind = torch.int32 if acc.numel() <= 2**31 else torch.int64
        if comm.rank == leader:
            indices = state.search.kernel.top(acc, None, k).indices.to(kind)
        else:
            indices = torch.empty(k, dtype=kind, device=acc.device)
        comm.broadcast(indices, leader)
        return Selection(indices.long(), cost.broadcast(indices.nbytes, comm.size).sent_bytes)
