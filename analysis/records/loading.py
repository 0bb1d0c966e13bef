"""Every record there is: this checkout's own runs and those that the repository ships."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import TABLES
from analysis.records.attempts import newest
from analysis.records.columns import IMPLIED, OUTCOMES, RUNS
from analysis.records.files import Damaged, read_note
from analysis.records.frames import Frames, empty, no_rows, restrict, stack
from analysis.records.parquet import column_names, listed, read_parquet
from analysis.records.schema import RunIndex
from analysis.records.steps import with_outcomes
from analysis.records.store import Store

ROOT = Path(__file__).parent.parent.parent
OWN, SHIPPED = "own", "shipped"
MOST_FAULTS = 20  # rows that are named, of those that are left out
ANEW = "runs are read from their logs, and `collect` makes the table anew"


def load(results: Path | str | None = None, tables: Iterable[str] = TABLES) -> Frames:
    """All runs as frames, own and shipped, without columns that are empty; see docs/records.md.

    A run that is both is taken from the own ones. What `collect` has put into tables is read from there, only
    newer runs from their logs.

    Args:
        results: the folder of results; by default $SPARSIFY_RESULTS, else results/ of this checkout.
        tables: those that are needed; the others are left empty. `runs` alone is read in a moment.

    Raises:
        Damaged: a table is not as it was written.
    """
    folder = Path(results or os.environ.get("SPARSIFY_RESULTS") or ROOT / "results")
    shipped = ROOT / "results" / "shipped"
    parts = {OWN: own(folder, tables, warnings.warn), SHIPPED: _read(shipped, tables)}
    keys = parts[SHIPPED].runs["key"][_not_in(parts[OWN].runs, parts[SHIPPED].runs)]
    parts[SHIPPED] = restrict(parts[SHIPPED], keys)
    both = stack([part._replace(runs=part.runs.assign(source=source)) for source, part in parts.items()])
    return tidy(both._replace(runs=with_names(both.runs, folder, shipped)))


def runs(
    results: Path, shipped: Path, last: Mapping[str, int], say: Callable[[str], None]
) -> dict[str, pd.DataFrame]:
    """The runs alone, own and shipped, as they are in their tables; `last` is of `Store.last_numbers`."""
    mine, theirs = own(results, ["runs"], say, last).runs, _read(shipped, ["runs"]).runs
    found = {OWN: mine, SHIPPED: theirs[_not_in(mine, theirs)]}
    return {source: table.assign(source=source) for source, table in found.items()}


def _not_in(mine: pd.DataFrame, theirs: pd.DataFrame) -> Any:
    return ~theirs["run_id"].isin(set(mine["run_id"]))


def own(
    results: Path,
    tables: Iterable[str],
    say: Callable[[str], None],
    last: Mapping[str, int] | None = None,
) -> Frames:
    """This checkout's runs: from the tables of `collect`, newer ones from their logs. What had to be left out
    is said."""
    store, collected, faults = Store(results / "runs"), empty(), list[Damaged]()
    try:
        collected = _read(results / "records", tables, faults.append)
    except Damaged as damage:
        say(f"left out {damage}; {ANEW}")
    for fault in faults[:MOST_FAULTS]:
        say(f"left out a row: {fault}; {ANEW}")
    if len(faults) > MOST_FAULTS:
        say(f"left out {len(faults) - MOST_FAULTS} more rows of {faults[0].path}; {ANEW}")
    known = dict(zip(collected.runs["run_id"], collected.runs.get("attempt", ()), strict=False))
    last = store.last_numbers() if last is None else last
    there = {run for run, number in last.items() if known.get(run) == number}
    newer = [run for run in last if run not in there]
    if {*tables} == {"runs"}:
        rows, notes = listed(store, newer, results / "records" / "listed")
        fresh = empty()._replace(runs=rows)
    else:
        fresh, notes = newest(store, newer)
    for note in notes:
        say(note)
    there |= set(known) & (set(newer) - set(fresh.runs["run_id"]))  # its newest attempt is not whole yet
    kept = restrict(collected, collected.runs["key"][collected.runs["run_id"].isin(there)])
    return stack([kept, _only(fresh, tables)]) if newer else kept


def tidy(frames: Frames) -> Frames:
    """The frames without empty columns, and with what older records imply."""
    runs = frames.runs
    for name, value in IMPLIED.items():
        if name in runs and value not in (None, {}):
            runs = runs.assign(**{name: runs[name].where(runs[name].notna(), _as(runs[name], value))})
    full = frames._replace(runs=runs)
    return Frames(*(frame.dropna(axis="columns", how="all") if len(frame) else frame for frame in full))


def with_names(runs: pd.DataFrame, results: Path, shipped: Path) -> pd.DataFrame:
    """The runs with the `items` and `sweeps` that each belongs to, from notes of figures and sweeps."""
    found: dict[str, dict[str, dict[str, None]]] = {"items": {}, "sweeps": {}}
    for folder, column in (
        (results / "records" / "figures", "items"),
        (shipped / "figures", "items"),
        (results / "records" / "sweeps", "sweeps"),
    ):
        for path in sorted(folder.glob("*.json")):
            name = path.stem.rpartition("-")[0] if column == "items" else path.stem
            index = read_note(path, RunIndex)  # where it is damaged, nobody knows
            for run in index.runs if index else ():
                found[column].setdefault(run, {})[name] = None
    columns = {
        column: [", ".join(of_runs.get(run, ())) or None for run in runs["run_id"]]
        for column, of_runs in found.items()
    }
    known = runs.drop(columns=[*columns], errors="ignore")
    named: pd.DataFrame = pd.concat([known, pd.DataFrame(columns, runs.index, dtype=object)], axis="columns")
    return named


def _read(folder: Path, tables: Iterable[str], on_fault: Callable[[Damaged], object] | None = None) -> Frames:
    """The tables in a folder, of those asked for; outcomes are computed where they were not stored.

    Args:
        on_fault: as for `read_parquet`.
    """
    path = folder / "runs.parquet"
    if not path.is_file():
        return empty()
    first = {name for name in OUTCOMES if not RUNS[name].since}  # of later ones older steps have nothing
    if first <= set(column_names(path)):
        return read_parquet(folder, {"runs", *tables}, on_fault)
    return _only(with_outcomes(read_parquet(folder, on_fault=on_fault)), tables)


def _only(frames: Frames, tables: Iterable[str]) -> Frames:
    left_out = set(TABLES) - {"runs", *tables}
    return frames._replace(**{name: no_rows(name) for name in left_out})


def _as(column: pd.Series[Any], value: Any) -> Any:
    """The value as the column holds such: as text where it holds text."""
    is_text = column.dropna().map(lambda one: isinstance(one, str)).any()
    return str(value).lower() if is_text and isinstance(value, bool) else value
