"""The commands: each file of this folder without a leading _ is one, with a function of its own name.

To add a command, add a file. The signature of its function says which words and options the command takes,
as a method's signature says which hyperparameters the method has. The docstring is the help:

    GROUP = "results"  # the part of the list of all commands: a key of GROUPS

    def trace(run: RunName, *, out: str | None = None, quick: bool = False) -> int:
        \"\"\"Write a run as a timeline for Chrome and Perfetto.

        Args:
            run: part of its name.
            out: the file to write; by default it lies in the run's folder.
            quick: leave out spans.
        \"\"\"

Positional parameters take words: one, or any number where the type is a sequence (`_arguments` has the usual
types, which completion knows). Keyword-only parameters are options: a bool is a flag, any other option takes
a value, which is checked by its type (`sparsify.ranges`). The function prints its answer and returns the exit
code. Signatures, docstrings and GROUP are read without executing a file's imports (`sparsify.core.spec`):
help and completion import no command. Several commands share the files that start with _.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

import sparsify
from experiments.bench import REGISTRY as BENCHMARKS
from experiments.commands._arguments import PROGRAM, CommandParser, format_two_columns, wrap_paragraphs
from experiments.config.choices import meaning_by_parameter
from slurm import environment
from sparsify.core.spec import BrokenFile, Registry, read_constant

REGISTRY = Registry("command", __name__, Path(__file__).parent)
GROUPS = {
    "here": "on this machine",
    "cluster": "on a cluster (cluster=NAME; there `run` and `reproduce` queue jobs and wait)",
    "results": "looking at results",
}
LISTED_FIRST = ("run", "reproduce")  # everybody needs these
# These start workers by themselves. `run` may also be one of several processes that mpirun has started.
STARTING_WORKERS = ("reproduce", "submit", "sweep")
GLOBAL_OPTIONS = ("-h", "--help", "--traceback", "--version")  # options that need no command
GLOBAL_OPTION_HELP = {
    "COMMAND --help": "show the words and options of a command",
    "--version": "show the version",
    "--traceback": "show where an error came from",
    "FORCE=1": "as --force: measure again what is already measured (earlier attempts are kept)",
}


def command_names() -> list[str]:
    """Return the names of all commands, in the order of lists."""
    return [*LISTED_FIRST, *(name for name in REGISTRY.names() if name not in LISTED_FIRST)]


def parameter_sources(command: str, words: Sequence[str]) -> list[tuple[Registry, str]]:
    """Return the entries whose parameters a command takes: its own, and that of the benchmark of `bench`.

    Args:
        words: behind the command; the first that is no option names the benchmark.

    Raises:
        ValueError: there is no such benchmark.
    """
    benchmarks = [word for word in words if not word.startswith("-")] if command == "bench" else []
    for benchmark in benchmarks[:1]:
        BENCHMARKS.check_name(benchmark)
    return [(REGISTRY, command), *((BENCHMARKS, benchmark) for benchmark in benchmarks[:1])]


def make_parser(name: str, words: Sequence[str] = (), *, with_help: bool = False) -> CommandParser:
    """Return the parser of a command's words and options.

    Args:
        words: behind the command.
        with_help: describe each word and option, for help.

    Raises:
        BrokenFile: the command's file can't be read, or has no function of its name.
    """
    sources = parameter_sources(name, words)
    registry, entry = sources[-1]
    parser = CommandParser(
        prog=" ".join([PROGRAM, *(entry for _, entry in sources)]),
        description=wrap_paragraphs(registry.docstring(entry).partition("\nArgs:")[0]),
    )
    for registry, entry in sources:
        parser.add_parameters(
            registry.parameters(entry), meaning_by_parameter(registry, entry) if with_help else {}
        )
    return parser


def import_command(name: str) -> Callable[..., int]:
    """Import a command's file and return its function.

    Raises:
        ValueError: a launcher such as mpirun has started several processes of a command that is for one.
        BrokenFile: the file can't be imported.
    """
    group = environment.find_launcher_group() if name in STARTING_WORKERS else None
    if group is not None:
        raise ValueError(
            f"{group.launcher} started {group.place.size} processes, and {name} starts its workers itself: "
            f"call it without {group.launcher}, or make a single run with `run`"
        )
    return REGISTRY.import_function(name)


def overview_text() -> str:
    """Return the list of all commands by groups, each with the first line of its help."""
    summaries_by_group: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    for name in command_names():
        group = "here"
        try:
            group = str(read_constant(REGISTRY.folder / f"{name}.py", "GROUP") or group)
            summary = REGISTRY.summary(name)
        except BrokenFile as broken:
            summary = f"can't be read: {broken}"
        summaries_by_group.setdefault(group, {})[name] = summary
    parts = [f"{PROGRAM} COMMAND [WORD ...] [OPTION ...]\n"]
    for group, summaries in summaries_by_group.items():
        if summaries:
            parts.append(f"{GROUPS.get(group, group)}:\n{format_two_columns(summaries)}")
    return "\n".join([*parts, f"for all commands:\n{format_two_columns(GLOBAL_OPTION_HELP)}"])


def version_text() -> str:
    return f"sparsify {sparsify.__version__}, Python {platform.python_version()}\n"
