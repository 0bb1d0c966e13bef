from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from analysis.published import tables
from analysis.records import parquet
from analysis.records.attempts import load_newest_attempts
from analysis.records.configs import run_id
from analysis.records.files import DamagedFileError
from analysis.records.frames import Frames
from analysis.records.log import read_json_lines
from experiments import figures
from experiments.commands._messages import iterate_with_progress
from experiments.commands.collect import read_figure_run_ids
from experiments.config.folders import ResultFolders
from experiments.figures.runs import additional_configs, required_configs

GROUP = "results"
MAX_SHIPPED_MB = 50  # everyone who clones the repository fetches them
BATCH_SIZE = 100  # runs


def validate() -> int:
    """Compare all stored records with their digests and schemas: `make validate`.

    The output lists what is wrong; then the exit code is 1. It also lists the shipped figures that are drawn
    from runs for which their item does not ask any more.
    """
    folders = ResultFolders()
    faults = [
        *_check_own(folders),
        *_check_shipped(folders),
        *_check_published(),
        *_check_benchmarks(folders),
    ]
    for line in (*faults, *map("for information: {}".format, describe_outdated_figures(folders))):
        print(line)
    print(f"{len(faults)} wrong" if faults else "all records are as they were written")
    return 1 if faults else 0


def _check_own(folders: ResultFolders) -> Iterator[str]:
    """Yield faults of this checkout's runs and tables; runs are read in batches, which bounds the memory."""
    runs = folders.store.list_run_ids()
    for first in iterate_with_progress(range(0, len(runs), BATCH_SIZE), f"times {BATCH_SIZE} runs"):
        yield from load_newest_attempts(folders.store, runs[first : first + BATCH_SIZE]).notes
    yield from _check_tables(folders.records, parquet.raise_fault)
    print(f"{len(runs)} runs in {folders.store.root}")


def _check_tables(
    folder: Path, on_fault: Callable[[DamagedFileError], object] | None = None
) -> Iterator[str]:
    for name in Frames._fields:
        try:
            parquet.read_parquet(folder, [name], on_fault)
        except DamagedFileError as damage:
            yield str(damage)


def _check_shipped(folders: ResultFolders) -> Iterator[str]:
    table_faults = list(_check_tables(folders.shipped))
    yield from table_faults
    shipped = set[str]()
    if not table_faults:
        shipped = set(parquet.read_parquet(folders.shipped, ["runs"]).runs["run_id"])
    paths = _index_paths(folders)
    for path in paths:
        try:
            absent = set(read_figure_run_ids(path)) - shipped
        except DamagedFileError as damage:
            yield str(damage)
            continue
        if absent and not table_faults:
            yield f"{path.stem} is shipped without {len(absent)} of its runs: {min(absent)}"
    size_mb = sum(path.stat().st_size for path in folders.shipped.rglob("*") if path.is_file()) / 1e6
    if size_mb > MAX_SHIPPED_MB:
        yield f"{folders.shipped} has {size_mb:.0f} MB, more than {MAX_SHIPPED_MB}"
    print(f"{len(shipped)} runs and {len(paths)} figures of them, {size_mb:.0f} MB, in {folders.shipped}")


def describe_outdated_figures(folders: ResultFolders) -> Iterator[str]:
    """Yield a line on each shipped figure that is drawn from runs that its item has not planned."""
    for path in iterate_with_progress(_index_paths(folders), "shipped figures"):
        prefix, _, profile = path.stem.rpartition("-")
        try:
            figure_item = figures.item_of_file_prefix_or_itself(prefix)
            drawn_runs = set(read_figure_run_ids(path))
        except (DamagedFileError, ValueError):
            continue
        figure = figures.load(figure_item)
        configs = [*required_configs(figure, profile), *additional_configs(figure, profile)]
        stale = drawn_runs - set(map(run_id, configs))
        if stale:
            yield (
                f"{path.stem} is drawn from {len(stale)} runs that {figure_item} does not ask for any more; "
                f"`reproduce {figure_item} profile={profile}` and `collect --ship` replace them"
            )


def _index_paths(folders: ResultFolders) -> list[Path]:
    """Return the files that list the runs of each shipped figure."""
    return sorted((folders.shipped / "figures").glob("*.json"))


def _check_published() -> Iterator[str]:
    try:
        published = tables.read_verified_tables(tables.FOLDER)
        print(f"{sum(map(len, published))} rows of published facts in {tables.FOLDER}")
    except DamagedFileError as damage:
        yield str(damage)


def _check_benchmarks(folders: ResultFolders) -> Iterator[str]:
    for folder in (folders.results / "bench", folders.shipped / "bench"):
        for path in sorted(folder.glob("*.jsonl")):
            try:
                _, num_bad_lines = read_json_lines(path)
            except DamagedFileError as damage:
                yield str(damage)
            else:
                if num_bad_lines:
                    yield f"{path} has {num_bad_lines} lines that are no records"
