"""The settings of recorded runs as words: `run again=NAME`, where the run is this checkout's or shipped."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from analysis.records import parquet
from analysis.records.configs import configs_by_variant, run_key
from analysis.records.files import DamagedFileError
from analysis.records.frames import is_missing, rows_as_dicts
from analysis.records.store import Attempt
from experiments.commands._named_runs import match_one_name
from experiments.config import compose
from experiments.config.folders import ResultFolders

AGAIN = "again="


def replace_again_word(words: Sequence[str], folders: ResultFolders) -> list[str]:
    """Return the words with `again=NAME` replaced by the settings of the run that it names.

    Settings among the other words replace the run's own.

    Raises:
        ValueError: `again=` names no run, or several; or no words mean that run any more.
    """
    names = [word.removeprefix(AGAIN) for word in words if word.startswith(AGAIN)]
    if not names:
        return [*words]
    if len(names) > 1:
        raise ValueError(f"{AGAIN} names one run, and there are {len(names)}")
    other_words = [word for word in words if not word.startswith(AGAIN)]
    other_keys = {word.partition("=")[0] for word in other_words}
    recorded_words = compose.rebuild_recorded_run(*_read_configs(names[0], folders)).to_words()
    return [*(word for word in recorded_words if word.partition("=")[0] not in other_keys), *other_words]


def _read_configs(word: str, folders: ResultFolders) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the configurations of the run that a word names, by variant, and the run's key.

    A run without variants has one configuration, under ''.
    """
    own_names = folders.store.list_run_ids()
    shipped = rows_as_dicts(parquet.read_parquet(folders.shipped).runs)
    name = match_one_name(word, list(dict.fromkeys([*own_names, *(row["run_id"] for row in shipped)])))
    attempts = folders.store.list_attempts(name) if name in own_names else []
    if attempts:
        config = _newest_readable_config(attempts)
        return configs_by_variant(config) or {"": config}, run_key(config)
    rows = [row for row in shipped if row["run_id"] == name]
    configs = {
        "" if is_missing(row["variant"]) else row["variant"]: json.loads(row["config_json"]) for row in rows
    }
    return configs, rows[0]["key"].partition("/")[0]


def _newest_readable_config(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the configuration of a run from its newest attempt that has it whole.

    Raises:
        DamagedFileError: no attempt has.
    """
    for attempt in reversed(attempts[1:]):
        with contextlib.suppress(DamagedFileError):
            return attempt.config
    return attempts[0].config
