"""Mode as_published: phases leak, and rank 0 validates, where the published code lets them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from experiments.training.settings import TrainSettings
from experiments.training.task import Metrics, Task
from sparsify.comm import virtual
from sparsify.core.timer import PhaseTimer
from tests.training.digits import Lines, trainer

METRICS = Metrics(1.5, 50.0, 90.0)
TICK_S, VALIDATION_S = 1e-6, 1.0  # between two looks at the clock; and what a validation takes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock by one that moves a little when it is read, and a second at each validation."""
    shown = 0.0

    def look() -> float:
        nonlocal shown
        shown += TICK_S
        return shown

    def validate(*_: Any) -> Metrics:
        nonlocal shown
        shown += VALIDATION_S
        return METRICS

    monkeypatch.setattr(time, "perf_counter", look)
    monkeypatch.setattr(Task, "evaluate", validate)


def trained(mode: str, ranks: int, steps: int, method: str = "topk") -> list[Lines]:
    def body(comm: virtual.VirtualComm) -> Lines:
        log, timer = Lines(), PhaseTimer(mode, comm.now_s, keep_spans=lambda step: True)
        trainer(comm, timer, method, log, steps=steps, train=TrainSettings(epoch_steps=3)).run()
        return log

    return virtual.run(ranks, body)


@pytest.mark.parametrize(("method", "ranks", "validations"), [("dense", 2, 1), ("topk", 3, 2)])
def test_w_ranks_and_v_validations_give_exactly_w_less_1_times_v_long_waits(
    method: str, ranks: int, validations: int, clock: None
) -> None:
    logs = trained("as_published", ranks, steps=3 * validations + 1, method=method)
    long = [
        (rank, step["step"])
        for rank, log in enumerate(logs)
        for step in log.of("step")
        if step["phases"]["synchronize"] > VALIDATION_S / 2
    ]
    following = [3 * (validation + 1) for validation in range(validations)]  # in the steps after whole epochs
    assert sorted(long) == [(rank, step) for rank in range(1, ranks) for step in following]
    validating = [[step["step"] for step in log.of("step") if "validate" in step["phases"]] for log in logs]
    assert validating == [following, *([[]] * (ranks - 1))]
    losses = [step["loss"] for step in logs[0].of("step")]
    for number, line in enumerate(logs[0].of("epoch")):
        assert (line["epoch"], line["step"]) == (number + 1, min(3 * (number + 1), len(losses)))
        assert (line["val_loss"], line["val_top1"], line["val_top5"]) == METRICS
        assert line["train_loss"] == pytest.approx(np.mean(losses[3 * number : line["step"]]))


def test_in_the_other_modes_no_validation_is_in_a_step(clock: None) -> None:
    for mode in ("serialised", "production"):
        for log in trained(mode, ranks=3, steps=7):
            assert max(step["step_s"] for step in log.of("step")) < VALIDATION_S / 2


def test_the_loss_is_read_after_compression_and_before_the_final_wait(clock: None) -> None:
    """So that what backpropagation has left on the device is counted as compression."""
    for log in trained("as_published", ranks=2, steps=2):
        for step in log.of("step"):
            phases = [phase for phase, _, _ in step["spans"]]
            of_interest = [phase for phase in phases if phase in ("backward", "select", "synchronize")]
            assert of_interest[:4] == ["backward", "select", "backward", "synchronize"]
