"""A cache of what logs hold, so that `list`, figures and `load` read each attempt's logs once.

    <records>/cache/<code>/<batch>/rows.msgpack     rows of runs, and what each was made from
                                   <table>.parquet  the other tables of these runs
                                   digests.json     digests of these files

A row counts while its `source_digest` is that of its run's newest whole attempt. What is damaged or missing
is read from the logs again, so all of it may be removed at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pandas as pd

from analysis.records import attempts as attempts_module
from analysis.records import schema
from analysis.records import steps as steps_module
from analysis.records.attempts import (
    MEASURED_TABLES,
    AttemptData,
    LoadedFrames,
    batch_runs_by_log_size,
    build_frames_with_outcomes,
    read_newest_attempt_logs,
)
from analysis.records.columns import OUTCOMES
from analysis.records.files import (
    DamagedFileError,
    read_bytes,
    read_bytes_checking_digest,
    read_struct_if_there,
    size_and_digest,
    temporary_part_folder,
    write_atomic,
    write_json,
)
from analysis.records.frames import (
    Frames,
    build_runs_table,
    concat_frames,
    empty_frames,
    select_runs,
    select_tables,
)
from analysis.records.parquet import find_run_row_fault, parse_table, write_frame
from analysis.records.store import Attempt, Store

ROWS = "rows.msgpack"
DIGESTS = "digests.json"
SMALL_BYTES = 2**16  # of a batch with few runs
MAX_SMALL_BATCHES = 32  # such batches, before their runs are read from logs again and kept together
CODE = (attempts_module, schema, steps_module)  # by which rows and tables are made from logs
DigestByAttempt = Mapping[tuple[Any, Any], str]  # of attempts, by run and number


class CachedRunRow(msgspec.Struct, frozen=True):
    """A row of `runs`, the digest of what it was made from, and the notes made when its logs were read."""

    source_digest: str
    cells: dict[str, str | int | float | bool | None]
    outcomes: dict[str, float]
    notes: list[str]


class CachedBatch(NamedTuple):
    """Rows and tables of runs that were read together."""

    rows: list[CachedRunRow]
    tables: Frames  # but for `runs`
    is_small: bool = False


def load_newest_attempts_cached(
    store: Store,
    run_ids: Iterable[str],
    records_folder: Path,
    tables: Collection[str] = Frames._fields,
    *,
    verify_digests: bool = False,
) -> LoadedFrames:
    """Return the frames of each run's newest whole attempt, and a line on each newer one that is damaged.

    What is not in the cache yet is read from logs, and kept there if the folder may be written.

    Args:
        records_folder: the folder in which the cache is.
        tables: those that are needed beside `runs`; the others are left empty.
        verify_digests: compare the digests of logs even of cached attempts.
    """
    names = [*dict.fromkeys(run_ids)]
    attempts, notes = store.find_newest_valid(names, verify_digests=verify_digests)
    digest_by_attempt = _digest_attempts(attempts)
    folder = records_folder / "cache" / _code_digest()
    batch_by_folder = _read_batches(folder, digest_by_attempt, tables)
    small = [path for path, batch in batch_by_folder.items() if batch.is_small]
    outdated = small if len(small) > MAX_SMALL_BATCHES else []
    batches = [batch for path, batch in batch_by_folder.items() if path not in outdated]
    cached = {row.cells["run_id"] for batch in batches for row in batch.rows}
    missing = [attempt.run_id for attempt in attempts if attempt.run_id not in cached]
    for batch_run_ids in batch_runs_by_log_size(store, missing):
        attempts_data, damage_notes = read_newest_attempt_logs(store, batch_run_ids)
        notes += damage_notes
        batches.append(_write_batch(folder, attempts_data, tables))
    for path in outdated:
        shutil.rmtree(path, ignore_errors=True)
    rows = [row for batch in batches for row in batch.rows]
    every_note = [*notes, *(note for row in rows for note in row.notes)]
    return LoadedFrames(_join(rows, [batch.tables for batch in batches], names), [*dict.fromkeys(every_note)])


def _read_batches(
    folder: Path, digest_by_attempt: DigestByAttempt, tables: Collection[str]
) -> dict[Path, CachedBatch]:
    """Return the batches that are whole, by their folders, with the rows of these attempts, each once."""
    batch_by_folder = dict[Path, CachedBatch]()
    missing = {**digest_by_attempt}
    for path in sorted(folder.glob("*")):
        with contextlib.suppress(DamagedFileError):  # then its runs are read from their logs
            batch_by_folder[path] = _read_batch(path, missing, tables)
            for row in batch_by_folder[path].rows:
                missing.pop((row.cells["run_id"], row.cells["attempt"]), None)
    return batch_by_folder


def _read_batch(folder: Path, digest_by_attempt: DigestByAttempt, tables: Collection[str]) -> CachedBatch:
    """Return what a folder holds of these attempts.

    Raises:
        DamagedFileError: a file is not as it was written.
    """
    path = folder / ROWS
    digests = read_struct_if_there(folder / DIGESTS, schema.CachedBatchDigests) or schema.CachedBatchDigests(
        {}
    )
    raws = {
        name: read_bytes_checking_digest(folder / name, facts.sha256)
        for name, facts in digests.files.items()
        if name == ROWS or Path(name).stem in tables
    }
    try:
        rows = msgspec.msgpack.decode(raws.pop(ROWS, b""), type=list[CachedRunRow])
    except msgspec.MsgspecError as error:
        raise DamagedFileError(path, f"is not as it was written: {error}") from error
    current = [
        row
        for row in rows
        if digest_by_attempt.get((row.cells.get("run_id"), row.cells.get("attempt"))) == row.source_digest
    ]
    for row in current:
        fault = find_run_row_fault(row.cells, path)
        if fault is not None:
            raise fault
    frames = empty_frames()
    if current:
        parsed = {Path(name).stem: parse_table(folder / name, raw) for name, raw in raws.items()}
        frames = frames._replace(**parsed)
        if len(current) < len(rows):
            frames = select_runs(frames, {str(row.cells["key"]) for row in current})
    return CachedBatch(current, frames, sum(facts.bytes for facts in digests.files.values()) < SMALL_BYTES)


def _write_batch(folder: Path, attempts_data: Sequence[AttemptData], tables: Collection[str]) -> CachedBatch:
    """Write a batch; return it as later calls will read it, to the digit, if it can be written."""
    frames = build_frames_with_outcomes(attempts_data)
    outcomes = frames.runs.reindex(columns=[*OUTCOMES])
    digest_by_attempt = _digest_attempts(data.attempt for data in attempts_data)
    rows = list[CachedRunRow]()
    for data in attempts_data:
        source_digest = digest_by_attempt.get((data.attempt.run_id, data.attempt.number), "")
        for cells in data.run_rows:
            measured = outcomes.iloc[len(rows)].dropna().to_dict()
            rows.append(CachedRunRow(source_digest, cells, measured, data.notes))
    name = hashlib.sha256(repr([row.source_digest for row in rows]).encode()).hexdigest()[:16]
    with contextlib.suppress(OSError):  # somebody else's results, or another process was quicker
        folder.mkdir(parents=True, exist_ok=True)
        with temporary_part_folder(folder) as part:
            new = part / name
            new.mkdir()
            write_atomic(new / ROWS, msgspec.msgpack.encode(rows))
            paths = [
                write_frame(new / f"{table}.parquet", getattr(frames, table)) for table in MEASURED_TABLES
            ]
            digests = {path.name: size_and_digest(path) for path in (new / ROWS, *paths)}
            write_json(new / DIGESTS, {"files": digests})
            shutil.rmtree(folder / name, ignore_errors=True)  # a damaged one
            new.rename(folder / name)
    try:
        return _read_batch(folder / name, digest_by_attempt, tables)
    except DamagedFileError:
        return CachedBatch(rows, select_tables(frames, tables))


def _join(rows: list[CachedRunRow], tables: Sequence[Frames], runs: Sequence[str]) -> Frames:
    """Return the frames of these rows and tables, in the order of the runs."""
    if not rows:
        return empty_frames()
    place_by_run = {run: place for place, run in enumerate(runs)}
    place_by_key = {row.cells["key"]: place_by_run[str(row.cells["run_id"])] for row in rows}
    rows.sort(key=lambda row: place_by_key[row.cells["key"]])
    outcomes = pd.DataFrame([row.outcomes for row in rows], columns=[*OUTCOMES], dtype=float)
    measured = [
        table.sort_values("key", key=lambda keys: keys.map(place_by_key), kind="stable", ignore_index=True)
        for table in concat_frames(tables)[1:]
    ]
    return Frames(
        pd.concat([build_runs_table([row.cells for row in rows]), outcomes], axis="columns"), *measured
    )


def _digest_attempts(attempts: Iterable[Attempt]) -> dict[tuple[Any, Any], str]:
    """Return a digest of what each attempt's frames follow from: run.json has the digests of its logs."""
    digest_by_attempt = dict[tuple[Any, Any], str]()
    for attempt in attempts:
        with contextlib.suppress(DamagedFileError, FileNotFoundError):  # it was removed meanwhile
            raw = read_bytes(attempt.path / "config.json") + read_bytes(attempt.path / "run.json")
            digest_by_attempt[attempt.run_id, attempt.number] = hashlib.sha256(raw).hexdigest()[:16]
    return digest_by_attempt


@cache
def _code_digest() -> str:
    sources = [Path(str(module.__file__)).read_bytes() for module in CODE]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:8]
