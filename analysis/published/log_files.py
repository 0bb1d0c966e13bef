"""The job logs of Yoon and Oh 2022 (github.com/kljp/topk_results, folder job/), line by line into tables.

A job left two files. `topk.e<job>` has the training's own lines: per rank and 40 iterations the mean FP, BP
and input time; per rank and 48 iterations the mean time of an iteration; per 49 iterations rank 0's
validation. `topk.o<job>` has lines that name neither rank nor iteration: per rank and iteration one on
compression (none in dense training) and one on communication, the time in the final wait. All ranks print
into the same file.

Lines that carry a number and are not in the form known here are refused, with their place. Other lines
(NCCL's, SLURM's, warnings) are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.records.files import MAX_LOG_BYTES, DamagedFileError, read_bytes

FIRST_WINDOW_ITERATIONS, WINDOW_ITERATIONS = (
    41,
    48,
)  # iterations behind each logged time: the first prints at iteration 40
LONG_WAIT_US = 500_000  # no wait for others' gradients is as long; one for a validation is


class JobFacts(NamedTuple):
    """Facts of a job that its logs do not state, or not in one place."""

    gpu: str
    link: str
    workers: int
    method: str


# The first five match the paper's speeds to every digit. GPU and link of the others are inferred: by their
# times of FP and BP, those of 129436 and 129435 resemble the V100's; links by the number of NCCL's channels.
JOBS = {
    130673: JobFacts("A100", "NVLink", 8, "dense"),
    130672: JobFacts("A100", "NVLink", 8, "topk"),
    130675: JobFacts("A100", "NVLink", 8, "randomk"),
    130263: JobFacts("V100", "NVLink", 8, "dense"),
    130264: JobFacts("V100", "NVLink", 8, "topk"),
    129436: JobFacts("not named", "NVLink (inferred)", 4, "dense"),
    129435: JobFacts("not named", "NVLink (inferred)", 4, "topk"),
    129440: JobFacts("not named", "PCIe (inferred)", 4, "dense"),
    129439: JobFacts("not named", "PCIe (inferred)", 4, "topk"),
}

SECONDS_PATTERN = r"(\d+\.\d+)"
CONFIGURATION_LINE = re.compile(r".*Configurations: Namespace\(.*\bbatch_size=(\d+),.*\bnworkers=(\d+)[,)].*")
WINDOW_LINE = re.compile(
    rf".*Time per iteration including communication: {SECONDS_PATTERN}, Speed: {SECONDS_PATTERN} images/s"
)
PHASES_LINE = re.compile(
    rf".*\[rank:(\d+)\] loss: \S+, average forward \({SECONDS_PATTERN}\) and backward \({SECONDS_PATTERN}\) "
    rf"time: {SECONDS_PATTERN}, iotime: {SECONDS_PATTERN}"
)
VALIDATION_LINE = re.compile(
    rf".*Epoch (\d+), lr: {SECONDS_PATTERN}, val loss: {SECONDS_PATTERN}, "
    rf"val top-1 acc: {SECONDS_PATTERN}, top-5 acc: {SECONDS_PATTERN}"
)
# Where a line of topk.e comes from -> the form that it must have.
LINE_PATTERNS = {
    "[dist_trainer.py:135]": CONFIGURATION_LINE,
    "[dist_trainer.py:90]": WINDOW_LINE,
    "[dl_trainer.py:731]": PHASES_LINE,
    "[dl_trainer.py:822]": VALIDATION_LINE,
}
COMPRESSION_LINE = re.compile(rf"COMP={SECONDS_PATTERN}")
# The first number of a sparse line is the sum of the others: values and indices.
COMMUNICATION_LINE = re.compile(
    rf"COMM={SECONDS_PATTERN}|"
    rf"COMM_TOTAL={SECONDS_PATTERN}, COMM_VAL={SECONDS_PATTERN}, COMM_ID={SECONDS_PATTERN}"
)


@dataclass(frozen=True)
class LoggedTraining:
    """The numbers in a job's topk.e, in the order of their lines."""

    speeds: list[float]  # samples/s of one rank, the mean of 48 iterations
    window_s: list[float]  # per 48 iterations, their mean time as the first rank printed it
    forward_s: list[float]
    backward_s: list[float]
    input_s: list[float]
    epochs: list[tuple[float, ...]]  # epoch, lr, loss, top-1, top-5 (%)

    def window_table(self) -> pd.DataFrame:
        """Return a row per window: its number, the number of iterations until its end, and its `ms`."""
        numbers = np.arange(len(self.window_s))
        milliseconds = np.round(1e3 * np.array(self.window_s), 3)
        until = FIRST_WINDOW_ITERATIONS + WINDOW_ITERATIONS * numbers
        table: pd.DataFrame = pd.DataFrame({"window": numbers, "until": until, "ms": milliseconds})
        return table

    def mean_speed_and_times(self, job: JobFacts) -> dict[str, float]:
        """Return samples/s of all workers, which is the mean of the logged speeds; FP, BP and input in ms."""
        phases = {"fp_ms": self.forward_s, "bp_ms": self.backward_s, "io_ms": self.input_s}
        times = {name: round(1e3 * float(np.mean(seconds)), 3) for name, seconds in phases.items()}
        return {"samples_per_s": round(job.workers * float(np.mean(self.speeds)), 2), **times}


def read_training_log(path: Path, job: JobFacts, batch: int = 128) -> LoggedTraining:
    """Read topk.e<job>.

    Raises:
        DamagedFileError: a line with a number is not as it should be, some ranks have more lines than others,
            or the job was another one than its name says.
    """
    groups_by_place: dict[str, list[tuple[str, ...]]] = {place: [] for place in LINE_PATTERNS}
    for number, line in _numbered_lines(path):
        for place, pattern in LINE_PATTERNS.items():
            if place in line:
                groups_by_place[place].append(_match_line(pattern, line, path, number))
    configured, windows, phases, validated = groups_by_place.values()
    if set(configured) != {(str(batch), str(job.workers))}:
        raise DamagedFileError(
            path,
            f"is the log of another job than one of {job.workers} workers with batches of {batch}: "
            f"it has {sorted(set(configured))}",
        )
    ranks = [int(rank) for rank, *_ in phases]
    if len(windows) % job.workers or set(np.bincount(ranks, minlength=job.workers)) != {
        len(ranks) // job.workers
    }:
        raise DamagedFileError(path, f"has not as many lines of each of its {job.workers} ranks")
    epochs = [(int(epoch), *map(float, values)) for epoch, *values in validated]
    if [epoch for epoch, *_ in epochs] != [*range(1, len(epochs) + 1)]:
        raise DamagedFileError(path, "has an epoch twice, or lacks one")
    return LoggedTraining(
        speeds=[float(speed) for _, speed in windows],
        # All ranks print a window before one prints the next, which is seconds later.
        window_s=[float(seconds) for seconds, _ in windows[:: job.workers]],
        forward_s=[float(line[1]) for line in phases],
        backward_s=[float(line[2]) for line in phases],
        input_s=[float(line[4]) for line in phases],
        epochs=epochs,
    )


def read_iteration_log(path: Path, job: JobFacts) -> pd.DataFrame:
    """Read topk.o<job>: a row per iteration, in microseconds over the ranks, and how many waited long.

    All ranks end compression before one ends communication, and print in one order or another. Where lines of
    communication stand between those of compression, which belong together is not known: such an iteration is
    left out. Its number still counts.

    Raises:
        DamagedFileError: a line with a number is not as it should be, or lines are missing.
    """
    lines = list(_read_times_us(path))
    workers, dense = job.workers, job.method == "dense"
    comp = np.array([time for kind, time in lines if kind == "COMP"], dtype=np.int64)
    comm = np.array([time for kind, time in lines if kind == "COMM"], dtype=np.int64)
    if len(comm) % workers or len(comp) != (0 if dense else len(comm)):
        raise DamagedFileError(path, f"has {len(comp)} lines of compression and {len(comm)} of communication")
    comm = comm.reshape(-1, workers)
    whole = (
        np.arange(len(comm)) if dense else _unmixed_iterations("".join(kind[3] for kind, _ in lines), workers)
    )
    table: pd.DataFrame = pd.DataFrame({"iteration": whole})
    for name, times in (("comp", None if dense else comp.reshape(-1, workers)[whole]), ("comm", comm[whole])):
        for part, over in (("min", np.min), ("mean", np.mean), ("max", np.max)):
            over_ranks = pd.NA if times is None else np.rint(over(times, axis=1)).astype(np.int64)
            table[f"{name}_{part}_us"] = pd.Series(over_ranks, index=table.index, dtype="Int64")
    table["long_waits"] = (comm[whole] > LONG_WAIT_US).sum(axis=1)
    return table


def _unmixed_iterations(kinds: str, workers: int) -> np.ndarray:
    """Return numbers of the iterations whose lines stand together: P of compression, then P of communication.

    `kinds` is a letter per line, the last of COMP or COMM.
    """
    iterations = []
    for group in re.finditer("P+M+", kinds):
        iteration, offset = divmod(group.start(), 2 * workers)
        if offset == 0 and group.group() == "P" * workers + "M" * workers:
            iterations.append(iteration)
    return np.array(iterations, dtype=np.int64)


def _read_times_us(path: Path) -> Iterator[tuple[str, int]]:
    """Yield COMP or COMM, and microseconds, of each line that has one."""
    for number, line in _numbered_lines(path):
        kind = line[:4]
        if kind in ("COMP", "COMM"):
            form = COMPRESSION_LINE if kind == "COMP" else COMMUNICATION_LINE
            seconds = next(filter(None, _match_line(form, line, path, number)))
            yield kind, round(1e6 * float(seconds))


def _match_line(form: re.Pattern[str], line: str, path: Path, number: int) -> tuple[str, ...]:
    match = form.fullmatch(line.rstrip())
    if match is None:
        raise DamagedFileError(
            path, f"can't be read: its line {number} is not of a known form: {line.strip()[:60]!r}"
        )
    return match.groups()


def _numbered_lines(path: Path) -> Iterable[tuple[int, str]]:
    try:
        text = read_bytes(path, MAX_LOG_BYTES).decode(errors="replace")
    except FileNotFoundError as error:
        raise DamagedFileError(path, "is missing: a clone of github.com/kljp/topk_results has it") from error
    return enumerate(text.splitlines(), start=1)
