"""The line of a window's time over its stall: against numpy's, and how often its interval holds."""

from __future__ import annotations

import numpy as np
import pytest

from analysis.published.rederived import JOB
from analysis.published.unvalidated import free_windows_ms, line, settled_windows, stall_line, step_ms
from tests.analysis.values import correlated, interval

A100_TOPK, A100_DENSE = JOB["A100", "topk"], JOB["A100", "dense"]


@pytest.mark.parametrize("job", JOB.values())
def test_the_line_of_the_windows_is_that_of_least_squares(job: int) -> None:
    times, stalls = settled_windows(job)
    slope, intercept = np.polyfit(stalls, times, 1)
    without = step_ms(job)
    assert (without.value, stall_line(job).slope.value) == pytest.approx((intercept, slope))
    assert (without.n, without.of, without.decides) == (138, "windows", True)
    # A stall lengthens its window by itself, and three windows have none.
    low, high = interval(stall_line(job).slope)
    assert low < 1.002
    assert high > 1
    low, high = interval(without)
    assert len(free_windows_ms(job)) == 3
    assert low < free_windows_ms(job).mean() < high


def test_residuals_of_topk_correlate_and_those_of_dense_hardly() -> None:
    assert stall_line(A100_TOPK).correlation == pytest.approx(0.58, abs=0.01)
    assert stall_line(A100_DENSE).correlation == pytest.approx(0.08, abs=0.01)


def test_its_interval_holds_the_time_without_a_stall() -> None:
    # Residuals: share of a slow drift, and its correlation from window to window; the second and third are
    # those of Top-k's.
    for share, r in ((0.0, 0.0), (0.6, 0.97), (0.68, 0.95), (1.0, 0.76), (1.0, 0.88)):
        draws = np.random.default_rng(0)
        _, stalls = settled_windows(A100_TOPK)
        held = []
        for _ in range(200):
            drift = correlated(r, len(stalls), draws)
            noise = draws.normal(size=len(stalls))
            times = 250 + stalls + np.sqrt(share) * drift + np.sqrt(1 - share) * noise
            low, high = interval(line(times, stalls).without)
            held.append(low < 250 < high)
        assert 0.91 <= np.mean(held) <= 0.99, (share, r)
