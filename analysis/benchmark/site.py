"""The benchmark's pages: static, for browsers that read them from a disk, and readable without scripts.

index.html           what is compared, and every link with what became of it
link-NAME.html       a Pareto picture, and a table for each task and number of workers
entry-NAME.html      what a method does, its laws, settings and cells
cells.html           all cells, to be filtered
rules.html, words.html
"""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from markdown_it import MarkdownIt
from markupsafe import Markup

from analysis import plots
from analysis.benchmark.cells import CELL_WORDS, Cell, aggregate_column, select_and_sort_table_cells
from analysis.benchmark.files import EntryFile
from analysis.pictures import style
from analysis.pictures.links import describe_link
from analysis.pictures.numbers import format_number, format_with_interval
from analysis.report.pages import SOURCE_FOLDER as REPORT
from analysis.site import NavigationLink, StaticSite

SOURCE_FOLDER = Path(__file__).parent
TEMPLATES = SOURCE_FOLDER / "templates"
MARKER_FILE = ".made-by-benchmark"  # without this file in it a folder is not replaced
MARK_BY_WORD: Mapping[str, tuple[str, str]] = {
    "baseline": ("·", "plain"), "faster": ("✓", "good"), "slower": ("✗", "bad"),
    "inconclusive": ("?", "middling"), "misses the target": ("✗", "bad"), "not timed": ("·", "plain"),
}  # fmt: skip
# Entries of the repository that are drawn as the methods of these names are in all figures.
METHODS_WITH_STYLE = ("dense", "topk", "dgc", "gaussiank", "oktopk", "powersgd")
OTHER_COLOURS = (
    "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#882255", "#332288", "#44AA99", "#999933",
)  # fmt: skip
OTHER_MARKERS = "^vDhX*P<>dH8"
STEP_MS_TICKS = tuple(digit * 10**power for power in range(-1, 5) for digit in (1, 2, 5))  # ms


class LinkDescription(NamedTuple):
    """Texts on a link, beside its cells, for its page and the front page."""

    name: str
    about: str  # what was asked for, and whose it is
    probed: str  # what probes found


class EntryClaimRow(NamedTuple):
    """A number of an entry's paper, and what became of it here."""

    text: str
    paper: str
    ours: str
    word: str


class TaskDescription(NamedTuple):
    """A task and what it trains."""

    name: str
    about: str


class BenchmarkPagesContent(NamedTuple):
    """The content of the benchmark's pages: entries with their cells, and texts."""

    tier: str
    version: int
    entries: Sequence[EntryFile]
    cells: Sequence[Cell]
    links: Sequence[LinkDescription]
    tasks: Sequence[TaskDescription]
    workers: Sequence[int]
    claims_by_entry: Mapping[str, Sequence[EntryClaimRow]]
    composition_note: str  # what composing is worth, in a sentence
    rules: str  # Markdown
    notes: Sequence[str] = ()  # on what could not be shown


def write_site_replacing_folder(folder: Path, content: BenchmarkPagesContent) -> Path:
    """Replace the folder by the benchmark's pages, and return the path of the first one.

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
    for asset in (REPORT / "assets" / "report.css", TEMPLATES / "benchmark.css", TEMPLATES / "cells.js"):
        shutil.copy(asset, folder)
    titles = {"cells": "All cells", "rules": "Rules", "words": "Words"}
    navigation = [
        *(
            NavigationLink(f"link-{link.name}", f"link-{link.name}.html", describe_link(link.name))
            for link in content.links
        ),
        *(NavigationLink(page, f"{page}.html", title) for page, title in titles.items()),
    ]
    filters: dict[str, Callable[..., Any]] = {
        "link_words": describe_link,
        "value": format_with_interval,
        "number": lambda value: "" if value is None else format_number(value),
    }
    site = StaticSite(
        folder,
        TEMPLATES,
        "Benchmark",
        navigation,
        filters,
        title_suffix=f" \N{MIDDLE DOT} Benchmark v{content.version}, tier {content.tier}",
        marks=MARK_BY_WORD,
        content=content,
        words=CELL_WORDS,
    )
    for link in content.links:
        _write_link_page(site, content, link)
    for entry in content.entries:
        _write_entry_page(site, content, entry)
    site.write_page("cells", cells=_sort_cells(content.cells))
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    site.write_page("rules", text=Markup(markdown.render(_strip_links(content.rules))))
    meanings: list[tuple[str, str]] = msgspec.yaml.decode((SOURCE_FOLDER / "words.yaml").read_bytes())
    site.write_page("words", meanings=meanings)
    counts: dict[str, dict[str, int]] = {}
    for link in content.links:
        words = Counter(cell.word for cell in content.cells if cell.link == link.name)
        counts[link.name] = {word: words[word] for word in CELL_WORDS if words[word]}
    best = {
        entry.statement.name: Counter(
            cell.word for cell in content.cells if cell.entry == entry.statement.name
        )
        for entry in content.entries
    }
    return site.write_page("index", counts=counts, best=best)


def _strip_links(rules: str) -> str:
    """Return the rules without what leads to other pages of the repository, and without anchors."""
    return re.sub(r"\[([^]]+)\]\((?!http)[^)]*\)", r"\1", re.sub(r"<a [^>]*></a>\s*", "", rules))


def _sort_cells(cells: Sequence[Cell]) -> list[Cell]:
    return sorted(cells, key=lambda cell: (cell.link, cell.task, cell.workers, cell.word != "baseline"))


def _write_link_page(site: StaticSite, content: BenchmarkPagesContent, link: LinkDescription) -> None:
    """Write a link's page and picture."""
    cells = [cell for cell in content.cells if cell.link == link.name]
    timed = [cell for cell in cells if cell.step_ms and cell.loss]
    page = f"link-{link.name}"
    if timed:
        figure = draw_pareto_figure(timed, [task.name for task in content.tasks], content.workers)
        style.save_png_pdf_svg(figure, site.folder, page)
        for kind in ("png", "pdf"):
            (site.folder / f"{page}.{kind}").unlink()
    tables = []
    for task in content.tasks:
        for workers in content.workers:
            rows = select_and_sort_table_cells(cells, task.name, workers, link.name)
            if rows:
                tables.append((task, workers, rows))
    site.write_page("link", page, link=link, tables=tables, pictured=bool(timed))


def _write_entry_page(site: StaticSite, content: BenchmarkPagesContent, entry: EntryFile) -> None:
    """Write an entry's card."""
    statement = entry.statement
    site.write_page(
        "entry",
        f"entry-{statement.name}",
        statement=statement,
        cells=_sort_cells([cell for cell in content.cells if cell.entry == statement.name]),
        facts={name: _task_facts(entry, name) for name in statement.tasks},
        tried_rates={name: _tried_rates_text(entry, name) for name in statement.tasks},
        claims=content.claims_by_entry.get(statement.name, ()),
    )


def _task_facts(entry: EntryFile, task: str) -> dict[str, float | None]:
    """Return the costs of an entry on a task: means over trainings with the fewest workers, or launches."""
    statement = entry.statement.tasks[task]
    fewest_workers = min(statement.trainings)
    training_keys = statement.trainings[fewest_workers]
    launch_keys = [key for links in statement.launches.values() for keys in links.values() for key in keys]
    runs = entry.frames.runs
    epochs = entry.frames.epochs
    trainings = runs[runs["key"].isin(training_keys)]
    launches = runs[runs["key"].isin(launch_keys)]
    return {
        "workers": fewest_workers,
        "kb": aggregate_column(trainings, "wire_bytes", factor=1e-3),
        "messages": aggregate_column(trainings, "messages"),
        "density": aggregate_column(trainings, "sent_density", factor=100),
        "waits": aggregate_column(epochs[epochs["key"].isin(training_keys)], "host_syncs"),
        "memory_mib": aggregate_column(launches, "memory.host_gib", factor=1024),
    }


def _tried_rates_text(entry: EntryFile, task: str) -> str:
    """Return the range of the learning rates that were tried, and whether the best lies at its end."""
    statement = entry.statement.tasks[task]
    runs = entry.frames.runs
    rates = runs.loc[runs["key"].isin([trial.key for trial in statement.trials]), "task.lr"].astype(float)
    ends = {float(rates.min()): "lowest", float(rates.max()): "highest"}
    at_end = f"; it is the {ends[statement.lr]} of them" if statement.lr in ends else ""
    return f"{format_number(rates.min())} to {format_number(rates.max())}{at_end}"


def entry_method_style(name: str, place: int) -> style.MethodStyle:
    """Return an entry's style: the method's in all figures, else one by its place among other entries."""
    if name in METHODS_WITH_STYLE:
        return style.method_style(name)._replace(label=name)
    return style.MethodStyle(
        name, OTHER_COLOURS[place % len(OTHER_COLOURS)], OTHER_MARKERS[place % len(OTHER_MARKERS)], ""
    )


def draw_pareto_figure(cells: Sequence[Cell], tasks: Sequence[str], workers: Sequence[int]) -> plots.Figure:
    """Return a picture of a link: loss at the end of the budget against the mean step.

    A line joins the entries than which no other is better in both.
    """
    places = itertools.count()
    names = dict.fromkeys(cell.entry for cell in cells)
    styles = {
        name: entry_method_style(name, 0 if name in METHODS_WITH_STYLE else next(places)) for name in names
    }
    panels = []
    for size in workers:
        for task in tasks:
            shown = [cell for cell in cells if (cell.task, cell.workers) == (task, size)]
            panels.append(_pareto_panel(shown, styles, f"{task}, {size} workers"))
    return plots.compose_figure(
        panels, 2.2 * len(workers) + 1.0, num_rows=len(workers), ylabel="Loss at the end of the budget (nats)"
    )


@plots.panel_maker
def _pareto_panel(
    axes: plots.Axes, /, cells: Sequence[Cell], styles: Mapping[str, style.MethodStyle], title: str
) -> None:
    points = [(cell.step_ms.value, cell.loss.value, cell) for cell in cells if cell.step_ms and cell.loss]
    front = list[tuple[float, float]]()
    for x, y, _ in sorted(points, key=lambda point: point[:2]):
        if y < (front[-1][1] if front else math.inf):
            front.append((x, y))
    if front:
        axes.plot(*zip(*front, strict=True), color="#BBBBBB", linewidth=0.8, zorder=0)
    for x, y, cell in points:
        look = styles[cell.entry]
        face = look.colour if cell.word != "misses the target" else "none"
        axes.plot([x], [y], look.marker, color=look.colour, markerfacecolor=face, ms=4.5, label=look.label)
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
