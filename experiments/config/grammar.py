"""Words of the command line, key=value in Hydra's grammar, and the values that they give."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException

from experiments.config import choices
from experiments.config.config import VARIANT_WORDS
from experiments.config.machines import Text
from experiments.config.parse_errors import explain_parse_error
from sparsify.ranges import Constraint, check_value, format_value, quote

MAX_CHARACTERS = 4000  # characters of a word, and of a path; Hydra's grammar takes half a second to read them
# In lists of seeds; read a thousand times faster than by Hydra.
PLAIN_INTEGER = re.compile(r"0|[1-9][0-9]{0,14}")
VariantName = Annotated[str, Constraint(pattern=r"^[A-Za-z0-9][\w-]{0,39}\Z")]
VariantWords = Annotated[dict[VariantName, Text], VARIANT_WORDS]


def split_key_value(word: str) -> tuple[str, str]:
    """key=value as its two parts."""
    key, equals, text = word.partition("=")
    if len(word) > MAX_CHARACTERS:
        raise ValueError(f"{format_value(word)} has {len(word)} characters, and {MAX_CHARACTERS} is the most")
    if not equals or not key:
        raise ValueError(f"{quote(word)} is not of the form key=value; for example method=topk or workers=4")
    return key, text


def parse_value(key: str, text: str) -> Any:
    """Return the single value that stands behind a key; of a group, the option's name.

    Raises:
        ValueError: it can't be read, or is several.
    """
    if key in choices.GROUPS:
        return text
    if PLAIN_INTEGER.fullmatch(text):
        return int(text)
    override = _parse_override(key, text)
    if override.is_sweep_override():
        raise ValueError(
            f"{key}={format_value(text)} is several values, and this is about one run; "
            "`run`, `plan` and `submit` take several"
        )
    return override.value()


def parse_values(key: str, text: str, max_count: int) -> list[Any]:
    """Return the values that stand behind a key, a,b,c or range(1,5), and at most `max_count` + 1 of them.

    Raises:
        ValueError: they can't be read, or are none.
    """
    override = _parse_override(key, text)
    if not override.is_sweep_override():
        return [parse_variants(text) if key == "variants" else parse_value(key, text)]
    sweep: Any = override.value()
    if isinstance(sweep, RangeSweep):
        sweep.shuffle = False  # it would list all of a range first, and the order changes no run
    try:
        if isinstance(sweep, Glob) and key in choices.GROUPS:
            texts = sweep.filter(choices.option_names(key))
        else:
            texts = [*islice(override.sweep_string_iterator(), max_count + 1)]
    except (HydraException, ArithmeticError, ValueError) as error:
        raise ValueError(
            f"{format_value(key)}={format_value(text)} lists no values; values are listed as "
            f"{format_value(key)}=a,b, or as range(0,5)"
        ) from error
    if not texts:
        raise ValueError(f"{format_value(key)}={format_value(text)} lists nothing")
    return texts if len(texts) > max_count else [parse_value(key, part) for part in texts]


def parse_variants(text: str) -> dict[str, dict[str, Any]]:
    """Return the settings of each variant, from {dense:'method=dense',sparse:'method=topk select=fused'}."""
    words_by_name = parse_value("variants", text)
    check_value("variants", words_by_name, VariantWords)
    return {name: _parse_variant(name, words) for name, words in words_by_name.items()}


def _parse_variant(name: str, words: str) -> dict[str, Any]:
    try:
        split = shlex.split(words)
    except ValueError as error:
        raise ValueError(
            f"variants.{name}={format_value(words)} can't be read: a quotation does not end"
        ) from error
    try:
        return {key: parse_value(key, text) for key, text in map(split_key_value, split)}
    except ValueError as error:
        raise ValueError(f"variant {name}: {error}") from error


@lru_cache(maxsize=20_000)
def _parse_override(key: str, text: str) -> Override:
    if "${" in text:
        raise ValueError(
            f"{key}={format_value(text)} refers to something else, which only the files of conf/ may do"
        )
    try:
        return OverridesParser.create().parse_override(f"value={text}")
    except Exception as error:  # its functions, such as int() and sort(), raise whatever Python does
        raise ValueError(
            f"{format_value(key)}={format_value(text)} can't be read: {explain_parse_error(text, error)}; "
            "text with other signs than letters, digits and -_./:+%@ stands in quotes, as in "
            f"'{format_value(key)}=\"a;b\"'"
        ) from error


def format_hydra_value(value: Any) -> str:
    """Return the text that Hydra's grammar reads as this value."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list() | tuple():
            return f"[{','.join(map(format_hydra_value, value))}]"
        case Mapping():
            return f"{{{','.join(f'{key}:{format_hydra_value(part)}' for key, part in value.items())}}}"
        case str() if not re.fullmatch(r"[\w./:+%@~-]+", value) or value != _parse_or_none(value):
            return str(QuotedString(value, Quote.double).with_quotes())
    return str(value)


def _parse_or_none(text: str) -> Any:
    try:
        return parse_value("", text)
    except ValueError:
        return None
