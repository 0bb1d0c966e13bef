"""Tables for people: with rich at the terminal's width; where the output goes elsewhere, Markdown."""

from __future__ import annotations

import sys

from analysis.tables import Table


def show(table: Table) -> None:
    """Print a table. NO_COLOR is honoured, and what texts hold is shown, never obeyed."""
    if not sys.stdout.isatty():
        print(table.markdown().rstrip("\n"))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid(box=SIMPLE_HEAD, pad_edge=False)
    for name, right in zip(table.header(), table.are_numbers(), strict=True):
        grid.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in table.texts():
        grid.add_row(*map(Text, row))
    console = Console()
    for part in (Text(table.title, "bold"), grid, Text(table.note, "dim")):
        if part:
            console.print(part)
