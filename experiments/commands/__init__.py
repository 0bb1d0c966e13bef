"""The commands: one file each, with a function of its own name; the folder is the list.

A command takes its words and its options, prints its answer, and returns the exit code. Files that start
with _ are what several commands share.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slurm import environment
from sparsify.registry import function_of

Command = Callable[[list[str], set[str]], int]
# These start workers; to begin a run together with other processes is what `run` does.
FIRST = ("run", "reproduce")  # in lists: what everybody needs
ALONE = ("reproduce", "submit", "sweep")


def names() -> list[str]:
    """All commands, as lists show them."""
    files = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return [*FIRST, *sorted(name for name in files if not name.startswith("_") and name not in FIRST)]


def load(name: str) -> Command:
    """A command's function.

    Raises:
        BrokenFile: its file can't be read, or has no function of its name.
    """
    return function_of(__name__, name)


def execute(name: str, words: list[str], options: set[str]) -> int:
    """The exit code of a command.

    Raises:
        ValueError: several processes were given a command that is for one.
    """
    if name in ALONE and (group := environment.joined()) is not None:
        raise ValueError(
            f"{group.starter} started {group.place.size} processes, and {name} starts its workers itself: "
            f"call it without {group.starter}, or make a single run with `run`"
        )
    return load(name)(words, options)
