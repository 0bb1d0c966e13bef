from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from experiments import commands, figures
from experiments.bench import REGISTRY as BENCHMARKS
from experiments.commands._arguments import Kind, Parser, fill, kinds
from experiments.config import choices
from experiments.config.config import types_of
from experiments.config.folders import ROOT, Folders
from experiments.config.machines import CLUSTERS, NoContainer, SlurmCluster
from experiments.figures.benchmark import entries
from sparsify import ranges
from sparsify.core.spec import BrokenFile

GROUP = "here"
CHECKOUT = "@CHECKOUT@"  # in the shells' scripts: the folder in which they ask
# The shells' scripts lie beside this. Bash and zsh ask the command line itself, through argcomplete:
# $_ARGCOMPLETE=3, the words begin behind `-m`. What else follows `python` is left to what completed it
# before, or to files. `complete` is asked at every Tab: nothing slow is imported.


def completion(shell: Literal["bash", "zsh", "fish"]) -> int:
    """What a shell needs to complete words at Tab: eval "$(python -m experiments completion bash)"

    Commands, options, figures, settings and their values, methods, runs. Into ~/.bashrc, ~/.zshrc or
    ~/.config/fish/config.fish it may go as well; in other folders than this checkout it completes nothing:
    `python -m experiments` would run a module of that folder.

    Args:
        shell: which one.
    """
    script = Path(__file__).with_name(f"_completion.{shell}").read_text()
    print(script.replace(CHECKOUT, _quote(str(ROOT), shell)), end="")
    return 0


def _quote(text: str, shell: str) -> str:
    """Return a text as one word of this shell."""
    if shell != "fish":
        return shlex.quote(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")  # fish knows these two escapes between quotes
    return f"'{escaped}'"


def complete(line: str) -> None:
    """Answer the shell that asks, and end this process.

    Args:
        line: what has been typed, up to the cursor.
    """
    import argcomplete

    given = line.split()
    parser = _Parser()
    parser.add_argument("--version", action="store_true", help=commands.GENERAL["--version"])
    below = parser.add_subparsers()
    for name in commands.names():
        try:
            one = below.add_parser(name, help=commands.REGISTRY.summary(name))
            if name in given:
                _fill(one, name, given)
        except BrokenFile:
            continue  # it breaks no other command
    argcomplete.autocomplete(parser, always_complete_options="long")


class _Parser(Parser):
    """Flags first: argparse, of which argcomplete asks what may come, takes no words in several parts."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        flags = {f"--{name}" for name, action in self.taken.items() if action.nargs == 0}
        ordered = sorted(args, key=lambda word: word not in flags)
        return super().parse_known_args(ordered, namespace)


def _fill(parser: Parser, command: str, given: Sequence[str]) -> None:
    words = given[given.index(command) + 1 :]
    known = [word for word in words if command != "bench" or word in BENCHMARKS.names()]
    for registry, entry in commands.taking(command, known):
        parameters = registry.parameters(entry)
        fill(parser, parameters, {})
        for name, parameter in parameters.items():
            if found := kinds(parameter.allowed):
                vars(parser.taken[name])["completer"] = _completer(found, given)  # argcomplete looks there


def _completer(found: Sequence[Kind], given: Sequence[str]) -> Callable[..., list[str]]:
    def completer(prefix: str, **_: object) -> list[str]:
        listed: dict[Kind, Callable[[], list[str]]] = {
            Kind.ITEM: lambda: list(figures.files_by_item()),
            Kind.SETTING: lambda: settings(prefix, given),
            Kind.RUN: lambda: _plain(Folders().store.run_ids()),
            Kind.BENCH: BENCHMARKS.names,
            Kind.ENTRY: lambda: sorted({*choices.REGISTRIES["method"].names(), *entries.shipped()}),
            Kind.FILTER: lambda: _of_runs(prefix, given),
            Kind.SWEEP: lambda: _plain(path.name for path in Folders().sweeps.glob("*")),
        }
        return [word for kind in found for word in listed[kind]()]

    return completer


def _plain(names: Iterable[str]) -> list[str]:
    """The names that mean nothing to a shell, sorted: folders of results may have any."""
    return sorted(name for name in names if re.fullmatch(r"\w[\w.=+-]*", name, re.ASCII))


def _of_runs(prefix: str, given: Sequence[str]) -> list[str]:
    """Words that a run can be chosen by, where they are few; and what `compare` puts on its axes."""
    key, equals, _ = prefix.partition("=")
    if equals and key in choices.GROUPS:
        return settings(prefix, given)
    if equals and key in ("x", "by"):
        return [f"{key}={name}" for name in ("method.name", "task.name", *_leaves(given))]
    named = _plain(f"sweep={path.stem}" for path in Folders().sweep_index.glob("*.json"))
    return [*named, "state=", "source=", *(f"{group}=" for group in choices.GROUPS), *figures.files_by_item()]


def settings(prefix: str, given: Sequence[str]) -> list[str]:
    """Words that `prefix` can become: the next part of a key, or key=value where its values are known.

    Of a list a,b it is about the last.
    """
    key, equals, value = prefix.partition("=")
    leaves = _leaves(given)
    if not equals:
        depth = prefix.count(".") + 1
        parts = [name.split(".") for name in [*choices.GROUPS, *leaves]]
        ends = [".".join(some[:depth]) + ("=" if len(some) <= depth else ".") for some in parts]
        return list(dict.fromkeys(ends))
    before = value[: value.rfind(",") + 1]
    values = choices.options(key) if key in choices.GROUPS else _values(leaves.get(key))
    return [f"{key}={before}{one}" for one in values]


def _values(allowed: Any) -> Iterator[str]:
    """The values that a type lists."""
    if allowed is bool:
        yield from ("true", "false")
    elif allowed is type(None):
        yield "null"
    elif get_origin(allowed) is Literal:
        yield from map(ranges.format_argument, get_args(allowed))
    else:
        for part in get_args(allowed):
            yield from _values(part)


def _leaves(given: Iterable[str]) -> dict[str, Any]:
    """The settings that the choices among these words have, and their types; of a grid's methods all."""
    usual = dict(re.findall(r"^  - (\w+): (\w+)", (choices.CONF / "config.yaml").read_text(), re.MULTILINE))
    chosen = usual | {key: value for word in given for key, _, value in [word.partition("=")]}
    found: dict[str, Any] = {}
    for method in chosen["method"].split(","):
        for task in chosen["task"].split(","):
            found |= types_of(
                _function("method", method) or usual["method"],
                _function("task", task) or usual["task"],
                CLUSTERS.get(chosen["cluster"], SlurmCluster),
                NoContainer.kind({"name": chosen["container"]}),
            )
    return choices.settable(found)


def _function(group: str, option: str) -> str:
    """The function that an option names; a preset's file says of which it is one. Empty where it can't be
    read.
    """
    path, registry = choices.files(group).get(option), choices.REGISTRIES[group]
    base = re.search(r"^defaults: *\[(\w+)", path.read_text(), re.MULTILINE) if path else None
    name = base.group(1) if base else option
    return name if name in registry.names() and not registry.reason_unreadable(name) else ""
