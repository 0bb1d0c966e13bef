"""The benchmark's pages: static, for browsers that read them from a disk, and readable without scripts.

index.html           what is compared, and every link with what became of it
link-NAME.html       a Pareto picture, and a table for each task and number of workers
entry-NAME.html      what a method does, its laws, settings and cells
cells.html           all cells, to be filtered
rules.html, words.html
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import msgspec
import numpy as np
import pandas as pd
from markdown_it import MarkdownIt
from markupsafe import Markup

from analysis import plots
from analysis.benchmark.cells import BASELINE, CELL_WORDS, Cell, sort_table_cells
from analysis.benchmark.files import EntryFile
from analysis.pictures import style
from analysis.pictures.numbers import format_brief, format_number, format_with_interval
from analysis.records.files import write_atomic
from analysis.report.pages import SOURCE_FOLDER as REPORT

SOURCE_FOLDER = Path(__file__).parent
MARKER_FILE = ".made-by-benchmark"  # without this file in it a folder is not replaced
MARK_BY_WORD: Mapping[str, tuple[str, str]] = {
    "baseline": ("·", "plain"), "faster": ("✓", "good"), "slower": ("✗", "bad"),
    "inconclusive": ("?", "middling"), "misses the target": ("✗", "bad"), "not timed": ("·", "plain"),
}  # fmt: skip
# Of the repository's entries; others have those of their names.
METHOD_BY_ENTRY = {
    "dense": "dense", "topk": "topk", "dgc": "dgc", "gaussiank": "gaussiank", "oktopk": "oktopk",
    "powersgd": "powersgd",
}  # fmt: skip
OTHER_COLOURS = (
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
    "#882255",
    "#332288",
    "#44AA99",
    "#999933",
)
OTHER_MARKERS = "^vDhX*P<>dH8"
STEP_MS_TICKS = tuple(digit * 10**power for power in range(-1, 5) for digit in (1, 2, 5))  # ms


class LinkDescription(NamedTuple):
    """What a link's page and the front page say of a link, beside its cells."""

    name: str
    about: str  # what was asked for, and whose it is
    found: str  # by probes


class ClaimRow(NamedTuple):
    """A number of an entry's paper, and what became of it here."""

    text: str
    paper: str
    ours: str
    word: str


class TaskDescription(NamedTuple):
    name: str
    about: str


class BenchmarkContent(NamedTuple):
    """All that the pages show."""

    tier: str
    version: int
    entered: Sequence[EntryFile]
    cells: Sequence[Cell]
    links: Sequence[LinkDescription]
    tasks: Sequence[TaskDescription]
    workers: Sequence[int]
    claimed: Mapping[str, Sequence[ClaimRow]]  # by entry
    checked: str  # what composing is worth, in a sentence
    rules: str  # Markdown
    notes: Sequence[str] = ()  # on what could not be shown


def write_pages(folder: Path, content: BenchmarkContent) -> Path:
    """All pages; returns the first one.

    Raises:
        ValueError: the folder holds something else.
    """
    if folder.exists() and not (folder / MARKER_FILE).is_file() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} would have to be replaced, and no benchmark was written there (it has no file "
            f"{MARKER_FILE}): move it"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER_FILE).touch()
    shutil.copyfile(REPORT / "assets" / "report.css", folder / "report.css")
    shutil.copyfile(SOURCE_FOLDER / "templates" / "benchmark.css", folder / "benchmark.css")
    shutil.copyfile(SOURCE_FOLDER / "templates" / "cells.js", folder / "cells.js")
    pages = _Pages(folder, content)
    for link in content.links:
        pages.link(link)
    for each in content.entered:
        pages.entry(each)
    pages.page("cells", cells=_sort_cells(content.cells))
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    pages.page("rules", text=Markup(markdown.render(_strip_links(content.rules))))
    known: list[tuple[str, str]] = msgspec.yaml.decode((SOURCE_FOLDER / "words.yaml").read_bytes())
    pages.page("words", known=known)
    counts = {
        link.name: {
            word: n for word in CELL_WORDS
            if (n := sum((cell.link, cell.word) == (link.name, word) for cell in content.cells))
        }
        for link in content.links
    }  # fmt: skip
    best = {
        name: Counter(cell.word for cell in content.cells if cell.entry == name) for name in _names(content)
    }
    return pages.page("index", counts=counts, best=best)


def _strip_links(rules: str) -> str:
    """The rules without what leads to other pages of the repository, and without anchors."""
    return re.sub(r"\[([^]]+)\]\((?!http)[^)]*\)", r"\1", re.sub(r"<a [^>]*></a>\s*", "", rules))


def _names(content: BenchmarkContent) -> list[str]:
    return [each.statement.name for each in content.entered]


def _sort_cells(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: (cell.link, cell.task, cell.workers, cell.word != "baseline"))


class _Pages:
    def __init__(self, folder: Path, content: BenchmarkContent) -> None:
        self.folder, self.content = folder, content
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(SOURCE_FOLDER / "templates"),
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self.templates.filters |= {
            "value": format_with_interval,
            "brief": lambda value: "" if value is None else format_brief(value),
            "number": format_number,
        }  # fmt: skip
        self.templates.globals |= {
            "marks": MARK_BY_WORD, "content": content, "baseline": BASELINE, "words": CELL_WORDS,
            "about": {task.name: task.about for task in content.tasks},
        }  # fmt: skip

    def page(self, template: str, name: str = "", **values: Any) -> Path:
        path = self.folder / f"{name or template}.html"
        text = self.templates.get_template(f"{template}.html").render(page=name or template, **values)
        write_atomic(path, text, durable=False)  # it can be made again
        return path

    def link(self, link: LinkDescription) -> None:
        """A link's page and picture."""
        own = [cell for cell in self.content.cells if cell.link == link.name]
        timed = [cell for cell in own if cell.step_ms and cell.loss]
        if timed:
            figure = pareto_figure(timed, [task.name for task in self.content.tasks], self.content.workers)
            style.save_figure(figure, self.folder, f"link-{link.name}")
            for kind in ("png", "pdf"):
                (self.folder / f"link-{link.name}.{kind}").unlink()
        tables = [
            (task, workers, sort_table_cells(own, task.name, workers, link.name))
            for task in self.content.tasks
            for workers in self.content.workers
        ]
        has_rows = [table for table in tables if table[2]]
        self.page("link", f"link-{link.name}", link=link, tables=has_rows, pictured=bool(timed))

    def entry(self, each: EntryFile) -> None:
        """An entry's card."""
        said = each.statement
        own = [cell for cell in self.content.cells if cell.entry == said.name]
        facts = {name: _task_facts(each, name) for name in said.tasks}
        tried = {name: _tried_rates_text(each, name) for name in said.tasks}
        self.page("entry", f"entry-{said.name}", said=said, cells=_sort_cells(own), facts=facts, tried=tried,
                  claimed=self.content.claimed.get(said.name, ()))  # fmt: skip


def _task_facts(each: EntryFile, task: str) -> dict[str, float | None]:
    """What an entry takes on a task: means over trainings with the fewest workers, and over launches."""
    own = each.statement.tasks[task]
    keys = own.trainings[min(own.trainings)]
    runs, epochs = each.frames.runs, each.frames.epochs
    trained = runs[runs["key"].isin(keys)]
    launched = [key for of_links in own.launches.values() for keys in of_links.values() for key in keys]
    timed = runs[runs["key"].isin(launched)]

    def mean(rows: pd.DataFrame, column: str) -> float | None:
        found = rows[column].astype(float).mean() if column in rows and len(rows) else np.nan
        return None if np.isnan(found) else float(found)

    return {
        "workers": min(own.trainings),
        "kb": _scale_or_none(1e-3, mean(trained, "wire_bytes")),
        "messages": mean(trained, "messages"),
        "density": _scale_or_none(100, mean(trained, "sent_density")),
        "waits": mean(epochs[epochs["key"].isin(keys)], "host_syncs"),
        "memory_mib": _scale_or_none(1024, mean(timed, "memory.host_gib")),
    }


def _tried_rates_text(each: EntryFile, task: str) -> str:
    """The range of the learning rates that were tried, and whether the best one lies at an end of it."""
    own, runs = each.statement.tasks[task], each.frames.runs
    rates = runs.loc[runs["key"].isin([trial.key for trial in own.trials]), "task.lr"].astype(float)
    ends = {float(rates.min()): "lowest", float(rates.max()): "highest"}
    at_end = f"; it is the {ends[own.lr]} of them" if own.lr in ends else ""
    return f"{format_number(rates.min())} to {format_number(rates.max())}{at_end}"


def _scale_or_none(unit: float, value: float | None) -> float | None:
    return None if value is None else unit * value


def entry_style(name: str, place: int) -> style.MethodStyle:
    """An entry's look: the method's in all figures, else one that its place gives."""
    if name in METHOD_BY_ENTRY:
        return style.method_style(METHOD_BY_ENTRY[name])._replace(label=name)
    return style.MethodStyle(
        name, OTHER_COLOURS[place % len(OTHER_COLOURS)], OTHER_MARKERS[place % len(OTHER_MARKERS)], ""
    )


def pareto_figure(cells: Sequence[Cell], tasks: Sequence[str], workers: Sequence[int]) -> plots.Figure:
    """Of a link: loss at the end of the budget against the hours that the budget takes; what no other is
    before in both is joined by a line.
    """
    names = list(dict.fromkeys(cell.entry for cell in cells))
    places = itertools.count()
    looks = {name: entry_style(name, 0 if name in METHOD_BY_ENTRY else next(places)) for name in names}
    panels = [
        _pareto_panel(
            [cell for cell in cells if (cell.task, cell.workers) == (task, size)],
            looks,
            f"{task}, {size} workers",
        )
        for size in workers
        for task in tasks
    ]  # fmt: skip
    return plots.compose_figure(
        panels, 2.2 * len(workers) + 1.0, rows=len(workers), ylabel="Loss at the end of the budget (nats)"
    )


@plots.panel_maker
def _pareto_panel(
    axes: plots.Axes, /, cells: Sequence[Cell], looks: Mapping[str, style.MethodStyle], title: str
) -> None:
    points = [(each.step_ms.value, each.loss.value, each) for each in cells if each.step_ms and each.loss]
    front, lowest = list[tuple[float, float]](), float("inf")
    for x, y, _ in sorted(points, key=lambda point: point[:2]):
        if y < lowest:
            lowest = y
            front.append((x, y))
    axes.plot(*zip(*front, strict=True), color="#BBBBBB", linewidth=0.8, zorder=0) if front else None
    for x, y, cell in points:
        own = looks[cell.entry]
        face = own.colour if cell.word != "misses the target" else "none"
        axes.plot([x], [y], own.marker, color=own.colour, markerfacecolor=face, ms=4.5, label=own.label)
    if cells:
        axes.axhline(cells[0].target, **plots.REFERENCE_LINE)
    axes.set(title=title, xscale="log", xlabel="Mean step (ms)")
    if not points:
        axes.set_xticks([])
        axes.set_xticks([], minor=True)
        axes.text(0.5, 0.5, "not timed", ha="center", transform=axes.transAxes)
        return
    low, high = axes.get_xlim()
    ticks = [tick for tick in STEP_MS_TICKS if low <= tick <= high]
    axes.set_xticks(ticks, labels=[format_number(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
