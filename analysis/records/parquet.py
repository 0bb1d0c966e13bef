"""Frames as Parquet files, from which a figure can be redrawn without the records."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import multiprocessing
import re
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.records import attempts as attempts_module
from analysis.records import schema
from analysis.records.attempts import newest, of_attempt
from analysis.records.columns import ALWAYS, COLUMNS
from analysis.records.files import (
    DEEPEST,
    MOST_LOG_BYTES,
    Damaged,
    converted,
    decoded,
    fingerprint,
    part_folder,
    read_as,
    read_bytes,
    read_recorded,
    write_atomic,
    write_json,
)
from analysis.records.frames import (
    Frames,
    empty,
    is_missing,
    no_rows,
    records,
    restrict,
    runs_frame,
    stack,
    typed,
)
from analysis.records.schema import NUMBER
from analysis.records.store import Attempt, Store

pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own keeps as much as the tables took
# At most so many runs, with so many bytes of logs, are read together: as tables they take many times as much.
RUNS_OF_A_PART, BYTES_OF_A_PART = 250, 32 * 2**20
SCHEMA_KEY = "schema"  # in a file's metadata; older files have none, and are of schema 1
# What reading a file may take: PACKED times its bytes, which is 50 times what tables of runs do.
UNPACKED, PACKED = 2**28, 1000
ORIGIN = "origin"  # a column of `listed`: what a row was made from
COPY = "copy.json"  # in the folder of an attempt's own tables: what they were when they were written
# Without these no figure can be drawn.
OF_EVERY_RUN = (
    "method.name", "task.name", "cluster.where", "workers", "seed", "timing.mode", "timing.warmup_steps",
    "train.validate", "simulated", "config_json", "provenance_json",
)  # fmt: skip

OBJECTS: dict[str, Any] = {
    "config_json": schema.ConfigFile,
    "provenance_json": schema.Provenance,
    "rules_json": dict[str, str],
}  # schemas of the texts that hold JSON, by column
# What only `decoded` sees: numbers of more than 64 bits, halves of characters.
ODD_TEXT = re.compile(r"[0-9]{19}|\\u[dD]")
MOST_NAME = 80  # characters of a run's name in a sentence: a forged one may be long


def write_parquet(frames: Frames, folder: Path) -> list[Path]:
    """One file per frame, each replaced as a whole; returns their paths.

    Steps, spans and looks are stored as float32, whose seven digits are enough for every field that is not
    `exact`; not what no field is for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _write(folder / f"{name}.parquet", [_arrow(name, frame)]) for name, frame in frames._asdict().items()
    ]


def shares(store: Store, runs: Iterable[str]) -> Iterator[list[str]]:
    """These runs in their order, so many at a time that they are in memory together."""
    share, room = list[str](), BYTES_OF_A_PART
    for run in runs:
        size = _log_bytes(store.root / run)
        if share and (size > room or len(share) == RUNS_OF_A_PART):
            yield share
            share, room = [], BYTES_OF_A_PART
        share.append(run)
        room -= size
    if share:
        yield share


def _log_bytes(folder: Path) -> int:
    with contextlib.suppress(OSError):  # it may be removed meanwhile
        return sum(path.stat().st_size for path in folder.glob("*/*.jsonl"))
    return 0


def collect(
    store: Store, folder: Path, processes: int = 1, told: Callable[[list[Path]], Iterable[Path]] = iter
) -> tuple[dict[str, int], list[str]]:
    """All runs of a store as Parquet files in `folder`; returns how many, and what was left out.

    Every log is read and compared with its digest: part by part, by so many processes, so that ten thousand
    runs need no more memory than the table of their steps.

    Args:
        told: is given the parts, and gives them back one by one, each when it is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with part_folder(folder) as parts:
        each = [*shares(store, store.runs())] or [[]]
        paths = [parts / str(number) for number in range(len(each))]
        written = _each_part(store, each, paths, processes)
        notes = [note for _, own in zip(told(paths), written, strict=True) for note in own]
        every = [pq.read_table(path / "runs.parquet").to_pandas() for path in paths]
        rows = runs_frame([row for part in every for row in records(part)])
        _write(folder / "runs.parquet", [_arrow("runs", rows)])
        for name in Frames._fields[1:]:
            _write(folder / f"{name}.parquet", [path / f"{name}.parquet" for path in paths])
    counts = {name: pq.read_metadata(folder / f"{name}.parquet").num_rows for name in ("steps", "epochs")}
    return {"runs": rows["run_id"].nunique(), **counts}, notes


def _each_part(
    store: Store, shares: Sequence[Sequence[str]], paths: Sequence[Path], processes: int
) -> Iterator[list[str]]:
    parts = [store] * len(paths), shares, paths
    if min(processes, len(paths)) < 2:
        yield from map(_write_part, *parts)
        return
    with process_pool(processes) as pool:
        yield from pool.map(_write_part, *parts)


@contextlib.contextmanager
def process_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Provide a pool of fresh processes; an early end of the block drops what none of them has begun.

    SIGTERM and SIGHUP end the block as Ctrl-C does, unless somebody else takes them: by themselves they would
    end this process alone, and multiprocessing would complain of what it had no time to remove.
    """
    # A forked process could wait for a lock that a thread of this one held.
    context = multiprocessing.get_context("spawn")
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in numbers if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _interrupt)
    try:
        with ProcessPoolExecutor(processes, context, _leave_interrupts_to_the_first) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _leave_interrupts_to_the_first() -> None:
    """Ignore Ctrl-C, which reaches every process: one sentence about it is enough."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _write_part(store: Store, runs: Sequence[str], path: Path) -> list[str]:
    gc.disable()  # it would look through a million objects, none of which is in a circle, again and again
    try:
        frames, notes = newest(store, runs)
        write_parquet(frames, path)
        return notes
    finally:
        gc.enable()


def _arrow(name: str, frame: pd.DataFrame) -> pa.Table:
    if name in ("steps", "spans", "looks"):
        listed = {column: field for column, field in COLUMNS[name].items() if column in frame}
        short = [column for column, field in listed.items() if field.type == NUMBER and not field.exact]
        frame = frame.astype(dict.fromkeys(short, np.float32))
    # Without pandas' own metadata, pandas 2 can read what pandas 3 wrote.
    return pa.Table.from_pandas(frame, preserve_index=False).replace_schema_metadata(None)


def _write(path: Path, tables: Sequence[pa.Table | Path]) -> Path:
    """One file of these tables or files, below each other; what one of them lacks is empty there."""
    kinds = [pq.read_schema(table) if isinstance(table, Path) else table.schema for table in tables]
    fields = [field for kind in kinds for field in kind]
    # Numbers here and texts there: of what no field is for, every run may have its own.
    mixed = {field.name for field in fields if pa.types.is_floating(field.type)}
    mixed &= {field.name for field in fields if _is_text(field.type)}
    whole = pa.unify_schemas([_with_texts(kind, mixed) for kind in kinds], promote_options="permissive")
    whole = whole.with_metadata({SCHEMA_KEY: str(schema.SCHEMA)})
    floats = [field.name for field in whole if pa.types.is_floating(field.type)]
    buffer = io.BytesIO()
    writer = pq.ParquetWriter(
        buffer,
        whole,
        compression="zstd",
        use_dictionary=[name for name in whole.names if name not in floats],
        use_byte_stream_split=floats,  # makes the files a third smaller
    )
    with writer:
        for table in tables:
            rows = pq.read_table(table) if isinstance(table, Path) else table
            rows = rows.cast(_with_texts(rows.schema, mixed))
            rows = pa.concat_tables([whole.empty_table(), rows], promote_options="permissive")
            writer.write_table(rows)
    write_atomic(path, buffer.getvalue())
    return path


def _with_texts(kind: pa.Schema, names: Collection[str]) -> pa.Schema:
    return pa.schema([field.with_type(pa.string()) if field.name in names else field for field in kind])


def read_parquet(
    folder: Path,
    names: Collection[str] = Frames._fields,
    on_fault: Callable[[Damaged], object] | None = None,
) -> Frames:
    """The frames in `folder`; a frame without a file, and one that is not among `names`, is empty.

    Args:
        on_fault: called with the fault of each row of runs that is not as a record has it; the run is left
            out. None: the tables come with this code, and their rows are not looked at.

    Raises:
        Damaged: a file is no table, or not one of these.
    """
    paths = [folder / f"{name}.parquet" for name in Frames._fields]
    tables = list[pd.DataFrame]()
    for path in paths:
        tables.append(_as_table(path, _bytes(path) if path.stem in names else None))
        release()  # of what reading took, a third of the tables' size
    frames = Frames(*tables)
    return frames if on_fault is None else _without_faults(frames, folder / "runs.parquet", on_fault)


def raise_fault(fault: Damaged) -> None:
    """Refuse a table for one of its rows."""
    raise fault


def _without_faults(frames: Frames, path: Path, on_fault: Callable[[Damaged], object]) -> Frames:
    """Return the frames without runs whose rows are not as a record has them."""
    whole, faults = _split_rows(frames.runs, path)
    for fault in faults:
        on_fault(fault)
    return restrict(frames._replace(runs=whole), set(whole["key"])) if faults else frames


def _split_rows(runs: pd.DataFrame, path: Path) -> tuple[pd.DataFrame, list[Damaged]]:
    """Return the rows that are as a record has them, and the fault of each other row.

    Args:
        path: the file of the table, for sentences.
    """
    columns = [name for name in schema.RunCells.__struct_fields__ if name in runs]
    faults = [_fault(cells, path) for cells in records(runs[columns])]
    damages = [fault for fault in faults if fault is not None]
    if not damages:
        return runs, []
    is_whole = np.array([fault is None for fault in faults], bool)
    return runs[is_whole].reset_index(drop=True), damages


def _fault(cells: Mapping[str, Any], path: Path) -> Damaged | None:
    """Return what is wrong with a row; None where nothing is."""
    name = str(cells.get("run_id"))[:MOST_NAME]
    there = {column: cell for column, cell in cells.items() if not is_missing(cell)}
    try:
        converted(there, schema.RunCells, path, f" in the row of {name}")
        for column, kind in OBJECTS.items():
            if column in there:
                _check_object(there[column], kind, path, f" in {column} of {name}")
    except Damaged as damage:
        return damage
    return None


def _check_object(text: str, kind: Any, path: Path, where: str) -> None:
    """Check that a text is the JSON of an object of this schema, as a file of a record is checked.

    Raises:
        Damaged: it is not.
    """
    if text.count("{") + text.count("[") <= DEEPEST and not ODD_TEXT.search(text):
        try:
            msgspec.json.decode(text, type=kind)  # takes a tenth of the time, as for thousands of rows
        except (msgspec.MsgspecError, UnicodeError):
            pass  # it is another one, or has a NaN
        else:
            return
    converted(decoded(text.encode(), path, where), kind, path, where)


def column_names(path: Path) -> list[str]:
    """The columns of a table.

    Raises:
        Damaged: the file is no table.
    """
    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError) as error:
        raise Damaged(path, "is not a whole Parquet file") from error


def release() -> None:
    """Give back to the system what tables took that are gone: the C library keeps it otherwise."""
    pa.default_memory_pool().release_unused()


def newest_frames(
    store: Store, runs: Iterable[str], kept: Path, verify: bool = False
) -> tuple[Frames, list[str]]:
    """The frames of each run's newest attempt that is whole, and a line on each newer one that is damaged.

    Args:
        kept: the folder for a copy of each attempt's frames, which is read 20 times faster.
        verify: compare the digests of logs even where there is such a copy.
    """
    parts, notes = store.newest(runs, lambda attempt, _: cached(attempt, kept), verify)
    return stack(parts), notes


def listed(store: Store, runs: Sequence[str], folder: Path) -> tuple[pd.DataFrame, list[str]]:
    """A row of each run's newest attempt that is whole, or of its variants, and a line on each newer one that
    is damaged: of `newest` the runs alone, but that only what is new is read from logs.

    Args:
        folder: for the table of rows that were read before.
    """
    origins = dict[str, str]()
    for run in runs:
        with contextlib.suppress(Damaged):
            if (attempts := store.attempts(run)) and attempts[-1].check()["state"] == "ok":
                origins[run] = _origin(attempts[-1])
    before = empty().runs
    with contextlib.suppress(Damaged):  # then it is made again
        before = read_parquet(folder, ["runs"], lambda _: None).runs  # what is left out is made again
    made_from = before[ORIGIN] if ORIGIN in before else [None] * len(before)
    rows_before = zip(before["run_id"], made_from, strict=True)
    is_known = [run in origins and origins[run] == was for run, was in rows_before]
    parts, notes = [before[np.array(is_known, bool)]], list[str]()
    known = set(parts[0]["run_id"])
    todo = [run for run in runs if run not in known]
    for share in shares(store, todo):
        fresh, own_notes = newest(store, share)
        parts.append(fresh.runs.assign(**{ORIGIN: fresh.runs["run_id"].map(origins)}))
        notes += own_notes
    rows = parts[0]
    if todo:
        rows = runs_frame([row for part in parts for row in records(part)])
    if ORIGIN in rows and len(rows) > len(parts[0]):
        with contextlib.suppress(OSError):  # somebody else's results, which are only read
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / "runs.parquet", [_arrow("runs", rows[rows[ORIGIN].notna()])])
    return rows.drop(columns=ORIGIN, errors="ignore"), notes


def cached(attempt: Attempt, folder: Path) -> tuple[Frames, list[str]]:
    """`attempts.of_attempt`, with a copy as Parquet below `folder`.

    The copy never expires: its name says what it was made from, and by which code.

    Raises:
        Damaged: a file is not as it was recorded.
    """
    if attempt.is_valid():
        kept = folder / "attempts" / f"{attempt.run_id}-{attempt.number:03d}-{_origin(attempt)}"
        with contextlib.suppress(Damaged):  # then it is made again
            frames = _read_copy(kept)
            if frames is not None and set(frames.runs["run_id"]) == {attempt.run_id}:
                return frames, []
    frames, notes = of_attempt(attempt)
    if not notes:
        frames = _write_copy(frames, kept)
    return frames, notes


def _read_copy(kept: Path) -> Frames | None:
    """The frames that `_write_copy` has written there, if it has."""
    note = read_as(kept / COPY, schema.Copy)
    if note is None:
        return None
    raws = {
        name: read_recorded(kept / name, msgspec.structs.asdict(facts)) for name, facts in note.files.items()
    }
    paths = [kept / f"{name}.parquet" for name in Frames._fields]
    frames = Frames(*(_as_table(path, raws.get(path.name)) for path in paths))
    return _without_faults(frames, paths[0], raise_fault)


def _write_copy(frames: Frames, kept: Path) -> Frames:
    """Write a copy, also while others write the same; returns what later calls will read, to the digit."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with part_folder(kept.parent) as folder:
        own = folder / kept.name
        files = {path.name: fingerprint(path) for path in write_parquet(frames, own)}
        write_json(own / COPY, {"files": files})
        written = read_parquet(own)
        shutil.rmtree(kept, ignore_errors=True)  # a damaged one
        with contextlib.suppress(OSError):  # another process was quicker
            own.rename(kept)
    return written


def _origin(attempt: Attempt) -> str:
    """8 digits of a hash over what an attempt's frames follow from: run.json has the digests of its logs."""
    sha = hashlib.sha256(_code())
    for name in ("config.json", "run.json"):
        sha.update(read_bytes(attempt.path / name))
    return sha.hexdigest()[:8]


@cache
def _code() -> bytes:
    return b"".join(Path(code).read_bytes() for code in (attempts_module.__file__, schema.__file__))


def _bytes(path: Path) -> bytes | None:
    try:
        return read_bytes(path, MOST_LOG_BYTES)
    except FileNotFoundError:
        return None


def _unpacked(metadata: pq.FileMetaData) -> int:
    """Bytes that a file's rows take in memory, or more; of texts that stand in many rows a reference each."""
    cells: int = metadata.num_rows * metadata.num_columns
    groups: list[int] = [metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups)]
    return max(8 * cells, sum(groups))


def _as_table(path: Path, raw: bytes | None) -> pd.DataFrame:
    """Frame in `path`, a file that is named after it; an empty one where there is no file."""
    name = path.stem
    if raw is None:
        return no_rows(name)
    try:
        file = pq.ParquetFile(io.BytesIO(raw))
        if _unpacked(file.metadata) > max(UNPACKED, PACKED * len(raw)):
            raise Damaged(
                path, f"unpacks {len(raw):,} bytes to {file.metadata.num_rows:,} rows: no run wrote it"
            )
        # A text that stands in a million rows is in memory once.
        texts = [each.name for each in file.schema_arrow if _is_text(each.type)]
        table = pq.ParquetFile(io.BytesIO(raw), metadata=file.metadata, read_dictionary=texts).read()
        made_for = (table.schema.metadata or {}).get(SCHEMA_KEY.encode(), b"1").decode(errors="replace")
        table = table.replace_schema_metadata(None)  # what pandas would obey, and none of our tables has
        # Column by column, each of which Arrow gives up when the next one comes.
        frame = _wide(table).to_pandas(self_destruct=True)
        del table
        for text in frame.select_dtypes("category").columns:
            frame[text] = frame[text].astype(object).where(frame[text].notna(), None)
    except (pa.ArrowException, OSError) as error:
        raise Damaged(path, "is not a whole Parquet file") from error
    if made_for != str(schema.SCHEMA):
        raise Damaged(path, f"has schema {made_for}, and this code reads schema {schema.SCHEMA}")
    older = {field.was: column for column, field in COLUMNS[name].items()}
    there = {*frame.columns, *(older.get(column) for column in frame.columns)}
    needed = [column for column, field in ALWAYS[name].items() if not field.since]
    needed += OF_EVERY_RUN if name == "runs" and len(frame) else ()
    if missing := [column for column in needed if column not in there]:
        raise Damaged(path, f"is not as it was written: it has no column {missing[0]}")
    try:
        return typed(name, frame)
    except (TypeError, ValueError) as error:
        raise Damaged(path, f"is not as it was written: {error}") from error


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))  # pandas 3 writes large ones


def _wide(table: pa.Table) -> pa.Table:
    """Numbers of twice the size, as frames have them, where files have smaller ones."""
    wide = [field.with_type(pa.float64()) if field.type == pa.float32() else field for field in table.schema]
    return table.cast(pa.schema(wide, table.schema.metadata))
