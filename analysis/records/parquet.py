"""Frames as Parquet files: written as the same bytes each time, read with every bound and row checked."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from analysis.records import schema
from analysis.records.columns import COLUMNS, REQUIRED_COLUMNS
from analysis.records.files import (
    MAX_LOG_BYTES,
    DamagedFileError,
    convert_to_schema,
    decode_json,
    read_bytes,
    write_atomic,
)
from analysis.records.frames import (
    Frames,
    empty_table,
    is_missing,
    order_and_type_columns,
    rows_as_dicts,
    select_runs,
)
from analysis.records.schema import NUMBER

pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own keeps as much as the tables took
SCHEMA_KEY = "schema"  # in a file's metadata; older files have none, and are of schema 1
# A file may unpack to UNPACKED_BYTES, or to UNPACKED_RATIO times its size: 50 times what tables of runs do.
UNPACKED_BYTES = 2**28
UNPACKED_RATIO = 1000
# Without these no figure can be drawn.
NEEDED_RUN_COLUMNS = (
    "method.name", "task.name", "cluster.where", "workers", "seed", "timing.mode", "timing.warmup_steps",
    "train.validate", "simulated", "config_json", "provenance_json",
)  # fmt: skip
# Of the columns that hold JSON.
SCHEMA_BY_JSON_COLUMN: dict[str, Any] = {
    "config_json": schema.ConfigFile,
    "provenance_json": schema.Provenance,
    "rules_json": dict[str, str],
}
MAX_NAME = 80  # characters of a run's name in a sentence: a forged one may be long


def write_parquet(frames: Frames, folder: Path) -> list[Path]:
    """Write one file per frame, each replaced as a whole; return their paths.

    Steps, spans and looks are stored as float32, whose seven digits are enough for every field that does not
    say `needs_float64`; what no field describes is stored as it is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [write_frame(folder / f"{name}.parquet", frame) for name, frame in frames._asdict().items()]


def write_frame(path: Path, frame: pd.DataFrame) -> Path:
    """Write the frame that the file's name says; return the path."""
    if path.stem in ("steps", "spans", "looks"):
        fields = {column: field for column, field in COLUMNS[path.stem].items() if column in frame}
        short = [
            column for column, field in fields.items() if field.dtype == NUMBER and not field.needs_float64
        ]
        frame = frame.astype(dict.fromkeys(short, np.float32))
    return _write_arrow(path, pa.Table.from_pandas(frame, preserve_index=False))


def concat_parquet_files(path: Path, parts: Sequence[Path]) -> None:
    """Write the rows of these files, below each other, into one; what one of them lacks is empty there."""
    tables = [pq.read_table(part) for part in parts]
    fields = [field for table in tables for field in table.schema]
    # Numbers here and texts there: of what no field is for, every run may have its own.
    mixed = {field.name for field in fields if pa.types.is_floating(field.type)}
    mixed &= {field.name for field in fields if _is_text(field.type)}
    same_kinds = [table.cast(_with_texts(table.schema, mixed)) for table in tables]
    _write_arrow(path, pa.concat_tables(same_kinds, promote_options="permissive"))


def _write_arrow(path: Path, table: pa.Table) -> Path:
    # Without pandas' own metadata, pandas 2 can read what pandas 3 wrote.
    plain = table.replace_schema_metadata({SCHEMA_KEY: str(schema.SCHEMA)})
    floats = [field.name for field in plain.schema if pa.types.is_floating(field.type)]
    buffer = io.BytesIO()
    pq.write_table(
        plain,
        buffer,
        compression="zstd",
        use_dictionary=[name for name in plain.column_names if name not in floats],
        use_byte_stream_split=floats,  # makes the files a third smaller
    )
    write_atomic(path, buffer.getvalue())
    return path


def _with_texts(kind: pa.Schema, names: Collection[str]) -> pa.Schema:
    return pa.schema([field.with_type(pa.string()) if field.name in names else field for field in kind])


def read_parquet(
    folder: Path,
    names: Collection[str] = Frames._fields,
    on_fault: Callable[[DamagedFileError], object] | None = None,
) -> Frames:
    """Return the frames in `folder`; a frame without a file, and one that is not among `names`, is empty.

    Args:
        on_fault: called with the fault of each row of runs that is not as a record has it; the run is left
            out. None: the tables come with this code, and their rows are not looked at.

    Raises:
        DamagedFileError: a file is no table, or not one of these.
    """
    tables = list[pd.DataFrame]()
    for name in Frames._fields:
        tables.append(_read_table(folder / f"{name}.parquet") if name in names else empty_table(name))
        release_arrow_memory()  # of what reading took, a third of the tables' size
    frames = Frames(*tables)
    if on_fault is None:
        return frames
    runs_path = folder / "runs.parquet"
    columns = [name for name in schema.RunRowCells.__struct_fields__ if name in frames.runs]
    faults = [find_run_row_fault(cells, runs_path) for cells in rows_as_dicts(frames.runs[columns])]
    for fault in filter(None, faults):
        on_fault(fault)
    if not any(faults):
        return frames
    whole = frames.runs[[fault is None for fault in faults]].reset_index(drop=True)
    return select_runs(frames._replace(runs=whole), whole["key"])


def _read_table(path: Path) -> pd.DataFrame:
    try:
        raw = read_bytes(path, MAX_LOG_BYTES)
    except FileNotFoundError:
        return empty_table(path.stem)
    return parse_table(path, raw)


def raise_fault(fault: DamagedFileError) -> None:
    """Raise the fault of a row, for `read_parquet` to refuse its table."""
    raise fault


def find_run_row_fault(cells: Mapping[str, Any], path: Path) -> DamagedFileError | None:
    """Return what is wrong with the cells of a run; None where nothing is.

    Args:
        path: the file of the table, for sentences.
    """
    name = str(cells.get("run_id"))[:MAX_NAME]
    present = {column: cell for column, cell in cells.items() if not is_missing(cell)}
    try:
        convert_to_schema(present, schema.RunRowCells, path, f" in the row of {name}")
        for column, kind in SCHEMA_BY_JSON_COLUMN.items():
            if column in present:
                where = f" in {column} of {name}"
                convert_to_schema(decode_json(present[column].encode(), path, where), kind, path, where)
    except DamagedFileError as damage:
        return damage
    return None


def release_arrow_memory() -> None:
    """Give back to the system what tables took that are gone: the C library keeps it otherwise."""
    pa.default_memory_pool().release_unused()


def parse_table(path: Path, raw: bytes) -> pd.DataFrame:
    """Return the frame that a file holds, which is named after it.

    Args:
        raw: the content of the file.

    Raises:
        DamagedFileError: it is no table, or not this one, or unpacks to too much.
    """
    name = path.stem
    try:
        table = _unpack(path, raw)
        schema_number = (table.schema.metadata or {}).get(SCHEMA_KEY.encode(), b"1").decode(errors="replace")
        table = table.replace_schema_metadata(None)  # what pandas would obey, and none of our tables has
        # Column by column, each of which Arrow gives up when the next one comes.
        frame = _widen_floats(table).to_pandas(self_destruct=True)
        del table
        for text in frame.select_dtypes("category").columns:
            frame[text] = frame[text].astype(object).where(frame[text].notna(), None)
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(path, "is not a whole Parquet file") from error
    if schema_number != str(schema.SCHEMA):
        raise DamagedFileError(
            path, f"has schema {schema_number}, and this code reads schema {schema.SCHEMA}"
        )
    new_names = {field.former_name: column for column, field in COLUMNS[name].items()}
    columns = {*frame.columns, *(new_names.get(column) for column in frame.columns)}
    needed = [column for column, field in REQUIRED_COLUMNS[name].items() if not field.since]
    needed += NEEDED_RUN_COLUMNS if name == "runs" and len(frame) else ()
    missing = [column for column in needed if column not in columns]
    if missing:
        raise DamagedFileError(path, f"is not as it was written: it has no column {missing[0]}")
    try:
        return order_and_type_columns(name, frame)
    except (TypeError, ValueError) as error:
        raise DamagedFileError(path, f"is not as it was written: {error}") from error


def _unpack(path: Path, raw: bytes) -> pa.Table:
    """Return the table in a file, whose texts are dictionaries: each is in memory once."""
    metadata = pq.read_metadata(io.BytesIO(raw))
    groups = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    # Of texts that stand in many rows, a reference in each of them.
    unpacked_bytes = max(8 * metadata.num_rows * metadata.num_columns, sum(groups))
    if unpacked_bytes > max(UNPACKED_BYTES, UNPACKED_RATIO * len(raw)):
        raise DamagedFileError(
            path, f"unpacks {len(raw):,} bytes to {metadata.num_rows:,} rows: no run wrote it"
        )
    texts = [field.name for field in metadata.schema.to_arrow_schema() if _is_text(field.type)]
    return pq.ParquetFile(io.BytesIO(raw), metadata=metadata, read_dictionary=texts).read()


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))  # pandas 3 writes large ones


def _widen_floats(table: pa.Table) -> pa.Table:
    """Return the table with floats of 64 bits, as frames have them, where files have 32."""
    wide = [field.with_type(pa.float64()) if field.type == pa.float32() else field for field in table.schema]
    return table.cast(pa.schema(wide, table.schema.metadata))
