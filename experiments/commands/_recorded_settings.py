"""`run again=NAME`: the settings of a recorded run, of this checkout or shipped with it, as words."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from analysis.records import parquet
from analysis.records.configs import configs_by_variant, run_key
from analysis.records.files import DamagedFileError
from analysis.records.frames import is_missing, to_dicts
from analysis.records.store import Attempt
from experiments.commands._named_runs import match_one_name
from experiments.config import compose
from experiments.config.folders import ResultFolders

AGAIN = "again="


def expand_recorded_run(words: Sequence[str], folders: ResultFolders) -> list[str]:
    """The words, with the settings of the run that `again=` names before the others, which replace its own.

    Raises:
        ValueError: it names none, or several; or no words mean that run any more.
    """
    names = [word.removeprefix(AGAIN) for word in words if word.startswith(AGAIN)]
    if not names:
        return [*words]
    if len(names) > 1:
        raise ValueError(f"{AGAIN} names one run, and there are {len(names)}")
    others = [word for word in words if not word.startswith(AGAIN)]
    given = {word.partition("=")[0] for word in others}
    own = compose.recover_run(*_recorded(names[0], folders)).words()
    return [*(word for word in own if word.partition("=")[0] not in given), *others]


def _recorded(word: str, folders: ResultFolders) -> tuple[dict[str, dict[str, Any]], str]:
    """The configurations of the variants of the run that a word names (its own, without a name, where it has
    none), and its key.
    """
    own = folders.store.run_ids()
    shipped = to_dicts(parquet.read_parquet(folders.shipped).runs)
    name = match_one_name(word, list(dict.fromkeys([*own, *(row["run_id"] for row in shipped)])))
    if name in own and (attempts := folders.store.attempts(name)):
        config = _newest_config(attempts)
        return configs_by_variant(config) or {"": config}, run_key(config)
    rows = [row for row in shipped if row["run_id"] == name]
    variants = ["" if is_missing(row["variant"]) else row["variant"] for row in rows]
    configs = (json.loads(row["config_json"]) for row in rows)
    return dict(zip(variants, configs, strict=True)), rows[0]["key"].partition("/")[0]


def _newest_config(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the configuration of these attempts, which is that of all, from the newest that has it whole.

    Raises:
        DamagedFileError: none has.
    """
    for attempt in reversed(attempts[1:]):
        with contextlib.suppress(DamagedFileError):
            return attempt.config
    return attempts[0].config
