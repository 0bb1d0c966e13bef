"""The commands: one file each, with a function of its own name; the folder is the list.

To add a command is to add a file. Its function's signature says what may stand behind the command, as a
method's says what its hyperparameters are, and its docstring is the help:

    GROUP = "results"  # where the list of all commands has it: a key of GROUPS

    def trace(run: RunName, *, out: str | None = None, quick: bool = False) -> int:
        \"\"\"A run as a timeline for Chrome and Perfetto.

        Args:
            run: part of its name.
            out: the file to write; the run's folder has it otherwise.
            quick: without spans.
        \"\"\"

Positional parameters take words: one, or any number where the type is a sequence (`_words` has the usual
ones, which completion knows). Keyword-only parameters are options: a bool is a flag, anything else takes a
value, which is checked by its type (`sparsify.ranges`). The function prints its answer and returns the exit
code. Signatures, docstrings and GROUP are read without what a file imports (`sparsify.core.spec`): help and
completion import no command. Files that start with _ are what several commands share.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import sparsify
from experiments.bench import REGISTRY as BENCHMARKS
from experiments.commands._arguments import PROGRAM, Parser, fill, paragraphs, table
from experiments.config.choices import meanings
from slurm import environment
from sparsify.core.spec import BrokenFile, Registry, read_constant

REGISTRY = Registry("command", __name__, Path(__file__).parent)
GROUPS = {
    "here": "on this machine",
    "cluster": "on a cluster (cluster=NAME; there `run` and `reproduce` queue jobs and wait)",
    "results": "looking at results",
}
FIRST = ("run", "reproduce")  # in lists: what everybody needs
# These start workers; to begin a run together with other processes is what `run` does.
STARTING = ("reproduce", "submit", "sweep")
ALONE = ("-h", "--help", "--traceback", "--version")  # options that need no command
GENERAL = {
    "COMMAND --help": "what stands behind a command",
    "--version": "which version this is",
    "--traceback": "show where an error came from",
    "FORCE=1": "as --force: measure again what is already measured (earlier attempts are kept)",
}


def names() -> list[str]:
    """All commands, as lists show them."""
    return [*FIRST, *(name for name in REGISTRY.names() if name not in FIRST)]


def group_of(name: str) -> str:
    """The group that a command's file says it belongs to, without importing it.

    Raises:
        BrokenFile: the file can't be read.
    """
    return str(read_constant(REGISTRY.folder / f"{name}.py", "GROUP") or next(iter(GROUPS)))


def taking(name: str, words: Sequence[str]) -> list[tuple[Registry, str]]:
    """Whose parameters stand behind a command: its own, and those of the benchmark that `bench` names first.

    Raises:
        ValueError: there is no such benchmark.
    """
    found = [(REGISTRY, name)]
    named = [word for word in words if not word.startswith("-")]
    if name == "bench" and named:
        BENCHMARKS.check_name(named[0])
        found.append((BENCHMARKS, named[0]))
    return found


def parser_of(name: str, words: Sequence[str] = (), has_meanings: bool = False) -> Parser:
    """Parser of what a command takes; with the meaning of each word and option where help is to be shown.

    Args:
        words: behind it.

    Raises:
        BrokenFile: its file can't be read, or has no function of its name.
    """
    sources = taking(name, words)
    registry, entry = sources[-1]
    about = paragraphs(registry.docstring(entry).partition("\nArgs:")[0])
    prog = " ".join([PROGRAM, *(entry for _, entry in sources)])
    parser = Parser(prog=prog, description=about)
    for registry, entry in sources:
        explained = meanings(registry, entry) if has_meanings else {}
        fill(parser, registry.parameters(entry), explained)
    return parser


def function_of(name: str) -> Callable[..., int]:
    """A command's function, imported.

    Raises:
        ValueError: several processes were given a command that is for one.
        BrokenFile: its file can't be imported.
    """
    if name in STARTING and (group := environment.find_launcher_group()) is not None:
        raise ValueError(
            f"{group.launcher} started {group.place.size} processes, and {name} starts its workers itself: "
            f"call it without {group.launcher}, or make a single run with `run`"
        )
    return REGISTRY.import_function(name)


def overview() -> str:
    """Every command in a line or two, by groups."""
    listed: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    for name in names():
        try:
            group, about = group_of(name), REGISTRY.summary(name)
        except BrokenFile as broken:
            group, about = "here", f"can't be read: {broken}"
        listed.setdefault(group, {})[name] = about
    parts = [f"{PROGRAM} COMMAND [WORD ...] [OPTION ...]\n"]
    for group, found in listed.items():
        if found:
            parts.append(f"{GROUPS.get(group, group)}:\n{table(found)}")
    return "\n".join([*parts, f"for all commands:\n{table(GENERAL)}"])


def version() -> str:
    return f"sparsify {sparsify.__version__}, Python {platform.python_version()}\n"
