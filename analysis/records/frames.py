"""Tidy frames of records, and selections from them.

Frames have one row per run; per run, rank and step; per epoch; per span of a drawn step; per number that was
looked for in gradients.

Statistics, claims and figures read frames, never records. analysis/records/parquet.py stores them.
"""

from __future__ import annotations

import difflib
import json
import keyword
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, TypeVar

import numpy as np
import pandas as pd

from analysis.records.columns import COLUMNS, IMPLIED_SETTINGS, REQUIRED_COLUMNS
from analysis.records.configs import flatten, label_configs
from analysis.records.schema import ALL, DIVERGED, DONE, NUMBER, TEXT

# In an expression: a text, or a name with its dots; not the exponent of a number.
EXPRESSION_NAMES = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|(?<![\w.@])[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*""")
EXPRESSION_WORDS = {*keyword.kwlist, "nan"}
LOGGED_TABLES = ("steps", "epochs")  # tables with numbers that no field is for
P = ParamSpec("P")
R = TypeVar("R")
_RESULTS_BY_TABLES: dict[tuple[int, ...], dict[Any, Any]] = {}  # by the identities of tables
_READ_KEYS: ContextVar[set[str] | None] = ContextVar("_READ_KEYS", default=None)
NO_ROWS = np.array([], dtype=int)


class Frames(NamedTuple):
    """Tables of what runs measured.

    `key` names the run in every table; of variants that took turns, each has a key of its own. Times are
    seconds, accuracies percent.
    """

    runs: pd.DataFrame
    steps: pd.DataFrame
    epochs: pd.DataFrame
    spans: pd.DataFrame
    looks: pd.DataFrame


def run_states(runs: pd.DataFrame) -> list[str]:
    """Return the end state of each of these whole runs: DONE or DIVERGED."""
    if "diverged" not in runs:
        return [DONE] * len(runs)
    return [DIVERGED if is_diverged else DONE for is_diverged in runs["diverged"].notna()]


def find_diverged_keys(frames: Frames) -> list[str]:
    """Return the keys of the trainings that diverged: at their last epoch nothing is a number."""
    states = zip(frames.runs["key"], run_states(frames.runs), strict=True)
    return [key for key, state in states if state == DIVERGED]


def empty_frames() -> Frames:
    """Return frames of no runs, with all their columns."""
    return Frames(*map(empty_table, Frames._fields))


@cache
def _empty_table(name: str) -> pd.DataFrame:
    return order_and_type_columns(name, pd.DataFrame())


def empty_table(name: str) -> pd.DataFrame:
    """Return a table of no runs, with all its columns."""
    table: pd.DataFrame = _empty_table(name).copy()
    return table


def select_runs(frames: Frames, keys: Collection[str]) -> Frames:
    """Return the rows of these runs from every table."""
    unique_keys = {*keys}
    return Frames(*(table[table["key"].isin(unique_keys)].reset_index(drop=True) for table in frames))


def select_tables(frames: Frames, names: Collection[str]) -> Frames:
    """Return the frames with `runs` and these tables; the others are empty."""
    return frames._replace(**{name: empty_table(name) for name in Frames._fields[1:] if name not in names})


def find_run_keys(frames: Frames, settings: Mapping[str, Any]) -> list[str]:
    """Return keys of the runs that have these values in these columns; [] where a column is not recorded."""
    runs = frames.runs
    if not len(runs) or not {*settings} <= {*runs, *IMPLIED_SETTINGS}:
        return []
    is_match = np.ones(len(runs), dtype=bool)
    for name, value in settings.items():  # without a copy of the other columns, of which there are hundreds
        if name in runs:
            column = runs[name]
            same = column.eq(value)
            if not pd.api.types.is_numeric_dtype(column):  # where methods differ in the type, all are texts
                same |= column.eq(str(_as_text(value)))
            if IMPLIED_SETTINGS.get(name) == value:
                same |= column.isna()
            is_match &= same.fillna(False).to_numpy(dtype=bool)
        else:
            is_match &= IMPLIED_SETTINGS[name] == value
    return list(runs["key"][is_match])


def merge_frames(old: Frames, new: Frames) -> Frames:
    """Return the rows of old and new frames; a run that is in both is taken from `new` only."""
    return concat_frames([select_runs(old, set(old.runs["key"]) - set(new.runs["key"])), new])


def concat_frames(parts: Sequence[Frames]) -> Frames:
    """Return the rows of all parts, which have no run in common."""
    runs = build_runs_table([row for part in parts for row in rows_as_dicts(part.runs)])
    tables = {name: [getattr(part, name) for part in parts] for name in Frames._fields[1:]}
    return Frames(runs, *(_concat_tables(name, parts_of_table) for name, parts_of_table in tables.items()))


def query_runs(frames: Frames, expression: str) -> Frames:
    """Return the runs for which an expression is true, with their rows in the other tables.

        query_runs(frames, "method.name == 'topk' and method.density <= 0.01")

    Args:
        expression: what `pandas.DataFrame.query` takes, over the columns of `runs`; dotted names need no
            quotes.

    Raises:
        ValueError: it names a column that there is not, or can't be read.
    """
    quoted = EXPRESSION_NAMES.sub(lambda word: _as_column(word[0], list(frames.runs.columns)), expression)
    try:
        matching_runs = frames.runs.query(quoted, engine="python")
    except Exception as error:  # whatever Python and pandas raise for what is no expression over columns
        raise ValueError(f"{expression!r} can't be evaluated: {error}") from error
    if not isinstance(matching_runs, pd.DataFrame):
        raise ValueError(f"{expression!r} says of no run whether it is meant")
    return select_runs(frames, matching_runs["key"])


def run_labels_by_key(runs: pd.DataFrame) -> pd.Series[Any]:
    """Return labels of these runs by key, which show what varies among them: `topk density=0.01 seed=2`."""
    configs = [json.loads(text) for text in runs["config_json"]]
    variants = runs["variant"] if "variant" in runs else pd.Series(None, runs.index, dtype=object)
    texts = [
        f"{variant}:{text}" if isinstance(variant, str) and not text.startswith(variant) else text
        for variant, text in zip(variants, label_configs(configs), strict=True)
    ]
    labels: pd.Series[Any] = pd.Series(texts, index=runs["key"], dtype=object)
    return labels


def _as_column(word: str, columns: Sequence[str]) -> str:
    """Return a name of an expression as `DataFrame.query` wants it; texts and words of Python unchanged."""
    if word[0] in "'\"`" or word in EXPRESSION_WORDS:
        return word
    parts = word.split(".")
    for length in range(len(parts), 0, -1):  # `items.str.contains`: a column, and what pandas does with it
        name = ".".join(parts[:length])
        if name in columns:
            return ".".join([f"`{name}`", *parts[length:]])
    close = difflib.get_close_matches(word, columns, 3)
    advice = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ValueError(
        f"no column {word!r} in runs{advice} (docs/records.md lists them; texts stand in quotes)"
    )


def map_provenance(frames: Frames, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Frames:
    """Return the frames with each run's provenance replaced by what `change` returns for it."""
    rows = []
    for row in rows_as_dicts(frames.runs):
        provenance = change(json.loads(row["provenance_json"]))
        others = {name: value for name, value in row.items() if not name.startswith("provenance")}
        text = json.dumps(provenance, sort_keys=True)
        rows.append({**others, **flatten(provenance, "provenance."), "provenance_json": text})
    return frames._replace(runs=build_runs_table(rows))


def order_and_type_columns(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with its required columns first, in their order and type, then all others.

    A column under its former name gets the new name. A column that nothing describes stays.
    """
    required = REQUIRED_COLUMNS[name]
    for new, field in COLUMNS[name].items():
        if (
            field.former_name and field.former_name in table
        ):  # a log that was begun by older code may have both
            values = table[new].fillna(table[field.former_name]) if new in table else table[field.former_name]
            table = table.drop(columns=field.former_name).assign(**{new: values})
    extra = [column for column in table.columns if column not in required]
    ordered: pd.DataFrame = table.reindex(columns=[*required, *extra])
    retyped = {
        column: field.dtype
        for column, field in required.items()
        if field.dtype != TEXT and ordered[column].dtype != field.dtype
    }
    if retyped:  # astype goes through all columns, also those that are of their type
        ordered = ordered.astype(retyped)
    for column, field in required.items():
        if field.dtype == TEXT and column not in table:
            ordered[column] = np.full(len(table), None, dtype=object)  # not NaN, which is no text
    undescribed = extra if name in LOGGED_TABLES else ()
    for column in undescribed:
        ordered[column] = _as_numbers_or_texts(ordered[column])
    if list(ordered.columns) == list(table.columns) and not retyped and not undescribed:
        return ordered  # as they were written
    # astype leaves each column by itself, which makes taking rows slow; and pandas warns of a hundred such.
    consolidated: pd.DataFrame = ordered.copy()
    return consolidated


def _as_numbers_or_texts(column: pd.Series[Any]) -> pd.Series[Any]:
    """Return a column that nothing describes as numbers, or as texts where a value is no number."""
    try:
        return column.astype(NUMBER)
    except (TypeError, ValueError):
        return column.map(lambda value: None if is_missing(value) else _as_text(value)).astype(object)


def rows_as_dicts(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows as dicts by column name."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def _concat_tables(name: str, tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    filled = [table for table in tables if len(table)]
    if not filled:
        return empty_table(name)
    columns = list(dict.fromkeys(column for table in filled for column in table.columns))
    typed = [order_and_type_columns(name, table.reindex(columns=columns)) for table in filled]
    joined = pd.concat(typed, ignore_index=True)
    # Texts in one of them were numbers in another, perhaps.
    texts = joined.columns[(joined.dtypes == TEXT) & ~joined.columns.isin(COLUMNS[name])]
    mended: pd.DataFrame = joined.assign(**{column: _as_numbers_or_texts(joined[column]) for column in texts})
    return mended


def build_runs_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the table of runs with these rows.

    Each column has one type: where configs disagree (a number here, a word there), it becomes text.
    """
    columns: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [None if is_missing(row.get(name)) else row[name] for row in rows]
        kinds = {type(value) for value in values if value is not None}
        is_mixed = len(kinds) > 1 and not kinds <= {int, float}
        columns[name] = [_as_text(value) for value in values] if is_mixed else values
    return order_and_type_columns("runs", pd.DataFrame(columns))


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def is_missing(value: Any) -> bool:
    """Tell whether a cell is empty: None, or NaN, as pandas may hold it."""
    return value is None or (isinstance(value, float) and np.isnan(value))


def largest_tensor_by_run(looks: pd.DataFrame) -> pd.Series[str]:
    """Return the name of each run's tensor with the most elements; of several the first by name."""
    sizes = looks[looks["what"].eq("size") & looks["of"].ne(ALL)]
    largest_first = sizes.sort_values(["value", "of"], ascending=[False, True])
    largest: pd.Series[str] = largest_first.groupby("key")["of"].first()
    return largest


@contextmanager
def track_read_run_keys() -> Iterator[set[str]]:
    """Yield a set that collects the keys of the runs whose numbers are read in the block."""
    keys = set[str]()
    token = _READ_KEYS.set(keys)
    try:
        yield keys
    finally:
        _READ_KEYS.reset(token)
        note_read_run_keys(keys)


def note_read_run_keys(keys: Iterable[str]) -> None:
    """Note that numbers of these runs are read, for the enclosing `track_read_run_keys`."""
    tracked = _READ_KEYS.get()
    if tracked is not None:
        tracked.update(keys)


def cache_by_frames(function: Callable[Concatenate[Frames, P], R]) -> Callable[Concatenate[Frames, P], R]:
    """Return a function that is called once for the same frames and arguments, while the frames live.

    Only runs, steps and epochs are compared. Neither they nor results may be changed in place.
    """

    @wraps(function)
    def call_once(frames: Frames, /, *args: P.args, **kwargs: P.kwargs) -> R:
        keyword_arguments = [(name, _hashable(kwargs[name])) for name in sorted(kwargs)]
        call = (function, *map(_hashable, args), *keyword_arguments)
        tables = (frames.runs, frames.steps, frames.epochs)
        ids = tuple(map(id, tables))
        if ids not in _RESULTS_BY_TABLES:
            _RESULTS_BY_TABLES[ids] = {}
            for table in tables:  # another table may get its identity afterwards
                weakref.finalize(table, _RESULTS_BY_TABLES.pop, ids, None)
        results = _RESULTS_BY_TABLES[ids]
        if call not in results:
            with track_read_run_keys() as keys:
                results[call] = (function(frames, *args, **kwargs), frozenset(keys))
        result: R
        result, read_keys = results[call]
        note_read_run_keys(read_keys)
        return result

    return call_once


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


@cache_by_frames
def _rows(frames: Frames, table: Literal["runs", "steps"]) -> dict[str, np.ndarray]:
    """Return the places of each run's rows, found for all at once."""
    return row_positions_by_key(getattr(frames, table))


def row_positions_by_key(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return the positions of each run's rows in a table, by the run's key."""
    return {str(key): np.asarray(rows) for key, rows in table.groupby("key").indices.items()}


def steps_of_run(frames: Frames, key: str) -> pd.DataFrame:
    """Return the steps of a run."""
    steps: pd.DataFrame = frames.steps.take(_rows(frames, "steps").get(key, NO_ROWS))
    return steps


def value_of_run(frames: Frames, key: str, column: str) -> Any:
    """Return a run's value in a column of `runs`; None where no run has the column."""
    return frames.runs[column].iloc[_rows(frames, "runs")[key][0]] if column in frames.runs else None
