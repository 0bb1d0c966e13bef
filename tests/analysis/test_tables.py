"""A frame in every form: the same numbers, and no text that another program would obey."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.stats import Estimate
from analysis.tables import Table, write_table_files

HOSTILE = (
    r"a|b <script>alert('x')</script> $x_1^2 & 5% #1 {\input{y}} `c` *d* ~e [f](g) \\" + "\x1b[31m\n=1+1"
)


def small(**more: Any) -> Table:
    frame = pd.DataFrame({
        "method": ["dense", "Top-k"],
        "top-1": [Estimate(91.518, 90.0, 92.25, 3), Estimate(90.0)],
        "k": np.array([17387.4, np.nan]),
    })  # fmt: skip
    return Table("Accuracy", frame, {"top-1": "%"}, **more)


def test_markdown_has_units_intervals_and_numbers_at_the_right() -> None:
    assert small(note="Two runs.").to_markdown() == (
        "**Accuracy**\n\n"
        "| method | top-1 (%) | k |\n"
        "| --- | ---: | ---: |\n"
        "| dense | 91.5 [90.0, 92.2] | 17,400 |\n"
        "| Top-k | 90 | - |\n"
        "\nTwo runs.\n"
    )


def test_csv_has_every_number_unrounded_and_intervals_apart() -> None:
    assert small().to_csv().splitlines() == [
        "method,top-1 (%),top-1: low (%),top-1: high (%),top-1: n,k",
        "dense,91.518,90,92.25,3,17387.4",
        "Top-k,90,,,1,",
    ]


def test_tex_is_a_booktabs_table_and_carries_its_scale_wherever_it_goes(tmp_path: Path) -> None:
    tables = [small(note="Two runs."), small()]
    write_table_files(tables, tmp_path, "fig3", "VGG-16, density 0.001, 8 workers", "vgg16:d0.001:w8")
    tex = "\n".join(line.strip() for line in (tmp_path / "fig3.tex").read_text().splitlines())
    assert "\n".join((
        r"\begin{tabular}{lrr}", r"\toprule", r"method & top-1 (\%) & k \\", r"\midrule",
        r"dense & 91.5 [90.0, 92.2] & 17,400 \\", r"Top-k & 90 & - \\", r"\bottomrule", r"\end{tabular}",
        r"\par\smallskip\footnotesize Two runs.",
    )) in tex  # fmt: skip
    assert tex.count(r"\caption{Accuracy. VGG-16, density 0.001, 8 workers}") == 2
    for name in ("fig3", "fig3-2"):
        assert f"\\label{{tab:{name}:vgg16:d0.001:w8}}" in tex


# The commands that a table is made of.
OF_TABLES = (
    "begin", "end", "caption", "centering", "toprule", "midrule", "bottomrule", "par", "smallskip",
    "footnotesize", "textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater",
    "textbar",
)  # fmt: skip


def test_html_has_the_plain_number_beside_the_one_for_people() -> None:
    text = small().to_html()
    assert re.findall('data-value="([^"]+)"', text) == ["91.518", "17387.4", "90"]
    assert "91.5 [90.0, 92.2]" in text


def all_forms(table: Table) -> list[str]:
    return [table.to_markdown(), table.to_tex(), table.to_csv(), table.to_html()]


def hostile() -> Table:
    return Table(HOSTILE, pd.DataFrame({HOSTILE: [HOSTILE, 1.0]}), {HOSTILE: HOSTILE}, HOSTILE)


def test_no_text_becomes_a_tag() -> None:
    text = hostile().to_html()
    tags = {"table", "caption", "thead", "tr", "th", "tbody", "td", "p"}
    assert {*re.findall(r"<([^\s/>]+)", text)} == tags
    assert "<script>" in html.unescape(text)


def test_no_text_becomes_a_command_of_latex() -> None:
    commands = "|".join(OF_TABLES)
    left = re.sub(rf"\\({commands})|\\[{{}}$&#_%\\]", "", hostile().to_tex())
    assert not set("\\$&#_%~^<>|") & set(left)


def test_a_row_that_begins_with_a_bracket_is_no_argument_of_the_row_before() -> None:
    r"""`\\[f]` would be a distance, and `\\*` a command."""
    lines = Table("", pd.DataFrame({"a": ["[f]", "*"]})).to_tex().splitlines()
    assert [line.strip() for line in lines if r" \\" in line][1:] == [r"{[}f] \\", r"{*} \\"]


def test_no_text_ends_a_cell_of_markdown_or_opens_a_tag_or_a_link() -> None:
    header, ruler, row, _ = hostile().to_markdown().splitlines()[2:6]
    for line in (header, row):
        plain = re.sub(r"\\[\\|<*`(]", "", line)
        assert plain.count("|") == ruler.count("|") == 2
        assert not set("<*`") & set(plain)
        assert "](" not in plain


def test_no_text_is_computed_by_a_spreadsheet_or_obeyed_by_a_terminal() -> None:
    texts = ["=1+1", "+1", "-1 x", "@a"]
    table = Table("", pd.DataFrame({"a": [*texts, -1.5]}))
    assert table.to_csv().splitlines() == ["a", *(f"'{text}" for text in texts), "-1.5"]
    assert "\x1b" not in "".join(all_forms(hostile()))


def test_where_there_is_nothing_no_form_says_nan() -> None:
    for nothing in (None, math.nan, pd.NA, Estimate(math.nan)):
        table = Table("", pd.DataFrame({"a": [1.5, nothing]}, dtype=object))
        assert not re.search("nan|none", "".join(all_forms(table)).lower())
        assert table.cell_texts() == [["1.5"], ["-"]]
        assert table.to_csv().splitlines()[-1].strip(",") in ("", '""')


def test_a_table_of_nothing_has_its_header_and_yes_and_no_are_no_numbers() -> None:
    table = Table("", pd.DataFrame(columns=["a", "b"]))
    assert table.to_markdown() == "| a | b |\n| --- | --- |\n"
    assert table.to_csv() == "a,b\n"
    table = Table("", pd.DataFrame({"a": [True, False]}))
    assert (table.cell_texts(), table.are_columns_numeric()) == ([["yes"], ["no"]], [False])


def test_a_figure_s_tables_lie_beside_it_and_those_of_a_former_drawing_do_not(tmp_path: Path) -> None:
    (tmp_path / "fig-10.csv").touch()  # another figure's
    for tables, files in (
        (3, {"fig.csv", "fig-2.csv", "fig-3.csv", "fig.tex"}),
        (1, {"fig.csv", "fig.tex"}),
        (0, set[str]()),
    ):
        write_table_files([small()] * tables, tmp_path, "fig")
        assert {path.name for path in tmp_path.iterdir()} == files | {"fig-10.csv"}


def test_a_unit_of_no_column_and_a_name_that_stands_twice_are_refused() -> None:
    with pytest.raises(ValueError, match="a unit for 'tme', which is no column; there are: time"):
        Table("x", pd.DataFrame({"time": [1.0]}), {"tme": "s"})
    with pytest.raises(ValueError, match="more than one column 'a'"):
        Table("x", pd.DataFrame([[1, 2]], columns=["a", "a"]))
