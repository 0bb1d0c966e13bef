"""The time of an iteration without validation, by regression over the windows of a job's log.

Training logged the mean time of every 48 iterations, with the validation that rank 0 made in one of them: of
138 windows after the warm-up three hold no validation. The line of a window's time over its stall, the wait
for rank 0 that falls into it, has the iteration without validation as its intercept. Its slope is about 1.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from analysis.published.log_files import JOBS
from analysis.published.tables import iteration_table_of_job, window_table
from analysis.stats import WINDOWS, Estimate, student_t_quantile

# The first iterations are not counted: they warm up, and send more (density warm-up).
SETTLED_FROM_ITERATION = 100
# Windows over which the residuals' autocovariance counts, falling linearly to none (Newey and West 1987): the
# residuals of Top-k correlate by 0.6 from one window to the next, and still by 0.4 over ten.
MAX_LAG_WINDOWS = 30


class StallRegression(NamedTuple):
    """The least-squares line of the times of a job's windows over their stalls."""

    intercept_ms: Estimate  # of an iteration in which nobody validates
    slope: Estimate
    correlation: float  # of a window's residual with the next one's


def validation_free_step_ms(job: int) -> Estimate:
    """Return milliseconds of an iteration without validation."""
    return fit_job_stall_regression(job).intercept_ms


@functools.cache
def fit_job_stall_regression(job: int) -> StallRegression:
    """Return the line of a job's settled windows."""
    return fit_stall_regression(*settled_windows(job))


def validation_free_windows_ms(job: int) -> np.ndarray:
    """Return the times of the windows in which nobody validated."""
    times, stalls = settled_windows(job)
    free: np.ndarray = times[stalls == 0]
    return free


class SettledWindows(NamedTuple):
    """The windows of a job after its warm-up, (n,) each."""

    iteration_ms: np.ndarray  # mean time of an iteration
    stall_ms: np.ndarray  # how much of it is a stall


def settled_windows(job: int) -> SettledWindows:
    """Return each window after the warm-up: its mean time of an iteration, and how much of it is a stall.

    A stall is by how much the ranks other than 0 waited longer than in an iteration without validation.
    """
    windows = window_table()
    windows = windows[windows["job"] == job]
    ends = windows["until"].to_numpy()
    starts = np.array([0, *ends[:-1]])
    table = iteration_table_of_job(job)
    workers = JOBS[job].workers
    is_stall = table["long_waits"] > 0
    ordinary = table.loc[~is_stall & (table["iteration"] >= SETTLED_FROM_ITERATION), "comm_mean_ms"].mean()
    stalled_rows = table[is_stall & (table["iteration"] < ends[-1])]
    waits = (workers * stalled_rows["comm_mean_ms"] - stalled_rows["comm_min_ms"]) / (workers - 1) - ordinary
    stalls = np.zeros(len(ends))
    np.add.at(stalls, np.searchsorted(ends, stalled_rows["iteration"], side="right"), waits.to_numpy())
    is_settled = starts >= SETTLED_FROM_ITERATION
    return SettledWindows(windows["ms"].to_numpy()[is_settled], (stalls / (ends - starts))[is_settled])


def fit_stall_regression(times_ms: np.ndarray, stalls_ms: np.ndarray) -> StallRegression:
    """Fit least squares with 95 % intervals that allow for autocorrelated residuals and for unlike windows.

    Only three windows are without a stall, so that their residuals decide the intercept. Its variance is the
    greater of two. One takes all windows to scatter alike, with the residuals' autocovariance, and adds what
    a series this short hides of a slow drift: the variance of its mean. The other takes each window by its
    own residual (HC3). By simulation with residuals like those of the logs the interval covers the intercept
    in 93 to 98 % of cases.
    """
    n = len(times_ms)
    design = np.stack([np.ones(n), stalls_ms], axis=1)
    solve = np.linalg.pinv(design)  # (2, n)
    coefficients = solve @ times_ms
    residuals = times_ms - design @ coefficients
    covariance = np.correlate(residuals, residuals, "full")[n - 1 :] / (n - 2)
    tapered = covariance * np.clip(1 - np.arange(n) / (MAX_LAG_WINDOWS + 1), 0, None)
    lags = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    variances_if_alike = np.einsum("ij,jk,ik->i", solve, tapered[lags], solve)
    variances_if_alike[0] += max(0.0, tapered[0] + 2 * tapered[1:].sum()) / n
    leverage = np.einsum("ij,ji->i", design, solve)
    variances_if_unlike = ((solve * residuals / (1 - leverage)) ** 2).sum(axis=1)
    half_widths = student_t_quantile(n - 2) * np.sqrt(np.maximum(variances_if_alike, variances_if_unlike))
    intercept_ms, slope = (
        Estimate(float(value), float(value - half_width), float(value + half_width), n, WINDOWS)
        for value, half_width in zip(coefficients, half_widths, strict=True)
    )
    return StallRegression(intercept_ms, slope, float(covariance[1] / covariance[0]))
