"""The timer: every second is counted once, and each mode does what its name promises."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from experiments.training import datasets
from experiments.training.settings import Train
from sparsify.comm import virtual
from sparsify.core.timer import MODES, PhaseTimer
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


def test_phases_are_added_up_and_the_rest_is_unaccounted() -> None:
    clock = Clock()
    timer = PhaseTimer("serialised", clock, keep_spans=lambda step: step == 1)
    for _ in range(2):
        with timer.step():
            for name, duration in (("forward", 1.0), ("select", 2.0), ("select", 3.0)):
                with timer.phase(name):
                    clock.time += duration
            clock.time += 0.5
    first, second = timer.resolve(alone)
    assert first.phases == {"forward": 1.0, "select": 5.0}
    assert first.step_s == 6.5
    assert first.spans == []
    assert second.spans == [("forward", 6.5, 1.0), ("select", 7.5, 2.0), ("select", 9.5, 3.0)]
    assert timer.resolve(alone) == []


@pytest.mark.parametrize(
    ("mode", "synchronised"), [("serialised", 4), ("production", 0), ("as_published", 0)]
)
def test_only_serialised_waits_for_the_device_within_a_step(mode: str, synchronised: int) -> None:
    calls = []
    timer = PhaseTimer(mode, Clock(), synchronise=lambda: calls.append(1))
    with timer.step(), timer.phase("forward"):
        pass
    assert len(calls) == synchronised


def test_production_splits_collectives_by_the_shortest_over_the_ranks() -> None:
    clock = Clock()
    timer = PhaseTimer("production", clock)
    with timer.step():
        for duration in (5.0, 1.0):
            with timer.phase("forward"):
                clock.time += 2.0
            with timer.collective():
                clock.time += duration
    (sample,) = timer.resolve(lambda mine: [mine, [1.0, 3.0]])
    assert sample.phases == {"wait": 4.0, "transfer": 2.0}
    assert sample.step_s == 10.0


def test_a_phase_inside_another_one_interrupts_it() -> None:
    clock = Clock()
    timer = PhaseTimer("serialised", clock, keep_spans=lambda step: True)
    with timer.step(), timer.phase("select"):
        clock.time += 1.0
        with timer.phase("wait"):
            clock.time += 2.0
        with timer.phase("transfer"):
            clock.time += 4.0
        clock.time += 8.0
    (sample,) = timer.resolve(alone)
    assert sample.phases == {"select": 9.0, "wait": 2.0, "transfer": 4.0}
    assert sample.spans == [
        ("select", 0.0, 1.0), ("wait", 1.0, 2.0), ("transfer", 3.0, 4.0), ("select", 7.0, 8.0)
    ]  # fmt: skip
    assert sample.step_s == 15.0


def test_a_step_that_failed_is_no_sample() -> None:
    timer = PhaseTimer("serialised", Clock())
    with pytest.raises(ZeroDivisionError), timer.step(), timer.phase("forward"):
        raise ZeroDivisionError
    assert timer.resolve(alone) == []
    with timer.step(), timer.phase("forward"):  # and the timer still works
        pass
    assert len(timer.resolve(alone)) == 1


def test_an_unknown_mode_lists_the_modes() -> None:
    with pytest.raises(ValueError, match=", ".join(MODES)):
        PhaseTimer("fast")


def trained(mode: str, method: str = "topk", steps: int = 12, **task: object) -> list[Lines]:
    """Train the VGG-16 of the digits (14.7 million gradients) on two virtual ranks; returns their logs."""
    torch.set_num_threads(1)
    name = "vgg16_digits" if steps < 10 else "cnn_digits"
    data = datasets.load("digits32" if steps < 10 else "digits", None, CPU)
    train = Train(validate="epoch" if steps >= 10 else "never")
    # The published operators: the fast ones would leave too little to be told apart from nothing.
    how: dict[str, Any] = {
        "name": name, "task": task, "data": data, "steps": steps, "train": train, "select": "torch",
    }  # fmt: skip

    def body(comm: virtual.VirtualComm) -> Lines:
        log = Lines()
        trainer(comm, PhaseTimer(mode, comm.now), method, log, **how).run()
        return log

    return virtual.run(2, body)


def test_serialised_phases_add_up_to_the_step_within_2_percent() -> None:
    for log in trained("serialised", steps=3, batch_size=8):
        for step in log.of("step"):
            assert set(step["phases"]) == {*EXPLAINED, "wait", "transfer"}
            explained = math.fsum(step["phases"].values())
            assert 0.98 * step["step_s"] <= explained <= step["step_s"]


def test_the_control_method_spends_next_to_nothing_on_selection() -> None:
    """Of a step with 14.7 million gradients; Top-k's own share, beside it, is not small."""
    share = {}
    for method in ("control", "topk"):
        step = trained("serialised", method, steps=3, batch_size=8)[0].of("step")[-1]
        share[method] = step["phases"]["select"] / step["step_s"]
    assert share["control"] < 0.02
    assert share["topk"] > 0.1


def test_as_published_communication_is_one_unsplit_wait() -> None:
    phases = [set(step["phases"]) for log in trained("as_published") for step in log.of("step")]
    assert set.union(*phases) <= {*EXPLAINED, "synchronize", "validate"}
