"""Loading of all records: this checkout's own runs and those that the repository ships."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

import pandas as pd

from analysis import TABLES
from analysis.records.columns import IMPLIED_SETTINGS
from analysis.records.files import try_read_struct
from analysis.records.frame_cache import load_newest_attempts_cached
from analysis.records.frames import Frames, concat_frames, select_runs
from analysis.records.parquet import read_parquet
from analysis.records.schema import RunIdList
from analysis.records.store import Store

ROOT = Path(__file__).parent.parent.parent
OWN, SHIPPED = "own", "shipped"


def load(results: Path | str | None = None, tables: Collection[str] = TABLES) -> Frames:
    """Return all runs as frames, own and shipped, without empty columns; see docs/records.md.

    A run that is both is taken from the own ones. Logs are read once and then kept in a cache.

    Args:
        results: the folder of results; by default $SPARSIFY_RESULTS, else results/ of this checkout.
        tables: those that are needed; the others are left empty. `runs` alone is read in a moment.

    Raises:
        DamagedFileError: a table is not as it was written.
    """
    folder = Path(results or os.environ.get("SPARSIFY_RESULTS") or ROOT / "results")
    shipped = ROOT / "results" / "shipped"
    frames = concat_frames([*load_frames_by_source(folder, shipped, tables, warnings.warn).values()])
    frames = frames._replace(runs=add_item_and_sweep_columns(frames.runs, folder, shipped))
    return _fill_and_drop_empty(frames)


def load_frames_by_source(
    results: Path, shipped: Path, tables: Collection[str], warn: Callable[[str], object]
) -> dict[str, Frames]:
    """Return the frames of OWN and SHIPPED runs, by source; a run that is both is among the own ones."""
    own_frames = load_own_runs(results, tables, warn)
    shipped_frames = read_parquet(shipped, {"runs", *tables})
    is_own = shipped_frames.runs["run_id"].isin(own_frames.runs["run_id"])
    other_frames = select_runs(shipped_frames, shipped_frames.runs["key"][~is_own])
    return {
        source: frames._replace(runs=frames.runs.assign(source=source))
        for source, frames in ((OWN, own_frames), (SHIPPED, other_frames))
    }


def load_own_runs(results: Path, tables: Collection[str], warn: Callable[[str], object]) -> Frames:
    """Return this checkout's runs; call `warn` with a line on each attempt that had to be left out."""
    store = Store(results / "runs")
    frames, notes = load_newest_attempts_cached(store, store.list_run_ids(), results / "records", tables)
    for note in notes:
        warn(note)
    return frames


def _fill_and_drop_empty(frames: Frames) -> Frames:
    """Return the frames with the settings that older records imply, and without empty columns."""
    runs = frames.runs
    for name, value in IMPLIED_SETTINGS.items():
        if name in runs and value not in (None, {}):
            has_texts = runs[name].map(lambda cell: isinstance(cell, str)).any()
            filler = str(value).lower() if has_texts and isinstance(value, bool) else value
            runs = runs.assign(**{name: runs[name].where(runs[name].notna(), filler)})
    full = frames._replace(runs=runs)
    return Frames(*(frame.dropna(axis="columns", how="all") if len(frame) else frame for frame in full))


def add_item_and_sweep_columns(runs: pd.DataFrame, results: Path, shipped: Path) -> pd.DataFrame:
    """Return the runs with columns for the figures (`items`) and `sweeps` that each belongs to."""
    names_by_column_and_run: dict[tuple[str, str], dict[str, None]] = {}
    for folder, column in (
        (results / "records" / "figures", "items"),
        (shipped / "figures", "items"),
        (results / "records" / "sweeps", "sweeps"),
    ):
        for path in sorted(folder.glob("*.json")):
            name = path.stem.rpartition("-")[0] if column == "items" else path.stem
            index = try_read_struct(path, RunIdList)  # where it is damaged, nobody knows
            for run in index.runs if index else ():
                names_by_column_and_run.setdefault((column, run), {})[name] = None
    columns = {
        column: [", ".join(names_by_column_and_run.get((column, run), ())) or None for run in runs["run_id"]]
        for column in ("items", "sweeps")
    }
    others = runs.drop(columns=[*columns], errors="ignore")
    named: pd.DataFrame = pd.concat([others, pd.DataFrame(columns, runs.index, dtype=object)], axis="columns")
    return named
