"""All runs of a results folder as five Parquet tables, for other programs to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from analysis.records.attempts import batch_runs_by_log_size, load_newest_attempts
from analysis.records.files import temporary_part_folder
from analysis.records.frames import Frames, build_runs_table, rows_as_dicts
from analysis.records.parquet import concat_parquet_files, write_frame, write_parquet
from analysis.records.process_pool import open_process_pool
from analysis.records.store import Store


class CollectionResult(NamedTuple):
    """The numbers of rows that were written, by table, and a line on everything that was left out."""

    count_by_table: dict[str, int]  # of `runs`: runs, whose variants are rows of their own
    notes: list[str]


def collect_runs_into_parquet(
    store: Store,
    folder: Path,
    processes: int = 1,
    show_progress: Callable[[list[Path]], Iterable[Path]] = iter,
) -> CollectionResult:
    """Write all runs of a store as Parquet files into `folder`; return how many, and what was left out.

    Every log is read and compared with its digest: part by part, by so many processes, so that ten thousand
    runs need no more memory than the table of their steps.

    Args:
        show_progress: is given the parts, and gives them back one by one, each when it is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_part_folder(folder) as parts:
        batches = [*batch_runs_by_log_size(store, store.list_run_ids())] or [[]]
        paths = [parts / str(number) for number in range(len(batches))]
        notes_by_part = _write_parts(store, batches, paths, processes)
        notes = [note for _, part in zip(show_progress(paths), notes_by_part, strict=True) for note in part]
        rows = [
            row for path in paths for row in rows_as_dicts(pq.read_table(path / "runs.parquet").to_pandas())
        ]
        runs = build_runs_table(rows)
        write_frame(folder / "runs.parquet", runs)
        for name in Frames._fields[1:]:
            concat_parquet_files(folder / f"{name}.parquet", [path / f"{name}.parquet" for path in paths])
    counts = {name: pq.read_metadata(folder / f"{name}.parquet").num_rows for name in ("steps", "epochs")}
    return CollectionResult({"runs": runs["run_id"].nunique(), **counts}, notes)


def _write_parts(
    store: Store, batches: Sequence[Sequence[str]], paths: Sequence[Path], processes: int
) -> Iterator[list[str]]:
    arguments = ([store] * len(paths), batches, paths)
    if min(processes, len(paths)) < 2:
        yield from map(_write_part, *arguments)
        return
    with open_process_pool(processes) as pool:
        yield from pool.map(_write_part, *arguments)


def _write_part(store: Store, runs: Sequence[str], path: Path) -> list[str]:
    frames, notes = load_newest_attempts(store, runs)
    write_parquet(frames, path)
    return notes
