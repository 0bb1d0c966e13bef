"""What the pages of benchmarks share: a device's records, and its picture and page drawn from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from analysis import plots
from analysis.pictures import style
from analysis.pictures.captions import join_words
from analysis.records.files import DamagedFileError, write_atomic
from analysis.records.log import read_objects
from experiments.bench._runner import SCHEMA, Record, newest_stores
from experiments.config.folders import Folders

Say = Callable[[str], None]


class Page(NamedTuple):
    """How a benchmark's records become a picture and a page."""

    bench: str
    read: Callable[[Path, Say], tuple[list[Record], list[Record]]]  # rows and invocations
    draw: Callable[[Sequence[Record]], plots.Figure]
    write: Callable[[Sequence[Record], Sequence[Record], str], str]

    def redraw(self, folders: Folders, say: Say = print) -> list[Path]:
        """Every device's figure, from this checkout's records where there are any, else from the shipped
        ones; says what had to be left out.
        """
        drawn = []
        for store in newest_stores(self.bench, folders):
            try:
                drawn.append(self.draw_one(store, folders.figures, say))
            except DamagedFileError as damage:
                say(f"left out: {damage}")
        return drawn

    def draw_one(self, store: Path, folder: Path, say: Say = print) -> Path:
        """One device's picture (returned, PNG and PDF) and page; DamagedFileError where it lacks records."""
        rows, starts = self.read(store, say)
        if not rows:
            raise DamagedFileError(store, "has no row of a case")
        folder.mkdir(parents=True, exist_ok=True)
        picture = style.save_figure(self.draw(rows), folder, store.stem)
        write_atomic(folder / f"{store.stem}.md", self.write(rows, starts, store.stem))
        return picture


def of_schema(path: Path, fits: Callable[[Record], bool], say: Say) -> tuple[list[Record], list[Record]]:
    """The rows and the invocations that are as they were written; says how many lines are not.

    Raises:
        DamagedFileError: it is no file of records.
    """
    lines, broken = read_objects(path)
    ours = [record for record in lines if record.get("schema") == SCHEMA]
    records = [record for record in ours if fits(record)]
    if damaged := broken + len(ours) - len(records):
        say(f"left out {damaged} lines of {path}: they are not as they were written")
    of = {kind: [each for each in records if each["kind"] == kind] for kind in ("row", "invocation")}
    return of["row"], of["invocation"]


def dated(rows: Iterable[Record]) -> list[Record]:
    """The rows with their day and their commit in words."""
    found = []
    for row in rows:
        commit = (row["commit"] or "unknown")[:7] + (" with changes" if row["dirty"] else "")
        found.append(row | {"day": row["at"][:10], "commit": commit})
    return found


def distinct(rows: Iterable[Record], field: str) -> str:
    """The values of a field, in words."""
    return join_words(sorted({row[field] for row in rows if field in row}))
