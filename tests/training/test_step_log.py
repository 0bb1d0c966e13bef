"""Records of a worker of its steps and epochs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import Parameter

import sparsify
from experiments.training.step_log import StepLog
from experiments.training.task import Metrics
from sparsify.comm import virtual
from sparsify.core.timer import PhaseTimer
from sparsify.wrappers.aggregator import Aggregator
from sparsify.wrappers.engine import NonFiniteGradientError
from tests.training.digits import Lines


class Steps:
    """Steps with given losses, of a model of ten elements."""

    def __init__(
        self, comm: virtual.VirtualComm, mode: str = "serialised", stops: Callable[[], int] = lambda: 0
    ) -> None:
        self.done = 0
        self.log = Lines()
        self.timer = PhaseTimer(mode, comm.now_s, count_stops=stops)
        self.step_log = StepLog(self.timer, comm, self.log, torch.device("cpu"))
        parameters = [("weight", Parameter(torch.zeros(10)))]
        self.aggregator = Aggregator(sparsify.build("topk", density=0.2), parameters, comm, self.timer)

    def make(self, epoch: int, loss: float, is_finite: bool = True) -> None:
        self.aggregator.gradients.flat.copy_(torch.arange(1.0, 11.0))
        with self.timer.step():
            report = self.aggregator.aggregate()
        finite = torch.tensor([is_finite])
        self.step_log.add_step(self.done, epoch, torch.tensor(loss), 0.1, report, self.aggregator, finite)
        self.done += 1


def test_a_step_with_a_stop_on_any_worker_says_so_on_all_and_counts_for_no_time() -> None:
    """Others may wait within a step for a worker that was stopped before it."""

    def body(comm: virtual.VirtualComm) -> Lines:
        stops = 0
        steps = Steps(comm, stops=lambda: stops)
        steps.make(0, 1.0)
        stops = 2 * comm.rank
        steps.make(0, 1.0)
        steps.make(0, 1.0)
        steps.step_log.write_waiting_steps()
        steps.step_log.add_epoch(0, 2, Metrics(1.5))
        return steps.log

    logs = virtual.run(2, body)
    for log in logs:
        assert [step["stops"] for step in log.of("step")] == [0, 2, 0]
    first, _, last = (step["step_s"] for step in logs[0].of("step"))
    assert logs[0].of("epoch")[0]["wall_s"] == pytest.approx(first + last)


def test_in_production_a_nan_is_told_by_all_when_the_window_closes() -> None:
    """The first one, by step and then by rank; before that nobody looks."""
    first_bad_step = [4, 3, 9]  # of each rank

    def body(comm: virtual.VirtualComm) -> str:
        steps = Steps(comm, "production")
        for step in range(5):
            steps.make(0, 1.0, is_finite=step < first_bad_step[comm.rank])
            if step == 1:
                steps.step_log.write_waiting_steps()
        with pytest.raises(NonFiniteGradientError) as caught:
            steps.step_log.write_waiting_steps()
        return str(caught.value)

    assert virtual.run(3, body) == [
        "rank 1, step 3: the gradient of weight has a NaN or Inf; noticed after step 4, so weights and "
        "residuals may hold it: go back to the last checkpoint"
    ] * 3  # fmt: skip


def test_in_production_a_window_waits_for_the_device_when_it_closes_and_not_before() -> None:
    waits = list[int]()
    timer = PhaseTimer("production", synchronise=lambda: waits.append(timer.num_steps))
    for _ in range(3):
        with timer.step(), timer.phase("select"):
            pass
    timer.finish_window_and_split_waits(lambda mine: [mine])
    assert waits == [3]
