"""Averaging's share of a step is reported once, where it is much."""

from __future__ import annotations

from typing import cast

import pytest

from sparsify.comm import Comm, CountingComm
from sparsify.wrappers.engine import StepReport
from sparsify.wrappers.overhead import LAST_STEP, AveragingOverheadMonitor, fewer_messages_advice


class Clock:
    """A time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now_s)

    def step(
        self, watched: AveragingOverheadMonitor, own_s: float, whole_s: float, is_skipped: bool = False
    ) -> None:
        self.now_s += whole_s - own_s
        with watched.measure_averaging():
            self.now_s += own_s
            watched.comm.collectives += 3
        watched.end_step(None if is_skipped else StepReport(10, 100, 2_000_000, 1, 3))


class Worker:
    """As much of a communicator of two workers as is asked for its name."""

    size, algorithm, links, predict_cost = 2, Comm.algorithm, Comm.links, Comm.predict_cost

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_where_the_last_measured_step_is_skipped_the_next_one_tells(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    watched = AveragingOverheadMonitor(CountingComm(cast(Comm, Worker(0))), "")
    for step in range(1, 3 * LAST_STEP):
        clock.step(watched, 0.03, 0.1, is_skipped=step in (LAST_STEP, LAST_STEP + 1))
        assert len(caplog.messages) == (step >= LAST_STEP + 2)


@pytest.mark.parametrize(
    ("rank", "own_s", "is_told"), [(0, 0.03, True), (0, 0.011, True), (0, 0.009, False), (1, 0.03, False)]
)
def test_what_exceeds_a_tenth_is_told_once_by_rank_0(
    rank: int, own_s: float, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    watched = AveragingOverheadMonitor(
        CountingComm(cast(Comm, Worker(rank))), fewer_messages_advice(False, 42)
    )
    for at in range(3 * LAST_STEP):
        clock.step(watched, 5.0 if at < 3 else own_s, 9.0 if at < 3 else 0.1)  # the first ones warm up
        assert bool(caplog.messages) is (is_told and at + 1 >= LAST_STEP)
    assert len(caplog.messages) == is_told
    for line in caplog.messages:
        assert line.startswith(
            f"averaging takes {own_s / 0.1:.0%} of a step ({1e3 * own_s:.1f} of 100.0 ms, "
        )
        assert "sends 2.00 MB in 3 collectives; this method sends its 42 buckets one after the other" in line
