"""Grids: words with lists in them -> runs, as method=topk,randomk method.density=0.001,0.01.

`sweep=thesis` among them names a sweep. The name is no part of a run's config, so that a run may belong to
several sweeps, and one that was measured before to a new one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

from analysis.records.configs import run_id
from analysis.records.files import read_struct_if_there, write_json
from analysis.records.locks import FileLock
from analysis.records.schema import RunIdList
from experiments.config import choices, compose, grammar
from experiments.config.config import Config
from experiments.config.folders import ResultFolders
from experiments.config.plan import requested_or_default_profile
from experiments.config.run import Run
from sparsify.ranges import format_value, quote

MAX_RUNS = 10_000
MAX_UNCONFIRMED_RUNS = 1_000  # more are made on request only
SWEEP = "sweep="
SWEEP_NAME = re.compile(r"[A-Za-z0-9][\w-]{0,39}")


def expand_grid(words: Sequence[str]) -> list[Run]:
    """Return a run for each point of the grid, in Hydra's grammar: a,b,c or range(1,5).

    Raises:
        ValueError: a word that can't be read, or more points than anybody would queue.
    """
    axes = [
        (key, grammar.parse_values(key, text, MAX_RUNS)) for key, text in map(grammar.split_key_value, words)
    ]
    if math.prod(len(values) for _, values in axes) > MAX_RUNS:
        longest = max(range(len(axes)), key=lambda place: len(axes[place][1]))
        raise ValueError(
            f"these words mean more than {MAX_RUNS} runs, the most at a time; the longest list is "
            f"{format_value(words[longest])}"
        )
    keys = [key for key, _ in axes]
    runs = list[Run]()
    for point in product(*(values for _, values in axes)):
        settings = dict(zip(keys, point, strict=True))
        runs.append(Run(settings, settings.pop("variants", {})))
    return runs


def resolve_grid(words: Sequence[str], *, allow_many: bool = True) -> list[Config]:
    """Return the configuration of each point of the grid that the words span.

    A point at which a method lacks a hyperparameter that others have (`method=dense,topk
    method.density=0.01`) is the run without it.

    Args:
        allow_many: also more than MAX_UNCONFIRMED_RUNS.

    Raises:
        ValueError: a word that can't be read, or too many points.
    """
    profile = requested_or_default_profile(words)
    points = expand_grid([word for word in words if not word.startswith("profile=")])
    methods = {_method(point.settings) for point in points}
    parameters_by_method = (
        {method: _hyperparameters(method) for method in methods} if len(methods) > 1 else {}
    )
    all_parameters = frozenset().union(*parameters_by_method.values())
    missing_by_method = {
        method: [f"method.{key}" for key in all_parameters - parameters]
        for method, parameters in parameters_by_method.items()
    }
    runs = [point.without(*missing_by_method.get(_method(point.settings), ())) for point in points]
    distinct_runs = list({repr(point): point for point in runs}.values())
    if len(distinct_runs) > MAX_UNCONFIRMED_RUNS and not allow_many:
        raise ValueError(
            f"these words mean {len(distinct_runs):,} runs; --yes makes them all, `plan` lists them, and "
            "fewer values mean fewer runs"
        )
    return [compose.resolve(point | {"profile": profile}) for point in distinct_runs]


def _method(settings: Mapping[str, Any]) -> str:
    return str(settings.get("method", ""))


def _hyperparameters(method: str) -> frozenset[str]:
    registry = choices.REGISTRIES["method"]
    if method in registry.names() and not registry.reason_unreadable(method):
        return frozenset(registry.parameters(method))
    return frozenset(compose.resolve({"method": method} if method else {}).method.arguments)


def split_sweep_name(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the sweep that the words name, and the other words.

    Raises:
        ValueError: the name is none, or there are several.
    """
    names = list(dict.fromkeys(word.removeprefix(SWEEP) for word in words if word.startswith(SWEEP)))
    other_words = [word for word in words if not word.startswith(SWEEP)]
    if not names:
        return None, other_words
    if len(names) > 1 or not SWEEP_NAME.fullmatch(names[0]):
        quoted_names = ", ".join(map(quote, names))
        raise ValueError(
            f"sweep={quoted_names}: a sweep has one name of at most 40 letters, digits, - and _, "
            "as sweep=thesis"
        )
    return names[0], other_words


def add_runs_to_sweep(
    folders: ResultFolders, sweep: str | None, configs: Iterable[Config], say: Callable[[str], None]
) -> None:
    """Add these runs to the list of a named sweep's runs; without a name nothing happens."""
    if sweep is None:
        return
    folders.sweep_index.mkdir(parents=True, exist_ok=True)
    path = folders.sweep_index / f"{sweep}.json"
    with FileLock(folders.scratch / "sweep-index.lock") as lock:
        lock.acquire(report_wait=say)
        before = read_struct_if_there(path, RunIdList)
        runs = [*(before.runs if before else []), *map(run_id, configs)]
        write_json(path, {"runs": list(dict.fromkeys(runs))})
