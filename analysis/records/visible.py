"""Texts of records and logs as a terminal may show them: what it would obey is shown as its escape."""

from __future__ import annotations

import unicodedata
from typing import Any, TextIO

KEPT = "\n\t"


def escape_controls(text: str) -> str:
    """The text, in which control characters, and signs that turn others around, are written as escapes."""
    return text if text.isprintable() else "".join(map(_sign, text))


def _sign(sign: str) -> str:
    is_shown = sign in KEPT or unicodedata.category(sign) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    return sign if is_shown else repr(sign)[1:-1]


class EscapingStream:
    """A stream on which all is `escape_controls`, whoever writes: an attempt's records may come from anybody."""

    def __init__(self, stream: TextIO) -> None:
        self.terminal = stream

    def write(self, text: str) -> int:
        self.terminal.write(escape_controls(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def unwrap_terminal(stream: TextIO) -> TextIO:
    """The stream behind a `EscapingStream` one, for colours and progress bars, whose texts are `escape_controls` already."""
    return getattr(stream, "terminal", stream)
