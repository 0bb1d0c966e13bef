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
from analysis.records.files import write_if_different
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
        repeated = sorted({str(name) for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"table {self.title!r} has more than one column {repeated[0]!r}; rename one")
        units_without_column = [name for name in self.units if name not in names]
        if units_without_column:
            raise ValueError(
                f"table {self.title!r} has a unit for {units_without_column[0]!r}, which is no column; "
                "there are: " + ", ".join(map(str, names))
            )

    @classmethod
    def from_rows(
        cls, title: str, rows: Sequence[Mapping[str, Any]], units: Mapping[str, str] = {}, note: str = ""
    ) -> Table:
        """Return a table of these rows, each with its cells by column."""
        return cls(title, pd.DataFrame(rows), units, note)

    def header(self) -> list[str]:
        """Return the names of the columns, with their units: 'step time (ms)'."""
        return [_with_unit(str(name), self.units.get(name, "")) for name in self.frame.columns]

    def rows(self) -> list[list[Any]]:
        """Return the cells, a list for each row."""
        return [list(row) for row in zip(*self._columns(), strict=True)]

    def cell_texts(self) -> list[list[str]]:
        """Return the cells as people read them, a list for each row."""
        return [[cell_text(cell) for cell in row] for row in self.rows()]

    def are_columns_numeric(self) -> list[bool]:
        """Return True for each column of numbers only, which stand at the right."""
        return [
            any(map(is_number_or_estimate, cells))
            and all(is_number_or_estimate(cell) or is_absent(cell) for cell in cells)
            for cells in self._columns()
        ]

    def _columns(self) -> list[list[Any]]:
        return [self.frame.iloc[:, place].tolist() for place in range(self.frame.shape[1])]

    def to_markdown(self) -> str:
        """Return a pipe table below its title, for GitHub and pandoc."""
        ruler = ["---:" if is_numeric else "---" for is_numeric in self.are_columns_numeric()]
        rows = [map(_escape_markdown, row) for row in (self.header(), *self.cell_texts())]
        lines = "".join(f"| {' | '.join(cells)} |\n" for cells in (rows[0], ruler, *rows[1:]))
        title = f"**{_escape_markdown(self.title)}**\n" if self.title else ""
        note = f"{_escape_markdown(self.note)}\n" if self.note else ""
        return "\n".join(filter(None, (title, lines, note)))

    def to_tex(self, scale: str = "", label: str = "") -> str:
        r"""Return a `table` environment; the document needs `\usepackage{booktabs}`.

        Args:
            scale: what its numbers are of, which its caption says too: a table travels without its page.
            label: for `\ref`.
        """
        alignment = "".join("r" if is_numeric else "l" for is_numeric in self.are_columns_numeric())
        header, *rows = [" & ".join(map(escape_tex, row)) for row in (self.header(), *self.cell_texts())]
        caption = ". ".join(filter(None, (self.title, scale)))
        lines = [r"\begin{table}", r"  \centering"]
        if caption:
            lines.append(rf"  \caption{{{escape_tex(caption)}}}")
        if label:
            lines.append(rf"  \label{{{label}}}")
        lines += [
            rf"  \begin{{tabular}}{{{alignment}}}",
            r"    \toprule",
            rf"    {header} \\",
            r"    \midrule",
        ]
        lines += [rf"    {row} \\" for row in rows]
        lines += [r"    \bottomrule", r"  \end{tabular}"]
        if self.note:
            lines.append(rf"  \par\smallskip\footnotesize {escape_tex(self.note)}")
        return "\n".join([*lines, r"\end{table}", ""])

    def to_csv(self) -> str:
        """Return plain numbers for programs; a column of estimates becomes four: value, low, high and n."""
        columns = list[list[Any]]()
        for name, cells in zip(self.frame.columns, self._columns(), strict=True):
            unit = self.units.get(name, "")
            columns.append([_with_unit(str(name), unit), *map(_plain_number, cells)])
            if any(isinstance(cell, Estimate) for cell in cells):
                for part, part_unit in {"low": unit, "high": unit, "n": ""}.items():
                    parts = [_estimate_part(cell, part) for cell in cells]
                    columns.append([_with_unit(f"{name}: {part}", part_unit), *parts])
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(
            map(_csv_cell, row) for row in zip(*columns, strict=True)
        )
        return out.getvalue()

    def to_html(self) -> str:
        """Return a `<table>`; `data-value` has a cell's plain number."""
        classes = [' class="number"' if is_numeric else "" for is_numeric in self.are_columns_numeric()]
        titles = zip(self.header(), classes, strict=True)
        head = "".join(f'<th scope="col"{class_}>{_escape_html(title)}</th>' for title, class_ in titles)
        body = ""
        for row in self.rows():
            cells = "".join(_html_cell(cell, class_) for cell, class_ in zip(row, classes, strict=True))
            body += f"<tr>{cells}</tr>\n"
        caption = f"<caption>{_escape_html(self.title)}</caption>\n" if self.title else ""
        note = f'<p class="note">{_escape_html(self.note)}</p>\n' if self.note else ""
        return f"<table>\n{caption}<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n{note}"


def is_absent(cell: Any) -> bool:
    """Return True for None, NaN, and an estimate that is NaN."""
    return bool(pd.isna(_plain_number(cell)))


def is_number_or_estimate(cell: Any) -> bool:
    """Return True for a number, with or without an interval; booleans are none."""
    return isinstance(cell, Estimate | Real) and not is_bool(cell) and not is_absent(cell)


def cell_text(cell: Any) -> str:
    """Return a cell as people read it."""
    if is_absent(cell):
        return numbers.ABSENT
    if isinstance(cell, Estimate):
        return numbers.format_with_interval(cell)
    if is_bool(cell):
        return "yes" if cell else "no"
    return numbers.format_number(float(cell)) if isinstance(cell, Real) else printable_line(str(cell))


def printable_line(words: str) -> str:
    """Return words on one line, without characters that a terminal would obey."""
    printable = (char if char.isprintable() or char.isspace() else "?" for char in words)
    return " ".join("".join(printable).split())


def escape_tex(words: str) -> str:
    """Return words escaped for LaTeX, also what a `\\\\` in front of it would take as its own argument."""
    escaped = "".join(TEX_ESCAPES.get(char, char) for char in printable_line(words))
    return f"{{{escaped[0]}}}{escaped[1:]}" if escaped[:1] in ("[", "*") else escaped


def write_table_files(
    tables: Sequence[Table], folder: Path, name: str, scale: str = "", label: str = ""
) -> None:
    """Write all tables to `name`.tex, the first to `name`.csv, the second to `name`-2.csv, and so on.

    Files of a former drawing are replaced or removed.

    Args:
        tables: of one figure.
        folder: which is made where it is missing.
        name: of the files, without a suffix.
        scale: what the numbers are of, for LaTeX's captions.
        label: the same, in short, for LaTeX's labels: tab:NAME:LABEL, tab:NAME-2:LABEL and so on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content_by_file = dict[str, str]()
    environments = list[str]()
    for place, table in enumerate(tables, 1):
        stem = name if place == 1 else f"{name}-{place}"
        content_by_file[f"{stem}.csv"] = table.to_csv()
        environments.append(table.to_tex(scale, ":".join(filter(None, ("tab", stem, label)))))
    if tables:
        content_by_file[f"{name}.tex"] = "\n".join(environments)
    former = folder.glob(f"{glob.escape(name)}-[0-9].csv")
    for path in (folder / f"{name}.tex", folder / f"{name}.csv", *former):
        if path.name not in content_by_file:
            path.unlink(missing_ok=True)
    for file, content in content_by_file.items():
        write_if_different(folder / file, content)


def tables_markdown(tables: Iterable[Table]) -> str:
    """Return the tables as Markdown, below each other."""
    return "\n".join(table.to_markdown() for table in tables)


def _with_unit(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def _escape_markdown(words: str) -> str:
    """Escape what would end a cell, open a tag, make a link or stand out."""
    return re.sub(r"([\\|<*`]|(?<=\])(?=\())", r"\\\1", printable_line(words))


def _csv_cell(cell: Any) -> str:
    """Return the plain text of a cell; a text that a spreadsheet would compute is quoted as text."""
    if is_absent(cell):
        return ""
    if is_number_or_estimate(cell):
        return format(float(cell), CSV_NUMBER_FORMAT)
    words = cell_text(cell)
    return f"'{words}" if words.startswith(("=", "+", "-", "@")) else words


def _escape_html(words: str) -> str:
    return html.escape(printable_line(words))


def _html_cell(cell: Any, class_: str) -> str:
    number = format(float(_plain_number(cell)), CSV_NUMBER_FORMAT) if is_number_or_estimate(cell) else ""
    value = f' data-value="{number}"' if number else ""
    return f"<td{class_}{value}>{_escape_html(cell_text(cell))}</td>"


def _plain_number(cell: Any) -> Any:
    return cell.value if isinstance(cell, Estimate) else cell


def _estimate_part(cell: Any, name: str) -> Any:
    """Return a part that an estimate has beside its number, and a plain number has not."""
    return getattr(cell, name) if isinstance(cell, Estimate) and not is_absent(cell) else None
