"""What averaging takes of a step is told once, where it is much."""

from __future__ import annotations

from typing import cast

import pytest

from sparsify.comm import Comm, CountingComm
from sparsify.wrappers.engine import StepReport
from sparsify.wrappers.overhead import LAST_STEP, AveragingOverhead, fewer_messages_advice
from tests.sparsify.laws import ALONE


class Clock:
    """A time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now_s)

    def step(self, overhead: AveragingOverhead, own_s: float, whole_s: float) -> None:
        self.now_s += whole_s - own_s
        with overhead.measure():
            self.now_s += own_s
            overhead.comm.collectives += 3
        overhead.end_step(StepReport(10, 100, 2_000_000, 1, 3))


@pytest.mark.parametrize(("own_s", "is_told"), [(0.03, True), (0.011, True), (0.009, False)])
def test_what_exceeds_a_tenth_is_told_once(
    own_s: float, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    overhead = AveragingOverhead(CountingComm(ALONE), fewer_messages_advice(False, 42))
    for at in range(3 * LAST_STEP):
        clock.step(overhead, 5.0 if at < 3 else own_s, 9.0 if at < 3 else 0.1)  # the first ones warm up
        assert bool(caplog.messages) is (is_told and at + 1 >= LAST_STEP)
    assert len(caplog.messages) == is_told
    for line in caplog.messages:
        assert line.startswith(
            f"averaging takes {own_s / 0.1:.0%} of a step ({1e3 * own_s:.1f} of 100.0 ms, "
        )
        assert "sends 2.00 MB in 3 collectives; this method sends its 42 buckets one after the other" in line


def test_only_rank_0_tells(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Other:
        rank, size, algorithm, links, predict_cost = 1, 2, Comm.algorithm, Comm.links, Comm.predict_cost

    clock, overhead = Clock(monkeypatch), AveragingOverhead(CountingComm(cast(Comm, Other())), "")
    for _ in range(2 * LAST_STEP):
        clock.step(overhead, 0.05, 0.1)
    assert not caplog.messages
