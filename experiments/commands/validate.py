from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from analysis.published import tables
from analysis.records import parquet
from analysis.records.attempts import load_newest
from analysis.records.configs import run_id
from analysis.records.files import DamagedFileError
from analysis.records.frames import Frames
from analysis.records.log import read_json_lines
from experiments import figures
from experiments.commands._messages import iterate_with_progress
from experiments.commands.collect import index_of
from experiments.config.folders import ResultFolders
from experiments.figures.runs import additional_configs, required_configs

GROUP = "results"
MOST_SHIPPED_MB = 50  # what everyone who clones the repository has to fetch
AT_A_TIME = 100  # runs


def validate() -> int:
    """Reads all that is stored, compares it with its digests and schemas, and says what is wrong (make
    validate); then the exit code is 1.

    Of shipped figures it also says which were drawn from runs that their item does not ask for any more.
    """
    folders = ResultFolders()
    wrong = [*_own(folders), *_shipped(folders), *_published(), *_benchmarks(folders)]
    for line in (*wrong, *map("for information: {}".format, outdated(folders))):
        print(line)
    print(f"{len(wrong)} wrong" if wrong else "all records are as they were written")
    return 1 if wrong else 0


def _own(folders: ResultFolders) -> Iterator[str]:
    """Runs and tables of this checkout. Some runs are read at a time: thousands need no more memory."""
    runs = folders.store.run_ids()
    for first in iterate_with_progress(range(0, len(runs), AT_A_TIME), f"times {AT_A_TIME} runs"):
        yield from load_newest(folders.store, runs[first : first + AT_A_TIME]).notes
    yield from _tables(folders.records, parquet.raise_fault)
    print(f"{len(runs)} runs in {folders.store.root}")


def _tables(folder: Path, on_fault: Callable[[DamagedFileError], object] | None = None) -> Iterator[str]:
    for name in Frames._fields:
        try:
            parquet.read_parquet(folder, [name], on_fault)
        except DamagedFileError as damage:
            yield str(damage)


def _shipped(folders: ResultFolders) -> Iterator[str]:
    broken = list(_tables(folders.shipped))
    yield from broken
    there = set() if broken else set(parquet.read_parquet(folders.shipped, ["runs"]).runs["run_id"])
    indexes = _indexes(folders)
    for path in indexes:
        try:
            missing = set(index_of(path)) - there
        except DamagedFileError as damage:
            yield str(damage)
            continue
        if missing and not broken:
            yield f"{path.stem} is shipped without {len(missing)} of its runs: {min(missing)}"
    size_mb = sum(path.stat().st_size for path in folders.shipped.rglob("*") if path.is_file()) / 1e6
    if size_mb > MOST_SHIPPED_MB:
        yield f"{folders.shipped} has {size_mb:.0f} MB, more than {MOST_SHIPPED_MB}"
    print(f"{len(there)} runs and {len(indexes)} figures of them, {size_mb:.0f} MB, in {folders.shipped}")


def outdated(folders: ResultFolders) -> Iterator[str]:
    """A line on each shipped figure with runs that its item has not planned."""
    for path in iterate_with_progress(_indexes(folders), "shipped figures"):
        name, _, profile = path.stem.rpartition("-")
        try:
            item, drawn = figures.item_of_prefix(name), set(index_of(path))
        except (DamagedFileError, ValueError):
            continue
        figure = figures.load(item)
        configs = [*required_configs(figure, profile), *additional_configs(figure, profile)]
        if stale := drawn - set(map(run_id, configs)):
            yield (
                f"{path.stem} is drawn from {len(stale)} runs that {item} does not ask for any more; "
                f"`reproduce {item} profile={profile}` and `collect --ship` replace them"
            )


def _indexes(folders: ResultFolders) -> list[Path]:
    return sorted((folders.shipped / "figures").glob("*.json"))


def _published() -> Iterator[str]:
    try:
        read = tables.read_tables(tables.FOLDER)
        print(f"{sum(map(len, read))} rows of published facts in {tables.FOLDER}")
    except DamagedFileError as damage:
        yield str(damage)


def _benchmarks(folders: ResultFolders) -> Iterator[str]:
    for folder in (folders.results / "bench", folders.shipped / "bench"):
        for path in sorted(folder.glob("*.jsonl")):
            try:
                _, others = read_json_lines(path)
            except DamagedFileError as damage:
                yield str(damage)
            else:
                if others:
                    yield f"{path} has {others} lines that are no records"
