"""What takes turns in one run: names with words of their own -> the parts of the config in which they differ.

    variants={dense:"method=dense",sparse:"method=topk method.density_warmup=[]"}

The first variant is what the others are compared with; the run's own config is that of the first.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.config import schema
from sparsify.ranges import shown

Resolve = Callable[[Sequence[str]], dict[str, Any]]
# Everything else belongs to the group of processes and to its data, which the variants share.
MAY_DIFFER = ("method", "select", "overlap", "cuda_graph", "timing.mode", "train.validate", "task.momentum")
DECIDED = ("train.steps", "train.epochs")  # by `alternate`, in a run of variants


def resolved(words: Sequence[str], variants: Mapping[str, str], resolve: Resolve) -> dict[str, Any]:
    """The config of a run whose variants take turns.

    Args:
        words: of all variants.
        variants: the words of each.
        resolve: words -> config of an ordinary run.

    Raises:
        ValueError: a variant is wrong by itself, or does not fit the others.
    """
    configs = {
        name: _resolved(name, [*words, *_split(name, text)], resolve) for name, text in variants.items()
    }
    first = next(iter(configs))
    for name, config in configs.items():
        _check_shared(first, configs[first], name, config)
    _check_together(configs)
    parts = [{"name": name, **_parts(config)} for name, config in configs.items()]
    train = {**configs[first]["train"], "steps": None}
    return {**configs[first], "train": train, "variants": parts}


def _split(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:  # a quotation that does not end
        raise ValueError(f"variants.{name}={shown(text)} can't be read: {error}") from error


def _resolved(name: str, words: Sequence[str], resolve: Resolve) -> dict[str, Any]:
    try:
        return resolve(words)
    except ValueError as error:
        raise ValueError(f"variant {name}: {error}") from error


def _check_shared(first: str, shared: Mapping[str, Any], name: str, config: Mapping[str, Any]) -> None:
    here, there = dict(schema.values(_rest(config))), dict(schema.values(_rest(shared)))
    for dotted in here.keys() | there.keys():
        if here.get(dotted) != there.get(dotted):
            raise ValueError(
                f"variants {first} and {name} differ in {dotted}, and variants may differ in "
                f"{', '.join(MAY_DIFFER)}; give {dotted} for all of them, or make two runs"
            )


def _check_together(configs: Mapping[str, Mapping[str, Any]]) -> None:
    if len(configs) < 2:
        raise ValueError(f"variants={','.join(configs)}: to take turns there must be two or more")
    names: dict[str, str] = {}
    for name, config in configs.items():
        if (other := names.setdefault(repr(_parts(config)), name)) != name:
            raise ValueError(f"variants {other} and {name} are the same; leave one of them out")
    first = next(iter(configs.values()))
    modes = {config["timing"]["mode"] for config in configs.values()}
    if len(modes) > 1 and first["cluster"]["where"] == "virtual" and first["device"] == "cuda":
        raise ValueError(
            f"timing.mode={','.join(sorted(modes))} in one run: virtual ranks on a GPU have one kind of "
            "clock; take one mode, or cluster=local"
        )


def _parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of MAY_DIFFER, what this config has, nested as it is there."""
    parts: dict[str, Any] = {}
    for dotted in MAY_DIFFER:
        above, _, name = dotted.rpartition(".")
        if (value := schema.leaf(config, dotted)) is not None:
            (parts.setdefault(above, {}) if above else parts)[name] = value
    return parts


def _rest(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what may differ."""
    kept = {name: dict(part) if isinstance(part, Mapping) else part for name, part in config.items()}
    for dotted in MAY_DIFFER:
        above, _, name = dotted.rpartition(".")
        (kept[above] if above else kept).pop(name, None)
    return kept
