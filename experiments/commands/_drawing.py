"""Draws figures and their verdicts, from this checkout's records or the shipped ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from analysis import tables, verdicts
from analysis.evidence import SCALE_NAMES, describe_scale_differences
from analysis.pictures import captions, style, summary
from analysis.records import parquet
from analysis.records.files import DamagedFileError, read_json_or_none, read_struct, write_atomic, write_json
from analysis.records.frame_cache import load_newest_cached
from analysis.records.frames import Frames, empty_frames, select_runs
from analysis.records.process_pool import open_process_pool
from analysis.records.schema import RunIndex
from analysis.tables import Table
from experiments import figures
from experiments.commands import _terminal as terminal
from experiments.commands._messages import iterate_with_progress, say
from experiments.config.folders import ROOT, Folders
from experiments.config.plan import remark
from experiments.figures.figure import PUBLISHED, Figure
from experiments.launch.local import usable_cores
from sparsify.core.spec import BrokenFile

OWN = "this machine's runs"
SHIPPED = "the records shipped with the repository"
TABLES = "the tables of published facts that the repository carries"
MOST_PROCESSES = 8  # each has all libraries in memory
WORTH_A_PROCESS = 4  # figures: it takes as long to start as one or two take to draw
T = TypeVar("T")


@dataclass(frozen=True)
class RenderedFigure:
    """A figure on disk and what became of the paper's claims."""

    item: str
    picture: Path  # PNG; beside it lie .pdf, .svg, .md; .csv and .tex of a table; .bib of a paper
    verdicts: Table
    tables: Sequence[Table]
    source: str  # whose records
    told: Sequence[str] = ()  # what the runs show, in plain sentences
    sure: str = ""  # how sure the least certain of them is, of times


@dataclass(frozen=True)
class Stored:
    frames: Frames
    source: str  # whose
    notes: tuple[str, ...] = ()  # what to know of them


def draw_own_runs(figure: Figure, profile: str, runs: Sequence[str], folders: Folders) -> RenderedFigure:
    """Draw from this checkout's own runs, and note which they are, so that `redraw` finds them."""
    frames, notes = load_newest_cached(folders.store, runs, folders.records)
    for note in notes:
        say(note)
    folders.index.mkdir(parents=True, exist_ok=True)
    index, noted = folders.index / f"{figure.stem(profile)}.json", {"runs": list(runs)}
    if read_json_or_none(index) != noted:
        write_json(index, noted)
    again = not is_up_to_date(figure, profile, folders)
    drawn = draw(figure, profile, frames, folders.figures, OWN, notes, again)
    return replace(
        drawn, told=figure.summary_sentences(frames), sure=summary.describe_least_certain_ratio(frames)
    )


def sources(figure: Figure, profile: str, folders: Folders) -> list[Path]:
    """The files that a picture follows from: its records, and the code."""
    own = folders.index / f"{figure.stem(profile)}.json"
    records = [own, *folders.store.root.glob("*/*/run.json")] if own.is_file() else []
    code = [
        Path(str(figure.module.__file__)),
        *figures.FOLDER.glob("_*.py"),
        *(ROOT / "analysis").rglob("*.py"),
    ]
    return [*records, *folders.shipped.glob("*.parquet"), *code]


def is_up_to_date(figure: Figure, profile: str, folders: Folders) -> bool:
    """Tell whether a picture was written after all that it follows from, as make sees it."""
    try:
        picture = folders.figures / f"{figure.stem(profile)}.svg"
        if picture.is_symlink():
            return False
        written = picture.stat().st_mtime_ns
        return all(each.stat().st_mtime_ns <= written for each in sources(figure, profile, folders))
    except FileNotFoundError:
        return False


def draw(
    figure: Figure, profile: str, frames: Frames, folder: Path, source: str, notes: Sequence[str] = (),
    again: bool = True,
) -> RenderedFigure:  # fmt: skip
    """Picture, tables, claims and page of one figure, from one set of frames.

    Args:
        again: draw the picture also where there is one.
    """
    name = figure.stem(profile)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{name}.png"
    if again:
        style.save_figure(figure.draw(frames, profile), folder, name)
    numbers = figure.tables(frames)
    tables.save_tables(numbers, folder, name, *_scale(figure, frames))
    if cited := figure.bibtex:
        write_atomic(folder / f"{name}.bib", cited)
    judged = figure.judge(frames)
    remarks = "".join(f"- {note}\n" for note in (f"Drawn from {source}.", *notes))
    page = figure.page(frames, profile, judged, numbers)
    write_atomic(folder / f"{name}.md", f"{page}\n{remarks}")
    table = verdicts.verdicts_table((figure.name, verdict) for verdict in judged)
    return RenderedFigure(figure.name, picture, table, numbers, source)


def _scale(figure: Figure, frames: Frames) -> tuple[str, str]:
    """What the numbers of an item are of, in words and in short."""
    paper = figure.scale
    if not len(frames.runs):
        told = [
            f"{SCALE_NAMES[leaf]} {value}"
            for leaf, value in paper.items()
            if isinstance(value, str | int | float)
        ]
        return ": ".join(filter(None, ("Published facts", ", ".join(told)))), "published"
    return "; ".join(
        filter(None, (captions.describe_scale(frames), describe_scale_differences(frames, paper)))
    ), captions.scale_label(frames)


def show(drawn: RenderedFigure) -> None:
    for table in drawn.tables:
        terminal.show(table)
    if len(drawn.verdicts.frame):
        terminal.show(drawn.verdicts)
    else:
        print(verdicts.NO_VERDICTS_NOTE)
    if drawn.told:
        print("\nWhat these runs show:")
        for line in drawn.told:
            print(f"- {line}")
    print(f"\n{drawn.item}: {drawn.picture} (from {drawn.source})")


def load_readable_figures() -> list[Figure]:
    """Return all figures but those whose file is broken, which is said."""
    found = []
    for item in figures.files_by_item():
        try:
            found.append(figures.load(item))
        except BrokenFile as broken:
            say(f"left out {item}: {broken}")
    return found


def redraw_all(folders: Folders, every_figure: Sequence[Figure]) -> tuple[list[RenderedFigure], bool]:
    """Every figure that was drawn before, from this checkout's runs where they are, else from the shipped
    ones; and those of published tables. False where one of them can't be written, which is said.
    """
    shipped = read_or_none(lambda: parquet.read_parquet(folders.shipped)) or empty_frames()
    names = [(figure, profile) for figure in every_figure for profile in figure.profiles]
    every, all_written = list[RenderedFigure](), True
    found = (_or_error(partial(stored, *name, folders, shipped)) for name in names)
    each = draw_in_parallel(names, found, folders.figures)
    for (figure, profile), drawn in zip(iterate_with_progress(names, "figures"), each, strict=True):
        if isinstance(drawn, OSError):
            where = drawn.filename2 or drawn.filename or folders.figures
            say(f"{figure.name}-{profile} can't be written: {where}: {drawn.strerror}")
            all_written = False
        elif drawn:
            every.append(drawn)
    return every, all_written


def draw_in_parallel(
    names: Sequence[tuple[Figure, str]], found: Iterable[Stored | OSError | None], folder: Path
) -> Iterator[RenderedFigure | OSError | None]:
    """Figures in their order, as many at a time as there are cores.

    Args:
        names: figure and profile of each.
        found: the records of each. None and errors are passed on.
    """
    calls = (partial(_drawn, *name, records, folder) for name, records in zip(names, found, strict=True))
    return call_in_parallel(calls, len(names))


def call_in_parallel(calls: Iterable[Callable[[], T]], figures: int) -> Iterator[T]:
    """What calls return, in their order, as many at a time as there are cores.

    Args:
        calls: each is taken when its turn comes: the records of all need not be in memory at once.
        figures: how many there are.
    """
    processes = min(usable_cores(), MOST_PROCESSES, figures // WORTH_A_PROCESS)
    if processes < 2:
        yield from (call() for call in calls)
        return
    with open_process_pool(processes) as pool:
        waiting = deque[_Begun[T]]()
        for call in calls:
            waiting.append(_Begun(pool, call))
            while sum(each.is_to_do for each in waiting) > 2 * processes:
                running = [each.future for each in waiting if each.future and not each.future.done()]
                if running and running[0] is waiting[0].future:  # it keeps no other waiting
                    wait(running, return_when=FIRST_COMPLETED)
                else:
                    yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class _Begun(Generic[T]):
    """What another process does.

    Processes that were killed, as where memory runs out, leave the rest to this one.
    """

    def __init__(self, pool: ProcessPoolExecutor, call: Callable[[], T]) -> None:
        self.call: Callable[[], T] | None = call
        try:
            self.future: Future[T] | None = pool.submit(call)
        except (BrokenProcessPool, OSError):  # OSError: none can be started, or the pool is closing
            self.future = None

    @property
    def is_to_do(self) -> bool:
        """Of what was done, the records are let go of."""
        if self.future and self.future.done() and not self.future.exception():
            self.call = None
        return self.call is not None

    def result(self) -> T:
        """Wait for it."""
        try:
            if self.future:
                return self.future.result()
        except BrokenProcessPool:
            pass
        assert self.call, "it has not ended well"
        return self.call()


def _drawn(
    figure: Figure, profile: str, found: Stored | OSError | None, folder: Path
) -> RenderedFigure | OSError | None:
    if not isinstance(found, Stored):
        return found
    return _or_error(partial(draw, figure, profile, found.frames, folder, found.source, found.notes))


def _or_error(do: Callable[[], T]) -> T | OSError:
    try:
        return do()
    except OSError as error:
        return error


def stored(figure: Figure, profile: str, folders: Folders, shipped: Frames) -> Stored | None:
    """The records of one figure, this checkout's first; None where no source has all of its runs."""
    own = read_or_none(lambda: read_struct(folders.index / f"{figure.stem(profile)}.json", RunIndex))
    if own:
        frames, notes = load_newest_cached(folders.store, own.runs, folders.records)
        for note in notes:
            say(note)
        missing = set(own.runs) - set(frames.runs["run_id"])
        if not missing:
            valid = filter(None, map(folders.store.find_newest_valid, own.runs))
            return Stored(frames, OWN, (*notes, *filter(None, [remark(valid)])))
        say(
            f"{figure.name}-{profile} is not drawn from {OWN}: {len(missing)} of {len(own.runs)} are not here"
        )
    return find_shipped_records(figure, profile, folders, shipped)


def find_shipped_records(figure: Figure, profile: str, folders: Folders, shipped: Frames) -> Stored | None:
    """The records of one figure that the repository carries; None where they do not suffice."""
    if profile == PUBLISHED:
        return Stored(empty_frames(), TABLES)
    path = folders.shipped / "figures" / f"{figure.stem(profile)}.json"
    index = read_or_none(lambda: read_struct(path, RunIndex))
    if not index or not set(index.runs) <= set(shipped.runs["run_id"]):
        return None
    return Stored(runs_of(shipped, index.runs), SHIPPED)


def read_or_none(read: Callable[[], T]) -> T | None:
    """The thing that was read, or None where it is damaged, which is said."""
    try:
        return read()
    except DamagedFileError as damage:
        say(f"left out: {damage}")
        return None


def runs_of(frames: Frames, run_ids: Collection[str]) -> Frames:
    return select_runs(frames, frames.runs["key"][frames.runs["run_id"].isin(run_ids)])
