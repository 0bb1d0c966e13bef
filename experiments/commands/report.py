from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from analysis.records import parquet
from analysis.records.attempts import from_attempts
from analysis.records.files import Damaged
from analysis.records.frames import Frames, empty
from analysis.records.store import DAMAGED, Attempt
from analysis.report import pages
from analysis.report.content import Item, facts
from analysis.report.runs import HERE, SHIPPED, RunPage, of_frames, page_id
from experiments import figures
from experiments.commands._draw import OWN, Stored, draw, stored
from experiments.commands._find import last_lines, log_files
from experiments.commands._make import say
from experiments.config.folders import Folders
from sparsify.methods import REGISTRY as METHODS
from sparsify.spec import BrokenFile

GROUP = "results"
KINDS = ("svg", "pdf", "png", "csv", "tex", "md")  # of a figure's files, in the order of their links
BATCH = 250  # runs whose steps are in memory at a time


def report(*, drawn: bool = False) -> int:
    """Pages on every figure, verdict and run, to read in a browser; needs no torch (make report).

    From stored records, this checkout's first. Pictures that are not there yet, or are older than their
    records, are drawn.

    Args:
        drawn: draw none, and show the pictures that are there: in seconds.
    """
    print(write_report(Folders(), draws=not drawn))
    return 0


def write_report(folders: Folders, draws: bool = True) -> Path:
    """Write all pages; returns the first one.

    Args:
        draws: the figures whose picture is not there, or older than its records.
    """
    site, notes = pages.Site(folders.report), list[str]()
    shipped = _shipped(folders, notes)
    items = [*_items(folders, shipped, draws)]
    site.begin()
    runs = list[RunPage]()
    of_runs = {
        key: tuple(item.stem for item in items if key in item.runs) for item in items for key in item.runs
    }
    for run in every_run(folders, shipped, of_runs):
        site.data(f"run/{run.id}", run.details())
        runs.append(replace(run, parts={}, provenance={}, logs=()))  # ten thousand are no burden
        if run.state == DAMAGED:
            notes.append(f"{run.run}: {run.why}")
    return pages.write(site, items, [*_methods()], notes, runs)


def _shipped(folders: Folders, notes: list[str]) -> Frames:
    try:
        return parquet.read_parquet(folders.shipped)
    except Damaged as damage:
        notes.append(str(damage))
        return empty()


def _methods() -> Iterator[pages.MethodCard]:
    for name in METHODS.names():
        why = METHODS.why_broken(name)
        summary = "" if why else METHODS.docstring(name).partition("\n\n")[0]
        yield name, " ".join(summary.split()), why


def _items(folders: Folders, shipped: Frames, draws: bool) -> Iterator[Item]:
    """Every figure that can be drawn; of one that fails, why."""
    for item in figures.items():
        try:
            title, profiles = figures.load(item).TITLE, figures.profiles(item)
        except BrokenFile as broken:
            yield Item(item, figures.file_name(item), "Its file is broken", damage=str(broken))
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
                yield Item(item, figures.stem(item, profile), title, source=found.source, damage=why)


def _item(item: str, profile: str, title: str, found: Stored, folders: Folders, draws: bool) -> Item:
    frames, stem = found.frames, figures.stem(item, profile)
    if draws and not _is_newer(folders.figures / f"{stem}.svg", _sources(item, profile, folders)):
        draw(item, profile, frames, folders.figures, found.source, found.notes)
    return Item(
        name=item,
        stem=stem,
        title=title,
        caption=figures.caption(item, frames, profile),
        source=found.source,
        remarks=found.notes,
        commands=_making(item, profile),
        facts=facts(frames),
        judged=tuple(figures.judge(item, frames)),
        tables=tuple(figures.tables(item, frames)),
        files=_files(stem, found, folders),
        bibtex=figures.bibtex(item),
        runs=tuple(frames.runs["key"]),
    )


def _files(stem: str, found: Stored, folders: Folders) -> dict[str, Path]:
    """The files of a figure by kind: those drawn here, else those that are shipped with their records."""
    sources = [folders.figures] + [folders.shipped / "figures"] * (found.source != OWN)
    here = next((folder for folder in sources if (folder / f"{stem}.png").is_file()), folders.figures)
    paths = {kind: here / f"{stem}.{kind}" for kind in KINDS}
    return {kind: path for kind, path in paths.items() if path.is_file()}


def _making(item: str, profile: str) -> tuple[str, ...]:
    """Commands that make a figure again: from stored records, and from the first step on."""
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
    """Whether a file was written after all of these, as make sees it."""
    try:
        written = path.stat().st_mtime_ns
        return all(source.stat().st_mtime_ns <= written for source in sources)
    except FileNotFoundError:
        return False


def every_run(folders: Folders, shipped: Frames, items: Mapping[str, tuple[str, ...]]) -> Iterator[RunPage]:
    """Every run once: where this machine has its record, that one.

    Args:
        items: by the key of a run, the figures that are drawn from it.
    """
    seen = set[str]()
    for run in (*_own(folders), *of_frames(shipped, SHIPPED)):
        if run.id not in seen:
            seen.add(run.id)
            yield replace(run, items=items.get(run.key, ()), commands=_commands(run))


def _own(folders: Folders) -> Iterator[RunPage]:
    """This machine's runs, many read together, which takes a fifth of the time of one by one."""
    every = folders.store.runs()
    for names in (every[first : first + BATCH] for first in range(0, len(every), BATCH)):
        valid = {name: attempt for name in names if (attempt := folders.store.newest_valid(name))}
        frames, notes = from_attempts(valid.values())
        found = defaultdict[str, list[RunPage]](list)
        for run in of_frames(frames, HERE):
            found[run.run].append(run)
        for name in names:
            attempts = folders.store.attempts(name)
            if name in found:
                told = [note for note in notes if valid[name].name in note]
                newer = [f"a newer attempt is {attempts[-1].state}"] * (attempts[-1] != valid[name])
                why = "; ".join([*told, *folders.store.faults(name), *newer])
                yield from (replace(run, why=why) for run in found[name])
            elif attempts:
                shown = valid.get(name, attempts[-1])
                yield _unfinished(shown, folders, shown.fault(verify=True) or "")


def _unfinished(attempt: Attempt, folders: Folders, fault: str) -> RunPage:
    """One that does not count, or not yet: why, and the end of its logs."""
    state = DAMAGED if fault else attempt.state
    manifest = {} if attempt.state == DAMAGED else attempt.manifest
    try:
        config, key = attempt.config, attempt.key
    except Damaged as damage:
        state, fault, config, key = DAMAGED, fault or damage.brief, {}, ""
        say(f"{attempt.name} is shown as damaged: {damage.brief}")
    logs = tuple({"name": log.name, "lines": last_lines(log)} for log in log_files(attempt, folders))
    return RunPage(
        id=page_id(attempt.run_id, key),
        run=attempt.run_id,
        origin=HERE,
        state=state,
        config=config,
        key=key,
        why=fault or str(manifest.get("why") or ""),
        started=str(manifest.get("started") or ""),
        simulated=bool(manifest.get("simulated")),
        logs=logs,
    )


def _commands(run: RunPage) -> tuple[str, ...]:
    words = ["why"] * (run.origin == HERE) + ["trace"] * bool(run.parts.get("timeline"))
    return tuple(f"python -m experiments {word} {shlex.quote(run.run)}" for word in words)
