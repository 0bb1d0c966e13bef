from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from analysis import verdicts
from analysis.evidence import RULES_COLUMN
from analysis.pictures import captions
from analysis.records import collection, parquet
from analysis.records.configs import run_id
from analysis.records.files import read_struct_if_there, remove_abandoned_parts, write_atomic, write_json
from analysis.records.frame_cache import load_newest_attempts_cached
from analysis.records.frames import Frames, empty_frames, merge_frames
from analysis.records.public import drop_undrawn_rows, strip_private_provenance
from analysis.records.schema import RunIdList
from analysis.records.steps import add_missing_outcomes
from analysis.significance import holm_significance_level, write_significance_level
from experiments import figures
from experiments.commands._drawing import (
    find_shipped_figure_records,
    load_readable_figures,
    select_rows_by_run_id,
    write_figures_in_parallel,
)
from experiments.commands._messages import iterate_with_progress
from experiments.config.folders import ROOT, ResultFolders
from experiments.figures.figure import Figure
from experiments.figures.runs import additional_configs, required_configs
from experiments.launch.local import count_usable_cores

GROUP = "results"
SHIPPED_PROFILES = ("laptop", "paper")
VERDICTS = "verdicts.csv"
VERDICTS_PAGE = "verdicts.md"
# The part of the README that the shipped records write: a count of each word.
README = ROOT / "README.md"
README_BEGIN = "<!-- verdicts: written by `python -m experiments collect --ship` -->"
README_END = "<!-- end of verdicts -->"
README_COLUMNS = 120


def collect(*, ship: bool = False) -> int:
    """Collect all valid runs in tables of runs, steps, epochs and spans: results/records/*.parquet.

    Args:
        ship: copy the runs of complete figures into results/shipped, which the repository carries, too, and
            draw these figures again.
    """
    folders = ResultFolders()
    for line in write_record_tables(folders):
        print(line)
    if ship:
        for line in ship_complete_figures(folders):
            print(line)
    return 0


def write_record_tables(folders: ResultFolders) -> Iterator[str]:
    """Write all valid runs of this checkout into results/records, and yield lines on the work."""
    num_removed = remove_abandoned_parts(folders.results)
    if num_removed:
        yield f"removed {num_removed} files and folders that a process had not finished when it was killed"
    show_progress = partial(iterate_with_progress, noun="parts of the runs")
    counts, notes = collection.collect_runs_into_parquet(
        folders.store, folders.records, count_usable_cores(), show_progress
    )
    yield from notes
    yield f"{', '.join(f'{count} {name}' for name, count in counts.items())} in {folders.records}"


def ship_complete_figures(folders: ResultFolders) -> Iterator[str]:
    """Copy the runs of complete figures into results/shipped, and yield lines on the work.

    A figure is complete if each of its runs is here or shipped already. Shipped runs that no figure needs are
    removed.
    """
    index_folder = folders.shipped / "figures"
    index_folder.mkdir(parents=True, exist_ok=True)
    before = parquet.read_parquet(folders.shipped)
    shipped_before = set(before.runs["run_id"])
    complete = dict(find_complete_figure_runs(folders, shipped_before))
    own_names = set(folders.store.list_run_ids())
    own_run_ids = dict.fromkeys(run for runs in complete.values() for run in runs if run in own_names)
    frames, notes = load_newest_attempts_cached(
        folders.store, own_run_ids, folders.records, verify_digests=True
    )
    yield from notes
    if not complete:
        yield "nothing is added: no figure has all its runs here (`reproduce ITEM profile=laptop` makes them)"
    for name, runs in complete.items():
        if shipped_before.union(frames.runs["run_id"]).issuperset(runs):
            write_json(index_folder / f"{name}.json", {"runs": runs})
    new_frames = drop_undrawn_rows(keep_only_shipped_rules(before, frames))
    merged = strip_private_provenance(add_missing_outcomes(merge_frames(before, new_frames)))
    needed = {run for path in index_folder.glob("*.json") for run in read_figure_run_ids(path)}
    parquet.write_parquet(select_rows_by_run_id(merged, needed), folders.shipped)
    shipped = parquet.read_parquet(folders.shipped)  # draw what a clone will draw from
    judged = [verdict for _, verdict in judge_shipped_figures(folders)]
    write_significance_level(folders.shipped, holm_significance_level(judged))
    pictures = list[tuple[Figure, str]]()
    for path in sorted(index_folder.glob("*.json")):
        prefix, _, profile = path.stem.rpartition("-")
        pictures.append((figures.load(figures.item_of_file_prefix_or_itself(prefix)), profile))
    pictures += [(figure, figures.PUBLISHED) for figure in load_figures_without_runs()]
    records = (find_shipped_figure_records(*picture, folders, shipped) for picture in pictures)
    results = write_figures_in_parallel(pictures, records, index_folder)
    for (figure, profile), rendered in zip(pictures, results, strict=True):
        if isinstance(rendered, OSError):
            raise rendered
        yield f"{figure.file_stem(profile)}: {rendered.picture if rendered else 'its runs are missing'}"
    rows = judge_shipped_figures(folders)
    write_atomic(folders.shipped / VERDICTS, verdicts.verdicts_csv(rows))
    write_atomic(folders.shipped / VERDICTS_PAGE, verdicts.verdicts_page_markdown(rows))
    before_part, _, from_part = README.read_text().partition(README_BEGIN)
    _, _, after_part = from_part.partition(README_END)
    part = f"{README_BEGIN}\n{readme_verdicts_markdown(rows)}{README_END}"
    write_atomic(README, f"{before_part}{part}{after_part}")


def keep_only_shipped_rules(before: Frames, new: Frames) -> Frames:
    """Return the new frames, in which a run keeps of its claims' rules only those that it was shipped with.

    The same seeds give the same curve again, so whoever makes a run again knows how it ends. Timings are
    excepted.
    """
    if RULES_COLUMN not in before.runs or RULES_COLUMN not in new.runs:
        return new
    shipped_rules = before.runs.set_index("key")[RULES_COLUMN]
    is_rerun = new.runs["key"].isin(shipped_rules.index)
    if "group" in new.runs:
        is_rerun &= new.runs["group"].isna()
    rules = new.runs[RULES_COLUMN].astype(object)
    for place in new.runs.index[is_rerun]:
        rules[place] = _common_rules(shipped_rules[new.runs.loc[place, "key"]], rules[place])
    return new._replace(runs=new.runs.assign(**{RULES_COLUMN: rules}))


def _common_rules(shipped: Any, new: Any) -> str | None:
    """Return the rules, as JSON, that both have."""
    if not isinstance(shipped, str) or not isinstance(new, str):
        return None
    shipped_rules = json.loads(shipped)
    common = {claim: rule for claim, rule in json.loads(new).items() if shipped_rules.get(claim) == rule}
    return json.dumps(common, sort_keys=True)


def find_complete_figure_runs(
    folders: ResultFolders, shipped: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the stem and the runs of each figure of which some runs are here and the others are shipped.

    So trainings of many hours can be made and shipped in batches, on any machine.
    """
    if not folders.store.list_run_ids():  # composing what all figures need takes its time
        return
    for figure in load_readable_figures():
        examined_runs = set[frozenset[str]]()  # some figures have the same runs in every profile
        for profile in SHIPPED_PROFILES:
            required = list(map(run_id, required_configs(figure, profile)))
            additional = list(map(run_id, additional_configs(figure, profile)))
            if frozenset(required) in examined_runs:
                continue
            examined_runs.add(frozenset(required))
            own_ids = {run for run in (*required, *additional) if folders.store.find_newest_valid_of_run(run)}
            available = own_ids.union(shipped)
            if own_ids and available.issuperset(required):
                runs = [*required, *(run for run in additional if run in available)]
                yield figure.file_stem(profile), list(dict.fromkeys(runs))


def load_figures_without_runs() -> list[Figure]:
    """Return the figures that have no runs: the tables that they are drawn from are shipped."""
    return [figure for figure in load_readable_figures() if not figure.needs_runs]


def read_figure_run_ids(path: Path) -> list[str]:
    """Return the runs of a figure that was shipped.

    Raises:
        DamagedFileError: the file does not say.
    """
    index = read_struct_if_there(path, RunIdList)
    return index.runs if index else []


def judge_shipped_figures(folders: ResultFolders) -> list[verdicts.ItemVerdict]:
    """Return the verdict on every claim of every shipped figure, from the shipped records."""
    shipped = parquet.read_parquet(folders.shipped)
    frames_by_figure = list[tuple[Figure, Frames]]()
    for path in sorted((folders.shipped / "figures").glob("*.json")):
        figure = figures.load(figures.item_of_file_prefix_or_itself(path.stem.rpartition("-")[0]))
        frames_by_figure.append((figure, select_rows_by_run_id(shipped, read_figure_run_ids(path))))
    frames_by_figure += [(figure, empty_frames()) for figure in load_figures_without_runs()]
    return [(figure.name, verdict) for figure, frames in frames_by_figure for verdict in figure.judge(frames)]


def readme_verdicts_markdown(rows: Sequence[verdicts.ItemVerdict]) -> str:
    """Return sentences for the README that count all verdicts."""
    counts = verdicts.count_causes_by_worst_word(rows)
    counts_alone = verdicts.count_causes_by_worst_word(
        (item, replace(verdict, word=verdict.word_alone)) for item, verdict in rows
    )
    fallen = counts.get("inconclusive", 0) - counts_alone.get("inconclusive", 0)
    num_tested = holm_significance_level(verdict for _, verdict in rows).num_tested
    counts_text = captions.join_with_and([f"{count} {word}" for word, count in counts.items()])
    sentences = (
        f"Claims that follow from one cause at one scale are counted once. Of {sum(counts.values())}, these "
        f"are the [verdicts](docs/measuring.md#verdicts): {counts_text}. Of {len(rows)} rows, one a case, "
        f"{num_tested} are tested together; of the inconclusive claims, {fallen} would be decided if each "
        "were tested alone."
    )
    return f"{textwrap.fill(sentences, README_COLUMNS)}\n"
