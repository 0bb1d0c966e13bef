"""A configuration that was measured -> the words that mean it, whatever the profile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.leaves import flatten
from analysis.records import IMPLIED, measured_config, run_key
from experiments.config import choices, compose
from sparsify.ranges import shown


def of_runs(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The words of each, in the order of the most telling settings.

    Raises:
        ValueError: no words mean one of them.
    """
    return [of_run(config) for config in configs]


def of_run(config: Mapping[str, Any]) -> list[str]:
    """Its choices, and every setting that some profile would give another value.

    Raises:
        ValueError: variants take turns in it, or it was measured with settings that are no more.
    """
    if config.get("variants"):
        raise ValueError("of runs whose variants take turns no figure can be saved; choose ordinary runs")
    chosen = [
        f"method={config['method']['name']}", f"task={config['task']['name']}",
        f"cluster={config['cluster']['name']}", f"link={config['cluster']['link']['name']}",
    ]  # fmt: skip
    own = flatten(config)
    words: dict[str, str] = {}
    profiles = [f"profile={profile}" for profile in choices.options("profile")]
    for profile in profiles:
        there = flatten(measured_config(compose.resolve([*chosen, profile])))
        for name in [*own, *there]:
            value = own.get(name, IMPLIED.get(name))
            if value != there.get(name, IMPLIED.get(name)):
                words[name] = f"{name}={_written(value)}"
    found = [*chosen, *words.values()]
    if {run_key(compose.resolve([*found, profile])) for profile in profiles} != {run_key(config)}:
        raise ValueError(f"no words mean this run any more: {shown(' '.join(found))} mean another one")
    return found


def _written(value: Any) -> str:
    """A leaf's value in Hydra's grammar; lists are JSON already."""
    is_list = isinstance(value, str) and value.startswith("[")
    return value.replace(" ", "") if is_list else (value if isinstance(value, str) else json.dumps(value))
