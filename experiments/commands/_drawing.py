"""Draw figures and their verdicts, from this checkout's records or the shipped ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from analysis import tables, verdicts
from analysis.evidence import SCALE_NAMES, describe_scale_differences
from analysis.pictures import captions, style
from analysis.records import parquet
from analysis.records.files import (
    DamagedFileError,
    read_struct_if_there,
    try_read_json_object,
    write_if_different,
    write_json,
)
from analysis.records.frame_cache import load_newest_attempts_cached
from analysis.records.frames import Frames, empty_frames, select_runs
from analysis.records.process_pool import open_process_pool
from analysis.records.schema import RunIdList
from analysis.tables import Table
from experiments import figures
from experiments.commands._messages import iterate_with_progress, say
from experiments.commands._terminal import print_table
from experiments.config.folders import ROOT, ResultFolders
from experiments.config.plan import describe_code_changes
from experiments.figures.figure import PUBLISHED, Figure
from experiments.launch.local import count_usable_cores
from sparsify.core.spec import BrokenFile

OWN_RUNS = "this machine's runs"
SHIPPED_RUNS = "the records shipped with the repository"
PUBLISHED_TABLES = "the tables of published facts that the repository carries"
MAX_PROCESSES = 8  # each has all libraries in memory
FIGURES_PER_PROCESS = 4  # at least: a process takes as long to start as one or two figures take to draw
PENDING_CALLS_PER_PROCESS = 4  # at most: the records of each are in memory
T = TypeVar("T")


@dataclass(frozen=True)
class RenderedFigure:
    """A figure on disk, and verdicts on the paper's claims."""

    item: str
    picture: Path  # PNG; beside it lie .pdf, .svg, .md; .csv and .tex of a table; .bib of a paper
    verdicts: Table
    tables: Sequence[Table]
    source: str  # of its records, in words
    summary: Sequence[str] = ()  # sentences on what the runs show, the most important first


@dataclass(frozen=True)
class FigureRecords:
    """The records that a figure is drawn from."""

    frames: Frames
    source: str  # in words
    notes: tuple[str, ...] = ()  # for whoever reads the figure


class RedrawResult(NamedTuple):
    """The figures that were drawn again."""

    rendered: list[RenderedFigure]
    are_all_written: bool


def draw_and_index_own_runs(
    figure: Figure, profile: str, run_ids: Sequence[str], folders: ResultFolders
) -> RenderedFigure:
    """Draw a figure from this checkout's own runs.

    The ids of the runs are stored, so that `redraw_recorded_figures` finds them.
    """
    frames, notes = load_newest_attempts_cached(folders.store, run_ids, folders.records)
    for note in notes:
        say(note)
    folders.index.mkdir(parents=True, exist_ok=True)
    path = folders.index / f"{figure.file_stem(profile)}.json"
    index = {"runs": list(run_ids)}
    if try_read_json_object(path) != index:
        write_json(path, index)
    records = FigureRecords(frames, OWN_RUNS, tuple(notes))
    is_current = is_picture_up_to_date(figure, profile, folders)
    rendered = write_figure_files(figure, profile, records, folders.figures, draws_picture=not is_current)
    return replace(rendered, summary=figure.summary_sentences(frames))


def picture_source_files(figure: Figure, profile: str, folders: ResultFolders) -> list[Path]:
    """Return the files that a picture is drawn from: its records, and the code."""
    index = folders.index / f"{figure.file_stem(profile)}.json"
    records = [index, *folders.store.root.glob("*/*/run.json")] if index.is_file() else []
    code = [
        Path(str(figure.module.__file__)),
        *figures.FOLDER.glob("_*.py"),
        *(ROOT / "analysis").rglob("*.py"),
    ]
    return [*records, *folders.shipped.glob("*.parquet"), *code]


def is_picture_up_to_date(figure: Figure, profile: str, folders: ResultFolders) -> bool:
    """Tell whether a picture is newer than all files that it is drawn from, as make compares them."""
    try:
        picture = folders.figures / f"{figure.file_stem(profile)}.svg"
        if picture.is_symlink():
            return False
        written_ns = picture.stat().st_mtime_ns
        sources = picture_source_files(figure, profile, folders)
        return all(source.stat().st_mtime_ns <= written_ns for source in sources)
    except FileNotFoundError:
        return False


def write_figure_files(
    figure: Figure, profile: str, records: FigureRecords, folder: Path, *, draws_picture: bool = True
) -> RenderedFigure:
    """Write picture, tables, claims and page of a figure into a folder.

    Args:
        draws_picture: without it, the picture stays as it is.
    """
    name = figure.file_stem(profile)
    frames = records.frames
    folder.mkdir(parents=True, exist_ok=True)
    if draws_picture:
        style.save_png_pdf_svg(figure.draw(frames, profile), folder, name)
    number_tables = figure.tables(frames)
    tables.write_table_files(number_tables, folder, name, *_describe_scale(figure, frames))
    if figure.bibtex:
        write_if_different(folder / f"{name}.bib", figure.bibtex)
    judged = figure.judge(frames)
    remarks = "".join(f"- {note}\n" for note in (f"Drawn from {records.source}.", *records.notes))
    page = figure.markdown_page(frames, profile, judged, number_tables)
    write_if_different(folder / f"{name}.md", f"{page}\n{remarks}")
    verdict_table = verdicts.verdicts_table((figure.name, verdict) for verdict in judged)
    return RenderedFigure(figure.name, folder / f"{name}.png", verdict_table, number_tables, records.source)


def _describe_scale(figure: Figure, frames: Frames) -> tuple[str, str]:
    """Return the scale that an item's numbers were measured at, as a sentence and as a label."""
    if len(frames.runs):
        differences = describe_scale_differences(frames, figure.declared_scale)
        parts = filter(None, (captions.describe_scale(frames), differences))
        return "; ".join(parts), captions.scale_label(frames)
    scale = ", ".join(
        f"{SCALE_NAMES[leaf]} {value}"
        for leaf, value in figure.declared_scale.items()
        if isinstance(value, str | int | float)
    )
    return ": ".join(filter(None, ("Published facts", scale))), "published"


def print_figure_results(rendered: RenderedFigure) -> None:
    """Print a figure's tables, verdicts, several sentences on its runs, and where its picture is."""
    for table in rendered.tables:
        print_table(table)
    if len(rendered.verdicts.frame):
        print_table(rendered.verdicts)
    else:
        print(verdicts.NO_VERDICTS_NOTE)
    if len(rendered.summary) > 1:
        print("\nWhat these runs show:", *rendered.summary, sep="\n- ")
    print(f"\n{rendered.item}: {rendered.picture} (from {rendered.source})")


def load_readable_figures() -> list[Figure]:
    """Return all figures; print a line on each whose file is broken."""
    readable = []
    for item in figures.files_by_item():
        try:
            readable.append(figures.load(item))
        except BrokenFile as broken:
            say(f"left out {item}: {broken}")
    return readable


def redraw_recorded_figures(folders: ResultFolders, chosen_figures: Sequence[Figure]) -> RedrawResult:
    """Draw all profiles of these figures for which complete records are stored.

    A line is printed of each that can't be written.
    """
    shipped = read_or_report_damage(lambda: parquet.read_parquet(folders.shipped)) or empty_frames()
    pictures = [(figure, profile) for figure in chosen_figures for profile in figure.profiles]
    records = (_return_os_error(find_figure_records, *picture, folders, shipped) for picture in pictures)
    results = write_figures_in_parallel(pictures, records, folders.figures)
    rendered = list[RenderedFigure]()
    are_all_written = True
    for (figure, profile), result in zip(iterate_with_progress(pictures, "figures"), results, strict=True):
        if isinstance(result, OSError):
            path = result.filename2 or result.filename or folders.figures
            say(f"{figure.name}-{profile} can't be written: {path}: {result.strerror}")
            are_all_written = False
        elif result:
            rendered.append(result)
    return RedrawResult(rendered, are_all_written)


def write_figures_in_parallel(
    pictures: Sequence[tuple[Figure, str]], records: Iterable[FigureRecords | OSError | None], folder: Path
) -> Iterator[RenderedFigure | OSError | None]:
    """Yield the rendered figures in their order, drawn on several cores.

    Args:
        pictures: figure and profile of each.
        records: of each figure. None and errors are yielded as they are.
    """
    calls = (
        partial(_try_write_figure, *picture, figure_records, folder)
        for picture, figure_records in zip(pictures, records, strict=True)
    )
    return call_in_parallel(calls, len(pictures))


def _try_write_figure(
    figure: Figure, profile: str, records: FigureRecords | OSError | None, folder: Path
) -> RenderedFigure | OSError | None:
    if not isinstance(records, FigureRecords):
        return records
    return _return_os_error(write_figure_files, figure, profile, records, folder)


def call_in_parallel(calls: Iterable[Callable[[], T]], num_calls: int) -> Iterator[T]:
    """Yield the results of calls in their order; as many processes as there are cores carry them out.

    Args:
        calls: taken one by one when their turn comes, for the records of all may not fit into memory.
    """
    processes = min(count_usable_cores(), MAX_PROCESSES, num_calls // FIGURES_PER_PROCESS)
    if processes < 2:
        yield from (call() for call in calls)
        return
    with open_process_pool(processes) as pool:
        pending = deque[tuple[Callable[[], T], Future[T] | None]]()
        for call in calls:
            pending.append((call, _try_submit(pool, call)))
            if len(pending) > PENDING_CALLS_PER_PROCESS * processes:
                yield _await_result(*pending.popleft())
        while pending:
            yield _await_result(*pending.popleft())


def _try_submit(pool: ProcessPoolExecutor, call: Callable[[], T]) -> Future[T] | None:
    """Return the future of a call; None where no other process can carry it out."""
    try:
        return pool.submit(call)
    except (BrokenProcessPool, OSError):  # OSError: none can be started, or the pool is closing
        return None


def _await_result(call: Callable[[], T], future: Future[T] | None) -> T:
    """Return the result of a call; this process carries it out where the other one was killed."""
    try:
        return future.result() if future else call()
    except BrokenProcessPool:  # as where memory runs out
        return call()


def _return_os_error(function: Callable[..., T], *arguments: Any) -> T | OSError:
    try:
        return function(*arguments)
    except OSError as error:
        return error


def find_figure_records(
    figure: Figure, profile: str, folders: ResultFolders, shipped: Frames
) -> FigureRecords | None:
    """Return the records of a figure, this checkout's first; None where no source has all of its runs."""
    path = folders.index / f"{figure.file_stem(profile)}.json"
    index = read_or_report_damage(lambda: read_struct_if_there(path, RunIdList))
    if index:
        frames, notes = load_newest_attempts_cached(folders.store, index.runs, folders.records)
        for note in notes:
            say(note)
        missing = set(index.runs) - set(frames.runs["run_id"])
        if not missing:
            attempts = folders.store.find_newest_valid(index.runs).attempts
            return FigureRecords(frames, OWN_RUNS, (*notes, *filter(None, [describe_code_changes(attempts)])))
        say(
            f"{figure.name}-{profile} is not drawn from {OWN_RUNS}: {len(missing)} of {len(index.runs)} are "
            "not here"
        )
    return find_shipped_figure_records(figure, profile, folders, shipped)


def find_shipped_figure_records(
    figure: Figure, profile: str, folders: ResultFolders, shipped: Frames
) -> FigureRecords | None:
    """Return the records of a figure that the repository carries; None where they do not suffice."""
    if profile == PUBLISHED:
        return FigureRecords(empty_frames(), PUBLISHED_TABLES)
    path = folders.shipped / "figures" / f"{figure.file_stem(profile)}.json"
    index = read_or_report_damage(lambda: read_struct_if_there(path, RunIdList))
    if not index or not set(index.runs) <= set(shipped.runs["run_id"]):
        return None
    return FigureRecords(select_rows_by_run_id(shipped, index.runs), SHIPPED_RUNS)


def read_or_report_damage(read: Callable[[], T]) -> T | None:
    """Return what `read` returns; None where the file is damaged, of which a line is printed."""
    try:
        return read()
    except DamagedFileError as damage:
        say(f"left out: {damage}")
        return None


def select_rows_by_run_id(frames: Frames, run_ids: Collection[str]) -> Frames:
    """Return the rows of these runs and of all their variants."""
    return select_runs(frames, frames.runs["key"][frames.runs["run_id"].isin(run_ids)])
