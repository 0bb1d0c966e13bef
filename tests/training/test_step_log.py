"""What a worker records of its steps and epochs."""

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
from sparsify.doors.aggregator import Aggregator
from sparsify.doors.engine import NonFinite
from tests.training.digits import Lines

METRICS = Metrics(loss=1.5, top1=50.0, top5=90.0)


class Steps:
    """Steps with given losses, of a model of ten elements."""

    def __init__(
        self, comm: virtual.VirtualComm, mode: str = "serialised", stops: Callable[[], int] = lambda: 0
    ) -> None:
        self.log, self.timer, self.done = Lines(), PhaseTimer(mode, comm.now, stops=stops), 0
        self.step_log = StepLog(self.timer, comm, self.log, torch.device("cpu"))
        parameters = [("weight", Parameter(torch.zeros(10)))]
        self.aggregator = Aggregator(sparsify.build("topk", density=0.2), parameters, comm, self.timer)

    def make(self, epoch: int, *losses: float) -> None:
        for loss in losses:
            self.aggregator.gradients.flat.copy_(torch.arange(1.0, 11.0))
            with self.timer.step():
                report = self.aggregator.aggregate()
            finite = self.aggregator.gradients.finite()
            self.step_log.observe(self.done, epoch, torch.tensor(loss), 0.1, report, self.aggregator, finite)
            self.done += 1
        self.step_log.write()


def test_an_epochs_means_are_of_its_own_steps() -> None:
    def body(comm: virtual.VirtualComm) -> Lines:
        steps = Steps(comm)
        steps.make(0, 1.0, 3.0)
        steps.step_log.end_epoch(0, 1, METRICS)
        steps.make(1, 10.0)
        steps.make(1, 20.0, 60.0)
        steps.step_log.end_epoch(1, 4, METRICS)
        return steps.log

    (log,) = virtual.run(1, body)
    first, second = log.of("epoch")
    assert (first["epoch"], first["step"], first["train_loss"]) == (1, 2, 2.0)
    assert (second["epoch"], second["step"], second["train_loss"]) == (2, 5, 30.0)
    assert (first["val_loss"], first["val_top1"], first["val_top5"]) == METRICS
    assert second["sent_density"] == pytest.approx(0.2)
    assert second["wall_s"] == pytest.approx(sum(step["step_s"] for step in log.of("step")))


def test_a_step_with_a_stop_on_any_worker_says_so_on_all_and_counts_for_no_time() -> None:
    """Others may wait within a step for a worker that was stopped before it."""
    stops = [0, 0]

    def body(comm: virtual.VirtualComm) -> Lines:
        steps = Steps(comm, stops=lambda: stops[comm.rank])
        steps.make(0, 1.0)
        stops[1] = 2
        steps.make(0, 1.0, 1.0)
        steps.step_log.end_epoch(0, 2, METRICS)
        return steps.log

    for log in virtual.run(2, body):
        assert [step["stops"] for step in log.of("step")] == [0, 2, 0]
        first, _, last = (step["step_s"] for step in log.of("step"))
        assert log.of("epoch")[0]["wall_s"] == pytest.approx(first + last)


def test_steps_are_counted_from_0_and_epochs_from_1_and_are_written_once() -> None:
    def body(comm: virtual.VirtualComm) -> Lines:
        steps = Steps(comm)
        steps.make(0, 1.0, 2.0)
        steps.make(0, 3.0)
        return steps.log

    (log,) = virtual.run(1, body)
    assert [(step["step"], step["epoch"], step["loss"]) for step in log.of("step")] == [
        (0, 1, 1.0), (1, 1, 2.0), (2, 1, 3.0)
    ]  # fmt: skip
    for step in log.of("step"):
        assert step["sent_density"] == 0.2
        assert step["update_density"] == pytest.approx(0.2)  # a float32 on its way


def test_in_production_a_nan_is_told_by_all_when_the_window_closes() -> None:
    """The first one, by step and then by rank; before that nobody looks."""

    def body(comm: virtual.VirtualComm) -> str:
        steps = Steps(comm, "production")
        steps.make(0, 1.0, 2.0)
        for step in range(3):
            finite = torch.tensor([not (step >= 1 and comm.rank == 1) and not (step == 2 and comm.rank == 0)])
            with steps.timer.step():
                report = steps.aggregator.aggregate()
            steps.step_log.observe(2 + step, 0, torch.tensor(0.0), 0.1, report, steps.aggregator, finite)
        with pytest.raises(NonFinite) as caught:
            steps.step_log.write()
        return str(caught.value)

    assert virtual.run(3, body) == [
        "rank 1, step 3: the gradient of weight has a NaN or Inf; noticed after step 4, so weights and "
        "residuals may hold it: go back to the last checkpoint"
    ] * 3  # fmt: skip


def test_only_the_worker_that_validated_records_the_epoch() -> None:
    def body(comm: virtual.VirtualComm) -> Lines:
        steps = Steps(comm)
        steps.make(0, 1.0)
        steps.step_log.end_epoch(0, 0, METRICS if comm.rank == 0 else None)
        return steps.log

    assert [len(log.of("epoch")) for log in virtual.run(2, body)] == [1, 0]


def test_an_interrupted_epoch_goes_on_with_the_steps_that_it_had() -> None:
    def body(comm: virtual.VirtualComm) -> Lines:
        before, after = Steps(comm), Steps(comm)
        before.make(0, 1.0, 2.0)
        after.step_log.restore(before.step_log.state())
        after.make(0, 6.0)
        after.step_log.end_epoch(0, 2, METRICS)
        return after.log

    (log,) = virtual.run(1, body)
    assert log.of("epoch")[0]["train_loss"] == 3.0
