from __future__ import annotations

import gc
import hashlib
import json
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec

from analysis.pictures import captions
from analysis.records import parquet
from analysis.records.attempts import batch_runs_by_log_size, load_valid_attempts
from analysis.records.configs import run_id
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
from analysis.report.runs import SHIPPED, THIS_MACHINE, RunPage, build_run_pages, run_page_id
from experiments import figures
from experiments.commands._drawing import (
    OWN_RUNS,
    FigureRecords,
    call_in_parallel,
    find_figure_records,
    is_picture_up_to_date,
    picture_source_files,
    write_figure_files,
)
from experiments.commands._findings import load_findings
from experiments.commands._messages import iterate_with_progress, repeat_until_interrupted, say
from experiments.commands._named_runs import find_log_files, query_status_by_attempt, read_last_lines
from experiments.config import code_version
from experiments.config.folders import ResultFolders
from experiments.figures.figure import Figure, file_prefix
from experiments.figures.runs import additional_configs
from experiments.launch.status import RunStatus
from sparsify.core.spec import BrokenFile
from sparsify.methods import REGISTRY as METHODS

GROUP = "results"
FILE_KINDS = ("svg", "pdf", "png", "csv", "tex", "md")  # of a figure, in the order of their links
SHIPPED_ROWS = "runs-shipped"  # names of rows that the report's folder keeps
OWN_ROWS = "runs-here"


def report(*, drawn: bool = False, follow: bool = False) -> int:
    """Write pages on every figure, verdict and run, to read in a browser: `make report`.

    The pages show stored records, this checkout's first. Pictures of its runs are drawn where they are not
    there yet, or are older than their records. Other pictures are the shipped ones, unless `figures` has
    drawn them since. Writing the report needs no torch.

    Args:
        drawn: draw no picture, and show those that are there: in seconds.
        follow: go on until Ctrl-C, and write the report again when a run has begun or ended; open pages show
            that.
    """
    # Objects that are read stay, and none is in a cycle: collecting garbage often takes a sixth of the time.
    gc.set_threshold(100_000, 50, 100)
    folders = ResultFolders()
    shown_state = _stat_results(folders) if follow else []
    print(write_report(folders, draws=not drawn), flush=True)

    def update() -> None:
        nonlocal shown_state
        state = _stat_results(folders)
        if state != shown_state:
            shown_state = state
            write_report(folders, draws=not drawn)

    if follow:
        repeat_until_interrupted(update)
    return 0


def _stat_results(folders: ResultFolders) -> list[object]:
    """Return a value that changes when a run begins or ends, or a figure is drawn."""
    manifests = sorted(folders.store.root.glob("*/*/run.json"))
    return [_stat(path) for path in (*manifests, *sorted(folders.figures.glob("*.png")))]


def write_report(folders: ResultFolders, *, draws: bool = True) -> Path:
    """Write all pages and return the first one; pages whose records have not changed are kept.

    Args:
        draws: draw pictures of this checkout's runs that are not there, or older than their records.
    """
    site = pages.ReportSite(folders.report)
    notes = list[str]()
    shipped = ShippedRecords(folders, notes)
    items = make_item_pages(site, folders, shipped, draws=draws)
    stems_by_key = defaultdict[str, list[str]](list)
    for item in items:
        for key in item.runs:
            stems_by_key[key].append(item.stem)
    digest = _digest([shipped.digest, sorted(stems_by_key.items())])
    own_digests = {
        name: _digest([_stat(path) for path in _record_files(folders.store.root / name)])
        for name in folders.store.list_run_ids()
    }
    # Where this machine has made a shipped run, too, its page is of this machine's record.
    shipped_rows = _load_rows(site, SHIPPED_ROWS, digest)
    own_rows = _load_rows(site, OWN_ROWS, digest)
    kept_shipped = _with_data(site, [run for _, run in shipped_rows if run.run not in own_digests])
    own_runs = _with_data(site, [run for record, run in own_rows if own_digests.get(run.run) == record])
    site.clear_stale_files_and_copy_assets([run.id for run in (*kept_shipped, *own_runs)])
    own_ids = {run.id for run in own_runs}
    kept_names = {run.run for run in own_runs}
    for run in _read_own_runs(folders, [name for name in own_digests if name not in kept_names]):
        if run.id not in own_ids:
            own_ids.add(run.id)
            own_runs.append(_write_run_data(site, run, stems_by_key))
            if run.state == DAMAGED:
                notes.append(f"{run.run}: {run.why}")
    shipped_runs = kept_shipped or [
        _write_run_data(site, run, stems_by_key, own_ids) for run in build_run_pages(shipped.frames, SHIPPED)
    ]
    if shipped.is_whole and not kept_shipped:
        _store_rows(site, SHIPPED_ROWS, digest, [("", run) for run in shipped_runs])
    # Of runs in other states the logs, which lie elsewhere, may tell more later.
    ended_runs = [run for run in own_runs if run.state in (DONE, DIVERGED)]
    _store_rows(site, OWN_ROWS, digest, [(own_digests[run.run], run) for run in ended_runs])
    runs = [*own_runs, *(run for run in shipped_runs if run.id not in own_ids)]
    return pages.write_report_pages(site, items, [*_method_cards()], notes, runs, [*_findings(items)])


def _load_rows(site: pages.ReportSite, name: str, digest: str) -> list[tuple[str, RunPage]]:
    """Return the rows of an earlier report, each with the digest of its record."""
    return site.load_kept_from_last_report(name, digest, list[tuple[str, RunPage]]) or []


def _with_data(site: pages.ReportSite, runs: list[RunPage]) -> list[RunPage]:
    """Return the runs if the data of all their pages are there, else none."""
    return runs if site.has_data_of_all_runs([run.id for run in runs]) else []


def _store_rows(site: pages.ReportSite, name: str, digest: str, rows: Sequence[tuple[str, RunPage]]) -> None:
    site.store_for_next_report(name, digest, msgspec.to_builtins(rows))


class ShippedRecords:
    """The records that the repository carries, read when they are first asked for."""

    def __init__(self, folders: ResultFolders, notes: list[str]) -> None:
        self.folders = folders
        self.notes = notes
        self.is_whole = True

    @cached_property
    def frames(self) -> Frames:
        """The shipped runs; none where a file is damaged, which is noted."""
        try:
            return parquet.read_parquet(self.folders.shipped)
        except DamagedFileError as damage:
            self.notes.append(str(damage))
            self.is_whole = False
            return empty_frames()

    @cached_property
    def digest(self) -> str:
        """A digest that changes with the files of these records, or with the code."""
        files = sorted(self.folders.shipped.glob("*.parquet"))
        return _digest([code_version.code_digest(), *map(_stat, files)])


def _write_run_data(
    site: pages.ReportSite,
    run: RunPage,
    stems_by_key: Mapping[str, Sequence[str]],
    skipped_ids: Collection[str] = (),
) -> RunPage:
    """Write the data of a run's page, unless it is to be skipped, and return the run's row."""
    commands = ["why"] if run.origin == THIS_MACHINE else []
    commands += ["trace"] if run.parts.get("timeline") else []
    calls = [f"{command} {shlex.quote(run.run)}" for command in commands]
    calls.append(f"run again={shlex.quote(run.run)}")
    run = replace(
        run,
        items=tuple(stems_by_key.get(run.key, ())),
        commands=tuple(f"python -m experiments {call}" for call in calls),
    )
    if run.id not in skipped_ids:
        site.write_data_script(f"{pages.RUN}/{run.id}", run.page_content())
    return replace(run, parts={}, provenance={}, logs=())  # ten thousand fit into memory


def _findings(items: Sequence[ItemPage]) -> Iterator[Finding]:
    """Yield the findings whose pictures are there, each with those of its claims that are judged."""
    item_by_stem = {item.stem: item for item in items if item.files}
    for finding in load_findings():
        if finding.picture not in item_by_stem:
            continue
        supporting = [
            SupportingClaim(claim.short, judged, item_by_stem[claim.page])
            for claim in finding.claims
            if claim.page in item_by_stem
            for judged in item_by_stem[claim.page].judged
            if judged.id == claim.claim
        ]
        yield Finding(finding.says, item_by_stem[finding.picture], tuple(supporting))


def _method_cards() -> Iterator[pages.MethodCard]:
    for name in METHODS.names():
        why = METHODS.reason_unreadable(name)
        summary = "" if why else METHODS.docstring(name).partition("\n\n")[0]
        yield name, " ".join(summary.split()), why


def make_item_pages(
    site: pages.ReportSite, folders: ResultFolders, shipped: ShippedRecords, *, draws: bool
) -> list[ItemPage]:
    """Return the page of every figure that has records; of a figure that fails, the reason."""
    pages_by_picture = dict[tuple[str, str], list[ItemPage]]()
    todo = list[tuple[Figure, str]]()
    for item in figures.items_in_reading_order():
        try:
            figure = figures.load(item)
        except BrokenFile as broken:
            page = _failed_page(item, file_prefix(item), "Its file is broken", str(broken))
            pages_by_picture[item, ""] = [page]
            continue
        for profile in figure.profiles:
            for kind in FILE_KINDS:
                path = folders.figures / f"{figure.file_stem(profile)}.{kind}"
                if path.is_symlink():
                    say(f"{path} is left out: it {NO_LINK}")
            digest = digest_item_page(figure, profile, folders, shipped)
            kept_pages = site.load_kept_from_last_report(figure.file_stem(profile), digest, list[ItemPage])
            is_usable = kept_pages is not None and all(
                _is_page_of(page, figure, profile, folders) for page in kept_pages
            )
            pages_by_picture[item, profile] = kept_pages if is_usable and kept_pages else []
            if not is_usable:
                todo.append((figure, profile))
    calls = (
        partial(
            _try_make_page, *picture, find_figure_records(*picture, folders, shipped.frames), folders, draws
        )
        for picture in todo
    )
    page_results = call_in_parallel(calls, len(todo))
    for (figure, profile), new_page in zip(iterate_with_progress(todo, "figures"), page_results, strict=True):
        new_pages = [new_page] if new_page else []
        pages_by_picture[figure.name, profile] = new_pages
        if new_page and new_page.damage:
            say(f"{figure.name} ({profile}) is left out: {new_page.damage}")
        elif new_page or shipped.is_whole:
            digest = digest_item_page(figure, profile, folders, shipped)  # a picture may have been drawn
            site.store_for_next_report(figure.file_stem(profile), digest, msgspec.to_builtins(new_pages))
        parquet.release_arrow_memory()
    return [page for item_pages in pages_by_picture.values() for page in item_pages]


def _failed_page(item: str, stem: str, title: str, why: str, source: str = "") -> ItemPage:
    return ItemPage(item, stem, title, source=source, damage=why, paper=figures.paper_label_or_empty(item))


def _is_page_of(page: ItemPage, figure: Figure, profile: str, folders: ResultFolders) -> bool:
    """Tell whether a kept page is of this figure and names only its files: others are never copied."""
    paths = [Path(path) for path in page.files.values()]
    return (
        (page.name, page.stem) == (figure.name, figure.file_stem(profile))
        and {*_picture_files(figure, profile, folders)}.issuperset(paths)
        and all(map(is_plain_file, paths))
    )


def _picture_files(figure: Figure, profile: str, folders: ResultFolders) -> list[Path]:
    """Return the paths of a figure's files, drawn here or shipped, whether they exist or not."""
    places = (folders.figures, folders.shipped / "figures")
    return [folder / f"{figure.file_stem(profile)}.{kind}" for folder in places for kind in FILE_KINDS]


def _try_make_page(
    figure: Figure, profile: str, records: FigureRecords | None, folders: ResultFolders, draws: bool
) -> ItemPage | None:
    """Return the page of a figure, or one that says why it fails; None of a figure without records."""
    if records is None:
        return None
    try:
        return _make_page(figure, profile, records, folders, draws)
    except Exception as error:  # a figure's file may raise anything, and stops no other
        why = f"{type(error).__name__}: {error}"
        return _failed_page(figure.name, figure.file_stem(profile), figure.title, why, records.source)


def _make_page(
    figure: Figure, profile: str, records: FigureRecords, folders: ResultFolders, draws: bool
) -> ItemPage:
    frames = records.frames
    stem = figure.file_stem(profile)
    shipped_folder = folders.shipped / "figures"
    is_drawn = is_picture_up_to_date(figure, profile, folders)
    is_shipped = records.source != OWN_RUNS and (shipped_folder / f"{stem}.png").is_file()
    if draws and not (is_drawn or is_shipped):
        write_figure_files(figure, profile, records, folders.figures)
    folder = shipped_folder if is_shipped and not is_drawn else folders.figures
    paths = {kind: folder / f"{stem}.{kind}" for kind in FILE_KINDS}
    commands = [f"figures {figure.name}"]
    if profile != figures.PUBLISHED:
        commands.append(f"reproduce {figure.name} profile={profile}")
    return ItemPage(
        name=figure.name,
        stem=stem,
        title=figure.title,
        caption=figure.caption(frames, profile),
        source=records.source,
        remarks=records.notes,
        commands=tuple(f"python -m experiments {command}" for command in commands),
        facts=describe_provenance(frames),
        judged=tuple(map(JudgedClaim.from_verdict, figure.judge(frames))),
        tables=tuple(HtmlTable(table.title, table.to_html()) for table in figure.tables(frames)),
        files={kind: str(path) for kind, path in paths.items() if is_plain_file(path)},
        bibtex=figure.bibtex,
        runs=tuple(frames.runs["key"]),
        paper=figures.paper_label_or_empty(figure.name),
        **(_own_run_facts(figure, profile, frames, folders) if records.source == OWN_RUNS else {}),
    )


def _own_run_facts(figure: Figure, profile: str, frames: Frames, folders: ResultFolders) -> dict[str, Any]:
    """Return what a page says of this machine's runs alone, by the fields of `ItemPage`."""
    more_ids = {run_id(config) for config in additional_configs(figure, profile)}
    starts = [
        datetime.fromisoformat(start).timestamp() for start in captions.distinct_values(frames, "started")
    ]
    index = folders.index / f"{figure.file_stem(profile)}.json"
    return {
        "summary": tuple(figure.summary_sentences(frames)),
        "num_more_runs": len(more_ids.difference(frames.runs["run_id"])),
        "made_s": max([*starts, index.stat().st_mtime]),
    }


def digest_item_page(figure: Figure, profile: str, folders: ResultFolders, shipped: ShippedRecords) -> str:
    """Return a digest that changes with an item's page: with its records, its files and the code."""
    drawn = filter(is_plain_file, _picture_files(figure, profile, folders))
    index = folders.shipped / "figures" / f"{figure.file_stem(profile)}.json"
    paths = [*picture_source_files(figure, profile, folders), *drawn, index]
    return _digest([shipped.digest, *map(_stat, paths)])


def _record_files(run: Path) -> list[Path]:
    """Return a run's attempts and the files in their folders; files below those are no part of a record."""
    return sorted([*run.glob("*"), *run.glob("*/*")])


def _stat(path: Path) -> tuple[str, int, int]:
    """Return a value that changes with a file, as make sees it."""
    try:
        stat = path.stat()
    except OSError:  # it is not there, or a link that leads nowhere
        return str(path), 0, 0
    return str(path), stat.st_mtime_ns, stat.st_size


def _digest(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read_own_runs(folders: ResultFolders, names: Sequence[str]) -> Iterator[RunPage]:
    """Yield these runs of this machine; reading many at a time takes a fifth of the time."""
    for batch in iterate_with_progress([*batch_runs_by_log_size(folders.store, names)], "batches of runs"):
        valid = {attempt.run_id: attempt for attempt in folders.store.find_newest_valid(batch).attempts}
        frames, notes = load_valid_attempts(valid.values())
        pages_by_name = defaultdict[str, list[RunPage]](list)
        for run in build_run_pages(frames, THIS_MACHINE):
            pages_by_name[run.run].append(run)
        attempts_by_name = {name: folders.store.list_attempts(name) for name in batch}
        newest = {name: attempts[-1] for name, attempts in attempts_by_name.items() if attempts}
        not_valid = [attempt for name, attempt in newest.items() if attempt != valid.get(name)]
        status_by_attempt = query_status_by_attempt(not_valid, folders)
        for name, newest_attempt in newest.items():
            attempt = valid.get(name, newest_attempt)
            own_notes = [note for note in notes if attempt.name in note]
            newer = status_by_attempt.get(newest_attempt)
            if name in pages_by_name:
                own_notes += folders.store.find_newest_valid([name]).notes
                own_notes += ["an older attempt is done, whose numbers these are"] if newer else []
                for run in pages_by_name[name]:  # its state is that of its newest attempt, as in `list`
                    state = newer.display_state if newer else run.state
                    yield replace(run, why="; ".join(own_notes), state=state)
            else:
                fault = attempt.find_damage_if_complete(verify_digests=True) or next(iter(own_notes), "")
                status = RunStatus("failed", fault, DAMAGED) if fault else status_by_attempt[attempt]
                yield _unfinished_run_page(attempt, folders, status)


def _unfinished_run_page(attempt: Attempt, folders: ResultFolders, status: RunStatus) -> RunPage:
    """Return the page of a run without a valid record: the reason, and the end of its logs."""
    manifest = {} if attempt.state == DAMAGED else attempt.manifest
    try:
        config = attempt.config
        key = attempt.key
    except DamagedFileError as damage:
        status = RunStatus("failed", status.why or damage.message_without_folder, DAMAGED)
        config = {}
        key = ""
        say(f"{attempt.name} is shown as damaged: {damage.message_without_folder}")
    logs = tuple(
        {"name": log.name, "lines": read_last_lines(log)} for log in find_log_files(attempt, folders)
    )
    return RunPage(
        id=run_page_id(attempt.run_id, key),
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
