"""Why a value can't be read, for people: what their text has, not what a grammar expected."""

from __future__ import annotations

import re

from sparsify.ranges import format_value

QUOTATION = re.compile(r"""\\[\\()\[\]{}:=, \t]|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
PLAIN = re.compile(r"[\w $%*+,\-./:?@\\|\t]", re.ASCII)  # what may stand outside of quotations
CLOSED_BY = {"(": ")", "[": "]", "{": "}"}
LONELY = re.compile(r"(^|[\[({,])\s*,|,\s*([\])}]|$)")
EVALUATED = re.compile(r"while evaluating '(\w+)")


def explain_parse_error(text: str, error: Exception) -> str:
    """Return what is wrong with a text that Hydra's grammar has refused with this error."""
    if isinstance(error, RecursionError):
        return "it has too many brackets within each other"
    called = EVALUATED.search(str(error))
    if called:
        name = format_value(called[1])
        is_known = "Unknown function" not in str(error)
        return f"{name}(...) can't be made of these" if is_known else f"there is no function {name}"
    bare = QUOTATION.sub("_", text)  # also signs after a backslash
    lone = re.search("'|\"", bare)
    if lone:
        return f"the quotation that {lone[0]} begins does not end"
    opened = list[str]()
    for place, sign in enumerate(bare):
        if sign in CLOSED_BY:
            if sign == "(" and not re.match(r"\w", bare[:place].rstrip()[-1:]):
                return "( follows no name of a function"
            opened.append(sign)
        elif sign in CLOSED_BY.values():
            if not opened or CLOSED_BY[opened.pop()] != sign:
                return f"{sign} closes nothing"
        elif not PLAIN.match(sign):
            return f"{format_value(sign)} stands outside of quotes"
    if opened:
        return f"{opened[-1]} is not closed"
    if LONELY.search(bare):
        return "a comma has nothing before or behind it"
    if "{" in bare:
        return "{...} holds key:value, with keys that need no quotes"
    return "a list or a quotation has something else beside it"
