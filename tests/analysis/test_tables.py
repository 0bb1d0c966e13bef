"""One frame in every form: the same numbers, and no text that another program would obey."""

from __future__ import annotations

import csv
import html.parser
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.stats import Value
from analysis.tables import Table, markdown, save

HOSTILE = (
    r"a|b <script>alert('x')</script> $x_1^2 & 5% #1 {\input{y}} `c` *d* ~e [f](g) \\" + "\x1b[31m\n=1+1"
)


def small(**more: Any) -> Table:
    frame = pd.DataFrame({
        "method": ["dense", "Top-k"],
        "top-1": [Value(91.518, 90.0, 92.25, 3), Value(90.0)],
        "k": np.array([17387.4, np.nan]),
    })  # fmt: skip
    return Table("Accuracy", frame, {"top-1": "%"}, **more)


def test_markdown_has_units_intervals_and_numbers_at_the_right() -> None:
    assert small(note="Two runs.").markdown() == (
        "**Accuracy**\n\n"
        "| method | top-1 (%) | k |\n"
        "| --- | ---: | ---: |\n"
        "| dense | 91.52 [90, 92.25] | 17,387 |\n"
        "| Top-k | 90 | - |\n"
        "\nTwo runs.\n"
    )
    assert markdown([small(), small()]) == f"{small().markdown()}\n{small().markdown()}"


def test_csv_has_every_number_unrounded_and_intervals_apart() -> None:
    first, second = csv.DictReader(small().csv().splitlines())
    assert first == {
        "method": "dense", "top-1 (%)": "91.518", "top-1: low (%)": "90", "top-1: high (%)": "92.25",
        "top-1: n": "3", "k": "17387.4",
    }  # fmt: skip
    assert second == {
        "method": "Top-k", "top-1 (%)": "90", "top-1: low (%)": "", "top-1: high (%)": "", "top-1: n": "1",
        "k": "",
    }  # fmt: skip


def test_tex_is_a_booktabs_table() -> None:
    lines = [line.strip() for line in small(note="Two runs.").tex().splitlines()]
    assert r"\caption{Accuracy}" in lines
    assert r"\begin{tabular}{lrr}" in lines
    rules = [lines.index(rf"\{rule}rule") for rule in ("top", "mid", "bottom")]
    assert lines[rules[0] + 1] == r"method & top-1 (\%) & k \\"
    assert lines[rules[1] + 1 : rules[2]] == [r"dense & 91.52 [90, 92.25] & 17,387 \\", r"Top-k & 90 & - \\"]
    assert r"\par\smallskip\footnotesize Two runs." in lines


def test_tex_carries_its_scale_wherever_it_goes(tmp_path: Path) -> None:
    save([small(), small()], tmp_path, "fig3", "VGG-16, density 0.001, 8 workers", "vgg16:d0.001:w8")
    lines = [line.strip() for line in (tmp_path / "fig3.tex").read_text().splitlines()]
    assert lines.count(r"\caption{Accuracy. VGG-16, density 0.001, 8 workers}") == 2
    assert [line for line in lines if "label" in line] == [
        r"\label{tab:fig3:vgg16:d0.001:w8}", r"\label{tab:fig3-2:vgg16:d0.001:w8}"
    ]  # fmt: skip


# The commands that a table is made of.
OF_TABLES = (
    "begin", "end", "caption", "centering", "toprule", "midrule", "bottomrule", "par", "smallskip",
    "footnotesize", "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater",
    "textbar",
)  # fmt: skip


class Cells(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.plain: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.plain += [value for name, value in attributes if name == "data-value" and value]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_has_the_plain_number_beside_the_one_for_people() -> None:
    cells = Cells()
    cells.feed(small().html())
    assert cells.plain == ["91.518", "17387.4", "90"]
    assert "91.52 [90, 92.25]" in cells.text


def hostile() -> Table:
    return Table(HOSTILE, pd.DataFrame({HOSTILE: [HOSTILE, 1.0]}), {HOSTILE: HOSTILE}, HOSTILE)


def test_no_text_becomes_a_tag() -> None:
    cells = Cells()
    cells.feed(hostile().html())
    assert set(cells.tags) == {"table", "caption", "thead", "tr", "th", "tbody", "td", "p"}
    assert "<script>" in cells.text


def test_no_text_becomes_a_command_of_latex() -> None:
    left = hostile().tex()
    for name in OF_TABLES:
        left = left.replace(f"\\{name}", "")
    for escaped in (r"\{", r"\}", r"\$", r"\&", r"\#", r"\_", r"\%", r"\\"):
        left = left.replace(escaped, "")
    assert not set("\\$&#_%~^<>|`"[:-1]) & set(left)
    assert "\\input" not in hostile().tex()


def test_a_row_that_begins_with_a_bracket_is_no_argument_of_the_row_before() -> None:
    r"""`\\[f]` would be a distance, and `\\*` a command."""
    lines = Table("", pd.DataFrame({"a": ["[f]", "*"]})).tex().splitlines()
    assert [line.strip() for line in lines if r" \\" in line][1:] == [r"{[}f] \\", r"{*} \\"]


def test_no_text_ends_a_cell_of_markdown_or_opens_a_tag_or_a_link() -> None:
    header, ruler, row, _ = hostile().markdown().splitlines()[2:6]
    for line in (header, row):
        plain = line
        for escaped in (r"\\", r"\|", r"\<", r"\*", r"\`", r"\("):
            plain = plain.replace(escaped, "")
        assert plain.count("|") == ruler.count("|") == 2
        assert not set("<*`") & set(plain)
        assert "](" not in plain


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1 x", "@a"])
def test_no_text_is_computed_by_a_spreadsheet(text: str) -> None:
    assert Table("", pd.DataFrame({"a": [text, -1.5]})).csv().splitlines() == ["a", f"'{text}", "-1.5"]


def test_no_form_has_what_a_terminal_would_obey() -> None:
    table = hostile()
    for text in (table.markdown(), table.tex(), table.csv(), table.html()):
        assert "\x1b" not in text


@pytest.mark.parametrize("nothing", [None, math.nan, pd.NA, Value(math.nan)])
def test_where_there_is_nothing_no_form_says_nan(nothing: Any) -> None:
    table = Table("", pd.DataFrame({"a": [1.5, nothing]}, dtype=object))
    for text in (table.markdown(), table.tex(), table.csv(), table.html()):
        assert "nan" not in text.lower()
        assert "None" not in text
    assert table.texts() == [["1.5"], ["-"]]
    assert table.csv().splitlines()[-1].strip(",") in ("", '""')


def test_a_table_of_nothing_has_its_header() -> None:
    table = Table("", pd.DataFrame(columns=["a", "b"]))
    assert table.markdown() == "| a | b |\n| --- | --- |\n"
    assert table.csv() == "a,b\n"


def test_a_figure_s_tables_lie_beside_it_and_those_of_a_former_drawing_do_not(tmp_path: Path) -> None:
    (tmp_path / "fig-10.csv").touch()  # another figure's
    save([small(), small(), small()], tmp_path, "fig")
    assert {path.name for path in tmp_path.iterdir()} == {
        "fig.csv", "fig-2.csv", "fig-3.csv", "fig.tex", "fig-10.csv",
    }  # fmt: skip
    assert (tmp_path / "fig.tex").read_text().count(r"\begin{table}") == 3
    save([small()], tmp_path, "fig")
    assert {path.name for path in tmp_path.iterdir()} == {"fig.csv", "fig.tex", "fig-10.csv"}
    save([], tmp_path, "fig")
    assert {path.name for path in tmp_path.iterdir()} == {"fig-10.csv"}


def test_yes_and_no_are_no_numbers() -> None:
    table = Table("", pd.DataFrame({"a": [True, False]}))
    assert (table.texts(), table.are_numbers()) == ([["yes"], ["no"]], [False])


def test_a_unit_of_no_column_and_a_name_that_stands_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="a unit for 'tme', which is no column; there are: time"):
        Table("x", pd.DataFrame({"time": [1.0]}), {"tme": "s"})
    with pytest.raises(ValueError, match="more than one column 'a'"):
        Table("x", pd.DataFrame([[1, 2]], columns=["a", "a"]))
