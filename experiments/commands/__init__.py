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
code. Signatures, docstrings and GROUP are read from the source: help and completion import no command. Files
that start with _ are what several commands share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.commands import _arguments
from experiments.commands._layout import paragraphs
from experiments.config.meanings import meanings
from slurm import environment
from sparsify.registry import Registry, constant, function_of

REGISTRY = Registry("command", __name__, Path(__file__).parent)
GROUPS = {
    "here": "on this machine",
    "cluster": "on a cluster (cluster=NAME; there `run` and `reproduce` queue jobs and wait)",
    "results": "looking at results",
}
FIRST = ("run", "reproduce")  # in lists: what everybody needs
# These start workers; to begin a run together with other processes is what `run` does.
ALONE = ("reproduce", "submit", "sweep")


def names() -> list[str]:
    """All commands, as lists show them."""
    return [*FIRST, *(name for name in REGISTRY.names() if name not in FIRST)]


def group_of(name: str) -> str:
    """The group that a command's file says it belongs to, without importing it.

    Raises:
        BrokenFile: the file can't be read.
    """
    return str(constant(REGISTRY.folder / f"{name}.py", "GROUP") or next(iter(GROUPS)))


def parser_of(name: str, has_meanings: bool = False) -> _arguments.Parser:
    """What a command takes; with the meaning of each word and option where help is to be shown.

    Raises:
        BrokenFile: its file can't be read, or has no function of its name.
    """
    about = paragraphs(REGISTRY.docstring(name).partition("\nArgs:")[0])
    parser = _arguments.Parser(prog=f"{_arguments.PROGRAM} {name}", description=about)
    return _arguments.fill(
        parser, REGISTRY.parameters(name), meanings(REGISTRY, name) if has_meanings else {}
    )


def execute(name: str, given: Mapping[str, Any]) -> int:
    """The exit code of a command.

    Args:
        given: the arguments of its function.

    Raises:
        ValueError: several processes were given a command that is for one.
        BrokenFile: its file can't be imported.
    """
    if name in ALONE and (group := environment.joined()) is not None:
        raise ValueError(
            f"{group.starter} started {group.place.size} processes, and {name} starts its workers itself: "
            f"call it without {group.starter}, or make a single run with `run`"
        )
    command: Callable[..., int] = function_of(__name__, name)
    return command(**given)
