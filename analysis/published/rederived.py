"""Results re-derived from the job logs of Yoon and Oh 2022, with intervals over their iterations.

Every number is computed from the shipped tables. An interval says how well one job's iterations determine it;
how much another job would differ, it can't say, for each configuration ran once. `block_intervals` makes the
intervals of what each iteration printed.

Rank 0 validated after every 49 iterations inside the timed loop, while the other seven waited in the
iteration's communication. `validation_free.validation_free_step_ms` is the time of an iteration without that.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.published.block_intervals import JackknifeParts, leave_one_block_out_sums
from analysis.published.log_files import JOBS, WINDOW_ITERATIONS
from analysis.published.tables import iteration_table_of_job, job_table
from analysis.published.validation_free import SETTLED_FROM_ITERATION

BATCH_PER_WORKER = 128
JOB_BY_GPU_AND_METHOD = {(job.gpu, job.method): number for number, job in JOBS.items() if job.workers == 8}
JOB_BY_LINK_AND_METHOD = {(job.link, job.method): number for number, job in JOBS.items() if job.workers == 4}
# The authors' parser of dense logs left out shorter communication; their parser of sparse logs did not.
DENSE_FILTER_MS = 0.1


class JobJackknifeSums(NamedTuple):
    """The sums over a job's settled iterations, all and without each block, (1 + blocks,) each; times in ms.

    Iterations with a stall count in `num_stalls` and `stall_wait_ms` only.
    """

    num_ordinary: JackknifeParts  # iterations without a stall
    wait_ms: JackknifeParts  # communication, mean over ranks
    least_wait_ms: JackknifeParts  # communication of the rank that waits least, which is the last to come
    select_ms: JackknifeParts  # compression, mean over ranks
    lateness_ms: JackknifeParts  # by how much the last rank selects longer than the mean
    lateness_ms_squared: JackknifeParts
    lateness_times_wait: JackknifeParts
    wait_ms_squared: JackknifeParts
    num_stalls: JackknifeParts
    stall_wait_ms: JackknifeParts  # mean over the ranks that wait for rank 0


@functools.cache
def jackknife_sums(job: int, with_loop_starts: bool = True) -> JobJackknifeSums:
    """Return the sums behind all that follows, made once per job.

    Args:
        job: its number.
        with_loop_starts: with loops' first iterations.
    """
    table = settled_iterations(job)
    workers = JOBS[job].workers
    stall = table["long_waits"].to_numpy() > 0
    mean = table["comm_mean_ms"].to_numpy()
    least = table["comm_min_ms"].to_numpy()
    select = np.nan_to_num(table["comp_mean_ms"].to_numpy())
    late = np.nan_to_num(table["comp_max_ms"].to_numpy()) - select
    ordinary = (~stall & (with_loop_starts | ~loop_start_mask(table))).astype(float)
    long_wait = (workers * mean - least) / (workers - 1)
    quantities = (1.0, mean, least, select, late, late**2, late * mean, mean**2)
    columns = [*(ordinary * quantity for quantity in quantities), stall.astype(float), stall * long_wait]
    return JobJackknifeSums(*leave_one_block_out_sums(np.stack(columns, axis=1)).T)


def settled_iterations(job: int) -> pd.DataFrame:
    """Return the rows of `iteration_table` from the 100th iteration on."""
    table = iteration_table_of_job(job)
    settled_rows: pd.DataFrame = table[table["iteration"] >= SETTLED_FROM_ITERATION]
    return settled_rows


def loop_start_mask(table: pd.DataFrame) -> np.ndarray:
    """Return a mask of the first iteration of each of the 141 loops of 48 iterations.

    Between loops some ranks are late by more than selection makes them.
    """
    return (table["iteration"] % WINDOW_ITERATIONS == 0).to_numpy()


def mean_communication_ms(job: int) -> JackknifeParts:
    """Return mean milliseconds of communication over ranks, without stalls."""
    return jackknife_sums(job).wait_ms / jackknife_sums(job).num_ordinary


def last_rank_communication_ms(job: int) -> JackknifeParts:
    """Return communication of the rank that comes last and waits for nobody: about what sending takes."""
    return jackknife_sums(job).least_wait_ms / jackknife_sums(job).num_ordinary


def mean_waiting_share_of_communication(job: int) -> JackknifeParts:
    """Return the share of communication by which a rank on average exceeds the last one."""
    return 1 - jackknife_sums(job).least_wait_ms / jackknife_sums(job).wait_ms


def mean_compression_ms(job: int) -> JackknifeParts:
    """Return milliseconds of compression in an iteration, mean over ranks."""
    return jackknife_sums(job).select_ms / jackknife_sums(job).num_ordinary


def mean_lateness_ms(job: int) -> JackknifeParts:
    """Return milliseconds by which the last rank selects longer than the mean."""
    return jackknife_sums(job).lateness_ms / jackknife_sums(job).num_ordinary


class LatenessRegression(NamedTuple):
    """The least-squares line of communication on lateness in compression, over iterations; ms."""

    slope: JackknifeParts
    intercept: JackknifeParts
    correlation: JackknifeParts


def fit_lateness_regression(job: int, with_loop_starts: bool = True) -> LatenessRegression:
    """Return the line of waiting over lateness.

    If selection alone made ranks late, it would have slope 1 from the time of sending.
    """
    sums = jackknife_sums(job, with_loop_starts)
    late = sums.lateness_ms / sums.num_ordinary
    wait = sums.wait_ms / sums.num_ordinary
    covariance = sums.lateness_times_wait / sums.num_ordinary - late * wait
    late_variance = sums.lateness_ms_squared / sums.num_ordinary - late**2
    wait_variance = sums.wait_ms_squared / sums.num_ordinary - wait**2
    slope = covariance / late_variance
    return LatenessRegression(slope, wait - slope * late, covariance / np.sqrt(late_variance * wait_variance))


def mean_stall_ms(job: int) -> JackknifeParts:
    """Return the time by which a validation lengthens its iteration.

    The wait of other ranks for rank 0 less an ordinary wait.
    """
    return jackknife_sums(job).stall_wait_ms / jackknife_sums(job).num_stalls - mean_communication_ms(job)


def published_iteration_ms(job: int) -> float:
    """Return the time of an iteration as the authors took it: a batch over the mean of the logged speeds."""
    row = job_table().set_index("job").loc[job]
    return float(1e3 * BATCH_PER_WORKER * row["workers"] / row["samples_per_s"])


class FilteredCommunicationMeans(NamedTuple):
    """Mean communication over ranks and iterations, ms, under either of the authors' filters."""

    sparse_filter_ms: float
    dense_filter_ms: (
        float  # at least so much: ranks other than the last may have been below its limit as well
    )


@functools.cache
def filtered_communication_ms(job: int) -> FilteredCommunicationMeans:
    """Return means over all iterations from the first, as the authors counted.

    Both filters leave out what is above 1 s.
    """
    table = iteration_table_of_job(job)
    workers = JOBS[job].workers
    is_stall = table["long_waits"] > 0
    least = table["comm_min_ms"]
    total = (workers * table["comm_mean_ms"]).where(~is_stall, least).sum()
    count = np.where(is_stall, 1, workers).sum()
    is_dropped = least < DENSE_FILTER_MS
    dense = (total - least[is_dropped].sum()) / (count - is_dropped.sum())
    return FilteredCommunicationMeans(sparse_filter_ms=float(total / count), dense_filter_ms=float(dense))


class NVLinkToPCIeChange(NamedTuple):
    """Milliseconds from the node with NVLink to the one with PCIe, 4 workers.

    Of jobs whose logs have no iterations.
    """

    iteration_ms: float
    computing_ms: float  # FP, BP and the compression inside BP: what no link takes part in
    iteration_factor: float


def nvlink_to_pcie_change(method: str) -> NVLinkToPCIeChange:
    """Return how times change from NVLink to PCIe; validation is in all of them."""
    nvlink, pcie = (JOB_BY_LINK_AND_METHOD[f"{link} (inferred)", method] for link in ("NVLink", "PCIe"))
    before = published_iteration_ms(nvlink)
    after = published_iteration_ms(pcie)
    table = job_table().set_index("job")
    computing = table["fp_ms"] + table["bp_ms"]
    return NVLinkToPCIeChange(after - before, float(computing[pcie] - computing[nvlink]), after / before)


def samples_per_s_of_8_workers(iteration_ms: float) -> float:
    """Return samples per second of 8 workers."""
    return 1e3 * 8 * BATCH_PER_WORKER / iteration_ms
