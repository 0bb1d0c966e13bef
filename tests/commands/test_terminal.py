"""Tables on a terminal: as wide as it is, whole words, and nothing in them is obeyed."""

from __future__ import annotations

import io
import sys

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


def shown(table: Table, width: int, monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    terminal = Terminal()
    for name, value in ({"COLUMNS": str(width), "TERM": "xterm-256color"} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", terminal)
    _terminal.show(table)
    return terminal.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_fits_and_breaks_no_word(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(VERDICTS, width, monkeypatch, NO_COLOR="1")
    lines = [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert set(LONG.split()) <= set(text.split())
    assert text.index("Reduced scale") < text.index("verdict") < text.index("not")


def test_a_short_text_stays_whole_so_that_a_run_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"run": "6414e186", "age": "19 h", "settings": "topk density=0.01 " * 9} for _ in range(3)]
    terminal = Terminal()
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", terminal)
    _terminal.show(Table("", pd.DataFrame(rows)), clipped="settings")
    assert terminal.getvalue().count("19 h") == 3
    assert len(terminal.getvalue().strip().splitlines()) == 2 + len(rows)


def test_a_word_is_coloured_unless_nobody_wants_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[32mholds" in shown(VERDICTS, 100, monkeypatch)
    plain = shown(VERDICTS, 100, monkeypatch, NO_COLOR="1")
    assert "\x1b[3" not in plain
    assert "\x1b[2J" not in plain
    assert {"[red]n", "1[/red]?[2J"} <= set(plain.split())


def test_columns_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("", pd.DataFrame([{f"column{number}": "x" * 20 for number in range(5)}]))
    text = shown(table, 50, monkeypatch, NO_COLOR="1")
    assert text.count("x" * 20) == 2
    assert "too narrow to show: column2, column3, column4" in " ".join(text.split())


def test_into_a_pipe_goes_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    _terminal.show(VERDICTS)
    assert capsys.readouterr().out == f"{VERDICTS.markdown()}\n"
