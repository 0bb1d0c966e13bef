"""What the words behind a command can be: items, choices of groups, and settings, each with its meaning, its
allowed values and its default.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import get_type_hints

from experiments import commands, figures
from experiments.bench import REGISTRY as BENCHMARKS
from experiments.commands._arguments import Kind, kinds, paragraphs, table
from experiments.config import choices, compose, grammar
from experiments.config.choices import meanings
from experiments.config.config import Config
from experiments.training.settings import meaning as meaning_of
from sparsify import ranges
from sparsify.core.spec import BrokenFile, read_constant

NAMES, OPTIONS, ITEMS = 30, 18, 26  # columns of key=value, of an option's name, of an item's
SETS_OTHERS = ("profile", "recipe")  # of these groups, help shows what differs from a bare `run`
# Where a group's settings stand, if not below its own name.
PREFIX = {"link": "cluster.link.", "inside": "cluster.inside."}


def explain(command: str, words: Sequence[str]) -> str:
    """Help on the words behind a command; where they choose something (method=dgc), what that is, alone."""
    parameters = commands.REGISTRY.parameters(command)
    taken = {kind for parameter in parameters.values() for kind in kinds(parameter.allowed)}
    chosen = [word for word in words if word.partition("=")[0] in choices.GROUPS]
    if Kind.SETTING in taken and chosen:
        return _chosen(command, dict(map(grammar.pair, chosen)))
    parts = [f"items:\n{table(_titles(), ITEMS)}"] if Kind.ITEM in taken else []
    if Kind.BENCH in taken and not any(word in BENCHMARKS.names() for word in words):
        listed = {name: BENCHMARKS.summary(name) for name in BENCHMARKS.readable_names()}
        parts.append(f"benchmarks:\n{table(listed)}")
    if Kind.SETTING in taken:
        hint = f"`{command} method=NAME --help` explains a method and its settings; so for all groups."
        parts += [*_choices(), *_settings(), paragraphs(hint)]
    return "\n".join(parts)


def _titles() -> dict[str, str]:
    """Items and what they show, without importing them."""
    found = {}
    for item, path in figures.files_by_item().items():
        try:
            title = read_constant(path, "TITLE")
        except BrokenFile as broken:
            title = f"can't be read: {broken}"
        found[item] = str(title or "")
    return found


def _choices() -> Iterator[str]:
    for group in choices.GROUPS:
        rows = {name: choices.about(group, name).partition("\n\n")[0] for name in choices.options(group)}
        yield f"{group}=\n{table(rows, OPTIONS)}"


def _settings() -> Iterator[str]:
    """All settings, part by part, with the values of a bare `run`."""
    usual = compose.resolve([])
    parts = defaultdict[str, list[str]](list)
    for key in compose.leaves(usual):
        parts[key.rpartition(".")[0].partition(".")[0]].append(key)
    hints = get_type_hints(Config)
    yield f"settings, with the values of a bare `run`:\n{table(_rows(usual, parts.pop('')), NAMES)}"
    for part, keys in parts.items():
        is_chosen = part in choices.REGISTRIES
        heading = f"of {part}={getattr(usual, part).name}" if is_chosen else hints[part].__doc__
        yield f"{part}: {heading}\n{table(_rows(usual, keys), NAMES)}"


def _chosen(command: str, chosen: Mapping[str, str]) -> str:
    """The options that were chosen, each with its settings as they are then."""
    for group, option in chosen.items():
        compose.check_choice(group, option)
    config, usual = compose.resolve(chosen), compose.resolve([])
    leaves, parts = compose.leaves(config), list[str]()
    for group, option in chosen.items():
        parts.append(f"{group}={option}\n\n{paragraphs(choices.about(group, option))}")
        if group in SETS_OTHERS:
            keys = [key for key in leaves if config.leaf(key) != usual.leaf(key)]
        else:
            keys = [key for key in leaves if key.startswith(PREFIX.get(group, f"{group}."))]
        if keys:
            parts.append(f"settings:\n{table(_rows(config, keys), NAMES)}")
    return "\n".join([*parts, f"`{command} --help` has all others\n"])


def _rows(config: Config, keys: Collection[str]) -> dict[str, str]:
    """key=value, its meaning and the allowed values, in the words of the command line."""
    leaves, said, rows = compose.leaves(config), dict[str, str](), dict[str, str]()
    for group in {key.partition(".")[0] for key in keys} & choices.REGISTRIES.keys():
        found = meanings(choices.REGISTRIES[group], getattr(config, group).name)
        said |= {f"{group}.{key}": meaning.replace("None:", "null:") for key, meaning in found.items()}
    for key in keys:
        meaning = said.get(key) or meaning_of(leaves[key])
        values = f"[{ranges.describe_type(leaves[key])}]"
        rows[f"{key}={ranges.format_argument(config.leaf(key))}"] = f"{meaning.rstrip('.')} {values}".strip()
    return rows
