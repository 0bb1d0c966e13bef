"""Tables on a terminal: as wide as it is, whole words, and nothing in them is obeyed."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import pandas as pd
import pytest

from analysis.tables import Table
from experiments.commands import _terminal

LONG = "the step from which on Top-k stays ahead of Random-k in top-1"
VERDICTS = Table(
    "Reduced scale: batch 16 instead of 128",
    pd.DataFrame({
        "verdict": ["not reproduced", "holds"], "claim": [LONG, "short"], "ours": [1.5, None],
        "because": ["", "[red]n = 1[/red]\x1b[2J"],
    }),
)  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


Show = Callable[..., str]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """Show a table on a terminal of so many columns, without colours unless they are asked for."""

    def call(table: Table, width: int, clipped: str = "", **environment: str) -> str:
        terminal = Terminal()
        around = {"COLUMNS": str(width), "TERM": "xterm-256color", "NO_COLOR": "1", **environment}
        for name, value in around.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", terminal)
        _terminal.print_table(table, clipped_column=clipped)
        return terminal.getvalue()

    return call


def test_a_table_fits_and_breaks_no_word(show: Show) -> None:
    for width in (60, 80, 120):
        text = show(VERDICTS, width)
        assert max(len(re.sub("\x1b\\[[01]m", "", line)) for line in text.splitlines()) <= width
        assert set(LONG.split()) <= set(text.split())
        assert text.index("Reduced scale") < text.index("verdict") < text.index("not")


def test_a_short_text_stays_whole_so_that_a_run_is_a_line(show: Show) -> None:
    row = {"run": "6414e186", "age": "19 h", "settings": "topk density=0.01 " * 9}
    text = show(Table("", pd.DataFrame([row] * 3)), 60, clipped="settings")
    assert text.count("19 h") == 3
    assert len(text.strip().splitlines()) == 2 + 3


def test_a_word_is_coloured_unless_nobody_wants_colours(show: Show) -> None:
    assert "\x1b[32mholds" in show(VERDICTS, 100, NO_COLOR="")
    plain = show(VERDICTS, 100)
    assert "\x1b[3" not in plain
    assert "\x1b[2J" not in plain
    assert {"[red]n", "1[/red]?[2J"} <= set(plain.split())


def test_columns_that_do_not_fit_are_named(show: Show) -> None:
    text = show(Table("", pd.DataFrame([{f"column{number}": "x" * 20 for number in range(5)}])), 50)
    assert text.count("x" * 20) == 2
    assert "too narrow to show: column2, column3, column4" in " ".join(text.split())
