"""Escapes in place of what a terminal would obey, in texts of records and logs."""

from __future__ import annotations

import unicodedata
from typing import Any, TextIO

SHOWN_CONTROLS = "\n\t"


def escape_controls(text: str) -> str:
    """Return a text with control characters, and signs that turn others around, written as escapes."""
    return text if text.isprintable() else "".join(map(_escape_sign, text))


def _escape_sign(sign: str) -> str:
    is_shown = sign in SHOWN_CONTROLS or unicodedata.category(sign) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
    return sign if is_shown else repr(sign)[1:-1]


class EscapingStream:
    """A stream that escapes control characters in what is written: records may come from anybody."""

    def __init__(self, stream: TextIO) -> None:
        self.terminal = stream

    def write(self, text: str) -> int:
        self.terminal.write(escape_controls(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.terminal, name)


def unwrap_terminal(stream: TextIO) -> TextIO:
    """Return the stream behind an EscapingStream, for colours and progress bars, which escape their texts."""
    return getattr(stream, "terminal", stream)
