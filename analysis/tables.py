"""Tables of numbers with their units, written as Markdown, LaTeX, CSV and HTML from one frame.

Texts may come from anywhere (names of methods, of files, of machines), so each form escapes what it would
obey.
"""

from __future__ import annotations

import csv
import glob
import html
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any

import pandas as pd
from pandas.api.types import is_bool

from analysis.pictures import numbers
from analysis.records.files import write_atomic
from analysis.stats import Estimate

CSV_NUMBER_FORMAT = ".10g"  # numbers in CSV: more than any measurement has, and alike on every machine
# What LaTeX would take as a command.
TEX_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_",
    "%": r"\%", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "|": r"\textbar{}", "\u2013": "--", "\u2014": "---", "\u00d7": r"$\times$",
    "\u00b1": r"$\pm$", "\u00b7": r"\textperiodcentered{}",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """Rows under named columns.

    A cell is a number, a `Estimate` (a number with its interval), a text, or None where there is nothing. The
    frame's index is not shown.
    """

    title: str
    frame: pd.DataFrame
    units: Mapping[str, str] = field(default_factory=dict)  # of the columns that have one
    note: str = ""  # what a reader must know, below the table

    def __post_init__(self) -> None:
        names = list(self.frame.columns)
        if repeated := sorted({str(name) for name in names if names.count(name) > 1}):
            raise ValueError(f"table {self.title!r} has more than one column {repeated[0]!r}; rename one")
        if strangers := [name for name in self.units if name not in names]:
            raise ValueError(
                f"table {self.title!r} has a unit for {strangers[0]!r}, which is no column; there are: "
                + ", ".join(map(str, names))
            )

    @classmethod
    def from_rows(
        cls, title: str, rows: Sequence[Mapping[str, Any]], units: Mapping[str, str] = {}, note: str = ""
    ) -> Table:
        """Table of these rows, each with its cells by column."""
        return cls(title, pd.DataFrame(rows), units, note)

    def header(self) -> list[str]:
        """The names of the columns, with their units: 'step time (ms)'."""
        return [_with_unit(str(name), self.units.get(name, "")) for name in self.frame.columns]

    def rows(self) -> list[list[Any]]:
        """The cells, a list for each row."""
        columns = [self.frame.iloc[:, place].tolist() for place in range(self.frame.shape[1])]
        return [list(row) for row in zip(*columns, strict=True)]

    def cell_texts(self) -> list[list[str]]:
        """The cells as people read them."""
        return [[cell_text(cell) for cell in row] for row in self.rows()]

    def are_columns_numeric(self) -> list[bool]:
        """True for each column of numbers only, which stand at the right."""
        columns = zip(*self.rows(), strict=True) if len(self.frame) else [()] * self.frame.shape[1]
        return [
            any(map(is_number, cells)) and all(is_number(c) or is_absent(c) for c in cells)
            for cells in columns
        ]

    def to_markdown(self) -> str:
        """A pipe table below its title, for GitHub and pandoc."""
        ruler = ["---:" if right else "---" for right in self.are_columns_numeric()]
        body = [
            map(_escape_markdown, self.header()),
            ruler,
            *(map(_escape_markdown, row) for row in self.cell_texts()),
        ]
        lines = "".join(f"| {' | '.join(cells)} |\n" for cells in body)
        title = f"**{_escape_markdown(self.title)}**\n" if self.title else ""
        note = f"{_escape_markdown(self.note)}\n" if self.note else ""
        return "\n".join(filter(None, (title, lines, note)))

    def to_tex(self, scale: str = "", label: str = "") -> str:
        r"""A `table` environment; the document needs `\usepackage{booktabs}`.

        Args:
            scale: what its numbers are of, which its caption says too: a table travels without its page.
            label: for `\ref`.
        """
        sides = "".join("r" if right else "l" for right in self.are_columns_numeric())
        rows = [" & ".join(map(escape_tex, row)) + r" \\" for row in self.cell_texts()]
        caption = ". ".join(filter(None, (self.title, scale)))
        return "\n".join((
            r"\begin{table}",
            r"  \centering",
            *([rf"  \caption{{{escape_tex(caption)}}}"] if caption else []),
            *([rf"  \label{{{label}}}"] if label else []),
            rf"  \begin{{tabular}}{{{sides}}}",
            r"    \toprule",
            f"    {' & '.join(map(escape_tex, self.header()))} \\\\",
            r"    \midrule",
            *(f"    {row}" for row in rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            *([rf"  \par\smallskip\footnotesize {escape_tex(self.note)}"] if self.note else []),
            r"\end{table}",
            "",
        ))  # fmt: skip

    def to_csv(self) -> str:
        """Plain numbers for programs; a column of values with intervals becomes four: it, low, high and n."""
        columns = list[list[Any]]()
        for place, name in enumerate(map(str, self.frame.columns)):
            cells, unit = self.frame.iloc[:, place].tolist(), self.units.get(self.frame.columns[place], "")
            columns.append([_with_unit(name, unit), *map(_plain_number, cells)])
            if any(isinstance(cell, Estimate) for cell in cells):
                parts = {"low": unit, "high": unit, "n": ""}
                columns += [
                    [_with_unit(f"{name}: {part}", of_part), *(_estimate_part(cell, part) for cell in cells)]
                    for part, of_part in parts.items()
                ]
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            map(_csv_cell, row) for row in zip(*columns, strict=True)
        )
        return out.getvalue()

    def to_html(self) -> str:
        """A `<table>`; `data-value` has a cell's plain number."""
        sides = self.are_columns_numeric()
        head = "".join(f'<th scope="col"{_html_class(right)}>{_escape_html(name)}</th>'
                       for name, right in zip(self.header(), sides, strict=True))  # fmt: skip
        body = "".join(
            "<tr>"
            + "".join(_html_cell(cell, right) for cell, right in zip(row, sides, strict=True))
            + "</tr>\n"
            for row in self.rows()
        )
        caption = f"<caption>{_escape_html(self.title)}</caption>\n" if self.title else ""
        note = f'<p class="note">{_escape_html(self.note)}</p>\n' if self.note else ""
        return f"<table>\n{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n{note}"


def is_absent(cell: Any) -> bool:
    """True for None, NaN, and a value that is NaN."""
    return bool(pd.isna(_plain_number(cell)))


def is_number(cell: Any) -> bool:
    """True for a number, with or without an interval; booleans are none."""
    return isinstance(cell, Estimate | Real) and not is_bool(cell) and not is_absent(cell)


def cell_text(cell: Any) -> str:
    """A cell as people read it."""
    if is_absent(cell):
        return numbers.ABSENT
    if isinstance(cell, Estimate):
        return numbers.format_with_interval(cell)
    if is_bool(cell):
        return "yes" if cell else "no"
    return numbers.format_number(float(cell)) if isinstance(cell, Real) else printable_line(str(cell))


def printable_line(words: str) -> str:
    """Words on one line, without characters that a terminal would obey."""
    return " ".join("".join(one if one.isprintable() or one.isspace() else "?" for one in words).split())


def escape_tex(words: str) -> str:
    """Escaped for LaTeX, also what a `\\\\` in front of it would take as its own argument."""
    escaped = "".join(TEX_ESCAPES.get(one, one) for one in printable_line(words))
    return f"{{{escaped[0]}}}{escaped[1:]}" if escaped[:1] in ("[", "*") else escaped


def save_tables(tables: Sequence[Table], folder: Path, name: str, scale: str = "", label: str = "") -> None:
    """Write `name`.tex with all of them; `name`.csv with the first, `name`-2.csv and so on with the others.

    Those of a former drawing are replaced or removed.

    Args:
        scale: what the numbers are of, for LaTeX's captions.
        label: the same, in short, for LaTeX's labels: tab:NAME:LABEL, tab:NAME-2:LABEL and so on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {f"{name}{f'-{place}' * (place > 1)}.csv": table.to_csv() for place, table in enumerate(tables, 1)}
    in_latex = [
        table.to_tex(scale, ":".join(filter(None, ("tab", f"{name}{f'-{place}' * (place > 1)}", label))))
        for place, table in enumerate(tables, 1)
    ]
    texts |= {f"{name}.tex": "\n".join(in_latex)} if tables else {}
    former = folder.glob(f"{glob.escape(name)}-[0-9].csv")
    for path in (folder / f"{name}.tex", folder / f"{name}.csv", *former):
        if path.name not in texts:
            path.unlink(missing_ok=True)
    for file, content in texts.items():
        write_atomic(folder / file, content)


def tables_markdown(tables: Iterable[Table]) -> str:
    return "\n".join(table.to_markdown() for table in tables)


def _with_unit(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def _escape_markdown(words: str) -> str:
    """No pipe ends a cell, no tag opens, no word becomes a link or stands out."""
    return re.sub(r"([\\|<*`]|(?<=\])(?=\())", r"\\\1", printable_line(words))


def _csv_cell(cell: Any) -> str:
    """Plain; a text that a spreadsheet would compute is quoted as text."""
    if is_absent(cell):
        return ""
    if is_number(cell):
        return format(float(cell), CSV_NUMBER_FORMAT)
    words = cell_text(cell)
    return f"'{words}" if words.startswith(("=", "+", "-", "@")) else words


def _escape_html(words: str) -> str:
    return html.escape(printable_line(words))


def _html_cell(cell: Any, right: bool) -> str:
    value = (
        f' data-value="{format(float(_plain_number(cell)), CSV_NUMBER_FORMAT)}"' if is_number(cell) else ""
    )
    return f"<td{_html_class(right)}{value}>{_escape_html(cell_text(cell))}</td>"


def _html_class(right: bool) -> str:
    return ' class="number"' if right else ""


def _plain_number(cell: Any) -> Any:
    return cell.value if isinstance(cell, Estimate) else cell


def _estimate_part(cell: Any, name: str) -> Any:
    """A part that a value has beside its number, and a plain number has not."""
    return getattr(cell, name) if isinstance(cell, Estimate) and not is_absent(cell) else None
