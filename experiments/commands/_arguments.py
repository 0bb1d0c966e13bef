"""What stands behind a command: the types of words that signatures name, help shows and completion knows; a
parser made of a signature and a docstring, without importing the command; and help as text.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from enum import Enum
from types import UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import msgspec

from sparsify import ranges
from sparsify.core.spec import REQUIRED, Parameter

PROGRAM = "python -m experiments"
LEAST, MOST = 60, 110  # columns of help


class Kind(Enum):
    """A kind of word, and what help calls it."""

    ITEM = "ITEM"  # a figure or a table of a paper
    SETTING = "KEY=VALUE"  # in Hydra's grammar
    RUN = "RUN"  # part of a run's name
    SWEEP = "SWEEP"  # part of a sweep's name
    BENCH = "NAME"  # a benchmark
    ENTRY = "ENTRY"  # of the benchmark with rules
    FILTER = "FILTER"  # what a run must be: method=topk, sweep=thesis, fig3, part of its name


Items = Annotated[Sequence[str], Kind.ITEM]
SettingWords = Annotated[Sequence[str], Kind.SETTING]
ItemsAndSettings = Annotated[Sequence[str], Kind.ITEM, Kind.SETTING]
Runs = Annotated[Sequence[str], Kind.RUN]
SweepsAndRuns = Annotated[Sequence[str], Kind.SWEEP, Kind.RUN]
Filters = Annotated[Sequence[str], Kind.FILTER]
Entries = Annotated[Sequence[str], Kind.ENTRY, Kind.SETTING]
RunName = Annotated[str, Kind.RUN]
BenchName = Annotated[str, Kind.BENCH]


def kinds(allowed: Any) -> list[Kind]:
    """The kinds of words that a parameter takes, from its annotation; none of a number or a choice."""
    parts = get_args(allowed)
    own = [part for part in parts if isinstance(part, Kind)]
    return own + [kind for part in parts if not isinstance(part, Kind) for kind in kinds(part)]


class Parser(argparse.ArgumentParser):
    """argparse, but that words at fault are a ValueError."""

    def __init__(self, **how: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **how)
        self.taken: dict[str, argparse.Action] = {}  # what a function takes, by the parameter's name
        self.takes_settings = False
        self.add_argument("--traceback", action="store_true", help="show where an error came from")

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` says what there is")

    def options(self) -> list[str]:
        return sorted(name for action in self._actions for name in action.option_strings if name[:2] == "--")

    def parsed(self, words: Sequence[str]) -> dict[str, Any]:
        """Values that the words give the command's function; options may stand anywhere between the others.

        Raises:
            ValueError: the command takes no such option or word.
            SystemExit: the words ask for help, which was printed.
        """
        if self.takes_settings:
            words = with_sbatch_options(words)
        given, strangers = self.parse_known_intermixed_args(words)
        for word in strangers:
            command = self.prog.removeprefix(PROGRAM).strip()
            if word.startswith("-"):
                raise ValueError(f"{command} has {ranges.describe_unknown('option', word, self.options())}")
            raise ValueError(f"{command} takes no further word: {ranges.quote(word)} is one too many")
        values = vars(given)
        values.pop("traceback")
        return values


def with_sbatch_options(words: Sequence[str]) -> list[str]:
    """The words, those behind `--`, which are options of sbatch, as the setting that they mean."""
    if "--" not in words:
        return [*words]
    from experiments.config.grammar import written  # Hydra comes with it

    at, options = words.index("--"), list[str]()
    for word in words[at + 1 :]:
        if options and word[:1] != "-" and options[-1][:2] == "--" and "=" not in options[-1]:
            options[-1] += f"={word}"  # sbatch knows --account=research and --account research
        else:
            options.append(word)
    return [*words[:at], *([f"cluster.more_sbatch={written(options)}"] if options else [])]


def own_words(words: Sequence[str], own: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values of the words key=value that mean something to a command alone; and the other words, as they are.

    Args:
        own: the types of its values by their keys; one that ends with a dot stands for all that begin so.

    Raises:
        ValueError: a value can't be read, or is out of range.
    """
    given, rest = dict[str, Any](), list[str]()
    for word in words:
        key, equals, text = word.partition("=")
        kinds_of_key = [own[one] for one in own if key == one or (one[-1:] == "." and key.startswith(one))]
        if equals and kinds_of_key:
            given[key] = _converted(key, text, kinds_of_key[0])
        else:
            rest.append(word)
    return given, rest


def fill(parser: Parser, parameters: Mapping[str, Parameter], meanings: Mapping[str, str]) -> Parser:
    """Give a parser what a function takes: positional parameters are words, keyword-only ones are options."""
    for name, parameter in parameters.items():
        add = _add_option if parameter.is_keyword_only else _add_words
        meaning = meanings.get(name, "").replace("%", "%%")
        parser.takes_settings |= Kind.SETTING in kinds(parameter.allowed)
        parser.taken[name] = add(parser, name, parameter, meaning)
    return parser


def _add_words(parser: Parser, name: str, parameter: Parameter, meaning: str) -> argparse.Action:
    allowed = parameter.allowed
    called = "|".join(kind.value for kind in kinds(allowed)) or name.upper()
    if get_origin(_plain(allowed)) is Sequence:
        return parser.add_argument(name, nargs="*", metavar=called, help=meaning)
    how = _value(name, allowed)
    if parameter.default != REQUIRED:
        how |= {"nargs": "?", "default": parameter.default}
    return parser.add_argument(name, metavar=called, help=meaning, **how)


def _add_option(parser: Parser, name: str, parameter: Parameter, meaning: str) -> argparse.Action:
    option, allowed = "--" + name.replace("_", "-"), parameter.allowed
    if allowed is bool:
        return parser.add_argument(option, action="store_true", help=meaning)
    how: dict[str, Any] = {"metavar": "|".join(kind.value for kind in kinds(allowed)) or None}
    if get_origin(_plain(allowed)) is Sequence:
        allowed, how["nargs"] = get_args(_plain(allowed))[0], "+"
    how |= _value(name, allowed)
    return parser.add_argument(option, dest=name, default=parameter.default, help=meaning, **how)


def _value(name: str, allowed: Any) -> dict[str, Any]:
    """The way argparse reads a value: by its type, as a configuration's is."""

    def read(text: str) -> Any:
        try:
            return _converted(name, text, allowed)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return {"type": read, **({"choices": choices} if (choices := _choices(allowed)) else {})}


def _converted(name: str, text: str, allowed: Any) -> Any:
    """A text as a value of this type, of several types the first that it can be; another one is refused."""
    value: Any = text
    is_union = get_origin(allowed) in (Union, UnionType)
    for kind in reversed(get_args(allowed)) if is_union else (allowed,):
        with contextlib.suppress(msgspec.ValidationError):
            value = msgspec.convert(text, kind, strict=False)
    if isinstance(value, float) and text.lstrip("-").isdigit():
        value = int(value)  # as it was typed
    ranges.check_value(name, value, allowed)
    return value


def _choices(allowed: Any) -> list[str]:
    if get_origin(allowed) is Literal:
        return [str(word) for word in get_args(allowed)]
    return [word for part in get_args(allowed) for word in _choices(part)]


def _plain(allowed: Any) -> Any:
    return allowed.__origin__ if hasattr(allowed, "__metadata__") else allowed


def width() -> int:
    """Columns of a line; longer ones are hard to read, and in shorter ones nothing fits."""
    return min(max(shutil.get_terminal_size().columns - 1, LEAST), MOST)


def table(rows: Mapping[str, str], names: int = 16) -> str:
    """Names in `names` columns, what they are beside them; below a name that is longer."""
    wrapper = textwrap.TextWrapper(width(), break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * (names + 2)
    lines = []
    for name, about in rows.items():
        fits = len(name) < names
        wrapper.initial_indent = f"  {name:{names}}" if fits else wrapper.subsequent_indent
        lines += [] if fits else [f"  {name}"]
        lines.append(wrapper.fill(about) if about else f"  {name}" * fits)
    return "".join(f"{line}\n" for line in lines if line)


def paragraphs(text: str) -> str:
    """A docstring's paragraphs, filled anew."""
    filled = (textwrap.fill(" ".join(part.split()), width()) for part in text.split("\n\n"))
    return "\n\n".join(filled) + "\n"
