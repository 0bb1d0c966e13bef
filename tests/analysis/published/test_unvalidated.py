"""The line of a window's time over its stall: against numpy's, and how often its interval holds."""

from __future__ import annotations

import numpy as np
import pytest

from analysis import published
from analysis.published.dependent import combined
from analysis.published.rederived import JOB
from analysis.published.unvalidated import free_windows_ms, line, settled_windows, stall_line, step_ms
from tests.analysis.values import interval

A100_TOPK, A100_DENSE = JOB["A100", "topk"], JOB["A100", "dense"]


@pytest.mark.parametrize("job", list(JOB.values()))
def test_the_line_of_the_windows_is_that_of_least_squares(job: int) -> None:
    times, stalls = settled_windows(job)
    slope, intercept = np.polyfit(stalls, times, 1)
    found = stall_line(job)
    assert (found.without.value, found.slope.value) == pytest.approx((intercept, slope))
    assert (found.without.n, found.without.of) == (138, "windows")
    assert found.without.decides


@pytest.mark.parametrize("job", list(JOB.values()))
def test_a_stall_lengthens_its_window_by_itself_and_three_windows_have_none(job: int) -> None:
    low, high = interval(stall_line(job).slope)
    assert low < 1.002
    assert high > 1
    without = interval(step_ms(job))
    assert len(free_windows_ms(job)) == 3
    assert without[0] < free_windows_ms(job).mean() < without[1]


@pytest.mark.parametrize("job", list(JOB.values()))
def test_the_windows_are_those_of_the_logged_speed(job: int) -> None:
    """The speed is the mean over all ranks' lines; the table has the line of the rank that printed first."""
    logged = published.windows()
    logged = logged[logged["job"] == job]
    assert len(logged) == 141
    assert logged["until"].iloc[[0, 1, -1]].to_list() == [41, 89, 6761]
    speed = published.jobs().set_index("job")["samples_per_s"][job]
    assert (8 * 128e3 / logged["ms"]).mean() == pytest.approx(speed, rel=2.5e-4)


def test_the_ratio_without_validation_holds_that_of_the_last_free_windows() -> None:
    ratio = combined(lambda one, other: one / other, step_ms(A100_TOPK), step_ms(A100_DENSE))
    low, high = interval(ratio)
    assert ratio.value == pytest.approx(7.27, abs=0.005)
    assert low < free_windows_ms(A100_TOPK)[-1] / free_windows_ms(A100_DENSE)[-1] < high
    assert high - low < 0.25


def test_residuals_of_topk_correlate_and_those_of_dense_hardly() -> None:
    assert stall_line(A100_TOPK).correlation == pytest.approx(0.58, abs=0.01)
    assert stall_line(A100_DENSE).correlation == pytest.approx(0.08, abs=0.01)


# Residuals: share of a slow drift, and its correlation from window to window; the second and third are those
# of Top-k's.
@pytest.mark.parametrize(("drifting", "r"), [(0.0, 0.0), (0.6, 0.97), (0.68, 0.95), (1.0, 0.76), (1.0, 0.88)])
def test_its_interval_holds_the_time_without_a_stall(drifting: float, r: float) -> None:
    draws = np.random.default_rng(0)
    _, stalls = settled_windows(A100_TOPK)
    n, held, tries = len(stalls), 0, 400
    for _ in range(tries):
        noise, drift = draws.normal(size=(2, n)), np.empty(n)
        drift[0] = noise[0, 0]
        for i in range(1, n):
            drift[i] = r * drift[i - 1] + np.sqrt(1 - r**2) * noise[0, i]
        times = 250 + stalls + np.sqrt(drifting) * drift + np.sqrt(1 - drifting) * noise[1]
        low, high = interval(line(times, stalls).without)
        held += low < 250 < high
    assert 0.91 <= held / tries <= 0.99
