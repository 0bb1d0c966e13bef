"""What follows from the job logs of Yoon and Oh 2022, with intervals over their iterations.

Every number is computed from the shipped tables. An interval says how well one job's iterations determine it;
how much another job would differ, it can't say, for each configuration ran once.

Rank 0 validated after every 49 iterations inside the timed loop, while the other seven waited in the
iteration's communication. The logged times of an iteration are means of 48, so that 137 of 141 hold one such
stall and 4 hold none; `iteration_ms` is the time without stalls that gives the logged mean speed, which is
taken as it was logged: how much the iterations beneath it differed, the tables do not hold.
`IN_A_FREE_WINDOW_MS` tells.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.published.log_files import JOBS
from analysis.published.tables import iterations, jobs
from analysis.stats import CONFIDENCE, Value

Resampled = NDArray[np.float64]  # (1 + draws,): what the table says, then what each draw from it says
BATCH = 128  # per worker
SETTLED = 100  # the first iterations are not counted: they warm up, and send more (density warm-up)
FIRST_WINDOW, WINDOW, WINDOWS = 41, 48, 141  # iterations behind each logged speed, and how many there are
EPOCH, EPOCHS = 49, 138  # iterations from validation to validation
JOB = {(job.gpu, job.method): number for number, job in JOBS.items() if job.workers == 8}
LINKED = {(job.link, job.method): number for number, job in JOBS.items() if job.workers == 4}
# What the logs print, mean over ranks, for iterations 6,665 to 6,712, the last 48 without a validation.
IN_A_FREE_WINDOW_MS = {130673: 34.84, 130672: 253.08, 130675: 42.07}
# The authors' parser of dense logs left out shorter communication; their parser of sparse logs did not.
DENSE_FILTER_MS = 0.1
DRAWS = 2000
SEED = 0  # the same table gives the same interval
# Iterations in a block: four validations, which come every 49 iterations. Compression drifts over hundreds of
# iterations (its autocorrelation is still 0.1 after 200), so blocks of 49 would give Top-k intervals a third
# narrower; 34 blocks are left.
BLOCK = 196


def block_sums(columns: np.ndarray, stream: int, block: int = BLOCK, draws: int = DRAWS) -> np.ndarray:
    """Sums over resampled iterations, (1 + draws, m); the first row is of the iterations as they were.

    A moving-block bootstrap over the iterations of one job (Künsch 1989, doi:10.1214/aos/1176347265).

    Blocks begin anywhere and go round the end, so that each iteration is drawn as often as the others. What
    follows from sums (means, ratios, slopes) is then the same arithmetic for the table and for each draw.

    Args:
        columns: (iterations, m)
        stream: of random numbers; jobs that ran apart are drawn apart.
    """
    n = len(columns)
    if block > n:
        raise ValueError(f"a block of {block} iterations is longer than the {n} there are")
    running = np.concatenate(
        [np.zeros((1, columns.shape[1])), np.cumsum([*columns, *columns[:block]], axis=0)]
    )
    of_block = running[block:][:n] - running[:n]  # (n, m), by where a block begins
    starts = np.random.default_rng([SEED, stream]).integers(0, n, (draws, round(n / block)))
    drawn = np.stack([of_block[:, column][starts].sum(axis=1) for column in range(columns.shape[1])], axis=1)
    return np.concatenate([columns.sum(axis=0, keepdims=True), drawn])


class Sums(NamedTuple):
    """Sums over a job's settled iterations, as they were and as resampled, (1 + draws,) each; times in ms.

    Those with a stall count in `stalls` and `stall_wait` only.
    """

    ordinary: Resampled  # iterations without a stall
    wait: Resampled  # communication, mean over ranks
    least: Resampled  # communication of the rank that waits least, which is the last to come
    select: Resampled  # compression, mean over ranks
    late: Resampled  # by how much the last rank selects longer than the mean
    late_late: Resampled
    late_wait: Resampled
    wait_wait: Resampled
    stalls: Resampled
    stall_wait: Resampled  # mean over the ranks that wait for rank 0


@functools.cache
def sums(job: int, loop_starts: bool = True) -> Sums:
    """The sums behind all that follows, drawn once per job; `loop_starts`: with each loop's first
    iteration.
    """
    table = settled(job)
    workers = jobs().set_index("job")["workers"][job]
    stall = table["long_waits"].to_numpy() > 0
    mean, least = table["comm_mean_ms"].to_numpy(), table["comm_min_ms"].to_numpy()
    select = np.nan_to_num(table["comp_mean_ms"].to_numpy())
    late = np.nan_to_num(table["comp_max_ms"].to_numpy()) - select
    ordinary = (~stall & (loop_starts | ~starts_a_loop(table))).astype(float)
    long_wait = (workers * mean - least) / (workers - 1)
    columns = [
        ordinary, ordinary * mean, ordinary * least,
        ordinary * select, ordinary * late, ordinary * late**2, ordinary * late * mean, ordinary * mean**2,
        stall.astype(float), stall * long_wait,
    ]  # fmt: skip
    return Sums(*block_sums(np.stack(columns, axis=1), stream=job).T)


def settled(job: int) -> pd.DataFrame:
    """The rows of `iterations` from the 100th iteration on."""
    table = iterations()
    found: pd.DataFrame = table[(table["job"] == job) & (table["iteration"] >= SETTLED)]
    return found


def starts_a_loop(table: pd.DataFrame) -> np.ndarray:
    """Mark the first iteration of each of the 141 loops of 48 iterations. What ranks do between loops makes
    some of them late by more than selection does.
    """
    return (table["iteration"] % WINDOW == 0).to_numpy()


def estimate(draws: Resampled) -> Value:
    """Value of the table, which is first of `draws`, with the percentile interval of the others."""
    low, high = np.quantile(draws[1:], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    blocks = round((WINDOW * WINDOWS - SETTLED) / BLOCK)
    return Value(float(draws[0]), float(low), float(high), blocks, "blocks")


def communication_ms(job: int) -> Resampled:
    """Mean over ranks, without stalls."""
    return sums(job).wait / sums(job).ordinary


def last_rank_ms(job: int) -> Resampled:
    """Communication of the rank that comes last and waits for nobody: about what sending takes."""
    return sums(job).least / sums(job).ordinary


def waiting_share(job: int) -> Resampled:
    """The share of communication by which a rank on average exceeds the last one."""
    return 1 - sums(job).least / sums(job).wait


def compression_ms(job: int) -> Resampled:
    """Milliseconds of compression in an iteration, mean over ranks."""
    return sums(job).select / sums(job).ordinary


def lateness_ms(job: int) -> Resampled:
    """Milliseconds by which the last rank selects longer than the mean."""
    return sums(job).late / sums(job).ordinary


class LatenessLine(NamedTuple):
    """Least squares of communication on lateness in compression, over iterations; ms."""

    slope: Resampled
    intercept: Resampled
    correlation: Resampled


def lateness_line(job: int, loop_starts: bool = True) -> LatenessLine:
    """Line of waiting over lateness: with late selection alone, of slope 1 from the time of sending."""
    s = sums(job, loop_starts)
    late, wait = s.late / s.ordinary, s.wait / s.ordinary
    covariance = s.late_wait / s.ordinary - late * wait
    variances = s.late_late / s.ordinary - late**2, s.wait_wait / s.ordinary - wait**2
    slope = covariance / variances[0]
    return LatenessLine(slope, wait - slope * late, covariance / np.sqrt(variances[0] * variances[1]))


def stall_ms(job: int) -> Resampled:
    """Time by which a validation lengthens its iteration: others' wait for rank 0 less an ordinary wait."""
    return sums(job).stall_wait / sums(job).stalls - communication_ms(job)


def iteration_ms(job: int) -> Resampled:
    """Time of an iteration without validation.

    With it, x, and the stall, a, the mean of the logged speeds is that of 128 / x over windows without a
    stall and of 128 / (x + a / 48) over those with one: a quadratic equation. The mean speed is taken as it
    was logged.
    """
    added = stall_ms(job) / WINDOW
    speed_sum = WINDOWS / published_iteration_ms(job)
    free = WINDOWS - windows_with_a_stall()
    half = (WINDOWS - speed_sum * added) / 2
    return (half + np.sqrt(half**2 + free * speed_sum * added)) / speed_sum


def windows_with_a_stall() -> int:
    """Windows behind the logged speeds."""
    ends = FIRST_WINDOW + WINDOW * np.arange(WINDOWS)
    window = np.searchsorted(ends, EPOCH * np.arange(1, EPOCHS + 1), side="right")
    return len(np.unique(window[window < WINDOWS]))


def published_iteration_ms(job: int) -> float:
    """Time of an iteration as the authors took it: a batch over the mean of the logged speeds."""
    row = jobs().set_index("job").loc[job]
    return float(1e3 * BATCH * row["workers"] / row["samples_per_s"])


class FilteredMeans(NamedTuple):
    """Mean communication over ranks and iterations, ms, under either of the authors' filters."""

    sparse: float
    dense: float  # at least so much: ranks other than the last may have been below its limit as well


@functools.cache
def filtered_communication_ms(job: int) -> FilteredMeans:
    """All iterations from the first, as the authors counted; both filters leave out what is above 1 s."""
    table = iterations()
    table = table[table["job"] == job]
    workers = int(jobs().set_index("job")["workers"][job])
    is_stall, least = table["long_waits"] > 0, table["comm_min_ms"]
    total = (workers * table["comm_mean_ms"]).where(~is_stall, least).sum()
    count = np.where(is_stall, 1, workers).sum()
    dropped = least < DENSE_FILTER_MS
    kept = (total - least[dropped].sum()) / (count - dropped.sum())
    return FilteredMeans(float(total / count), float(kept))


class LinkChange(NamedTuple):
    """Milliseconds from the node with NVLink to the one with PCIe, 4 workers; of jobs whose logs have no
    iterations.
    """

    iteration: float
    computing: float  # FP, BP and the compression inside BP: what no link takes part in
    slower: float  # the iteration, as a factor


def link_change(method: str) -> LinkChange:
    """Validation is in all of these times."""
    nvlink, pcie = (LINKED[f"{link} (inferred)", method] for link in ("NVLink", "PCIe"))
    before, after = published_iteration_ms(nvlink), published_iteration_ms(pcie)
    table = jobs().set_index("job")
    computing = table["fp_ms"] + table["bp_ms"]
    return LinkChange(after - before, float(computing[pcie] - computing[nvlink]), after / before)


Ms = TypeVar("Ms", float, Resampled)


def speed(iteration_ms: Ms) -> Ms:
    """Samples per second of 8 workers."""
    return 1e3 * 8 * BATCH / iteration_ms
