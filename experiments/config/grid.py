"""Words with lists in them -> the runs of a grid: method=topk,randomk method.density=0.001,0.01"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import islice, product
from typing import Any

from hydra.core.override_parser.types import Glob, RangeSweep
from hydra.errors import HydraException

from experiments import figures
from experiments.config import choices, compose, sweeps
from experiments.config.plan import configs_of, more_configs_of, profile_of
from sparsify.ranges import shown

MOST_RUNS = 10_000
ASKED_FOR = 1_000  # more are made on request only


def expand(words: Sequence[str]) -> list[list[str]]:
    """One list of words for each point of the grid, in Hydra's grammar: a,b,c or range(1,5).

    Raises:
        ValueError: a word that can't be read, or more points than anybody would queue.
    """
    axes = [_values(word) for word in words]
    if math.prod(map(len, axes)) > MOST_RUNS:
        raise ValueError(
            f"these words mean more than {MOST_RUNS} runs, the most at a time; the longest list is "
            f"{shown(max(zip(axes, words, strict=True), key=lambda axis: len(axis[0]))[1])}"
        )
    return [list(point) for point in product(*axes)]


def _values(word: str) -> list[str]:
    """This word for each of the values that it lists, of which MOST_RUNS + 1 suffice."""
    key, text = compose.pair(word)
    override = compose.parse(word)
    if not override.is_sweep_override():
        return [word]
    listed: Any = override.value()
    if isinstance(listed, RangeSweep):
        listed.shuffle = False  # it would list all of a range first, and the order changes no run
    try:
        if isinstance(listed, Glob) and key in choices.GROUPS:
            found = listed.filter(choices.options(key))
        else:
            found = [*islice(override.sweep_string_iterator(), MOST_RUNS + 1)]
    except (HydraException, ArithmeticError, ValueError) as error:
        raise ValueError(
            f"{shown(word)} lists no values; values are listed as {shown(key)}=a,b, or as range(0,5)"
        ) from error
    if not found:
        raise ValueError(f"{shown(key)}={shown(text)} lists nothing")
    return [f"{key}={value}" for value in found]


def name_and_configs(
    words: Sequence[str], more: bool = False, many: bool = True
) -> tuple[str, list[dict[str, Any]]]:
    """What `plan` and `submit` were asked for: figures' runs (and those that make them firmer), else one run,
    else a grid of them.

    The name is the sweep's (`sweep=thesis`) where the words name one.
    """
    sweep, words = sweeps.named(words)
    items = [figures.find(word) for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    for item in items:
        figures.check(item)
        if not figures.has_runs(item):
            raise ValueError(
                f"{item} has no runs to queue: `reproduce {item}` draws it from published tables"
            )
    profile = profile_of(overrides)
    if items:
        sources = (configs_of, more_configs_of) if more else (configs_of,)
        found = [config for of in sources for item in items for config in of(item, profile, overrides)]
        return sweep or "-".join([*map(figures.file_name, items), profile]), found
    return sweep or "runs", configs(overrides, many)


def configs(words: Sequence[str], many: bool = True) -> list[dict[str, Any]]:
    """One resolved configuration for each point of the grid that the words span.

    A point at which a method lacks a hyperparameter that others have (`method=dense,topk
    method.density=0.01`) is the run without it.

    Args:
        many: also more than ASKED_FOR.

    Raises:
        ValueError: a word that can't be read, or too many points.
    """
    profile = profile_of(words)
    points = expand([word for word in words if not word.startswith("profile=")])
    methods = {_method(point) for point in points}
    fitting = dict.fromkeys(tuple(_fitting(point, methods)) for point in points)
    if len(fitting) > ASKED_FOR and not many:
        raise ValueError(
            f"these words mean {len(fitting):,} runs; --yes makes them all, `plan` lists them, and fewer "
            "values mean fewer runs"
        )
    return [compose.resolve([*point, f"profile={profile}"]) for point in fitting]


def _fitting(point: Sequence[str], methods: Collection[str]) -> list[str]:
    """Without those hyperparameters that this point's method lacks and another of the grid's methods has."""
    lacks = set().union(*map(_hyperparameters, methods)) - _hyperparameters(_method(point))
    return [word for word in point if word.partition("=")[0].removeprefix("method.") not in lacks]


def _method(point: Sequence[str]) -> str:
    given = [word.partition("=")[2] for word in point if word.startswith("method=")]
    return given[-1] if given else ""


def _hyperparameters(method: str) -> set[str]:
    return set(compose.resolve([f"method={method}"] if method else [])["method"])
