"""Parsers of commands' words and options, made of signatures and docstrings without importing the commands.

Signatures name the types of words; help shows them and completion knows them.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import msgspec

from sparsify import ranges
from sparsify.core.spec import REQUIRED, Parameter

PROGRAM = "python -m experiments"
LEAST_COLUMNS = 60  # of help
MOST_COLUMNS = 110


class WordKind(Enum):
    """A kind of word, and what help calls it."""

    ITEM = "ITEM"  # a figure or a table of a paper
    SETTING = "KEY=VALUE"  # in Hydra's grammar
    RUN = "RUN"  # part of a run's name
    SWEEP = "SWEEP"  # part of a sweep's name
    BENCH = "NAME"  # a benchmark
    ENTRY = "ENTRY"  # of the benchmark with rules
    FILTER = "FILTER"  # what a run must be: method=topk, sweep=thesis, fig3, part of its name


Items = Annotated[Sequence[str], WordKind.ITEM]
SettingWords = Annotated[Sequence[str], WordKind.SETTING]
ItemsAndSettings = Annotated[Sequence[str], WordKind.ITEM, WordKind.SETTING]
Runs = Annotated[Sequence[str], WordKind.RUN]
SweepsAndRuns = Annotated[Sequence[str], WordKind.SWEEP, WordKind.RUN]
Filters = Annotated[Sequence[str], WordKind.FILTER]
Entries = Annotated[Sequence[str], WordKind.ENTRY, WordKind.SETTING]
RunName = Annotated[str, WordKind.RUN]
BenchName = Annotated[str, WordKind.BENCH]


def word_kinds(allowed: Any) -> list[WordKind]:
    """Return the kinds of words that a parameter takes, from its annotation; none of a number or a choice."""
    if isinstance(allowed, WordKind):
        return [allowed]
    return [kind for part in get_args(allowed) for kind in word_kinds(part)]


class CommandParser(argparse.ArgumentParser):
    """argparse's parser of one command, which raises a ValueError for words at fault."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)
        self.action_by_parameter: dict[str, argparse.Action] = {}
        self.takes_settings = False
        self.add_argument("--traceback", action="store_true", help="show where an error came from")

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` says what there is")

    def add_parameters(self, parameters: Mapping[str, Parameter], meanings: Mapping[str, str]) -> None:
        """Add what a function takes: positional parameters as words, keyword-only ones as options."""
        for name, parameter in parameters.items():
            self.takes_settings |= WordKind.SETTING in word_kinds(parameter.allowed)
            flag = "--" + name.replace("_", "-") if parameter.is_keyword_only else name
            options = _argument_options(name, parameter) | {"help": meanings.get(name, "").replace("%", "%%")}
            self.action_by_parameter[name] = self.add_argument(flag, **options)

    def parse_words(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the arguments of the command's function; options may stand anywhere between the words.

        Raises:
            ValueError: the command takes no such option or word.
            SystemExit: the words ask for help, which was printed.
        """
        if self.takes_settings:
            words = fold_sbatch_options(words)
        arguments, unknown_words = self.parse_known_intermixed_args(words)
        for word in unknown_words:
            command = self.prog.removeprefix(PROGRAM).strip()
            if word.startswith("-"):
                options = sorted(
                    name for action in self._actions for name in action.option_strings if name[:2] == "--"
                )
                raise ValueError(f"{command} has {ranges.describe_unknown('option', word, options)}")
            raise ValueError(f"{command} takes no further word: {ranges.quote(word)} is one too many")
        del arguments.traceback
        return vars(arguments)


def fold_sbatch_options(words: Sequence[str]) -> list[str]:
    """Return the words with those behind `--`, which are options of sbatch, as one setting."""
    if "--" not in words:
        return [*words]
    from experiments.config.grammar import format_hydra_value  # Hydra comes with it

    place = words.index("--")
    options = list[str]()
    for word in words[place + 1 :]:
        if options and word[:1] != "-" and options[-1][:2] == "--" and "=" not in options[-1]:
            options[-1] += f"={word}"  # sbatch knows --account=research and --account research
        else:
            options.append(word)
    return [*words[:place], *([f"cluster.more_sbatch={format_hydra_value(options)}"] if options else [])]


def parse_own_words(words: Sequence[str], type_by_key: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the words key=value that only this command knows, and the other words.

    Args:
        type_by_key: types of the values; a key that ends with a dot stands for all that begin so.

    Raises:
        ValueError: a value can't be read, or is out of range.
    """
    values = dict[str, Any]()
    other_words = list[str]()
    for word in words:
        key, equals, text = word.partition("=")
        types = [
            allowed
            for name, allowed in type_by_key.items()
            if key == name or (name[-1:] == "." and key.startswith(name))
        ]
        if equals and types:
            values[key] = _convert_text(key, text, types[0])
        else:
            other_words.append(word)
    return values, other_words


def _argument_options(name: str, parameter: Parameter) -> dict[str, Any]:
    """Return the options of `ArgumentParser.add_argument` for a parameter, but for its help."""
    allowed = parameter.allowed
    if allowed is bool:
        return {"action": "store_true"}
    without_notes = getattr(allowed, "__origin__", None) if hasattr(allowed, "__metadata__") else allowed
    called = "|".join(kind.value for kind in word_kinds(allowed))
    options: dict[str, Any] = {"metavar": called or (None if parameter.is_keyword_only else name.upper())}
    if get_origin(without_notes) is Sequence:
        allowed = get_args(without_notes)[0]
        options["nargs"] = "+" if parameter.is_keyword_only else "*"
    elif parameter.default != REQUIRED and not parameter.is_keyword_only:
        options["nargs"] = "?"
    if parameter.default != REQUIRED:
        options["default"] = parameter.default
    choices = _literal_choices(allowed)
    return options | {"type": _make_reader(name, allowed)} | ({"choices": choices} if choices else {})


def _make_reader(name: str, allowed: Any) -> Callable[[str], Any]:
    """Return the function by which argparse reads a value: by its type, as a configuration's is."""

    def read(text: str) -> Any:
        try:
            return _convert_text(name, text, allowed)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def _convert_text(name: str, text: str, allowed: Any) -> Any:
    """Return a text as a value of a type, of several types the first that fits; refuse other texts."""
    value: Any = text
    is_union = get_origin(allowed) in (Union, UnionType)
    for kind in reversed(get_args(allowed)) if is_union else (allowed,):
        with contextlib.suppress(msgspec.ValidationError):
            value = msgspec.convert(text, kind, strict=False)
    if isinstance(value, float) and text.lstrip("-").isdigit():
        value = int(value)  # as it was typed
    ranges.check_value(name, value, allowed)
    return value


def _literal_choices(allowed: Any) -> list[str]:
    if get_origin(allowed) is Literal:
        return [str(word) for word in get_args(allowed)]
    return [word for part in get_args(allowed) for word in _literal_choices(part)]


def help_width_columns() -> int:
    """Return the columns of a line of help; longer lines are hard to read, in shorter ones nothing fits."""
    return min(max(shutil.get_terminal_size().columns - 1, LEAST_COLUMNS), MOST_COLUMNS)


def format_two_columns(description_by_name: Mapping[str, str], name_columns: int = 16) -> str:
    """Return names with their descriptions beside them, or below names that are too long."""
    indent = " " * (name_columns + 2)
    lines = []
    for name, description in description_by_name.items():
        first = f"  {name:{name_columns}}"
        if len(name) >= name_columns:
            lines.append(f"  {name}")
            first = indent
        lines += textwrap.wrap(
            description,
            help_width_columns(),
            initial_indent=first,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [first.rstrip()]
    return "".join(f"{line}\n" for line in lines if line)


def wrap_paragraphs(text: str) -> str:
    """Return a docstring's paragraphs, each wrapped anew."""
    wrapped = (textwrap.fill(" ".join(part.split()), help_width_columns()) for part in text.split("\n\n"))
    return "\n\n".join(wrapped) + "\n"
