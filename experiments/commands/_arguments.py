"""A command's parser, from the signature and the docstring of its function; the command is not imported."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

import msgspec

from experiments.commands._words import kinds
from sparsify import ranges
from sparsify.registry import REQUIRED, Parameter

PROGRAM = "python -m experiments"


class Parser(argparse.ArgumentParser):
    """argparse, but that words at fault are a ValueError."""

    def __init__(self, **how: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **how)
        self.taken: dict[str, argparse.Action] = {}  # what a function takes, by the parameter's name
        self.add_argument("--traceback", action="store_true", help="show where an error came from")

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` says what there is")

    def options(self) -> list[str]:
        """All of them, in their long form."""
        return sorted(name for action in self._actions for name in action.option_strings if name[:2] == "--")

    def parsed(self, words: Sequence[str]) -> dict[str, Any]:
        """What the words give the command's function; options may stand anywhere between the others.

        Raises:
            ValueError: the command takes no such option or word.
            SystemExit: the words ask for help, which was printed.
        """
        given, strangers = self.parse_known_intermixed_args(words)
        for word in strangers:
            command = self.prog.removeprefix(PROGRAM).strip()
            if word.startswith("-"):
                raise ValueError(f"{command} has {ranges.unknown('option', word, self.options())}")
            raise ValueError(f"{command} takes no further word: {ranges.quoted(word)} is one too many")
        values = vars(given)
        values.pop("traceback")
        return values


def fill(parser: Parser, parameters: Mapping[str, Parameter], meanings: Mapping[str, str]) -> Parser:
    """Give a parser what a function takes: positional parameters are words, keyword-only ones are options."""
    for name, parameter in parameters.items():
        add = _add_option if parameter.is_keyword_only else _add_words
        meaning = meanings.get(name, "").replace("%", "%%")
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
    option = "--" + name.replace("_", "-")
    if parameter.allowed is bool:
        return parser.add_argument(option, action="store_true", help=meaning)
    called = "|".join(kind.value for kind in kinds(parameter.allowed)) or None
    how = _value(name, parameter.allowed)
    return parser.add_argument(
        option, dest=name, default=parameter.default, metavar=called, help=meaning, **how
    )


def _value(name: str, allowed: Any) -> dict[str, Any]:
    """How argparse reads a value: by its type, as a configuration's is."""

    def read(text: str) -> Any:
        try:
            value = msgspec.convert(text, allowed, strict=False)
        except msgspec.ValidationError:
            value = text
        try:
            ranges.check(name, value, allowed)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return value

    return {"type": read, **({"choices": choices} if (choices := _choices(allowed)) else {})}


def _choices(allowed: Any) -> list[str]:
    """The words that a value is one of."""
    if get_origin(allowed) is Literal:
        return [str(word) for word in get_args(allowed)]
    return [word for part in get_args(allowed) for word in _choices(part)]


def _plain(allowed: Any) -> Any:
    """The type without what annotates it."""
    return allowed.__origin__ if hasattr(allowed, "__metadata__") else allowed
