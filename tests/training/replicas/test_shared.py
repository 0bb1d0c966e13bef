"""Virtual ranks share parameters and the optimiser's state, each held once, and nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from experiments.training.loop import Trainer
from experiments.training.replicas.shared import Replica
from sparsify.comm import virtual
from sparsify.core.timer import PhaseTimer
from sparsify.method import Dense, Method
from tests.sparsify import laws
from tests.training.digits import trainer

SIZE = 3


def trained(steps: int, method: Method, momentum: float = 0.9) -> list[Trainer]:
    def body(comm: virtual.VirtualComm) -> Trainer:
        timer = PhaseTimer("serialised", comm.now_s)
        worker = trainer(comm, timer, method, task={"momentum": momentum})
        for _ in range(steps):
            worker.step()
        return worker

    return virtual.run(SIZE, body)


def places(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_parameters_and_momentum_are_there_once_and_the_rest_is_each_ranks_own() -> None:
    first, *others = trained(2, laws.build("topk", 0.1, "global"))
    assert first.replica.optimiser.state_dict()["state"]  # momentum
    for other in others:
        assert places(other.model.parameters()) == places(first.model.parameters())
        assert other.replica.optimiser is first.replica.optimiser
        assert not set(places(other.model.buffers())) & set(places(first.model.buffers()))
        # Batch norm's statistics are of each rank's own batches.
        assert not all(map(torch.equal, other.model.buffers(), first.model.buffers()))
        assert other.aggregator.gradients.flat.data_ptr() != first.aggregator.gradients.flat.data_ptr()


@pytest.mark.parametrize("name", ["dense", "topk", "dgc", "oktopk", "powersgd"])
def test_ranks_that_share_end_where_ranks_with_replicas_of_their_own_end(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, after some steps with momentum and weight decay."""

    def ends() -> list[dict[str, Tensor]]:
        workers = trained(5, laws.build(name, 0.1, "global"), momentum=0.0 if name == "dgc" else 0.9)
        assert all(worker.replica.has_seen_no_disagreement() for worker in workers)
        return [worker.model.state_dict() for worker in workers]

    shared = ends()
    monkeypatch.setattr("experiments.training.loop.make_replica", Replica)
    for state, expected in zip(shared, ends(), strict=True):
        assert state.keys() == expected.keys()
        assert all(map(torch.equal, state.values(), expected.values()))


class Drifting(Dense):
    """Breaks the law that all workers have the same average, in the step after the first."""

    calls: ClassVar[Counter[int]] = Counter()  # by rank

    def aggregate(self, grad: Tensor, step: Any, state: Any, comm: Any, timer: Any) -> int:
        self.calls[comm.rank] += 1
        sent = super().aggregate(grad, step, state, comm, timer)
        if comm.rank == 1 and self.calls[1] == 2:
            grad[0] += 1
        return sent


def test_averages_that_differ_are_noticed_although_parameters_cannot() -> None:
    for steps, agrees in ((1, True), (3, False)):
        Drifting.calls.clear()
        assert {worker.replica.has_seen_no_disagreement() for worker in trained(steps, Drifting())} == {
            agrees
        }


def test_each_rank_is_charged_for_what_is_done_once() -> None:
    """By a clock that nothing else moves."""
    seconds = 0.0

    class At(float):
        def elapsed_time(self, end: float) -> float:
            return 1e3 * (end - self)

    def step() -> None:
        nonlocal seconds
        seconds += 2.0

    def body(comm: virtual.VirtualComm) -> float:
        before = comm.record_mark()
        comm.run_on_rank_0(step)
        return before.elapsed_time(comm.record_mark()) / 1e3

    assert virtual.run(4, body, record_event=lambda: At(seconds)) == [2.0] * 4
    assert seconds == 2.0


def test_bits_are_compared_and_not_numbers() -> None:
    def body(comm: virtual.VirtualComm) -> list[bool]:
        nan = torch.tensor([float("nan"), 0.0])
        zero = torch.tensor([-0.0 if comm.rank else 0.0])
        of_last = torch.full((3,), float(comm.rank == SIZE - 1))
        dtypes = (torch.float16, torch.float32, torch.float64)
        return [
            bool(comm.is_equal_on_all_ranks(tensor.to(dtype)))
            for dtype in dtypes
            for tensor in (nan, zero, of_last)
        ]

    assert virtual.run(SIZE, body) == [[True, False, False] * 3] * SIZE


def test_ranks_at_other_collectives_or_with_other_shapes_are_told_so() -> None:
    def gather_alone(comm: virtual.VirtualComm) -> None:
        collective = comm.all_reduce if comm.rank else comm.all_gather
        collective(torch.zeros(2))

    def reduce_another_shape(comm: virtual.VirtualComm) -> None:
        comm.all_reduce(torch.zeros(2 + comm.rank))

    for body in (gather_alone, reduce_another_shape):
        with pytest.raises(RuntimeError, match="the ranks do not stand at the same collective"):
            virtual.run(2, body)
