"""What the words behind a command can be: items, choices of groups, and settings, each with its meaning, its
allowed values and its default.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_type_hints

from experiments import commands, figures
from experiments.commands._layout import paragraphs, table
from experiments.commands._words import Kind, kinds
from experiments.config import choices, compose, schema
from experiments.config.meanings import meanings
from sparsify import ranges
from sparsify.registry import BrokenFile, constant

NAMES, OPTIONS, ITEMS = 30, 18, 26  # columns of key=value, of an option's name, of an item's
SETS_OTHERS = ("profile", "recipe")  # of these groups, help shows what differs from a bare `run`
PREFIX = {
    "link": "cluster.link.",
    "inside": "cluster.inside.",
}  # where a group's settings stand, if not below its own name


def explain(command: str, words: Sequence[str]) -> str:
    """What can stand behind a command; where words choose something (method=dgc), what that is, alone."""
    parameters = commands.REGISTRY.parameters(command)
    taken = {kind for parameter in parameters.values() for kind in kinds(parameter.allowed)}
    chosen = [word for word in words if word.partition("=")[0] in choices.GROUPS]
    if Kind.SETTING in taken and chosen:
        return _chosen(command, dict(map(compose.pair, chosen)))
    parts = [f"items:\n{table(_titles(), ITEMS)}"] if Kind.ITEM in taken else []
    if Kind.SETTING in taken:
        hint = f"`{command} method=NAME --help` explains a method and its settings; so for all groups."
        parts += [*_choices(), *_settings(), paragraphs(hint)]
    return "\n".join(parts)


def _titles() -> dict[str, str]:
    """Items and what they show, without importing them."""
    found = {}
    for item, module in figures.items().items():
        try:
            title = constant(figures.FOLDER / f"{module.rpartition('.')[2]}.py", "TITLE")
        except BrokenFile as broken:
            title = f"can't be read: {broken}"
        found[item] = str(title or "")
    return found


def _choices() -> Iterator[str]:
    """Of each group the options, in a line or two each."""
    for group in choices.GROUPS:
        rows = {name: choices.about(group, name).partition("\n\n")[0] for name in choices.options(group)}
        yield f"{group}=\n{table(rows, OPTIONS)}"


def _settings() -> Iterator[str]:
    """All settings, part by part, with the values of a bare `run`."""
    config = compose.resolve([])
    parts: dict[str, list[str]] = {"": []}
    for key in compose.leaves(config):
        parts.setdefault(key.rpartition(".")[0].partition(".")[0], []).append(key)
    hints = get_type_hints(schema.Run)
    yield f"settings, with the values of a bare `run`:\n{table(_rows(config, parts.pop('')), NAMES)}"
    for part, keys in parts.items():
        heading = f"of {part}={config[part]['name']}" if part in choices.REGISTRIES else hints[part].__doc__
        yield f"{part}: {heading}\n{table(_rows(config, keys), NAMES)}"


def _chosen(command: str, chosen: Mapping[str, str]) -> str:
    """The options that were chosen, each with its settings as they are then."""
    for group, option in chosen.items():
        compose.check_choice(group, option)
    config, usual = (
        compose.resolve([f"{group}={option}" for group, option in chosen.items()]),
        compose.resolve([]),
    )
    leaves, parts = compose.leaves(config), list[str]()
    for group, option in chosen.items():
        parts.append(f"{group}={option}\n\n{paragraphs(choices.about(group, option))}")
        if group in SETS_OTHERS:
            keys = [key for key in leaves if schema.leaf(config, key) != schema.leaf(usual, key)]
        else:
            keys = [key for key in leaves if key.startswith(PREFIX.get(group, f"{group}."))]
        if keys:
            parts.append(f"settings:\n{table(_rows(config, keys), NAMES)}")
    return "\n".join([*parts, f"`{command} --help` has all others\n"])


def _rows(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, str]:
    """key=value, its meaning and the allowed values, in the words of the command line."""
    leaves, said, rows = compose.leaves(config), dict[str, str](), dict[str, str]()
    for group in {key.partition(".")[0] for key in keys} & choices.REGISTRIES.keys():
        found = meanings(choices.REGISTRIES[group], config[group]["name"])
        said |= {f"{group}.{key}": meaning.replace("None:", "null:") for key, meaning in found.items()}
    for key in keys:
        meaning = said.get(key) or schema.meaning(leaves[key])
        values = f"[{ranges.described(leaves[key])}]"
        rows[f"{key}={ranges.word(schema.leaf(config, key))}"] = f"{meaning.rstrip('.')} {values}".strip()
    return rows
