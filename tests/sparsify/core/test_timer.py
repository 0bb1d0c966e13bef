"""The timer: every second is counted once, and each mode does what its name promises."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import Mock

import pytest

from experiments.training import datasets
from experiments.training.settings import TrainSettings
from sparsify.comm import virtual
from sparsify.core.timer import TIMING_MODES, PhaseTimer
from tests.training.digits import CPU, Lines, trainer

EXPLAINED = {"io", "forward", "backward", "check", "select", "exchange", "scatter", "update"}  # not the wait


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


def alone(mine: list[float]) -> list[list[float]]:
    return [mine]


def test_phases_are_added_up_an_inner_one_interrupts_the_outer_and_the_rest_is_unaccounted() -> None:
    clock = Clock()
    timer = PhaseTimer("serialised", clock, keep_spans=lambda step: step == 1)
    for _ in range(2):
        with timer.step():
            for duration in (2.0, 3.0):
                with timer.phase("select"):
                    clock.time += duration
            with timer.phase("forward"):
                clock.time += 1.0
                with timer.phase("wait"):
                    clock.time += 4.0
                clock.time += 8.0
            clock.time += 0.5
    first, second = timer.finish_window_and_split_waits(alone)
    assert first.phases == {"select": 5.0, "forward": 9.0, "wait": 4.0}
    assert first.step_s == 18.5
    assert first.spans == []
    assert second.spans == [
        ("select", 18.5, 2.0), ("select", 20.5, 3.0), ("forward", 23.5, 1.0), ("wait", 24.5, 4.0),
        ("forward", 28.5, 8.0),
    ]  # fmt: skip
    assert timer.finish_window_and_split_waits(alone) == []


def test_only_serialised_waits_for_the_device_within_a_step() -> None:
    for mode, num_waits in (("serialised", 4), ("production", 0), ("as_published", 0)):
        synchronise = Mock()
        timer = PhaseTimer(mode, Clock(), synchronise)
        with timer.step(), timer.phase("forward"):
            pass
        assert synchronise.call_count == num_waits, mode
    with pytest.raises(ValueError, match=", ".join(TIMING_MODES)):
        PhaseTimer("fast")


def test_production_splits_collectives_by_the_shortest_over_the_ranks() -> None:
    clock = Clock()
    timer = PhaseTimer("production", clock)
    with timer.step():
        for duration in (5.0, 1.0):
            with timer.phase("forward"):
                clock.time += 2.0
            with timer.collective():
                clock.time += duration
    (sample,) = timer.finish_window_and_split_waits(lambda mine: [mine, [1.0, 3.0]])
    assert sample.phases == {"wait": 4.0, "transfer": 2.0}
    assert sample.step_s == 10.0


def test_a_step_that_failed_is_no_sample() -> None:
    timer = PhaseTimer("serialised", Clock())
    with pytest.raises(ZeroDivisionError), timer.step(), timer.phase("forward"):
        raise ZeroDivisionError
    with timer.step(), timer.phase("forward"):  # and the timer still works
        pass
    assert [sample.phases for sample in timer.finish_window_and_split_waits(alone)] == [{"forward": 0.0}]


def trained(mode: str, method: str, **settings: Any) -> list[Lines]:
    """Train on two virtual ranks; return their logs."""

    # The published operators: the fast ones would leave too little to be told apart from nothing.
    def body(comm: virtual.VirtualComm) -> Lines:
        log = Lines()
        trainer(comm, PhaseTimer(mode, comm.now_s), method, log, select="torch", **settings).run()
        return log

    return virtual.run(2, body)


def test_serialised_phases_add_up_to_the_step() -> None:
    """The model is the VGG-16 of the digits (14.7 million gradients)."""
    data = datasets.load("digits32", None, CPU)
    logs = trained("serialised", "topk", name="vgg16_digits", data=data, steps=2, task={"batch_size": 8})
    for step in (step for log in logs for step in log.of("step")):
        assert set(step["phases"]) == {*EXPLAINED, "wait", "transfer"}
        explained = math.fsum(step["phases"].values())
        assert 0.98 * step["step_s"] <= explained <= step["step_s"]


def test_as_published_communication_is_one_unsplit_wait() -> None:
    logs = trained("as_published", "topk", steps=6, train=TrainSettings(validate="epoch"))
    phases = [set(step["phases"]) for log in logs for step in log.of("step")]
    assert set.union(*phases) <= {*EXPLAINED, "synchronize", "validate"}
