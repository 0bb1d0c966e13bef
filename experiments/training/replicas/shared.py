"""Parameters and optimizer state that are alike on all workers.

Each process has its own; virtual ranks share one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from sparsify.comm import Comm
from sparsify.comm.virtual import VirtualComm
from sparsify.wrappers.checks import broadcast_model

T = TypeVar("T")
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def make_replica(comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> Replica:
    """Give a fresh model rank 0's values, and an optimiser. Collective."""
    return (
        SharedReplica(comm, model, make_optimizer)
        if isinstance(comm, VirtualComm)
        else Replica(comm, model, make_optimizer)
    )


class Replica:
    """Parameters, and the optimiser that moves them: a process has its own."""

    def __init__(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        broadcast_model(model, comm)
        self.optimiser = make_optimizer(model)

    def update(self, rate: float, average: Tensor) -> None:
        """Make the optimizer's step.

        Args:
            average: (n,) of all gradients, in which the parameters' own `.grad` lie.
        """
        step_at_rate(self.optimiser, rate)

    def has_seen_no_disagreement(self) -> bool:
        """Return False if this worker saw averages differ between workers in some step; not collective."""
        return True  # each has parameters of its own, in which it would show


class SharedReplica(Replica):
    """A virtual rank's view of rank 0's parameters.

    One optimizer, rank 0's, moves them when all have their average. Each rank is charged the time that it
    takes.

    That is what each would do by itself, as long as all have the same average, bit for bit; so they are
    compared in every step. Buffers, gradients and residuals are each rank's own.
    """

    def __init__(self, comm: VirtualComm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.comm = comm
        for p, shared in zip(
            model.parameters(), comm.make_on_rank_0(lambda: [*model.parameters()]), strict=True
        ):
            p.data = shared.data
        self.optimiser = comm.make_on_rank_0(lambda: make_optimizer(model))
        for buffer in model.buffers():
            comm.broadcast(buffer)
        self.same: Tensor | None = None  # () bool on the device, of all steps so far

    def update(self, rate: float, average: Tensor) -> None:
        is_same = self.comm.is_equal_on_all_ranks(average)
        self.same = is_same if self.same is None else self.same & is_same
        self.comm.run_on_rank_0(lambda: step_at_rate(self.optimiser, rate))

    def has_seen_no_disagreement(self) -> bool:
        return self.same is None or bool(self.same)


def make_once_for_virtual_ranks(comm: Comm, make: Callable[[], T]) -> T:
    """Call `make`; virtual ranks call it once and share what it returns, which is alike on all workers."""
    return comm.make_on_rank_0(make) if isinstance(comm, VirtualComm) else make()


def step_at_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Move the parameters at this rate."""
    set_learning_rate(optimiser, rate)
    optimiser.step()


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameters: in each group times its `lr_factor`, where it has one."""
    for group in optimiser.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)
