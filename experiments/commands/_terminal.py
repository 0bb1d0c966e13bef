"""Tables on a terminal, by rich at the terminal's width; elsewhere the output is Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analysis.claims import IN_BAND, OUT_OF_BAND, UNDECIDED
from analysis.records.terminal_escapes import unwrap_terminal
from analysis.tables import Table

COLOUR_BY_VERDICT: dict[str, str] = (
    dict.fromkeys(IN_BAND, "green") | dict.fromkeys(OUT_OF_BAND, "red") | dict.fromkeys(UNDECIDED, "dim")
)  # the others: yellow
GAP = 2  # characters between two columns
MAX_UNBROKEN = 12  # characters of a text that is not broken at its spaces, such as "19 h"
MIN_CLIPPED = 24  # characters of a column that is cut


def print_table(table: Table, clipped_column: str = "") -> None:
    """Print a table; NO_COLOR is honoured, and escape sequences in texts are shown, never obeyed.

    Args:
        clipped_column: is cut where a terminal is too narrow, so that a row stays a line.
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
    header = table.header()
    rows = table.cell_texts()
    columns = [[title, *cells] for title, *cells in zip(header, *rows, strict=True)]
    widths = fit_column_widths(
        columns, console.width, header.index(clipped_column) if clipped_column in header else None
    )
    grid = Grid(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title, width, is_numeric in zip(header, widths, table.are_columns_numeric(), strict=False):
        is_cut = title == clipped_column
        grid.add_column(
            Text(title),
            justify="right" if is_numeric else "left",
            width=width,
            overflow="ellipsis" if is_cut else "fold",
            no_wrap=is_cut,
        )
    for row in rows:
        grid.add_row(
            *(
                Text(text, COLOUR_BY_VERDICT.get(text, "yellow") if title == "verdict" else "")
                for title, text in zip(header, row[: len(widths)], strict=False)
            )
        )
    console.print(grid)
    omitted = header[len(widths) :]
    if omitted:
        console.print(Text(f"This terminal is too narrow to show: {', '.join(omitted)}"))
    if table.note:
        console.print(Text(table.note))


def fit_column_widths(
    columns: Sequence[Sequence[str]], total_width: int, clipped_place: int | None = None
) -> list[int]:
    """Return the widths of the first columns that fit without breaking words; one column may be clipped.

    The columns with the longest texts share the width that is left over.
    """
    longest = [max(map(len, texts)) for texts in columns]
    narrowest = []
    for texts, length in zip(columns, longest, strict=True):
        words = (len(word) for text in texts for word in text.split())
        narrowest.append(length if length <= MAX_UNBROKEN else max(words, default=1))
    if clipped_place is not None:
        narrowest[clipped_place] = min(MIN_CLIPPED, longest[clipped_place])
    fitting = [n for n in range(1, len(columns) + 1) if sum(narrowest[:n]) + GAP * n + 1 <= total_width]
    widths = narrowest[: max(fitting, default=1)]
    for _ in range(total_width - sum(widths) - GAP * len(widths) - 1):
        place = max(range(len(widths)), key=lambda place: longest[place] / widths[place])
        if longest[place] > widths[place]:
            widths[place] += 1
    return widths
