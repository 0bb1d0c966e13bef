"""What a value may be: types with a range, which signatures name, and the sentence for a value outside.

A plain `float` is any number but NaN. Without torch, so that configurations are checked where nothing is
trained.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.inspect import Type

LARGEST = sys.float_info.max  # no larger: infinite
MOST = 2**31 - 1  # of things that are counted

NotNegative = Annotated[float, Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
AtLeast1 = Annotated[float, Meta(ge=1, le=LARGEST)]
Share = Annotated[float, Meta(gt=0, le=1)]
Natural = Annotated[int, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1, le=MOST)]

# What the signatures of several methods have in common; see `sparsify.methods.topk`.
Density = Share
MomentumFactor = Annotated[float, Meta(ge=0, lt=1)]
Megabytes = Annotated[float, Meta(gt=0, le=LARGEST, description="a bucket size in MB, above 0")]
Scope = Literal["global", "layer"] | Megabytes
FeedbackName = Literal["gradient", "learning_rate", "none"]
AnyFeedback = Literal["gradient", "learning_rate", "literal", "none"]
Index = Literal["int32", "int64", "delta16"]
Value = Literal["as_is", "fp32", "bf16", "fp16"]

SHOWN = 60  # characters of a value in a sentence


def check(name: str, value: Any, allowed: Any) -> None:
    """
    Raises:
        ValueError: the value is not of the type `allowed`, or outside of its range.
    """
    kind = msgspec.inspect.type_info(allowed)
    if not _is_data(kind):
        return  # a device, a path: what its own class is to judge
    plain = value.tolist() if hasattr(value, "tolist") else value
    try:
        if plain != plain:  # NaN
            raise msgspec.ValidationError
        msgspec.convert(plain, allowed)
    except msgspec.ValidationError:
        if isinstance(kind, msgspec.inspect.LiteralType):
            raise ValueError(unknown(name, value, [word(one) for one in kind.values])) from None
        written = shown(repr(value)) if isinstance(value, str) else shown(value)
        raise ValueError(f"{name}={written} is out of range: it must be {described(kind)}") from None


def unknown(noun: str, word: object, known: Sequence[str]) -> str:
    """The sentence for a word that is none of those known."""
    return (
        f"no {noun} {quoted(word)}{did_you_mean(shown(word), known)}; there are: {', '.join(known) or 'none'}"
    )


def quoted(word: object) -> str:
    """As `shown`, in quotes."""
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


def described(kind: Type) -> str:
    """What values a type has, as the end of 'it must be ...'."""
    match kind:
        case msgspec.inspect.Metadata(extra_json_schema={"description": str(words)}):
            return words
        case msgspec.inspect.IntType():
            return "a whole number" + _interval(kind)
        case msgspec.inspect.FloatType(gt=None, ge=None, lt=None, le=None):
            return "a number"
        case msgspec.inspect.FloatType():
            return ("a finite number" if kind.le == LARGEST else "a number") + _interval(kind)
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.LiteralType():
            return "one of " + ", ".join(map(word, kind.values))
        case msgspec.inspect.NoneType():
            return "null"
        case msgspec.inspect.StrType():
            return "text"
        case msgspec.inspect.ListType() | msgspec.inspect.VarTupleType():
            return f"a list [a,b], each {described(kind.item_type)}"
        case msgspec.inspect.UnionType():
            return ", or ".join(map(described, kind.types))
    return "of another kind"


def _interval(kind: msgspec.inspect.IntType | msgspec.inspect.FloatType) -> str:
    """' in (0, 1]', ', 1 or more', ..."""
    low, high = (kind.gt if kind.ge is None else kind.ge), (kind.lt if kind.le is None else kind.le)
    high = None if high in (LARGEST, MOST) else high
    if low is not None and high is not None and isinstance(kind, msgspec.inspect.IntType):
        return f" from {low} to {high}"
    if low is not None and high is not None:
        return f" in {'(' if kind.ge is None else '['}{low:g}, {high:g}{')' if kind.le is None else ']'}"
    if low is not None:
        return f" above {low:g}" if kind.ge is None else f", {low:g} or more"
    return "" if high is None else f" below {high:g}" if kind.le is None else f", {high:g} or less"


def _is_data(kind: Type) -> bool:
    """Is it made of numbers, words, lists?"""
    if isinstance(kind, msgspec.inspect.UnionType):
        return all(map(_is_data, kind.types))
    return not isinstance(kind, msgspec.inspect.CustomType)


def word(value: object) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN:
        return f"a number of {value.bit_length()} bits"  # Python writes no more than 4300 digits
    if isinstance(value, list | tuple):
        return f"[{','.join(map(word, value[:SHOWN]))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
