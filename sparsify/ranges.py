"""What a value may be: types with a range, which signatures name, and the sentence for a value outside.

A plain `float` is any number but NaN. Without torch, so that configurations are checked where nothing is
trained.
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
LARGEST = sys.float_info.max  # no larger: infinite
MOST = 2**31 - 1  # of things that are counted


@dataclass(frozen=True)
class Meta:
    """Within `Annotated`: the range of a number, or a regular expression for text; how a sentence says it."""

    ge: float | None = None  # greater than or equal to, ...
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    pattern: str | None = None
    description: str = ""

    def holds(self, value: Any) -> bool:
        """True where the value lies within all bounds."""
        bounds = (
            (self.ge, operator.ge), (self.gt, operator.gt), (self.le, operator.le), (self.lt, operator.lt),
        )  # fmt: skip
        is_inside = all(bound is None or compare(value, bound) for bound, compare in bounds)
        return is_inside and (self.pattern is None or re.search(self.pattern, value) is not None)


NotNegative = Annotated[float, Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
AtLeast1 = Annotated[float, Meta(ge=1, le=LARGEST)]
Share = Annotated[float, Meta(gt=0, le=1)]
Portion = Annotated[float, Meta(ge=0, le=1)]
Natural = Annotated[int, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1, le=MOST)]

# What the signatures of several methods have in common; see `sparsify.methods.topk`.
Density = Share
MomentumFactor = Annotated[float, Meta(ge=0, lt=1)]
Kept = Annotated[float, Meta(ge=0, lt=1)]  # share of a worker's own parameters that an exchange leaves
Megabytes = Annotated[float, Meta(gt=0, le=LARGEST, description="a bucket size in MB, above 0")]
Scope = Literal["global", "layer"] | Megabytes
AnyScope = Literal["global", "layer", "bucket"] | Megabytes  # `bucket`: one of DistributedDataParallel's
FeedbackName = Literal["gradient", "learning_rate", "none"]
AnyFeedback = Literal["gradient", "learning_rate", "literal", "none"]
FollowRule = Literal["intended", "published"]
Index = Literal["int32", "int64", "delta16"]
ValueType = Literal["as_is", "fp32", "bf16", "fp16"]
Code = Literal["as_is", "fp32", "bf16", "int8", "e3m0", "symmetric2", "statistical2"]
AverageOver = Literal["workers", "senders"]
Side = Annotated[int, Meta(ge=1, le=64)]  # of a chunk, so that 12 bits hold a place in it

DATA = (
    bool, dict, float, int, list, str, tuple, types.NoneType, abc.Sequence, typing.Any, typing.Literal,
)  # fmt: skip
SHOWN = 60  # characters of a value in a sentence
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def check(name: str, value: Any, allowed: Any) -> None:
    """
    Raises:
        ValueError: the value is not of the type `allowed`, or outside of its range.
    """
    if not is_data(allowed) or fits(value.tolist() if hasattr(value, "tolist") else value, allowed):
        return  # a device or a path is for its own class to judge
    plain, _ = _parts(allowed)
    if get_origin(plain) is Literal:
        raise ValueError(unknown(name, value, _words(plain)))
    written = shown(repr(value)) if isinstance(value, str) else shown(value)
    is_too_large = type(value) is int and value > MOST and fits(MOST, allowed)
    limit = f"; the largest is {MOST}" if is_too_large else ""
    raise ValueError(f"{name}={written} is out of range: it must be {described(allowed)}{limit}")


def check_fields(part: Any) -> None:
    """Refuse a dataclass of which a field is not of its type, or outside of its range."""
    for field in fields(part):
        check(field.name, getattr(part, field.name), hints(part.__class__)[field.name])


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A function that refuses values outside of the types in its signature, whoever calls it."""

    @functools.wraps(function)
    def call(*values: P.args, **named: P.kwargs) -> R:
        allowed = hints(function)
        for name, value in inspect.signature(function).bind(*values, **named).arguments.items():
            check(name, value, allowed[name])
        return function(*values, **named)

    return call


@functools.cache
def hints(described: Any) -> dict[str, Any]:
    """Types of a function's or a class's values, by name, with what annotates them."""
    found: dict[str, Any] = typing.get_type_hints(described, include_extras=True)
    return found


def fits(value: Any, allowed: Any) -> bool:
    """True if it is of this type and in its range. Nothing is converted, but a whole number is a number."""
    plain, metas = _parts(allowed)
    return _is_of(value, plain) and all(meta.holds(value) for meta in metas)


def _is_of(value: Any, plain: Any) -> bool:
    inside = get_args(plain)
    match get_origin(plain) or plain:
        case typing.Literal:
            return any(type(value) is type(one) and value == one for one in inside)
        case typing.Union | types.UnionType:
            return any(fits(value, one) for one in inside)
        case abc.Sequence | builtins.list | builtins.tuple:
            return isinstance(value, list | tuple) and all(fits(each, inside[0]) for each in value)
        case builtins.dict:
            return isinstance(value, dict) and all(
                fits(key, inside[0]) and fits(each, inside[1]) for key, each in value.items()
            )
        case builtins.float:
            is_whole = type(value) is int and abs(value) <= LARGEST
            return is_whole or (type(value) is float and value == value)
        case typing.Any:
            return True
    return type(value) is plain


def unknown(noun: str, word: object, known: Sequence[str]) -> str:
    """The sentence for a word that is none of those known."""
    return (
        f"no {noun} {quoted(word)}{did_you_mean(shown(word), known)}; there are: {', '.join(known) or 'none'}"
    )


def quoted(word: object) -> str:
    """Text of `shown`, in quotes."""
    text = shown(word)
    return text if text[:1] in ("'", '"') else f"'{text}'"


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """' (did you mean X?)' where something known is close to `word`, else nothing."""
    close = difflib.get_close_matches(word[:SHOWN], known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(value: object) -> str:
    """A value as a sentence writes it: on one line, short, control characters escaped."""
    text = value[: 2 * SHOWN] if isinstance(value, str) else word(value)
    text = text if text.isprintable() and text == text.strip() else repr(text)
    is_cut = len(text) > SHOWN or (isinstance(value, str) and len(value) > 2 * SHOWN)
    return text[: SHOWN - 3] + "..." if is_cut else text


def stable_repr(value: object) -> str:
    """Return `repr(value)`, the same in all processes: a class of a user's without `__repr__` tells where its
    instance lies in memory, and that is left out.
    """
    return ADDRESS.sub("", repr(value))


def described(allowed: Any) -> str:
    """Description of a type's values, as the end of 'it must be ...'."""
    plain, metas = _parts(allowed)
    meta, inside = (metas or [Meta()])[0], get_args(plain)
    if meta.description:
        return meta.description
    match get_origin(plain) or plain:
        case builtins.int:
            return "a whole number" + _interval(meta, is_whole=True)
        case builtins.float:
            return ("a finite number" if meta.le == LARGEST else "a number") + _interval(meta)
        case builtins.bool:
            return "true or false"
        case builtins.str:
            return "text"
        case types.NoneType:
            return "null"
        case typing.Literal:
            return "one of " + ", ".join(_words(plain))
        case abc.Sequence | builtins.list | builtins.tuple:
            return f"a list [a,b], each {described(inside[0])}"
        case typing.Union | types.UnionType:
            return ", or ".join(map(described, inside))
    return "of another kind"


def _interval(meta: Meta, is_whole: bool = False) -> str:
    """' in (0, 1]', ', 1 or more', ..."""
    low, high = (meta.gt if meta.ge is None else meta.ge), (meta.lt if meta.le is None else meta.le)
    high = None if high in (LARGEST, MOST) else high
    if low is not None and high is not None and is_whole:
        return f" from {low} to {high}"
    if low is not None and high is not None:
        return f" in {'(' if meta.ge is None else '['}{low:g}, {high:g}{')' if meta.le is None else ']'}"
    if low is not None:
        return f" above {low:g}" if meta.ge is None else f", {low:g} or more"
    return "" if high is None else f" below {high:g}" if meta.le is None else f", {high:g} or less"


def _parts(allowed: Any) -> tuple[Any, list[Meta]]:
    """A type without what annotates it, and what annotates it."""
    if get_origin(allowed) is not Annotated:
        return allowed, []
    plain, *annotations = get_args(allowed)
    return plain, [each for each in annotations if isinstance(each, Meta)]


def _words(choice: Any) -> list[str]:
    """The values of a Literal, sorted."""
    return sorted(map(word, get_args(choice)))


def is_data(allowed: Any) -> bool:
    """True if it is made of numbers, words, lists."""
    plain, _ = _parts(allowed)
    kind = get_origin(plain) or plain
    if kind in (typing.Union, types.UnionType):
        return all(map(is_data, get_args(plain)))
    return kind in DATA


def word(value: object) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN:
        return f"a number of {value.bit_length()} bits"  # Python writes no more than 4300 digits
    if isinstance(value, list | tuple):
        return f"[{','.join(map(word, value[:SHOWN]))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
