"""A cache of what logs hold, so that `list`, figures and `load` read each attempt's logs once.

    <records>/cache/<code>/<batch>/rows.msgpack     rows of runs, and what each was made from
                                   <table>.parquet  the other tables of these runs
                                   digests.json     digests of these files

A row counts while its `origin` is that of its run's newest whole attempt. What is damaged or missing is read
from the logs again, so all of it may be removed at any time.
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
    build_frames,
    read_newest,
    split_into_batches,
)
from analysis.records.columns import OUTCOMES
from analysis.records.files import (
    DamagedFileError,
    read_bytes,
    read_struct,
    read_verified,
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
from analysis.records.parquet import find_row_fault, parse_table, write_frame
from analysis.records.store import Attempt, Store

ROWS = "rows.msgpack"
DIGESTS = "digests.json"
SMALL_BYTES = 2**16  # of a batch with few runs
MOST_SMALL = 32  # such batches, before their runs are read from logs again and kept together
CODE = (attempts_module, schema, steps_module)  # by which rows and tables are made from logs
Origins = Mapping[tuple[Any, Any], str]  # of attempts, by run and number


class CachedRow(msgspec.Struct, frozen=True):
    """A row of `runs`, what it was made from, and what was said when its logs were read."""

    origin: str
    cells: dict[str, str | int | float | bool | None]
    outcomes: dict[str, float]
    notes: list[str]


class CachedBatch(NamedTuple):
    """Rows and tables of runs that were read together."""

    rows: list[CachedRow]
    tables: Frames  # but for `runs`
    is_small: bool = False


def load_newest_cached(
    store: Store,
    runs: Iterable[str],
    records_folder: Path,
    tables: Collection[str] = Frames._fields,
    verify: bool = False,
) -> LoadedFrames:
    """Return the frames of each run's newest whole attempt, and a line on each newer one that is damaged.

    What is not in the cache yet is read from logs, and kept there if the folder may be written.

    Args:
        records_folder: the folder in which the cache is.
        tables: those that are needed beside `runs`; the others are left empty.
        verify: compare the digests of logs even of cached attempts.
    """
    names = [*dict.fromkeys(runs)]
    attempts, notes = store.newest_attempts(names, verify)
    origins = _digest_origins(attempts)
    folder = records_folder / "cache" / _code_digest()
    batch_by_folder = _read_batches(folder, origins, tables)
    small = [path for path, batch in batch_by_folder.items() if batch.is_small]
    replaced = small if len(small) > MOST_SMALL else []
    batches = [batch for path, batch in batch_by_folder.items() if path not in replaced]
    cached = {row.cells["run_id"] for batch in batches for row in batch.rows}
    missing = [attempt.run_id for attempt in attempts if attempt.run_id not in cached]
    for share in split_into_batches(store, missing):
        data_by_attempt, damage_notes = read_newest(store, share)
        notes += damage_notes
        batches.append(_write_batch(folder, data_by_attempt, tables))
    for path in replaced:
        shutil.rmtree(path, ignore_errors=True)
    rows = [row for batch in batches for row in batch.rows]
    every_note = [*notes, *(note for row in rows for note in row.notes)]
    return LoadedFrames(_join(rows, [batch.tables for batch in batches], names), [*dict.fromkeys(every_note)])


def _read_batches(folder: Path, origins: Origins, tables: Collection[str]) -> dict[Path, CachedBatch]:
    """Return the batches that are whole, by their folders, with the rows of these attempts, each once."""
    batch_by_folder = dict[Path, CachedBatch]()
    missing = {**origins}
    for path in sorted(folder.glob("*")):
        with contextlib.suppress(DamagedFileError):  # then its runs are read from their logs
            batch_by_folder[path] = _read_batch(path, missing, tables)
            for row in batch_by_folder[path].rows:
                missing.pop((row.cells["run_id"], row.cells["attempt"]), None)
    return batch_by_folder


def _read_batch(folder: Path, origins: Origins, tables: Collection[str]) -> CachedBatch:
    """Return what a folder holds of these attempts.

    Raises:
        DamagedFileError: a file is not as it was written.
    """
    path = folder / ROWS
    digests = read_struct(folder / DIGESTS, schema.BatchDigests) or schema.BatchDigests({})
    raws = {
        name: read_verified(folder / name, msgspec.structs.asdict(facts))
        for name, facts in digests.files.items()
        if name == ROWS or Path(name).stem in tables
    }
    try:
        rows = msgspec.msgpack.decode(raws.pop(ROWS, b""), type=list[CachedRow])
    except msgspec.MsgspecError as error:
        raise DamagedFileError(path, f"is not as it was written: {error}") from error
    current = [
        row for row in rows if origins.get((row.cells.get("run_id"), row.cells.get("attempt"))) == row.origin
    ]
    for row in current:
        fault = find_row_fault(row.cells, path)
        if fault is not None:
            raise fault
    frames = empty_frames()
    if current:
        parsed = {Path(name).stem: parse_table(folder / name, raw) for name, raw in raws.items()}
        frames = frames._replace(**parsed)
        if len(current) < len(rows):
            frames = select_runs(frames, {str(row.cells["key"]) for row in current})
    return CachedBatch(current, frames, sum(facts.bytes for facts in digests.files.values()) < SMALL_BYTES)


def _write_batch(
    folder: Path, data_by_attempt: Sequence[AttemptData], tables: Collection[str]
) -> CachedBatch:
    """Write a batch; return it as later calls will read it, to the digit, if it can be written."""
    frames = build_frames(data_by_attempt)
    outcomes = frames.runs.reindex(columns=[*OUTCOMES])
    origins = _digest_origins(data.attempt for data in data_by_attempt)
    rows = list[CachedRow]()
    for data in data_by_attempt:
        origin = origins.get((data.attempt.run_id, data.attempt.number), "")
        for cells in data.rows:
            measured = outcomes.iloc[len(rows)].dropna().to_dict()
            rows.append(CachedRow(origin, cells, measured, data.notes))
    name = hashlib.sha256(repr([row.origin for row in rows]).encode()).hexdigest()[:16]
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
        return _read_batch(folder / name, origins, tables)
    except DamagedFileError:
        return CachedBatch(rows, select_tables(frames, tables))


def _join(rows: list[CachedRow], tables: Sequence[Frames], runs: Sequence[str]) -> Frames:
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


def _digest_origins(attempts: Iterable[Attempt]) -> dict[tuple[Any, Any], str]:
    """Return a digest of what each attempt's frames follow from: run.json has the digests of its logs."""
    origins = dict[tuple[Any, Any], str]()
    for attempt in attempts:
        with contextlib.suppress(DamagedFileError, FileNotFoundError):  # it was removed meanwhile
            raw = read_bytes(attempt.path / "config.json") + read_bytes(attempt.path / "run.json")
            origins[attempt.run_id, attempt.number] = hashlib.sha256(raw).hexdigest()[:16]
    return origins


@cache
def _code_digest() -> str:
    sources = [Path(str(module.__file__)).read_bytes() for module in CODE]
    return hashlib.sha256(b"".join(sources)).hexdigest()[:8]
