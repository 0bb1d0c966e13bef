"""Tables of runs for people: the settings that tell the runs apart, then their outcomes."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from analysis.records import loading
from analysis.records.columns import IMPLIED_SETTINGS, OUTCOME_LABELS
from analysis.records.configs import (
    ALWAYS_SHOWN,
    flatten,
    format_setting,
    select_distinguishing_leaves,
    short_leaf_name,
)
from analysis.records.files import DamagedFileError
from analysis.records.frames import is_missing, run_states
from analysis.records.schema import DONE
from analysis.records.store import Attempt, explain_no_attempts
from analysis.tables import Table
from experiments.commands._messages import say
from experiments.commands._named_runs import query_status_by_attempt, strip_variant
from experiments.config.folders import ResultFolders
from sparsify.ranges import format_value, quote, suggest_similar

MAX_SETTING_COLUMNS = 4  # if more settings vary, some share a column
OTHER_SETTINGS = "settings"  # the shared column
KEY_DIGITS = 8  # of a run's key in a table: enough for `why`
CHOICES = ("method", "task", "cluster")  # filters say method=topk for method.name=topk
COLUMN_BY_FILTER = {"state": "state", "source": "source", "sweep": "sweeps", "item": "items", "run": "run_id"}
AGE_UNITS = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def load_all_runs(folders: ResultFolders) -> pd.DataFrame:
    """Return a row for each run, own and shipped, in any state: columns of `Frames.runs`, and `state`."""
    newest_numbers = folders.store.newest_attempt_number_by_run()
    for run in sorted({*folders.store.list_run_ids()} - {*newest_numbers}):
        say(f"left out {run}: {explain_no_attempts(folders.store.root / run)}")
    frames = loading.load_frames_by_source(folders.results, folders.shipped, ["runs"], say)
    own_runs = frames[loading.OWN].runs
    shipped = frames[loading.SHIPPED].runs
    whole_numbers = dict(zip(own_runs["run_id"], own_runs["attempt"], strict=True)) if len(own_runs) else {}
    # A run whose newest attempt is not whole is shown in the state of that attempt.
    unfinished = [run for run, number in newest_numbers.items() if whole_numbers.get(run) != number]
    if len(own_runs):
        own_runs = own_runs[~own_runs["run_id"].isin(unfinished)]
    statuses = query_status_by_attempt([folders.store.list_attempts(run)[-1] for run in unfinished], folders)
    rows = [_unfinished_row(attempt, status.display_state) for attempt, status in statuses.items()]
    parts = [
        own_runs.assign(state=run_states(own_runs)),
        pd.DataFrame(rows),
        shipped.assign(state=run_states(shipped)),
    ]
    runs = pd.concat(parts, ignore_index=True)
    return loading.add_item_and_sweep_columns(runs, folders.results, folders.shipped)


def _unfinished_row(attempt: Attempt, state: str) -> dict[str, Any]:
    """Return the row of a run whose newest attempt is not whole."""
    row: dict[str, Any] = {
        "run_id": attempt.run_id,
        "key": attempt.key,
        "attempt": attempt.number,
        "source": loading.OWN,
        "state": state,
    }
    try:
        manifest = attempt.manifest
        config = attempt.config
    except DamagedFileError:
        return row
    times = {name: manifest.get(name) for name in ("started", "ended")}
    return {**row, **flatten(config), **times, "config_json": json.dumps(config)}


def filter_runs(runs: pd.DataFrame, words: Sequence[str]) -> pd.DataFrame:
    """Return the runs that all words fit.

    A word is `method=topk,dgc`, `seed=0`, `state=failed`, `sweep=thesis`, an item such as `fig3`, or part of
    a run's name. Without `source=`, own runs are meant, or shipped ones where no own run fits.

    Raises:
        ValueError: a word is no filter.
    """
    for word in words:
        runs = runs[_fits_filter(runs, word)]
    own_runs = runs[runs["source"] == loading.OWN]
    if len(own_runs) and not any(word.startswith("source=") for word in words):
        runs = own_runs
    chosen: pd.DataFrame = runs.reset_index(drop=True)
    return chosen


def _fits_filter(runs: pd.DataFrame, word: str) -> Any:
    """Return True for each run that a word fits."""
    name, equals, text = word.partition("=")
    if not equals:
        part = strip_variant(word)
        is_named = runs["run_id"].str.contains(part, regex=False)
        if part != word and "variant" in runs:
            is_named &= runs["variant"].isna() | runs["variant"].eq(word[len(part) + 1 :])
        return _has_listed(runs, "items", [word]) | is_named
    column = COLUMN_BY_FILTER.get(name, f"{name}.name" if name in CHOICES else name)
    wanted_values = text.split(",")
    if column in ("items", "sweeps"):
        return _has_listed(runs, column, wanted_values)
    if column not in runs:
        filter_names = [
            *COLUMN_BY_FILTER,
            *CHOICES,
            *(name for name in map(str, runs) if not name.endswith("_json")),
        ]
        raise ValueError(
            f"no filter {quote(name)}{suggest_similar(format_value(name), filter_names)}: a leaf of the "
            "configuration (method=topk, seed=0), a column of docs/records.md, state=, source=, sweep=, "
            "an item, or part of a run's name"
        )
    implied = IMPLIED_SETTINGS.get(column)
    values = runs[column].map(lambda value: implied if is_missing(value) else value)
    return values.map(
        lambda value: any(_is_written_as(value, wanted_value) for wanted_value in wanted_values)
    )


def _has_listed(runs: pd.DataFrame, column: str, wanted_words: Collection[str]) -> Any:
    """Return True for each run whose text in a column lists one of these words."""
    texts = runs[column] if column in runs else pd.Series(None, runs.index, dtype=object)
    return texts.map(lambda text: isinstance(text, str) and not {*wanted_words}.isdisjoint(text.split(", ")))


def _is_written_as(value: Any, text: str) -> bool:
    """Tell whether a text is how somebody may write a value."""
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return format_setting(value).lower() == text.replace(" ", "").lower()


def make_run_table(runs: pd.DataFrame, *, is_sorted: bool = False) -> Table:
    """Return a table of these runs, the newest last unless they are sorted already."""
    if not len(runs):
        return Table("", pd.DataFrame())
    if "started" in runs and not is_sorted:
        runs = runs.sort_values("started", kind="stable", na_position="first")
    runs = runs.reset_index(drop=True)
    variants = runs.reindex(columns=["variant"])["variant"]
    names = [
        str(key)[:KEY_DIGITS] + (f"/{variant}" if isinstance(variant, str) else "")
        for key, variant in zip(runs["key"], variants, strict=True)
    ]
    columns = {"run": names, **_setting_columns(parse_run_configs(runs))}
    other_settings = columns.pop(OTHER_SETTINGS, None)
    columns |= outcome_column_by_heading(runs)
    if set(runs["state"]) != {DONE}:
        columns["state"] = [*runs["state"]]
    if len(set(runs["source"])) > 1:
        columns["source"] = [*runs["source"]]
    times = runs.reindex(columns=["ended", "started"])
    columns["age"] = [*map(_format_age, times["ended"].where(times["ended"].notna(), times["started"]))]
    if other_settings:
        columns[OTHER_SETTINGS] = other_settings
    units = {
        labels.column_heading: labels.unit + labels.unit_suffix
        for labels in OUTCOME_LABELS.values()
        if labels.column_heading in columns
    }
    note = _describe_simulated(runs[runs["step_s"].notna()]) if "step" in columns else ""
    return Table("", pd.DataFrame(columns, dtype=object), units, note)


def parse_run_configs(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the configurations of these runs; {} of a run whose record is damaged."""
    texts = runs.reindex(columns=["config_json"])["config_json"]
    return [json.loads(text) if isinstance(text, str) else {} for text in texts]


def _describe_simulated(timed: pd.DataFrame) -> str:
    """Return a sentence on step times that were not measured; empty without any."""
    is_simulated = timed.reindex(columns=["simulated"])["simulated"].eq(True)
    if not is_simulated.any():
        return ""
    which = "" if is_simulated.all() else " of virtual workers"
    return f"Step times{which} are simulated: waits and transfers follow the model of a link."


def outcome_column_by_heading(runs: pd.DataFrame) -> dict[str, list[Any]]:
    """Return the outcomes that some runs have, by column heading; the loss only of runs without accuracy."""
    columns = {}
    for name, labels in OUTCOME_LABELS.items():
        if labels.column_heading and name in runs:
            values = labels.display_factor * pd.to_numeric(runs[name])
            if name == "val_loss" and "val_top1" in runs:
                values = values.where(runs["val_top1"].isna())
            if values.notna().any():
                columns[labels.column_heading] = values.tolist()
    return columns


def _setting_columns(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return a column for each leaf that varies; if they are many, leaves behind the density share one."""
    readable = [config for config in configs if config]
    leaves = dict.fromkeys(["method.name", *select_distinguishing_leaves(readable)])
    columns = dict[str, list[Any]]()
    shared = [list[str]() for _ in configs]
    for leaf in leaves:
        texts = [_leaf_text(config, leaf) for config in configs]
        if len(leaves) <= MAX_SETTING_COLUMNS or leaf in ALWAYS_SHOWN:
            columns[short_leaf_name(leaf)] = texts
            continue
        for words, text in zip(shared, texts, strict=True):
            words += [] if text is None else [f"{short_leaf_name(leaf)}={text}"]
    if any(shared):
        columns[OTHER_SETTINGS] = [" ".join(words) for words in shared]
    return columns


def _leaf_text(config: dict[str, Any], leaf: str) -> str | None:
    value = flatten(config).get(leaf, IMPLIED_SETTINGS.get(leaf) if config else None)
    return None if is_missing(value) else format_setting(value)


def _format_age(timestamp: Any) -> str | None:
    """Return the time since a timestamp in its largest unit; None for a cell without one."""
    if not isinstance(timestamp, str):
        return None
    age_s = max(0.0, (pd.Timestamp.now("UTC") - pd.Timestamp(timestamp)).total_seconds())
    unit, unit_s = next((pair for pair in AGE_UNITS if age_s >= pair[1]), AGE_UNITS[-1])
    return f"{age_s / unit_s:.0f} {unit}"
