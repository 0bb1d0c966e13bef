"""Types with a range for signatures and fields, and checks of values against them.

A plain `float` allows any number but NaN. This module does not import torch, so configurations are also
checked where nothing is trained.
"""

from __future__ import annotations

import builtins
import difflib
import functools
import inspect
import operator
import re
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, get_args, get_origin

P = ParamSpec("P")
R = TypeVar("R")
LARGEST_FLOAT = sys.float_info.max  # only infinity is larger
LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Constraint:
    """The range of a number or a regular expression for text, for use within `Annotated`."""

    ge: float | None = None  # greater than or equal to, and so on
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    pattern: str | None = None
    description: str = ""  # completes the sentence "it must be ..."

    def is_met_by(self, value: Any) -> bool:
        """Return True if the value lies within all bounds."""
        bounds = (
            (self.ge, operator.ge), (self.gt, operator.gt), (self.le, operator.le), (self.lt, operator.lt),
        )  # fmt: skip
        is_inside = all(bound is None or compare(value, bound) for bound, compare in bounds)
        return is_inside and (self.pattern is None or re.search(self.pattern, value) is not None)


NonNegativeFloat = Annotated[float, Constraint(ge=0, le=LARGEST_FLOAT)]
PositiveFloat = Annotated[float, Constraint(gt=0, le=LARGEST_FLOAT)]
FloatAtLeast1 = Annotated[float, Constraint(ge=1, le=LARGEST_FLOAT)]
PositiveFraction = Annotated[float, Constraint(gt=0, le=1)]
NonNegativeFraction = Annotated[float, Constraint(ge=0, le=1)]
NonNegativeInt = Annotated[int, Constraint(ge=0, le=LARGEST_COUNT)]
PositiveInt = Annotated[int, Constraint(ge=1, le=LARGEST_COUNT)]

# Types that the signatures of several methods share; see `sparsify.methods.topk`.
Density = PositiveFraction
MomentumFactor = Annotated[float, Constraint(ge=0, lt=1)]
KeptFraction = Annotated[float, Constraint(ge=0, lt=1)]  # share that a worker keeps of its parameters
Megabytes = Annotated[float, Constraint(gt=0, le=LARGEST_FLOAT, description="a bucket size in MB, above 0")]
Scope = Literal["global", "layer"] | Megabytes
ScopeOrBucket = (
    Literal["global", "layer", "bucket"] | Megabytes
)  # `bucket`: DistributedDataParallel's buckets
FeedbackName = Literal["gradient", "learning_rate", "none"]
AnyFeedbackName = Literal["gradient", "learning_rate", "literal", "none"]
ImplementationVariant = Literal["intended", "published"]
IndexFormat = Literal["int32", "int64", "delta16"]
ValueFormat = Literal["as_is", "fp32", "bf16", "fp16"]
CodeName = Literal["as_is", "fp32", "bf16", "int8", "e3m0", "symmetric2", "statistical2"]
AverageOver = Literal["workers", "senders"]
ChunkSide = Annotated[int, Constraint(ge=1, le=64)]  # so that 12 bits hold a position in a chunk

DATA_TYPES = (
    bool, dict, float, int, list, str, tuple, types.NoneType, abc.Sequence, typing.Any, typing.Literal,
)  # fmt: skip
MAX_VALUE_CHARS = 60  # of a value in a message
ADDRESS_PATTERN = re.compile(r" at 0x[0-9a-fA-F]+")


def check_value(name: str, value: Any, allowed: Any) -> None:
    """Refuse a value that does not have the type `allowed` or lies outside of its range.

    Raises:
        ValueError: names the value, and the values that are allowed.
    """
    if not is_plain_data_type(allowed):
        return  # a device or a path is checked by its own class
    if is_allowed(value.tolist() if hasattr(value, "tolist") else value, allowed):
        return
    plain, _ = _split_annotated(allowed)
    if get_origin(plain) is Literal:
        raise ValueError(describe_unknown(name, value, _literal_choices(plain)))
    written = format_value(repr(value) if isinstance(value, str) else value)
    is_too_large = type(value) is int and value > LARGEST_COUNT and is_allowed(LARGEST_COUNT, allowed)
    limit = f"; the largest is {LARGEST_COUNT}" if is_too_large else ""
    raise ValueError(f"{name}={written} is out of range: it must be {describe_type(allowed)}{limit}")


def check_fields(instance: Any) -> None:
    """Refuse a dataclass with a field that does not have its type or lies outside of its range."""
    for field in fields(instance):
        check_value(field.name, getattr(instance, field.name), type_hints(instance.__class__)[field.name])


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it refuses arguments outside of the types in its signature."""

    @functools.wraps(function)
    def checked_function(*args: P.args, **kwargs: P.kwargs) -> R:
        allowed = type_hints(function)
        for name, value in inspect.signature(function).bind(*args, **kwargs).arguments.items():
            check_value(name, value, allowed[name])
        return function(*args, **kwargs)

    return checked_function


@functools.cache
def type_hints(annotated: Any) -> dict[str, Any]:
    """Return the types of a function's parameters or a class's fields by name, with their annotations."""
    return typing.get_type_hints(annotated, include_extras=True)


def is_allowed(value: Any, allowed: Any) -> bool:
    """Return True if the value has this type and lies in its range. An int is also a float."""
    plain, constraints = _split_annotated(allowed)
    return _has_type(value, plain) and all(constraint.is_met_by(value) for constraint in constraints)


def _has_type(value: Any, plain: Any) -> bool:
    """Return True if the value has this type, which has no annotations."""
    inner = get_args(plain)
    match get_origin(plain) or plain:
        case typing.Literal:
            return any(type(value) is type(choice) and value == choice for choice in inner)
        case typing.Union | types.UnionType:
            return any(is_allowed(value, member) for member in inner)
        case abc.Sequence | builtins.list | builtins.tuple:
            return isinstance(value, list | tuple) and all(is_allowed(item, inner[0]) for item in value)
        case builtins.dict:
            return isinstance(value, dict) and all(
                is_allowed(key, inner[0]) and is_allowed(item, inner[1]) for key, item in value.items()
            )
        case builtins.float:
            is_whole = type(value) is int and abs(value) <= LARGEST_FLOAT
            return is_whole or (type(value) is float and value == value)
        case typing.Any:
            return True
    return type(value) is plain


def describe_unknown(noun: str, word: object, known: Sequence[str]) -> str:
    """Return an error message for a word that is not among the known ones."""
    similar = suggest_similar(format_value(word), known)
    return f"no {noun} {quote(word)}{similar}; there are: {', '.join(known) or 'none'}"


def quote(word: object) -> str:
    """Return a value as `format_value` writes it, in quotes."""
    text = format_value(word)
    return text if text[:1] in ("'", '"') else f"'{text}'"


def suggest_similar(word: str, known: Sequence[str]) -> str:
    """Return ' (did you mean X?)' if a known word is similar to `word`, else an empty string."""
    close = difflib.get_close_matches(word[:MAX_VALUE_CHARS], known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def format_value(value: object) -> str:
    """Return a value as messages write it: on one line, shortened, with control characters escaped."""
    text = value[: 2 * MAX_VALUE_CHARS] if isinstance(value, str) else format_argument(value)
    text = text if text.isprintable() and text == text.strip() else repr(text)
    return text[: MAX_VALUE_CHARS - 3] + "..." if len(text) > MAX_VALUE_CHARS else text


def repr_without_addresses(value: object) -> str:
    """Return `repr(value)` without memory addresses, so that it is equal in all processes.

    Only classes without a `__repr__` of their own have such addresses.
    """
    return ADDRESS_PATTERN.sub("", repr(value))


def describe_type(allowed: Any) -> str:
    """Return a description of the values that a type allows, to complete 'it must be ...'."""
    plain, constraints = _split_annotated(allowed)
    constraint = constraints[0] if constraints else Constraint()
    if constraint.description:
        return constraint.description
    match get_origin(plain) or plain:
        case builtins.int:
            return "a whole number" + _describe_interval(constraint, is_whole=True)
        case builtins.float:
            number = "a finite number" if constraint.le == LARGEST_FLOAT else "a number"
            return number + _describe_interval(constraint)
        case builtins.bool:
            return "true or false"
        case builtins.str:
            return "text"
        case types.NoneType:
            return "null"
        case typing.Literal:
            return "one of " + ", ".join(_literal_choices(plain))
        case abc.Sequence | builtins.list | builtins.tuple:
            return f"a list [a,b], each {describe_type(get_args(plain)[0])}"
        case typing.Union | types.UnionType:
            return ", or ".join(map(describe_type, get_args(plain)))
    return "of another kind"


def _describe_interval(constraint: Constraint, is_whole: bool = False) -> str:
    """Return an interval as text, such as ' in (0, 1]' or ', 1 or more'."""
    is_open_below = constraint.ge is None
    is_open_above = constraint.le is None
    low = constraint.gt if is_open_below else constraint.ge
    high = constraint.lt if is_open_above else constraint.le
    if high in (LARGEST_FLOAT, LARGEST_COUNT):
        high = None
    if low is None:
        return "" if high is None else f" below {high:g}" if is_open_above else f", {high:g} or less"
    if high is None:
        return f" above {low:g}" if is_open_below else f", {low:g} or more"
    if is_whole:
        return f" from {low} to {high}"
    return f" in {'(' if is_open_below else '['}{low:g}, {high:g}{')' if is_open_above else ']'}"


def _split_annotated(allowed: Any) -> tuple[Any, list[Constraint]]:
    """Return a type without its annotations, and the constraints among these."""
    if get_origin(allowed) is not Annotated:
        return allowed, []
    plain, *annotations = get_args(allowed)
    return plain, [annotation for annotation in annotations if isinstance(annotation, Constraint)]


def _literal_choices(literal: Any) -> list[str]:
    """Return the values of a Literal, sorted."""
    return sorted(map(format_argument, get_args(literal)))


def is_plain_data_type(allowed: Any) -> bool:
    """Return True if values of this type are numbers, words, or lists and dicts of them."""
    plain, _ = _split_annotated(allowed)
    kind = get_origin(plain) or plain
    if kind in (typing.Union, types.UnionType):
        return all(map(is_plain_data_type, get_args(plain)))
    return kind in DATA_TYPES


def format_argument(value: object) -> str:
    """Return a value as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, int) and value.bit_length() > 4 * MAX_VALUE_CHARS:
        return f"a number of {value.bit_length()} bits"  # Python writes no more than 4300 digits
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_argument, value[:MAX_VALUE_CHARS]))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
