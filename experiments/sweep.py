"""Words with lists in them -> the runs of a grid: method=topk,randomk method.density=0.001,0.01"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from experiments import config as configs
from experiments import figures
from experiments.planning import plan, profile_of


def expand(words: Sequence[str]) -> list[list[str]]:
    """One list of words for each point of the grid, in Hydra's grammar: a,b,c or range(1,5).

    Raises:
        ValueError: a word that is not of the form key=value.
    """
    axes = []
    for word in words:
        try:
            (override,) = OverridesParser.create().parse_overrides([word])
        except HydraException:
            axes.append([word])  # with odd characters in it; taken as it stands
            continue
        if override.is_sweep_override():
            axes.append([f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()])
        else:
            axes.append([word])
    return [list(point) for point in product(*axes)]


def name_and_configs(words: Sequence[str]) -> tuple[str, list[dict[str, Any]]]:
    """What `plan` and `submit` were asked for: figures' runs, else one run, else a grid of them.

    A grid's point at which a method lacks a hyperparameter that others have (`method=dense,topk
    method.density=0.01`) is the run without it.
    """
    items = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    for item in items:
        figures.check(item)
    profile = profile_of(overrides)
    if items:
        found = [config for item in items for config in plan(item, profile, overrides)]
        return "-".join([*items, profile]), found
    rest = [word for word in overrides if not word.startswith("profile=")]
    points = expand(rest)
    methods = {_method(point) for point in points}
    fitting = dict.fromkeys(tuple(_fitting(point, methods)) for point in points)
    return "runs", [configs.resolve([*point, f"profile={profile}"]) for point in fitting]


def _fitting(point: Sequence[str], methods: Collection[str]) -> list[str]:
    """Without those hyperparameters that this point's method lacks and another of the grid's methods has."""
    lacks = set().union(*map(_hyperparameters, methods)) - _hyperparameters(_method(point))
    return [word for word in point if word.partition("=")[0].removeprefix("method.") not in lacks]


def _method(point: Sequence[str]) -> str:
    given = [word.partition("=")[2] for word in point if word.startswith("method=")]
    return given[-1] if given else ""


def _hyperparameters(method: str) -> set[str]:
    return set(configs.resolve([f"method={method}"] if method else [])["method"])
