"""What virtual ranks share: parameters and the optimiser's state are there once, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.training.loop import Trainer
from experiments.training.replicas.shared import Replica, SharedReplica, replica
from sparsify.comm import virtual
from sparsify.core.timer import PhaseTimer
from sparsify.doors.aggregator import Aggregator
from sparsify.method import Dense
from tests.sparsify import laws
from tests.training.digits import trainer

SIZE = 3


def lived(body_steps: int, method: Any = None) -> list[Trainer]:
    def body(comm: virtual.VirtualComm) -> Trainer:
        built = method or laws.build("topk", 0.1, "global")
        own = trainer(comm, PhaseTimer("production", comm.now), built)
        for _ in range(body_steps):
            own.step()
        return own

    return virtual.run(SIZE, body)


def places(tensors: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_parameters_and_momentum_are_there_once_and_the_rest_is_each_ranks_own() -> None:
    first, *others = lived(2)
    assert first.replica.optimiser.state_dict()["state"]  # momentum
    for other in others:
        assert places(other.model.parameters()) == places(first.model.parameters())
        assert other.replica.optimiser is first.replica.optimiser
        assert not set(places(other.model.buffers())) & set(places(first.model.buffers()))
        assert other.aggregator.gradients.flat.data_ptr() != first.aggregator.gradients.flat.data_ptr()
        assert isinstance(mine := other.aggregator, Aggregator)
        assert isinstance(theirs := first.aggregator, Aggregator)
        assert not torch.equal(mine.states[0].feedback, theirs.states[0].feedback)
    running = [torch.cat([b.flatten().double() for b in each.model.buffers()]) for each in (first, *others)]
    assert not torch.equal(running[0], running[1])  # batch norm's, of each rank's own batches


@pytest.mark.parametrize("name", ["dense", "topk", "dgc", "oktopk", "powersgd"])
def test_ranks_that_share_end_where_ranks_with_replicas_of_their_own_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, after some steps with momentum and weight decay."""

    def ends() -> list[dict[str, Tensor]]:
        method = laws.build(name, 0.1, "global")

        def body(comm: virtual.VirtualComm) -> dict[str, Tensor]:
            momentum = 0.0 if name == "dgc" else 0.9
            own = trainer(comm, PhaseTimer("serialised", comm.now), method, task={"momentum": momentum})
            for _ in range(5):
                own.step()
            assert own.replica.agreed()
            return {key: value.clone() for key, value in own.model.state_dict().items()}

        return virtual.run(SIZE, body)

    shared = ends()
    monkeypatch.setattr("experiments.training.loop.replica", Replica)
    for here, there in zip(shared, ends(), strict=True):
        assert here.keys() == there.keys()
        assert all(torch.equal(here[key], there[key]) for key in here)


class Drifting(Dense):
    """Breaks the law that all workers have the same average, in the step after the first."""

    def aggregate(self, grad: Tensor, step: Any, state: Any, comm: Any, timer: Any) -> int:
        self.calls[comm.rank] = self.calls.get(comm.rank, 0) + 1
        sent = super().aggregate(grad, step, state, comm, timer)
        if comm.rank == 1 and self.calls[1] == 2:
            grad[0] += 1
        return sent

    @property
    def calls(self) -> dict[int, int]:
        return CALLS


CALLS: dict[int, int] = {}


def test_averages_that_differ_are_noticed_although_parameters_cannot() -> None:
    CALLS.clear()
    assert all(own.replica.agreed() for own in lived(1, Drifting()))
    CALLS.clear()
    assert not any(own.replica.agreed() for own in lived(3, Drifting()))


def test_each_rank_is_charged_for_the_step_of_the_optimiser() -> None:
    """By a clock that only the optimiser's step moves."""
    seconds = 0.0

    class At(float):
        def elapsed_time(self, end: float) -> float:
            return 1e3 * (end - self)

    def slow(model: nn.Module) -> torch.optim.SGD:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)

        def move(*_: Any) -> None:
            nonlocal seconds
            seconds += 2.0

        optimiser.register_step_post_hook(move)
        return optimiser

    def body(comm: virtual.VirtualComm) -> float:
        model = nn.Linear(2, 2)
        own = replica(comm, model, slow)
        assert isinstance(own, SharedReplica)
        before = comm.mark()
        own.update(0.5, torch.zeros(6))
        return before.elapsed_time(comm.mark()) / 1e3

    assert virtual.run(4, body, event=lambda: At(seconds)) == [2.0] * 4
    assert seconds == 2.0  # done once


def test_what_is_made_once_is_made_by_rank_0_and_not_kept() -> None:
    made = []

    class Thing:
        def __init__(self, rank: int) -> None:
            made.append(rank)

    def body(comm: virtual.VirtualComm) -> tuple[int, int]:
        first, second = comm.first(lambda: Thing(comm.rank)), comm.first(lambda: Thing(comm.rank))
        comm.barrier()
        third = comm.first(lambda: Thing(comm.rank))
        assert all(kept is None for kept in comm.cluster.made[:2])
        return id(first), id(second) if third else 0

    assert len(set(virtual.run(SIZE, body))) == 1
    assert made == [0, 0, 0]


def test_bits_are_compared_and_not_numbers() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    for dtype in (torch.float16, torch.float32, torch.float64):

        def body(comm: virtual.VirtualComm, dtype: torch.dtype = dtype) -> tuple[bool, bool, bool]:
            own, minus = nan.to(dtype), torch.tensor([0.0, -0.0]).to(dtype)
            last = torch.full((3,), float(comm.rank == SIZE - 1), dtype=dtype)
            return (
                bool(comm.same(own.clone())),
                bool(comm.same(minus[:1] if comm.rank else minus[1:])),
                bool(comm.same(last)),
            )

        assert virtual.run(SIZE, body) == [(True, False, False)] * SIZE
