"""Tables for people: with rich at the terminal's width; where the output goes elsewhere, Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from analysis.claims import IN_BAND, OUT_OF_BAND, UNDECIDED
from analysis.records.terminal_escapes import unwrap_terminal
from analysis.tables import Table

COLOURS: dict[str, str] = (
    dict.fromkeys(IN_BAND, "green") | dict.fromkeys(OUT_OF_BAND, "red") | dict.fromkeys(UNDECIDED, "dim")
)  # the others: yellow
GAP = 2  # characters between two columns
UNBROKEN = 12  # characters of a text that is not broken at its spaces, such as "19 h"
CLIPPED = 24  # characters of a column that is cut, at least


def print_table(table: Table, clipped: str = "") -> None:
    """Print a table. NO_COLOR is honoured, and what texts hold is shown, never obeyed.

    Args:
        clipped: the column that is cut where a terminal is too narrow, so that a row stays a line.
    """
    if not sys.stdout.isatty():
        print(table.to_markdown())
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    console = Console(file=unwrap_terminal(sys.stdout))
    if table.title:
        console.print(Text(table.title, "bold"))
    header, rows, sides = table.header(), table.cell_texts(), table.are_columns_numeric()
    columns = [[title, *cells] for title, *cells in zip(header, *rows, strict=True)]
    widths = _widths(columns, console.width, header.index(clipped) if clipped in header else None)
    grid = Grid(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title, width, right in zip(header, widths, sides, strict=False):
        side: Literal["right", "left"] = "right" if right else "left"
        is_cut = title == clipped
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if is_cut else "fold"
        grid.add_column(Text(title), justify=side, width=width, overflow=overflow, no_wrap=is_cut)
    for row in rows:
        grid.add_row(
            *(
                Text(cell, _colour(title, cell))
                for title, cell in zip(header, row[: len(widths)], strict=False)
            )
        )
    console.print(grid)
    if header[len(widths) :]:
        console.print(Text(f"This terminal is too narrow to show: {', '.join(header[len(widths) :])}"))
    if table.note:
        console.print(Text(table.note))


def _widths(columns: Sequence[Sequence[str]], width: int, clipped: int | None = None) -> list[int]:
    """Widths of the columns that fit in without breaking words, from the left; one may be clipped.

    What is left over goes to those whose texts are longest.
    """
    longest = [max(map(len, texts)) for texts in columns]
    least = [
        most if most <= UNBROKEN else max((len(word) for text in texts for word in text.split()), default=1)
        for texts, most in zip(columns, longest, strict=True)
    ]
    if clipped is not None:
        least[clipped] = min(CLIPPED, longest[clipped])
    fitting = [n for n in range(1, len(columns) + 1) if sum(least[:n]) + GAP * n + 1 <= width]
    found = least[: max(fitting, default=1)]
    for _ in range(width - sum(found) - GAP * len(found) - 1):
        place = max(range(len(found)), key=lambda at: longest[at] / found[at])
        if longest[place] > found[place]:
            found[place] += 1
    return found


def _colour(column: str, text: str) -> str:
    return COLOURS.get(text, "yellow") if column == "verdict" else ""
