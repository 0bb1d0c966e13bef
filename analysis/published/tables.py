"""The tables of facts below results/published: written once from logs, and read only as they were written."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.published.log_files import JOBS, read_iteration_log, read_training_log
from analysis.records import schema
from analysis.records.files import (
    DamagedFileError,
    read_bytes_checking_digest,
    read_struct_if_there,
    size_and_digest,
    write_atomic,
    write_json,
)

FOLDER = Path(__file__).parents[2] / "results" / "published" / "yoon2022"
DIGESTS = "digests.json"
SOURCE = "derived from the job logs in github.com/kljp/topk_results; the logs are not part of this repository"


class LoggedTables(NamedTuple):
    """Facts from the job logs of Yoon and Oh 2022; `job` names the job in each table."""

    jobs: pd.DataFrame  # a row per job
    epochs: pd.DataFrame  # per job and validation
    windows: pd.DataFrame  # per job of 8 workers and 48 iterations
    iterations: pd.DataFrame  # per job of 8 workers and iteration whose lines do not mix with others'


def job_table() -> pd.DataFrame:
    """Return a row per job: gpu, link, workers, method, `samples_per_s`, `fp_ms`, `bp_ms`, `io_ms`.

    Samples per second are of all workers, the mean of the logged speeds. Milliseconds are means over
    iterations; compression is part of `bp_ms`.

    Raises:
        DamagedFileError: a table does not match its digest, as in the other three.
    """
    table: pd.DataFrame = _shipped_tables().jobs.copy()
    return table


def epoch_table() -> pd.DataFrame:
    """Return a row per job and epoch: gpu, workers, method, `lr`, and rank 0's validation.

    The columns of the validation are `val_loss`, `top1` and `top5` (%).
    """
    return _join_job_facts(_shipped_tables().epochs, ["gpu", "workers", "method"])


def window_table() -> pd.DataFrame:
    """Return a row per job and window of 48 iterations, 41 at first: gpu, method, `until`, `ms`.

    `until` is its last iteration; `ms` is the mean time of its iterations, as the first rank printed it. Of
    the jobs that `iteration_table` has.
    """
    return _join_job_facts(_shipped_tables().windows, ["gpu", "method"])


def iteration_table() -> pd.DataFrame:
    """Return a row per job and iteration: times over the ranks, and how many waited above 500 ms.

    Least, mean and greatest compression and communication in ms, NaN where a job printed none. Columns: job,
    gpu, method, iteration, comp_min_ms ... comm_max_ms, long_waits.
    """
    table: pd.DataFrame = _iterations_in_ms().copy()
    return table


def iteration_table_of_job(job: int) -> pd.DataFrame:
    """Return the rows of `iteration_table` of one job."""
    table = _iterations_in_ms()
    rows: pd.DataFrame = table[table["job"] == job]
    return rows


def epoch_column_per_machine(method: str, column: str = "top1", workers: int = 8) -> pd.DataFrame:
    """Return `column` of `epoch_table`, with a row per epoch and a column per machine.

    Empty where the method did not run.
    """
    curves = epoch_table().merge(job_table()[["job", "link"]], on="job")
    curves = curves[(curves["method"] == method) & (curves["workers"] == workers)]
    machine = curves["gpu"] + ", " + curves["link"]
    table: pd.DataFrame = curves.assign(machine=machine).pivot_table(column, "epoch", "machine")
    return table


def mean_and_range_over_machines(method: str, column: str = "top1", workers: int = 8) -> pd.DataFrame:
    """Return per epoch the mean, and as low and high the range over the machines, NaN where there was one.

    The range of two jobs is no interval of confidence.
    """
    return mean_and_range_over_columns(epoch_column_per_machine(method, column, workers))


def mean_and_range_over_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of `mean_and_range_over_machines` from one column per machine."""
    columns = {"mean": table.mean(axis=1), "low": table.min(axis=1), "high": table.max(axis=1)}
    limits: pd.DataFrame = pd.DataFrame(columns)
    if table.shape[1] <= 1:
        limits[["low", "high"]] = np.nan
    by_epoch: pd.DataFrame = limits.reset_index()
    return by_epoch


def learning_rate_decay_epochs() -> list[int]:
    """Return the epochs that ended with a smaller learning rate than the one before, the same in all jobs."""
    rates = epoch_table().pivot_table(index="epoch", columns="job", values="lr").dropna()
    fell = (rates.diff() < 0).all(axis=1)
    return [int(epoch) for epoch in fell.index[fell]]


def read_tables_from_logs(clone: Path) -> LoggedTables:
    """Return the tables from a clone of the authors' repository.

    Raises:
        DamagedFileError: a log is missing or not as expected; the message says which line.
    """
    rows = []
    tables_of_jobs = []
    for number, job in JOBS.items():
        training = read_training_log(clone / "job" / f"topk.e{number}", job)
        rows.append({"job": number, **job._asdict(), **training.mean_speed_and_times(job)})
        epochs = pd.DataFrame(training.epochs, columns=["epoch", "lr", "val_loss", "top1", "top5"])
        iterations = read_iteration_log(clone / "job" / f"topk.o{number}", job)
        windows = training.window_table()[: None if len(iterations) else 0]
        for table in (epochs, windows, iterations):
            table.insert(0, "job", number)
        tables_of_jobs.append((epochs, windows, iterations))
    other_tables = (pd.concat(tables, ignore_index=True) for tables in zip(*tables_of_jobs, strict=True))
    return LoggedTables(pd.DataFrame(rows), *other_tables)


def write_tables(tables: LoggedTables, folder: Path) -> None:
    """Write the tables and their digests: small ones as CSV, so that people can read them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, table in tables._asdict().items():
        write_atomic(folder / _file_name(name), _encode_table(name, table))
    files = {_file_name(name): size_and_digest(folder / _file_name(name)) for name in tables._fields}
    write_json(folder / DIGESTS, {"source": SOURCE, "files": files})


def read_verified_tables(folder: Path) -> LoggedTables:
    """Return the tables in `folder`.

    Raises:
        DamagedFileError: one is missing, or does not match its digest.
    """
    digests = read_struct_if_there(folder / DIGESTS, schema.PublishedTableDigests)
    if digests is None:
        raise DamagedFileError(folder / DIGESTS, "is missing; `git checkout` brings it back")
    return LoggedTables(*(_decode_table(folder / _file_name(name), digests) for name in LoggedTables._fields))


def find_table_differences(ours: LoggedTables, theirs: LoggedTables) -> list[str]:
    """Return a sentence on each table in which two disagree.

    Rounding by one in the last digit is no disagreement.
    """
    sentences = []
    for name, table, other in zip(LoggedTables._fields, ours, theirs, strict=True):
        keys = [key for key in ("job", "epoch", "window", "iteration") if key in table]
        if not np.array_equal(table[keys].to_numpy(), other[keys].to_numpy()):
            sentences.append(f"{name}: {len(table)} rows against {len(other)}, or in another order")
            continue
        for column in table.columns.difference(keys):
            unequal = _count_unequal(table[column], other[column])
            if unequal:
                sentences.append(f"{name}: {unequal} of {len(table)} rows differ in {column}")
    return sentences


@functools.cache
def _shipped_tables() -> LoggedTables:
    return read_verified_tables(FOLDER)


@functools.cache
def _iterations_in_ms() -> pd.DataFrame:
    table = _shipped_tables().iterations
    ms = {column: column.removesuffix("_us") + "_ms" for column in map(str, table) if column.endswith("_us")}
    table = table.astype(dict.fromkeys(ms, np.float64)).rename(columns=ms)
    table[list(ms.values())] /= 1e3
    return _join_job_facts(table, ["gpu", "method"])


def _join_job_facts(table: pd.DataFrame, facts: list[str]) -> pd.DataFrame:
    merged = table.join(_shipped_tables().jobs.set_index("job")[facts], on="job")
    ordered: pd.DataFrame = merged[["job", *facts, *(column for column in table if column != "job")]]
    return ordered


def _file_name(name: str) -> str:
    return f"{name}.parquet" if name == "iterations" else f"{name}.csv"


def _encode_table(name: str, table: pd.DataFrame) -> bytes:
    if name != "iterations":
        return table.to_csv(index=False, lineterminator="\n").encode()
    whole = pa.schema([(column, pa.int32()) for column in table])
    buffer = io.BytesIO()
    # Whole microseconds without a dictionary: a third smaller than milliseconds as floats.
    pq.write_table(
        pa.Table.from_pandas(table, schema=whole, preserve_index=False).replace_schema_metadata(None),
        buffer,
        compression="zstd",
        use_dictionary=["job"],
    )
    return buffer.getvalue()


def _decode_table(path: Path, digests: schema.PublishedTableDigests) -> pd.DataFrame:
    recorded_digest = digests.files.get(path.name)
    if recorded_digest is None:
        raise DamagedFileError(path.parent / DIGESTS, f"has no digest of {path.name}")
    try:
        raw = io.BytesIO(read_bytes_checking_digest(path, recorded_digest.sha256))
    except DamagedFileError as damage:
        raise DamagedFileError(
            path, f"{damage.why}; `git checkout` brings it back, `python -m analysis.published` explains it"
        ) from damage
    table: pd.DataFrame = pq.read_table(raw).to_pandas() if path.suffix == ".parquet" else pd.read_csv(raw)
    return table


def _count_unequal(column: pd.Series, other_column: pd.Series) -> int:
    """Return the number of rows in which two columns differ."""
    if not pd.api.types.is_numeric_dtype(column):
        return int((column.to_numpy() != other_column.to_numpy()).sum())
    ours, theirs = (side.to_numpy(dtype=float, na_value=np.nan) for side in (column, other_column))
    digit = 1.0 if str(column.name).endswith("_us") else 1e-3
    return int((~np.isclose(ours, theirs, rtol=1e-6, atol=1.01 * digit, equal_nan=True)).sum())
