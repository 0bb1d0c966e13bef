from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from analysis.benchmark import site
from analysis.benchmark.agreement import compare_measurements
from analysis.benchmark.cells import Cell, ComposedTimeCheck, compare_composed_times, evaluate_entry
from analysis.benchmark.files import EntryFile, read_newest_entries
from analysis.pictures import captions
from analysis.pictures.links import describe_link
from analysis.pictures.numbers import format_number
from analysis.tables import Table
from experiments.commands._messages import say
from experiments.commands._terminal import print_table
from experiments.config import choices
from experiments.config.folders import ROOT, ResultFolders
from experiments.figures.benchmark.entering import (
    find_baseline_entry,
    read_entries_by_todays_rules,
    targets_by_task_and_workers,
)
from experiments.figures.benchmark.entries import BASELINE
from experiments.figures.benchmark.rules import OWN, rules, rules_digest

GROUP = "results"
RULES = ROOT / "docs" / "benchmark.md"
TIER = "laptop"
AGREEMENT_COLUMNS = {  # of `compare_measurements`: the title and the unit of each
    "link": ("link", ""),
    "num_cells": ("cells", ""),
    "num_cells_at_target": ("that reach the target", ""),
    "time_to_target_tau": ("Kendall's time_to_target_tau", ""),
    "reached_time_to_target_tau": ("of those that reach it", ""),
    "step_time_tau": ("of steps", ""),
    "speedup_containment": ("times as soon contain each other", "%"),
    "same_word_share": ("same word", "%"),
    "step_containment": ("step ratios of all contain each other", "%"),
    "expected_containment": ("and of one distribution", "%"),
}


def benchmark(*, profile: str = TIER, against: str | None = None) -> int:
    """Write the benchmark's pages from entries' files, to read in a browser: `make benchmark`.

    Writing the pages needs no torch.

    Args:
        profile: the tier; entries of two tiers are never in one table.
        against: a folder with files of another day's entries; then no pages are written, but the agreement of
            both days is shown.
    """
    tier = rules().parse_tier(profile)
    folders = ResultFolders()
    entries, notes = read_entries_by_todays_rules(folders, profile)
    base = find_baseline_entry(folders, profile)
    if base is None:
        raise ValueError(
            f"no entry of tier {profile} can be shown: the baseline has none, with which all are compared; "
            f"`python -m experiments enter {BASELINE} profile={profile}` makes it"
        )
    for note in notes:
        say(note)
    targets = targets_by_task_and_workers(profile, base)
    cells = list[Cell]()
    for entry in [*entries]:
        try:
            cells += evaluate_entry(entry, base, targets)
        except (KeyError, IndexError, TypeError, ValueError) as error:  # somebody's file may say anything
            entries.remove(entry)
            notes.append(f"{entry.path.name} is damaged: {type(error).__name__}: {error}")
    if against is not None:
        other_entries, notes = read_newest_entries([Path(against)], profile, rules_digest(profile))
        for note in notes:
            say(note)
        other_cells = [cell for entry in other_entries for cell in evaluate_entry(entry, base, targets)]
        if not other_cells:
            raise ValueError(f"{against} has no entries of tier {profile}")
        print_table(make_agreement_table(cells, other_cells))
        return 0
    with (folders.shipped / "verdicts.csv").open(newline="") as file:
        verdict_by_claim = {row["id"]: row for row in csv.DictReader(file)}
    composed_times = [time for entry in entries for time in compare_composed_times(entry, cells)]
    content = site.BenchmarkPagesContent(
        profile,
        rules().version,
        entries,
        cells,
        [
            site.LinkDescription(
                name,
                "The cluster's own link." if name == OWN else choices.describe_option("link", name),
                _describe_link(cells, name),
            )
            for name in tier.links
        ],
        [site.TaskDescription(name, task.about) for name, task in tier.tasks.items()],
        tier.workers,
        {entry.statement.name: [*_claim_rows(entry, verdict_by_claim)] for entry in entries},
        _describe_composing(composed_times),
        RULES.read_text(),
        notes,
    )
    print(site.write_site_replacing_folder(folders.results / "benchmark" / profile, content))
    return 0


def make_agreement_table(cells: Sequence[Cell], other_cells: Sequence[Cell]) -> Table:
    """Return a table of the agreement of two measurements, by link."""
    agreements = (
        row._replace(link=describe_link(row.link)) for row in compare_measurements(cells, other_cells)
    )
    rows = [
        {
            title: 100 * getattr(row, name) if unit == "%" else getattr(row, name)
            for name, (title, unit) in AGREEMENT_COLUMNS.items()
        }
        for row in agreements
    ]
    units = {title: unit for title, unit in AGREEMENT_COLUMNS.values() if unit}
    return Table.from_rows("Two measurements", rows, units)


def _describe_composing(composed_times: Sequence[ComposedTimeCheck]) -> str:
    """Return the errors of composed times, by the trainings that were made in real time as a whole."""
    if not composed_times:
        return ""
    errors = captions.join_with_and(
        f"{format_number(time.error_percent, 2)} % ({time.entry}, {time.task}, {time.workers} workers, "
        f"{describe_link(time.link)}: {format_number(time.real_min)} minutes, "
        f"{format_number(time.composed_min)} composed)"
        for time in composed_times
    )
    return f"Times are composed. Trainings in real time as a whole were off by {errors}."


def _describe_link(cells: Sequence[Cell], link: str) -> str:
    """Return the rates and delays of a link that probes found in all launches."""
    rows = pd.DataFrame([cell for cell in cells if cell.link == link])
    if not len(rows) or not rows["launches"].any():
        return "Not measured yet."
    if rows["simulated"].any():
        return "Simulated: times of exchanges are a model's."
    if rows["gbit_s"].isna().all():
        return ""
    limits = [format_number(rows["gbit_s"].min()), format_number(rows["gbit_s"].max())]
    delays = rows["delay_ms"].dropna()
    delay = f"; {format_number(delays.median())} ms one way, found alone" if len(delays) else ""
    rate = " to ".join(dict.fromkeys(limits))
    return f"Found while all workers send: {rate} Gbit/s a node{delay}."


def _claim_rows(
    entry: EntryFile, verdict_by_claim: Mapping[str, Mapping[str, str]]
) -> Iterator[site.EntryClaimRow]:
    """Yield the claims of an entry's paper that are shipped with a verdict."""
    for claim in entry.statement.claims:
        row = verdict_by_claim.get(claim)
        if row is not None:
            ours = row["ours"] and f"{format_number(float(row['ours']))} {row['unit']}".strip()
            yield site.EntryClaimRow(row["claim"], row["paper"], ours, row["verdict"])
