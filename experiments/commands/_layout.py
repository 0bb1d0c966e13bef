"""Help as text: what is explained in one column, its explanation in the other, at the terminal's width."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping

LEAST, MOST = 60, 110  # columns


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
