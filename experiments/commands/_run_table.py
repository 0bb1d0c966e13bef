"""Runs as a table for people: only the leaves that tell them apart, then what they came to."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.records import loading
from analysis.records.columns import IMPLIED_SETTINGS, TITLES
from analysis.records.configs import ALWAYS_SHOWN, distinguishing_leaves, flatten, format_setting, short_name
from analysis.records.files import DamagedFileError
from analysis.records.frames import is_missing, run_states
from analysis.records.schema import DONE
from analysis.records.store import Attempt, explain_no_attempts
from analysis.tables import Table
from experiments.commands._messages import say
from experiments.commands._named_runs import query_statuses, strip_variant
from experiments.config.folders import ResultFolders
from sparsify.ranges import format_value, quote, suggest_similar

MOST_LEAVES = 4  # that have a column of their own
OTHER_SETTINGS = "settings"  # the column of those that have none of their own
KEY_DIGITS = 8  # of a run's key in a table: enough for `why`
CHOICES = ("method", "task", "cluster")  # filters say method=topk for method.name=topk
OTHERS = {"state": "state", "source": "source", "sweep": "sweeps", "item": "items", "run": "run_id"}
AGES = (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))


def load_runs(folders: ResultFolders) -> pd.DataFrame:
    """A row per run, own and shipped, in any state: columns of `Frames.runs`, and `state`."""
    last = folders.store.last_number_by_run()
    for run in sorted({*folders.store.run_ids()} - {*last}):
        say(f"left out {run}: {explain_no_attempts(folders.store.root / run)}")
    frames = loading.load_by_source(folders.results, folders.shipped, ["runs"], say)
    own = frames[loading.OWN].runs
    whole = dict(zip(own["run_id"], own["attempt"], strict=True)) if len(own) else {}
    # A run that was measured before an attempt that failed is shown as what it is now.
    replaced = [run for run, number in last.items() if whole.get(run) != number]
    kept = own[~own["run_id"].isin(replaced)] if len(own) else own
    became_of = query_statuses([folders.store.attempts(run)[-1] for run in replaced], folders)
    rows = pd.DataFrame([_unfinished(attempt, status.display_state) for attempt, status in became_of.items()])
    shipped = frames[loading.SHIPPED].runs
    found = pd.concat(
        [kept.assign(state=run_states(kept)), rows, shipped.assign(state=run_states(shipped))],
        ignore_index=True,
    )
    return loading.add_items_and_sweeps(found, folders.results, folders.shipped)


def _unfinished(attempt: Attempt, state: str) -> dict[str, Any]:
    """A row of what is known of a run whose newest attempt is not whole."""
    names = {"run_id": attempt.run_id, "key": attempt.key, "attempt": attempt.number}
    row: dict[str, Any] = {**names, "source": loading.OWN}
    try:
        manifest, config = attempt.manifest, attempt.config
    except DamagedFileError:
        return {**row, "state": state}
    times = {name: manifest.get(name) for name in ("started", "ended")}
    return {**row, **flatten(config), **times, "config_json": json.dumps(config), "state": state}


def filter_runs(runs: pd.DataFrame, words: Sequence[str]) -> pd.DataFrame:
    """The runs that all words mean: `method=topk,dgc`, `seed=0`, `state=failed`, `sweep=thesis`, an item such
    as `fig3`, or part of a run's name.

    Without `source=`, own runs; where none of those is meant, shipped ones.

    Raises:
        ValueError: a word that means nothing here.
    """
    meant = np.logical_and.reduce([np.ones(len(runs), bool), *(_matching(runs, word) for word in words)])
    is_own = runs["source"] == loading.OWN
    if not any(word.startswith("source=") for word in words) and (meant & is_own).any():
        meant = meant & is_own
    found: pd.DataFrame = runs[meant].reset_index(drop=True)
    return found


def _matching(runs: pd.DataFrame, word: str) -> Any:
    name, equals, text = word.partition("=")
    if not equals:
        part = strip_variant(word)
        is_named = runs["run_id"].str.contains(part, regex=False)
        if part != word and "variant" in runs:
            is_named &= runs["variant"].isna() | runs["variant"].eq(word[len(part) + 1 :])
        return _lists(runs, "items", [word]) | is_named
    column = OTHERS.get(name, f"{name}.name" if name in CHOICES else name)
    wanted = text.split(",")
    if column in ("items", "sweeps"):
        return _lists(runs, column, wanted)
    if column not in runs:
        known = [*OTHERS, *CHOICES, *(str(column) for column in runs if not str(column).endswith("_json"))]
        raise ValueError(
            f"no filter {quote(name)}{suggest_similar(format_value(name), known)}: a leaf of the "
            "configuration (method=topk, seed=0), a column of docs/records.md, state=, source=, sweep=, "
            "an item, or part of a run's name"
        )
    values = runs[column].map(lambda value: IMPLIED_SETTINGS.get(column) if is_missing(value) else value)
    return values.map(lambda value: any(_is(value, one) for one in wanted))


def _lists(runs: pd.DataFrame, column: str, wanted: Collection[str]) -> Any:
    texts = runs[column] if column in runs else pd.Series(None, runs.index, dtype=object)
    return texts.map(lambda text: isinstance(text, str) and not {*wanted}.isdisjoint(text.split(", ")))


def _is(value: Any, text: str) -> bool:
    try:
        return float(value) == float(text)
    except (TypeError, ValueError):
        return format_setting(value).lower() == text.replace(" ", "").lower()


def make_run_table(runs: pd.DataFrame, in_order: bool = False) -> Table:
    """These runs, the newest last unless they are `in_order` already."""
    if not len(runs):
        return Table("", pd.DataFrame())
    if "started" in runs and not in_order:
        runs = runs.sort_values("started", kind="stable", na_position="first")
    rows = [{str(name): value for name, value in row.items()} for row in runs.to_dict("records")]
    configs = run_configs(runs)
    columns = {"run": [_name(row) for row in rows], **_settings(configs)}
    others = columns.pop(OTHER_SETTINGS, None)
    columns.update(_outcomes(rows))
    states = [row["state"] for row in rows]
    columns |= {"state": states} if set(states) != {DONE} else {}
    sources = [row["source"] for row in rows]
    columns |= {"source": sources} if len(set(sources)) > 1 else {}
    columns["age"] = [_age(row) for row in rows]
    columns |= {OTHER_SETTINGS: others} if others else {}
    units = {one.listed: one.unit + one.per for one in TITLES.values() if one.listed in columns}
    return Table("", pd.DataFrame(columns, dtype=object), units, _note(rows) if "step" in columns else "")


def run_configs(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Configurations of these runs; {} of one whose record is damaged."""
    texts = runs["config_json"] if "config_json" in runs else [None] * len(runs)
    return [json.loads(text) if isinstance(text, str) else {} for text in texts]


def _note(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on step times that were not measured."""
    simulated = [row.get("simulated") is True for row in rows if not is_missing(row.get("step_s"))]
    which = "" if all(simulated) else " of virtual workers"
    told = f"Step times{which} are simulated: waits and transfers follow the model of a link."
    return told if any(simulated) else ""


def _outcomes(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Outcomes that some of the runs have; the loss of those without an accuracy."""
    found = {
        title.listed: [
            None
            if is_missing(row.get(column)) or (column == "val_loss" and not is_missing(row.get("val_top1")))
            else title.factor * float(row[column])
            for row in rows
        ]
        for column, title in TITLES.items()
        if title.listed
    }
    return {title: values for title, values in found.items() if any(value is not None for value in values)}


def _name(row: Mapping[str, Any]) -> str:
    variant = row.get("variant")
    return str(row["key"])[:KEY_DIGITS] + (f"/{variant}" if isinstance(variant, str) else "")


def _settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """A column for each leaf that varies; where they are many, those behind the density share one."""
    leaves = dict.fromkeys(["method.name", *distinguishing_leaves([config for config in configs if config])])
    values = {leaf: [_leaf(config, leaf) for config in configs] for leaf in leaves}
    alone = [leaf for leaf in leaves if len(leaves) <= MOST_LEAVES or leaf in ALWAYS_SHOWN]
    columns = {short_name(leaf): values.pop(leaf) for leaf in alone}
    if values:
        told = [
            [f"{short_name(leaf)}={value}" * (value is not None) for value in values[leaf]] for leaf in values
        ]
        columns[OTHER_SETTINGS] = [" ".join(filter(None, words)) for words in zip(*told, strict=True)]
    return columns


def _leaf(config: Mapping[str, Any], leaf: str) -> str | None:
    value = flatten(config).get(leaf, IMPLIED_SETTINGS.get(leaf) if config else None)
    return None if is_missing(value) else format_setting(value)


def _age(row: Mapping[str, Any]) -> str | None:
    at = next((row[name] for name in ("ended", "started") if isinstance(row.get(name), str)), None)
    if at is None:
        return None
    seconds = max(0.0, (pd.Timestamp.now("UTC") - pd.Timestamp(at)).total_seconds())
    unit, length = next(((unit, length) for unit, length in AGES if seconds >= length), AGES[-1])
    return f"{seconds / length:.0f} {unit}"
