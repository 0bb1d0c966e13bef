"""Every record there is: this checkout's own runs and those that the repository ships."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import TABLES
from analysis.records.columns import IMPLIED_SETTINGS, OUTCOMES, RUN_COLUMNS
from analysis.records.files import read_struct_or_none
from analysis.records.frame_cache import load_newest_cached
from analysis.records.frames import Frames, concat_frames, empty_frames, select_runs, select_tables
from analysis.records.parquet import read_column_names, read_parquet
from analysis.records.schema import RunIndex
from analysis.records.steps import add_outcomes
from analysis.records.store import Store

ROOT = Path(__file__).parent.parent.parent
OWN, SHIPPED = "own", "shipped"


def load(results: Path | str | None = None, tables: Collection[str] = TABLES) -> Frames:
    """Return all runs as frames, own and shipped, without empty columns; see docs/records.md.

    A run that is both is taken from the own ones. Logs are read once and then kept in a cache.

    A run that is both is taken from the own ones. What `collect` has put into tables is read from there, only
    newer runs from their logs.

    Args:
        results: the folder of results; by default $SPARSIFY_RESULTS, else results/ of this checkout.
        tables: those that are needed; the others are left empty. `runs` alone is read in a moment.

    Raises:
        DamagedFileError: a table is not as it was written.
    """
    folder = Path(results or os.environ.get("SPARSIFY_RESULTS") or ROOT / "results")
    shipped = ROOT / "results" / "shipped"
    parts = {OWN: load_own(folder, tables, warnings.warn), SHIPPED: _read_shipped(shipped, tables)}
    keys = parts[SHIPPED].runs["key"][_not_in(parts[OWN].runs, parts[SHIPPED].runs)]
    parts[SHIPPED] = select_runs(parts[SHIPPED], keys)
    both = concat_frames(
        [part._replace(runs=part.runs.assign(source=source)) for source, part in parts.items()]
    )
    return fill_and_drop_empty(both._replace(runs=add_items_and_sweeps(both.runs, folder, shipped)))


def load_runs(results: Path, shipped: Path, say: Callable[[str], None]) -> dict[str, pd.DataFrame]:
    """Return the tables of runs alone, by their source; a run that is both is among the own ones."""
    mine, theirs = load_own(results, ["runs"], say).runs, _read_shipped(shipped, ["runs"]).runs
    found = {OWN: mine, SHIPPED: theirs[_not_in(mine, theirs)]}
    return {source: table.assign(source=source) for source, table in found.items()}


def _not_in(mine: pd.DataFrame, theirs: pd.DataFrame) -> Any:
    return ~theirs["run_id"].isin(set(mine["run_id"]))


def load_own(results: Path, tables: Collection[str], say: Callable[[str], None]) -> Frames:
    """Return this checkout's runs; say what had to be left out."""
    store = Store(results / "runs")
    frames, notes = load_newest_cached(store, store.run_ids(), results / "records", tables)
    for note in notes:
        say(note)
    return frames


def fill_and_drop_empty(frames: Frames) -> Frames:
    """Return the frames with the settings that older records imply, and without empty columns."""
    runs = frames.runs
    for name, value in IMPLIED_SETTINGS.items():
        if name in runs and value not in (None, {}):
            runs = runs.assign(**{name: runs[name].where(runs[name].notna(), _as(runs[name], value))})
    full = frames._replace(runs=runs)
    return Frames(*(frame.dropna(axis="columns", how="all") if len(frame) else frame for frame in full))


def add_items_and_sweeps(runs: pd.DataFrame, results: Path, shipped: Path) -> pd.DataFrame:
    """Return the runs with columns for the figures (`items`) and `sweeps` that each belongs to."""
    found: dict[str, dict[str, dict[str, None]]] = {"items": {}, "sweeps": {}}
    for folder, column in (
        (results / "records" / "figures", "items"),
        (shipped / "figures", "items"),
        (results / "records" / "sweeps", "sweeps"),
    ):
        for path in sorted(folder.glob("*.json")):
            name = path.stem.rpartition("-")[0] if column == "items" else path.stem
            index = read_struct_or_none(path, RunIndex)  # where it is damaged, nobody knows
            for run in index.runs if index else ():
                found[column].setdefault(run, {})[name] = None
    columns = {
        column: [", ".join(of_runs.get(run, ())) or None for run in runs["run_id"]]
        for column, of_runs in found.items()
    }
    known = runs.drop(columns=[*columns], errors="ignore")
    named: pd.DataFrame = pd.concat([known, pd.DataFrame(columns, runs.index, dtype=object)], axis="columns")
    return named


def _read_shipped(folder: Path, tables: Collection[str]) -> Frames:
    """Return the tables in a folder, of those asked for; outcomes are computed where they were not stored."""
    path = folder / "runs.parquet"
    if not path.is_file():
        return empty_frames()
    first = {
        name for name in OUTCOMES if not RUN_COLUMNS[name].since
    }  # of later ones older steps have nothing
    if first <= set(read_column_names(path)):
        return read_parquet(folder, {"runs", *tables})
    return select_tables(add_outcomes(read_parquet(folder)), tables)


def _as(column: pd.Series[Any], value: Any) -> Any:
    """Return a value as a column holds it: as text where the column holds text."""
    is_text = column.dropna().map(lambda one: isinstance(one, str)).any()
    return str(value).lower() if is_text and isinstance(value, bool) else value
