from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from experiments import commands, figures
from experiments.bench import REGISTRY as BENCHMARKS
from experiments.commands._arguments import CommandParser, WordKind, word_kinds
from experiments.config import choices
from experiments.config.config import setting_type_by_key_for
from experiments.config.folders import ROOT, ResultFolders
from experiments.config.machines import CLUSTERS, AnyContainer, SlurmCluster
from experiments.figures.benchmark import entries
from sparsify import ranges
from sparsify.core.spec import BrokenFile

GROUP = "here"
CHECKOUT_MARK = "@CHECKOUT@"  # in the shells' scripts: the folder in which they complete words
# The shells' scripts lie beside this file. Bash and zsh ask the command line itself, through argcomplete:
# $_ARGCOMPLETE=3 says that the words begin behind `-m`. Other words behind `python` are completed as before.
# Each Tab calls `print_completions_and_exit`, so nothing slow is imported.


def completion(shell: Literal["bash", "zsh", "fish"]) -> int:
    """Print the script by which a shell completes words at Tab: `eval "$(... completion bash)"`.

    Tab then completes commands, options, figures, settings and their values, methods and runs. The line
    `eval "$(python -m experiments completion bash)"` may also stand in ~/.bashrc or ~/.zshrc, and the script
    in ~/.config/fish/config.fish. In other folders than this checkout nothing is completed: there,
    `python -m experiments` would run a module of that folder.

    Args:
        shell: the shell that you use.
    """
    script = Path(__file__).with_name(f"_completion.{shell}").read_text()
    print(script.replace(CHECKOUT_MARK, quote_for_shell(str(ROOT), shell)), end="")
    return 0


def quote_for_shell(text: str, shell: str) -> str:
    """Return a text as one word of this shell."""
    if shell != "fish":
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")  # fish knows these two escapes between quotes
    return f"'{escaped}'"


def print_completions_and_exit(line: str) -> None:
    """Answer a shell that asks for completions, and end this process.

    Args:
        line: the typed text, up to the cursor.
    """
    import argcomplete

    typed_words = line.split()
    parser = FlagsFirstParser()
    parser.add_argument("--version", action="store_true", help=commands.GLOBAL_OPTION_HELP["--version"])
    subparsers = parser.add_subparsers()
    for name in commands.command_names():
        try:
            command_parser = subparsers.add_parser(name, help=commands.REGISTRY.summary(name))
            if name in typed_words:
                _add_arguments(command_parser, name, typed_words)
        except BrokenFile:
            continue  # it breaks no other command
    argcomplete.autocomplete(parser, always_complete_options="long")


class FlagsFirstParser(CommandParser):
    """A parser that reads flags before all other words.

    argcomplete asks argparse what may follow, and argparse takes no list of words in several parts.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        flags = {f"--{name}" for name, action in self.action_by_parameter.items() if action.nargs == 0}
        ordered = sorted(args, key=lambda word: word not in flags)
        return super().parse_known_args(ordered, namespace)


def _add_arguments(parser: CommandParser, command: str, typed_words: Sequence[str]) -> None:
    """Add a command's words and options to its parser, each with the function that completes it."""
    words = typed_words[typed_words.index(command) + 1 :]
    known_words = [word for word in words if command != "bench" or word in BENCHMARKS.names()]
    for registry, entry in commands.parameter_sources(command, known_words):
        parameters = registry.parameters(entry)
        parser.add_parameters(parameters, {})
        for name, parameter in parameters.items():
            kinds = word_kinds(parameter.allowed)
            if kinds:
                action = parser.action_by_parameter[name]
                vars(action)["completer"] = partial(_list_words, kinds, typed_words)  # for argcomplete


def _list_words(kinds: Sequence[WordKind], typed_words: Sequence[str], prefix: str, **_: object) -> list[str]:
    """Return the words of these kinds that a shell may offer for a prefix."""
    list_by_kind: dict[WordKind, Callable[[], list[str]]] = {
        WordKind.ITEM: lambda: list(figures.files_by_item()),
        WordKind.SETTING: lambda: complete_setting_word(prefix, typed_words),
        WordKind.RUN: lambda: _sort_plain_names(ResultFolders().store.list_run_ids()),
        WordKind.BENCH: BENCHMARKS.names,
        WordKind.ENTRY: lambda: sorted(
            {*choices.REGISTRIES["method"].names(), *entries.shipped_entrants_by_name()}
        ),
        WordKind.FILTER: lambda: _list_filters(prefix, typed_words),
        WordKind.SWEEP: lambda: _sort_plain_names(path.name for path in ResultFolders().sweeps.glob("*")),
    }
    return [word for kind in kinds for word in list_by_kind[kind]()]


def _sort_plain_names(names: Iterable[str]) -> list[str]:
    """Return the names without letters that mean something to a shell: folders of results may have any."""
    return sorted(name for name in names if re.fullmatch(r"\w[\w.=+-]*", name, re.ASCII))


def _list_filters(prefix: str, typed_words: Sequence[str]) -> list[str]:
    """Return words by which runs can be chosen, where they are few; and the axes of `compare`."""
    key, equals, _ = prefix.partition("=")
    if equals and key in choices.GROUPS:
        return complete_setting_word(prefix, typed_words)
    if equals and key in ("x", "by"):
        return [f"{key}={name}" for name in ("method.name", "task.name", *_settable_types(typed_words))]
    sweeps = _sort_plain_names(f"sweep={path.stem}" for path in ResultFolders().sweep_index.glob("*.json"))
    groups = (f"{group}=" for group in choices.GROUPS)
    return [*sweeps, "state=", "source=", *groups, *figures.files_by_item()]


def complete_setting_word(prefix: str, typed_words: Sequence[str]) -> list[str]:
    """Return words that `prefix` can become: the next part of a key, or key=value where values are known.

    Of a list a,b the last value is completed.
    """
    key, equals, value = prefix.partition("=")
    type_by_key = _settable_types(typed_words)
    if not equals:
        depth = prefix.count(".") + 1
        keys = [name.split(".") for name in [*choices.GROUPS, *type_by_key]]
        next_parts = (".".join(parts[:depth]) + ("=" if len(parts) <= depth else ".") for parts in keys)
        return list(dict.fromkeys(next_parts))
    earlier_values = value[: value.rfind(",") + 1]
    values = choices.option_names(key) if key in choices.GROUPS else _listed_values(type_by_key.get(key))
    return [f"{key}={earlier_values}{last_value}" for last_value in values]


def _listed_values(allowed: Any) -> Iterator[str]:
    """Yield the values that a type lists."""
    if allowed is bool:
        yield from ("true", "false")
    elif allowed is type(None):
        yield "null"
    elif get_origin(allowed) is Literal:
        yield from map(ranges.format_argument, get_args(allowed))
    else:
        for part in get_args(allowed):
            yield from _listed_values(part)


def _settable_types(typed_words: Iterable[str]) -> dict[str, Any]:
    """Return the types of the settings that the typed choices have; of a grid those of all its methods."""
    config = (choices.CONF / "config.yaml").read_text()
    option_by_group = dict(re.findall(r"^  - (\w+): (\w+)", config, re.MULTILINE))
    default_method = option_by_group["method"]
    default_task = option_by_group["task"]
    for word in typed_words:
        group, _, option = word.partition("=")
        option_by_group[group] = option
    type_by_key: dict[str, Any] = {}
    for method, task in product(option_by_group["method"].split(","), option_by_group["task"].split(",")):
        type_by_key |= setting_type_by_key_for(
            _entry_name("method", method) or default_method,
            _entry_name("task", task) or default_task,
            CLUSTERS.get(option_by_group["cluster"], SlurmCluster),
            AnyContainer.subclass_for({"name": option_by_group["container"]}),
        )
    return choices.drop_unsettable_keys(type_by_key)


def _entry_name(group: str, option: str) -> str:
    """Return the registered function behind an option, which a preset's file names; '' if unreadable."""
    path = choices.files_by_option(group).get(option)
    registry = choices.REGISTRIES[group]
    preset_of = re.search(r"^defaults: *\[(\w+)", path.read_text(), re.MULTILINE) if path else None
    name = preset_of.group(1) if preset_of else option
    return name if name in registry.names() and not registry.reason_unreadable(name) else ""
