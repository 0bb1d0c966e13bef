"""Help on the words behind a command: items, choices of groups, and settings.

Each setting is shown with its meaning, its allowed values and its default.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import get_type_hints

from experiments import commands, figures
from experiments.bench import REGISTRY as BENCHMARKS
from experiments.commands._arguments import WordKind, format_two_columns, word_kinds, wrap_paragraphs
from experiments.config import choices, compose, grammar
from experiments.config.choices import meaning_by_parameter
from experiments.config.config import Config
from experiments.training.settings import setting_meaning
from sparsify import ranges
from sparsify.core.spec import BrokenFile, read_constant

SETTING_COLUMNS = 30
OPTION_COLUMNS = 18
ITEM_COLUMNS = 26
OVERRIDING_GROUPS = ("profile", "recipe")  # help on these shows what differs from a bare `run`
# Where a group's settings stand, if not below its own name.
PREFIX_BY_GROUP = {"link": "cluster.link.", "inside": "cluster.inside."}


def explain_command_words(command: str, words: Sequence[str]) -> str:
    """Return help on the words behind a command.

    Where the words choose something, as method=dgc does, help is on the choice alone.
    """
    parameters = commands.REGISTRY.parameters(command)
    kinds = {kind for parameter in parameters.values() for kind in word_kinds(parameter.allowed)}
    choice_words = [word for word in words if word.partition("=")[0] in choices.GROUPS]
    if WordKind.SETTING in kinds and choice_words:
        return _explain_choices(command, dict(map(grammar.split_key_value, choice_words)))
    parts = []
    if WordKind.ITEM in kinds:
        parts.append(f"items:\n{format_two_columns(_read_item_titles(), ITEM_COLUMNS)}")
    if WordKind.BENCH in kinds and not any(word in BENCHMARKS.names() for word in words):
        summaries = {name: BENCHMARKS.summary(name) for name in BENCHMARKS.loadable_names()}
        parts.append(f"benchmarks:\n{format_two_columns(summaries)}")
    if WordKind.SETTING in kinds:
        for group in choices.GROUPS:
            options = {
                option: choices.describe_option(group, option).partition("\n\n")[0]
                for option in choices.option_names(group)
            }
            parts.append(f"{group}=\n{format_two_columns(options, OPTION_COLUMNS)}")
        hint = f"`{command} method=NAME --help` explains a method and its settings; so for all groups."
        parts += [*_list_settings(), wrap_paragraphs(hint)]
    return "\n".join(parts)


def _read_item_titles() -> dict[str, str]:
    """Return the title of each item by its name, without importing any."""
    title_by_item = {}
    for item, path in figures.files_by_item().items():
        try:
            title = read_constant(path, "TITLE")
        except BrokenFile as broken:
            title = f"can't be read: {broken}"
        title_by_item[item] = str(title or "")
    return title_by_item


def _list_settings() -> Iterator[str]:
    """Yield the settings of each part of the configuration, with the values of a bare `run`."""
    config = compose.resolve([])
    keys_by_part = defaultdict[str, list[str]](list)
    for key in compose.settable_type_by_key(config):
        keys_by_part[key.rpartition(".")[0].partition(".")[0]].append(key)
    hints = get_type_hints(Config)
    for part, keys in keys_by_part.items():
        if not part:
            heading = "settings, with the values of a bare `run`:"
        elif part in choices.REGISTRIES:
            heading = f"{part}: of {part}={getattr(config, part).name}"
        else:
            heading = f"{part}: {hints[part].__doc__}"
        yield f"{heading}\n{_describe_settings(config, keys)}"


def _explain_choices(command: str, option_by_group: Mapping[str, str]) -> str:
    """Return help on the chosen options, each with the values that its settings have then."""
    for group, option in option_by_group.items():
        compose.check_choice(group, option)
    config = compose.resolve(option_by_group)
    default_config = compose.resolve([])
    parts = list[str]()
    for group, option in option_by_group.items():
        parts.append(f"{group}={option}\n\n{wrap_paragraphs(choices.describe_option(group, option))}")
        if group in OVERRIDING_GROUPS:
            keys = [
                key
                for key in compose.settable_type_by_key(config)
                if config.get_setting(key) != default_config.get_setting(key)
            ]
        else:
            prefix = PREFIX_BY_GROUP.get(group, f"{group}.")
            keys = [key for key in compose.settable_type_by_key(config) if key.startswith(prefix)]
        if keys:
            parts.append(f"settings:\n{_describe_settings(config, keys)}")
    return "\n".join([*parts, f"`{command} --help` has all others\n"])


def _describe_settings(config: Config, keys: Collection[str]) -> str:
    """Return a line or more for each setting: key=value, its meaning and the allowed values."""
    type_by_key = compose.settable_type_by_key(config)
    meaning_by_key = dict[str, str]()
    for group in {key.partition(".")[0] for key in keys} & choices.REGISTRIES.keys():
        parameters = meaning_by_parameter(choices.REGISTRIES[group], getattr(config, group).name)
        for name, text in parameters.items():
            meaning_by_key[f"{group}.{name}"] = text.replace("None:", "null:")
    rows = {}
    for key in keys:
        text = meaning_by_key.get(key) or setting_meaning(type_by_key[key])
        values = ranges.describe_type(type_by_key[key])
        rows[f"{key}={ranges.format_argument(config.get_setting(key))}"] = (
            f"{text.rstrip('.')} [{values}]".strip()
        )
    return format_two_columns(rows, SETTING_COLUMNS)
