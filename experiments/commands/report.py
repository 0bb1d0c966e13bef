from __future__ import annotations

import gc
import hashlib
import json
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import msgspec

from analysis.records import parquet
from analysis.records.attempts import load_attempts, split_into_batches
from analysis.records.files import NO_LINK, DamagedFileError, is_plain_file
from analysis.records.frames import Frames, empty_frames
from analysis.records.schema import DIVERGED, DONE
from analysis.records.store import DAMAGED, Attempt
from analysis.report import pages
from analysis.report.content import (
    Finding,
    HtmlTable,
    ItemPage,
    JudgedClaim,
    SupportingClaim,
    describe_provenance,
)
from analysis.report.runs import SHIPPED, THIS_MACHINE, RunPage, page_id, run_pages
from experiments import figures
from experiments.commands._drawing import (
    OWN_RUNS,
    FigureRecords,
    call_in_parallel,
    find_records,
    is_up_to_date,
    picture_sources,
)
from experiments.commands._findings import findings
from experiments.commands._messages import iterate_with_progress, repeat_until_interrupted, say
from experiments.commands._named_runs import find_logs, query_statuses, read_last_lines
from experiments.config import code_version
from experiments.config.folders import ResultFolders
from experiments.figures.figure import Figure, file_prefix
from experiments.launch.status import RunStatus
from sparsify.core.spec import BrokenFile
from sparsify.methods import REGISTRY as METHODS

GROUP = "results"
KINDS = ("svg", "pdf", "png", "csv", "tex", "md")  # of a figure's files, in the order of their links
SHIPPED_RUN_ROWS = "runs-shipped"  # names of rows that the report's folder keeps
OWN_RUN_ROWS = "runs-here"


def report(*, drawn: bool = False, follow: bool = False) -> int:
    """Pages on every figure, verdict and run, to read in a browser; needs no torch (make report).

    From stored records, this checkout's first. Pictures of its runs that are not there yet, or are older than
    their records, are drawn. Others are those that are shipped, unless `figures` has drawn them since.

    Args:
        drawn: draw none, and show the pictures that are there: in seconds.
        follow: go on until Ctrl-C, and write it again when a run has begun or ended; open pages show that.
    """
    # What is read stays, and none of it is in a circle: looking through it again and again takes a sixth.
    gc.set_threshold(100_000, 50, 100)
    folders = ResultFolders()
    seen = _states(folders) if follow else []
    print(write_report(folders, draws=not drawn), flush=True)

    def look() -> None:
        nonlocal seen
        if (now := _states(folders)) != seen:
            seen = now
            write_report(folders, draws=not drawn)

    if follow:
        repeat_until_interrupted(look)
    return 0


def _states(folders: ResultFolders) -> list[object]:
    """What changes when a run begins or ends, or a figure is drawn."""
    return [
        _stat(path)
        for place in (folders.store.root.glob("*/*/run.json"), folders.figures.glob("*.png"))
        for path in sorted(place)
    ]


def write_report(folders: ResultFolders, draws: bool = True) -> Path:
    """Write all pages; returns the first one. What has not changed since the last report is not made again.

    Args:
        draws: pictures of this checkout's runs that are not there, or older than their records.
    """
    site, notes = pages.ReportSite(folders.report), list[str]()
    shipped = Shipped(folders, notes)
    items = _items(site, folders, shipped, draws)
    of_runs = {
        key: tuple(item.stem for item in items if key in item.runs) for item in items for key in item.runs
    }
    made_from = _digest([shipped.made_from, sorted(of_runs.items())])
    own = {
        name: _digest([*map(_stat, _files_of(folders.store.root / name))]) for name in folders.store.run_ids()
    }
    # Of what this machine has made, too, the pages are of its own records.
    known = [(digest, run) for digest, run in _known(site, SHIPPED_RUN_ROWS, made_from) if run.run not in own]
    whole = [
        (digest, run) for digest, run in _known(site, OWN_RUN_ROWS, made_from) if own.get(run.run) == digest
    ]
    known, whole = (rows if site.has_runs([run.id for _, run in rows]) else [] for rows in (known, whole))
    site.begin([run.id for _, run in (*known, *whole)])
    here, seen = [run for _, run in whole], {run.id for _, run in whole}
    for run in _own(folders, [name for name in own if name not in {run.run for run in here}]):
        if run.id not in seen:
            seen.add(run.id)
            here.append(_written(site, run, of_runs))
            if run.state == DAMAGED:
                notes.append(f"{run.run}: {run.why}")
    theirs = [run for _, run in known] or [
        _written(site, run, of_runs, seen) for run in run_pages(shipped.frames, SHIPPED)
    ]
    if shipped.is_whole and not known:
        _keep(site, SHIPPED_RUN_ROWS, made_from, [("", run) for run in theirs])
    # Of the others the logs may tell more, which lie elsewhere.
    _keep(
        site, OWN_RUN_ROWS, made_from, [(own[run.run], run) for run in here if run.state in (DONE, DIVERGED)]
    )
    runs = [*here, *(run for run in theirs if run.id not in seen)]
    return pages.write_pages(site, items, [*_methods()], notes, runs, [*_found(items)])


def _known(site: pages.ReportSite, name: str, made_from: str) -> list[tuple[str, RunPage]]:
    """The rows of an earlier report, each with the digest of what it was made from besides."""
    return site.kept(name, made_from, list[tuple[str, RunPage]]) or []


def _keep(site: pages.ReportSite, name: str, made_from: str, rows: Sequence[tuple[str, RunPage]]) -> None:
    site.keep(name, made_from, [(digest, msgspec.to_builtins(run)) for digest, run in rows])


class Shipped:
    """The records that the repository carries, read when they are first asked for."""

    def __init__(self, folders: ResultFolders, notes: list[str]) -> None:
        self.folders, self.notes, self.is_whole = folders, notes, True

    @cached_property
    def frames(self) -> Frames:
        """No runs where they are damaged, which is noted."""
        try:
            return parquet.read_parquet(self.folders.shipped)
        except DamagedFileError as damage:
            self.notes.append(str(damage))
            self.is_whole = False
            return empty_frames()

    @cached_property
    def made_from(self) -> str:
        """A digest that changes where they do, or the code."""
        return _digest(
            [code_version.code_digest(), *map(_stat, sorted(self.folders.shipped.glob("*.parquet")))]
        )


def _written(
    site: pages.ReportSite, run: RunPage, items: Mapping[str, tuple[str, ...]], seen: Collection[str] = ()
) -> RunPage:
    """The row of a run whose page's data are written, unless this machine's record of it has one."""
    run = replace(run, items=items.get(run.key, ()), commands=_commands(run))
    if run.id not in seen:
        site.data(f"{pages.RUN}/{run.id}", run.details())
    return replace(run, parts={}, provenance={}, logs=())  # ten thousand are no burden


def _found(items: Sequence[ItemPage]) -> Iterator[Finding]:
    """The findings whose pictures are there, each with those of its claims that are judged here."""
    by_stem = {item.stem: item for item in items if item.files}
    for finding in findings():
        if finding.picture not in by_stem:
            continue
        told = [
            SupportingClaim(claim.short, judged, by_stem[claim.page])
            for claim in finding.claims
            if claim.page in by_stem
            for judged in by_stem[claim.page].judged
            if judged.id == claim.claim
        ]
        yield Finding(finding.says, by_stem[finding.picture], tuple(told))


def _methods() -> Iterator[pages.MethodCard]:
    for name in METHODS.names():
        why = METHODS.reason_unreadable(name)
        summary = "" if why else METHODS.docstring(name).partition("\n\n")[0]
        yield name, " ".join(summary.split()), why


def _items(site: pages.ReportSite, folders: ResultFolders, shipped: Shipped, draws: bool) -> list[ItemPage]:
    """Every figure that can be drawn; of one that fails, why."""
    found = dict[tuple[str, str], list[ItemPage] | None]()  # None: to be made
    loaded = dict[str, Figure]()
    for item in figures.items_in_reading_order():
        try:
            figure = loaded[item] = figures.load(item)
        except BrokenFile as broken:
            found[item, ""] = [
                ItemPage(
                    item,
                    file_prefix(item),
                    "Its file is broken",
                    damage=str(broken),
                    paper=figures.paper_label(item),
                )
            ]
            continue
        for profile in figure.profiles:
            _tell_links(figure.stem(profile), folders)
            made_from = _made_from(figure, profile, folders, shipped)
            rows = site.kept(figure.stem(profile), made_from, list[ItemPage])
            is_known = rows is not None and all(_is_page_of(row, figure, profile, folders) for row in rows)
            found[item, profile] = rows if is_known else None
    todo = [(loaded[item], profile) for (item, profile), known in found.items() if known is None]
    calls = (
        partial(_item_or_why, *picture, find_records(*picture, folders, shipped.frames), folders, draws)
        for picture in todo
    )
    pictures = iterate_with_progress(todo, "figures")
    for (figure, profile), made in zip(pictures, call_in_parallel(calls, len(todo)), strict=True):
        found[figure.name, profile] = own = [made] if made else []
        if made and made.damage:
            say(f"{figure.name} ({profile}) is left out: {made.damage}")
        elif made or shipped.is_whole:
            made_from = _made_from(figure, profile, folders, shipped)  # a picture may have been drawn
            site.keep(figure.stem(profile), made_from, [*map(msgspec.to_builtins, own)])
        parquet.release_arrow_memory()
    return [item for known in found.values() for item in known or ()]


def _tell_links(stem: str, folders: ResultFolders) -> None:
    """Say which files of a figure are links, and so are left out."""
    for kind in KINDS:
        path = folders.figures / f"{stem}.{kind}"
        if path.is_symlink():
            say(f"{path} is left out: it {NO_LINK}")


def _is_page_of(row: ItemPage, figure: Figure, profile: str, folders: ResultFolders) -> bool:
    """Tell whether a row that was kept is of this figure, and names its files: others are never copied."""
    stem = figure.stem(profile)
    places = (folders.figures, folders.shipped / "figures")
    own = {str(folder / f"{stem}.{kind}") for folder in places for kind in KINDS}
    are_plain = all(is_plain_file(Path(path)) for path in row.files.values())
    return (row.name, row.stem) == (figure.name, stem) and own >= {*row.files.values()} and are_plain


def _item_or_why(
    figure: Figure, profile: str, found: FigureRecords | None, folders: ResultFolders, draws: bool
) -> ItemPage | None:
    """A figure, or why it fails; None of one without records."""
    if found is None:
        return None
    try:
        return _item(figure, profile, found, folders, draws)
    except Exception as error:  # what a figure's file does may raise anything, and stops no other
        why = f"{type(error).__name__}: {error}"
        stem, paper = figure.stem(profile), figures.paper_label(figure.name)
        return ItemPage(figure.name, stem, figure.title, source=found.source, damage=why, paper=paper)


def _item(
    figure: Figure, profile: str, found: FigureRecords, folders: ResultFolders, draws: bool
) -> ItemPage:
    frames, stem = found.frames, figure.stem(profile)
    is_drawn, theirs = is_up_to_date(figure, profile, folders), folders.shipped / "figures"
    is_shipped = found.source != OWN_RUNS and (theirs / f"{stem}.png").is_file()
    if draws and not (is_drawn or is_shipped):
        render_figure(figure, profile, found, folders.figures)
    folder = theirs if is_shipped and not is_drawn else folders.figures
    return ItemPage(
        name=figure.name,
        stem=stem,
        title=figure.title,
        caption=figure.caption(frames, profile),
        source=found.source,
        remarks=found.notes,
        commands=_making(figure.name, profile),
        facts=describe_provenance(frames),
        judged=tuple(map(JudgedClaim.of, figure.judge(frames))),
        tables=tuple(HtmlTable(table.title, table.to_html()) for table in figure.tables(frames)),
        files={kind: str(path) for kind in KINDS if is_plain_file(path := folder / f"{stem}.{kind}")},
        bibtex=figure.bibtex,
        runs=tuple(frames.runs["key"]),
        paper=figures.paper_label(figure.name),
    )


def _made_from(figure: Figure, profile: str, folders: ResultFolders, shipped: Shipped) -> str:
    """A digest that changes where an item's page does: its records, its files, the code."""
    stem = figure.stem(profile)
    folders_of_files = (folders.figures, folders.shipped / "figures")
    drawn = [
        path
        for folder in folders_of_files
        for kind in KINDS
        if is_plain_file(path := folder / f"{stem}.{kind}")
    ]
    index = folders.shipped / "figures" / f"{stem}.json"
    return _digest(
        [shipped.made_from, *map(_stat, [*picture_sources(figure, profile, folders), *drawn, index])]
    )


def _files_of(run: Path) -> list[Path]:
    """The attempts of a run and what is in their folders; what lies deeper is no part of a record."""
    return sorted([*run.glob("*"), *run.glob("*/*")])


def _stat(path: Path) -> tuple[str, int, int]:
    """What changes with a file, as make sees it."""
    try:
        found = path.stat()
    except OSError:  # it is not there, or a link that leads nowhere
        return str(path), 0, 0
    return str(path), found.st_mtime_ns, found.st_size


def _digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _making(item: str, profile: str) -> tuple[str, ...]:
    """Commands that make a figure again: from stored records, and from the first step on."""
    drawn = f"python -m experiments figures {item}"
    if profile == figures.PUBLISHED:
        return (drawn,)
    return drawn, f"python -m experiments reproduce {item} profile={profile}"


def _own(folders: ResultFolders, every: Sequence[str]) -> Iterator[RunPage]:
    """These runs of this machine, many read together, which takes a fifth of the time of one by one."""
    for names in iterate_with_progress([*split_into_batches(folders.store, every)], "batches of runs"):
        valid = {name: attempt for name in names if (attempt := folders.store.find_newest_valid(name))}
        frames, notes = load_attempts(valid.values())
        found = defaultdict[str, list[RunPage]](list)
        for run in run_pages(frames, THIS_MACHINE):
            found[run.run].append(run)
        all_of = {name: attempts for name in names if (attempts := folders.store.attempts(name))}
        newest = query_statuses(
            [attempts[-1] for name, attempts in all_of.items() if attempts[-1] != valid.get(name)], folders
        )
        for name, attempts in all_of.items():
            if name in found:
                told = [note for note in notes if valid[name].name in note]
                newer = newest.get(attempts[-1])
                told += [
                    *folders.store.describe_damaged(name),
                    *(["an older attempt is done, whose numbers these are"] if newer else []),
                ]
                why = "; ".join(told)
                for run in found[name]:  # as `list` and `status` have it, it is what its newest attempt is
                    yield replace(run, why=why, state=newer.display_state if newer else run.state)
            else:
                attempt = valid.get(name, attempts[-1])
                fault = attempt.find_fault(verify=True) or next(
                    (note for note in notes if attempt.name in note), ""
                )
                status = RunStatus("failed", fault, DAMAGED) if fault else newest[attempt]
                yield _unfinished(attempt, folders, status)


def _unfinished(attempt: Attempt, folders: ResultFolders, status: RunStatus) -> RunPage:
    """One that does not count, or not yet: why, and the end of its logs."""
    manifest = {} if attempt.state == DAMAGED else attempt.manifest
    try:
        config, key = attempt.config, attempt.key
    except DamagedFileError as damage:
        status, config, key = RunStatus("failed", status.why or damage.brief, DAMAGED), {}, ""
        say(f"{attempt.name} is shown as damaged: {damage.brief}")
    logs = tuple({"name": log.name, "lines": read_last_lines(log)} for log in find_logs(attempt, folders))
    return RunPage(
        id=page_id(attempt.run_id, key),
        run=attempt.run_id,
        origin=THIS_MACHINE,
        state=status.display_state,
        config=config,
        key=key,
        why=status.why,
        started=str(manifest.get("started") or ""),
        simulated=bool(manifest.get("simulated")),
        logs=logs,
    )


def _commands(run: RunPage) -> tuple[str, ...]:
    words = (
        ["why "] * (run.origin == THIS_MACHINE)
        + ["trace "] * bool(run.parts.get("timeline"))
        + ["run again="]
    )
    return tuple(f"python -m experiments {word}{shlex.quote(run.run)}" for word in words)
