"""The benchmark's pages: static, for browsers that read them from a disk, and readable without scripts.

index.html           which link, which model, how good must it be: what is faster than dense there
link-NAME.html       loss over time, the frontier, performance profiles, and all cells of a link
entry-NAME.html      where a method wins and loses, what it costs, its laws and settings
rules.html, words.html
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from markdown_it import MarkdownIt
from markupsafe import Markup

from analysis import plots
from analysis.benchmark.cells import BASELINE, REPEATED_BASELINE, SHARES, Cell, aggregate_column
from analysis.benchmark.files import EntryFile
from analysis.benchmark.pictures import draw_loss_over_time, draw_performance_profiles
from analysis.benchmark.summaries import (
    PROFILE_SHARES,
    LevelSummary,
    count_decided,
    count_false_words,
    describe_best,
    find_frontier,
    summarize_level,
    time_factors_by_entry,
)
from analysis.pictures import style
from analysis.pictures.numbers import format_number, format_with_interval
from analysis.report.pages import SOURCE_FOLDER as REPORT
from analysis.site import NavigationLink, StaticSite

SOURCE_FOLDER = Path(__file__).parent
TEMPLATES = SOURCE_FOLDER / "templates"
MARKER_FILE = ".made-by-benchmark"  # without this file in it a folder is not replaced
MARK_BY_WORD: Mapping[str, tuple[str, str]] = {
    "baseline": ("·", "plain"), "faster": ("✓", "good"), "slower": ("✗", "bad"),
    "slower (censored)": ("✗", "bad"), "inconclusive": ("?", "middling"), "not reached": ("…", "plain"),
    "not timed": ("·", "plain"),
}  # fmt: skip
PROFILE_FACTORS = (1.0, 2.0, 4.0)  # of the table beside the picture


class LinkDescription(NamedTuple):
    """Texts on a link, for its page and the front page."""

    name: str
    title: str  # in words
    found: str  # rates, behind the title
    about: str  # what was asked for, and whose it is
    probed: str  # what probes found, in a sentence


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
    entries: Sequence[EntryFile]
    cells: Sequence[Cell]  # with words that are tested together
    links: Sequence[LinkDescription]
    tasks: Sequence[TaskDescription]
    workers: Sequence[int]
    claims_by_entry: Mapping[str, Sequence[EntryClaimRow]]
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
    for asset in (REPORT / "assets" / "report.css", TEMPLATES / "benchmark.css"):
        shutil.copy(asset, folder)
    navigation = [
        *(
            NavigationLink(f"link-{link.name}", f"link-{link.name}.html", link.title)
            for link in content.links
        ),
        NavigationLink("rules", "rules.html", "Rules"),
        NavigationLink("words", "words.html", "Words"),
    ]
    filters: dict[str, Callable[..., str]] = {
        "value": format_with_interval,
        "number": lambda value, digits=3: "" if value is None else format_number(value, digits),
        "percent": lambda share: f"{100 * share:.0f} %",
    }
    site = StaticSite(
        folder,
        TEMPLATES,
        "Benchmark",
        navigation,
        filters,
        title_suffix=f" \N{MIDDLE DOT} Benchmark, tier {content.tier}",
        marks=MARK_BY_WORD,
        content=content,
        shares=SHARES,
        link_titles={link.name: f"{link.title}{link.found}" for link in content.links},
    )
    for link in content.links:
        _write_link_page(site, content, link)
    for entry in content.entries:
        _write_entry_page(site, content, entry)
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    site.write_page("rules", text=Markup(markdown.render(_strip_links(content.rules))))
    meanings: list[tuple[str, str]] = msgspec.yaml.decode((SOURCE_FOLDER / "words.yaml").read_bytes())
    site.write_page("words", meanings=meanings)
    choices = [("all", "All models together", _choices(content, content.cells))]
    for task in content.tasks:
        own = [cell for cell in content.cells if cell.task == task.name]
        choices.append((task.name, task.about, _choices(content, own)))
    sentences = {link.name: _describe_link(_cells_of_link(content, link)) for link in content.links}
    false_words = count_false_words(content.cells)
    return site.write_page("index", choices=choices, sentences=sentences, false_words=false_words)


def _choices(
    content: BenchmarkPagesContent, cells: Sequence[Cell]
) -> list[tuple[LinkDescription, list[list[LevelSummary] | None]]]:
    """Return what is faster than the baseline by link and level; None where no task has the level."""
    rows = []
    for link in content.links:
        own = [cell for cell in cells if cell.link == link.name]
        columns = [
            summarize_level(own, share) if any(cell.level(share) for cell in own) else None
            for share in SHARES
        ]
        rows.append((link, columns))
    return rows


def _strip_links(rules: str) -> str:
    """Return the rules without what leads to other pages of the repository, and without anchors."""
    return re.sub(r"\[([^]]+)\]\((?!http)[^)]*\)", r"\1", re.sub(r"<a [^>]*></a>\s*", "", rules))


def _cells_of_link(content: BenchmarkPagesContent, link: LinkDescription) -> list[Cell]:
    return [cell for cell in content.cells if cell.link == link.name]


def _describe_link(cells: Sequence[Cell]) -> str:
    decided, total = count_decided(cells)
    return f"{describe_best(cells)} {decided} of {total} cells have a decision at some level."


def _write_link_page(site: StaticSite, content: BenchmarkPagesContent, link: LinkDescription) -> None:
    """Write a link's page and pictures."""
    cells = _cells_of_link(content, link)
    timed = [cell for cell in cells if cell.step_ms]
    if timed:
        tasks = [task.name for task in content.tasks]
        timed_workers = sorted({cell.workers for cell in timed})
        _save_svg(site, f"link-{link.name}", draw_loss_over_time(timed, tasks, timed_workers))
        _save_svg(site, f"profile-{link.name}", draw_performance_profiles(timed))
    tables = []
    for task in content.tasks:
        for workers in content.workers:
            rows = [cell for cell in cells if (cell.task, cell.workers) == (task.name, workers)]
            if rows:
                tables.append((task, workers, sort_by_speedup(rows), find_frontier(rows)))
    profiles: dict[str, list[str]] = {cell.entry: [] for cell in timed if cell.entry != REPEATED_BASELINE}
    for share in PROFILE_SHARES:
        factors = time_factors_by_entry(timed, share)
        for entry, counts in profiles.items():
            own = factors.get(entry, [])
            for limit in PROFILE_FACTORS:
                counts.append(f"{sum(factor <= limit for factor in own)} of {len(own)}")
    site.write_page(
        "link",
        f"link-{link.name}",
        link=link,
        sentence=_describe_link(cells),
        false_words=count_false_words(cells),
        tables=tables,
        pictured=bool(timed),
        profiles=profiles,
        profile_columns=[(share, limit) for share in PROFILE_SHARES for limit in PROFILE_FACTORS],
    )


def _save_svg(site: StaticSite, name: str, figure: plots.Figure) -> None:
    style.save_png_pdf_svg(figure, site.folder, name)
    for kind in ("png", "pdf"):
        (site.folder / f"{name}.{kind}").unlink()


def sort_by_speedup(cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells of one table: the baseline first, then by speedup at the highest levels."""

    def rank(cell: Cell) -> list[float]:
        speedups = [-level.speedup.value if level.speedup else 0.0 for level in reversed(cell.levels)]
        return [float(cell.entry != BASELINE), *speedups]

    return sorted(cells, key=rank)


def _write_entry_page(site: StaticSite, content: BenchmarkPagesContent, entry: EntryFile) -> None:
    """Write an entry's card."""
    statement = entry.statement
    cells = [cell for cell in content.cells if cell.entry == statement.name]
    words = {link.name: {share: list[str]() for share in SHARES} for link in content.links}
    for cell in cells:
        for level in cell.levels:
            words[cell.link][level.share].append(level.word)
    site.write_page(
        "entry",
        f"entry-{statement.name}",
        statement=statement,
        words=words,
        tables=[(link, [cell for cell in cells if cell.link == link.name]) for link in content.links],
        code_lines=sum(bool(line.strip()) for line in statement.code.splitlines()),
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
