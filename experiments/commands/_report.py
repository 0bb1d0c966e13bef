"""Gathers what the report shows: every figure that stored records suffice for, and every run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from analysis import parquet, verdicts
from analysis.files import Damaged
from analysis.frames import Frames, empty
from analysis.records import DAMAGED
from analysis.report import content, pages
from analysis.report.runs import Run
from experiments import figures
from experiments.commands._draw import OWN, Stored, draw, stored
from experiments.commands._make import say
from experiments.commands._report_runs import every_run
from experiments.config.folders import Folders
from sparsify.methods import REGISTRY as METHODS
from sparsify.registry import BrokenFile

KINDS = ("svg", "pdf", "png", "csv", "tex", "md")  # of a figure's files, in the order of their links


def write_report(folders: Folders, draws: bool = True) -> Path:
    """Write all pages; returns the first one.

    Args:
        draws: the figures whose picture is not there, or older than its records.
    """
    notes = list[str]()
    shipped = _shipped(folders, notes)
    items, rows = list[content.Item](), list[verdicts.Row]()
    for item, judged in _items(folders, shipped, draws):
        items.append(item)
        rows += judged
    site = pages.Site(folders.report)
    site.begin()
    runs = list[Run]()
    of_runs = {
        key: tuple(item.stem for item in items if key in item.runs) for item in items for key in item.runs
    }
    for run in every_run(folders, shipped, of_runs):
        site.run(run)
        runs.append(replace(run, parts={}, provenance={}, logs=()))  # ten thousand are no burden
        if run.state == DAMAGED:
            notes.append(f"{run.run}: {run.why}")
    found = content.Report(tuple(items), verdicts.counts(rows), tuple(_methods()), tuple(notes))
    return pages.write(site, found, runs)


def _shipped(folders: Folders, notes: list[str]) -> Frames:
    try:
        return parquet.read_parquet(folders.shipped)
    except Damaged as damage:
        notes.append(str(damage))
        return empty()


def _methods() -> Iterator[content.Method]:
    for name in METHODS.names():
        why = METHODS.why_broken(name)
        summary = "" if why else METHODS.docstring(name).partition("\n\n")[0]
        yield content.Method(name, " ".join(summary.split()), why)


def _items(
    folders: Folders, shipped: Frames, draws: bool
) -> Iterator[tuple[content.Item, list[verdicts.Row]]]:
    """Every figure that can be drawn, with its verdicts; of one that fails, why."""
    for item in figures.items():
        try:
            title, profiles = figures.load(item).TITLE, figures.profiles(item)
        except BrokenFile as broken:
            yield content.Item(item, figures.file_name(item), "Its file is broken", damage=str(broken)), []
            continue
        for profile in profiles:
            found = stored(item, profile, folders, shipped)
            if found is None:
                continue
            try:
                yield _item(item, profile, title, found, folders, draws)
            except Exception as error:  # what a figure's file does may raise anything, and stops no other
                why = f"{type(error).__name__}: {error}"
                say(f"{item} ({profile}) is left out: {why}")
                stem = figures.stem(item, profile)
                yield content.Item(item, stem, title, source=found.source, damage=why), []


def _item(
    item: str, profile: str, title: str, found: Stored, folders: Folders, draws: bool
) -> tuple[content.Item, list[verdicts.Row]]:
    frames, stem = found.frames, figures.stem(item, profile)
    if draws and not _is_newer(folders.figures / f"{stem}.svg", _sources(item, profile, folders)):
        draw(item, profile, frames, folders.figures, found.source, found.notes)
    rows = [(item, verdict) for verdict in figures.judge(item, frames)]
    return content.Item(
        name=item,
        stem=stem,
        title=title,
        caption=figures.caption(item, frames, profile),
        source=found.source,
        remarks=found.notes,
        commands=_commands(item, profile),
        facts=content.facts(frames),
        judged=content.judged(rows),
        tables=tuple(figures.tables(item, frames)),
        files=_files(stem, found, folders),
        bibtex=figures.bibtex(item),
        runs=tuple(frames.runs["key"]),
    ), rows


def _files(stem: str, found: Stored, folders: Folders) -> dict[str, Path]:
    """The files of a figure by kind: those drawn here, else those that are shipped with their records."""
    sources = [folders.figures] + [folders.shipped / "figures"] * (found.source != OWN)
    here = next((folder for folder in sources if (folder / f"{stem}.png").is_file()), folders.figures)
    paths = {kind: here / f"{stem}.{kind}" for kind in KINDS}
    return {kind: path for kind, path in paths.items() if path.is_file()}


def _commands(item: str, profile: str) -> tuple[str, ...]:
    """What makes a figure again: from stored records, and from the first step on."""
    drawn = f"python -m experiments figures {item}"
    if profile == figures.PUBLISHED:
        return (drawn,)
    return drawn, f"python -m experiments reproduce {item} profile={profile}"


def _sources(item: str, profile: str, folders: Folders) -> list[Path]:
    """The files that a picture follows from: its records, and its own code."""
    own = folders.index / f"{figures.stem(item, profile)}.json"
    records = [own, *folders.store.root.glob("*/*/run.json")] if own.is_file() else []
    code = Path(str(figures.load(item).__file__))
    return [*records, *folders.shipped.glob("*.parquet"), code]


def _is_newer(path: Path, sources: list[Path]) -> bool:
    """As make sees it: was it written after all of these?"""
    try:
        written = path.stat().st_mtime_ns
        return all(source.stat().st_mtime_ns <= written for source in sources)
    except FileNotFoundError:
        return False
