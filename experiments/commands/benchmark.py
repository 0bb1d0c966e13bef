from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from analysis.benchmark import site
from analysis.benchmark.agreement import compare_measurements
from analysis.benchmark.cells import Cell, ComposedTime, compare_composed_times, evaluate_entry
from analysis.benchmark.files import EntryFile, read_entries
from analysis.pictures import captions
from analysis.pictures.numbers import format_brief
from analysis.tables import Table
from experiments.commands._messages import say
from experiments.commands._terminal import print_table
from experiments.config import choices
from experiments.config.folders import ROOT, ResultFolders
from experiments.figures.benchmark.entering import baseline, by_todays_rules, targets_of
from experiments.figures.benchmark.entries import BASELINE
from experiments.figures.benchmark.rules import OWN, digest, rules

GROUP = "results"
RULES = ROOT / "docs" / "benchmark.md"
TIER = "laptop"


def benchmark(*, profile: str = TIER, against: str | None = None) -> int:
    """The benchmark's pages, to read in a browser: from entries' files; needs no torch (make benchmark).

    Args:
        profile: the tier; those of two tiers are never in one table.
        against: a folder with files of another day's entries: no pages, but how alike both are.
    """
    tier, folders = rules().tier(profile), ResultFolders()
    entered, notes = by_todays_rules(folders, profile)
    base = baseline(folders, profile)
    if base is None:
        raise ValueError(
            f"no entry of tier {profile} can be shown: the baseline has none, with which all are compared; "
            f"`python -m experiments enter {BASELINE} profile={profile}` makes it"
        )
    for note in notes:
        say(note)
    aims, found = targets_of(profile, base), list[Cell]()
    for each in [*entered]:
        try:
            found += evaluate_entry(each, base, aims)
        except (KeyError, IndexError, TypeError, ValueError) as error:  # of what somebody's file may say
            entered.remove(each)
            notes.append(f"{each.path.name} is damaged: {type(error).__name__}: {error}")
    if against is not None:
        return _compare(found, Path(against), profile, base)
    content = site.BenchmarkContent(
        profile,
        rules().version,
        entered,
        found,
        [site.LinkDescription(name, _about(name), _found(found, name)) for name in tier.links],
        [site.TaskDescription(name, task.about) for name, task in tier.tasks.items()],
        tier.workers,
        {each.statement.name: [*_claimed(each, folders)] for each in entered},
        _checked([one for each in entered for one in compare_composed_times(each, found)]),
        RULES.read_text(),
        notes,
    )
    print(site.write_pages(folders.results / "benchmark" / profile, content))
    return 0


def _compare(found: Sequence[Cell], folder: Path, tier: str, base: EntryFile) -> int:
    """How alike these cells and those of another folder are, by link."""
    others, notes = read_entries([folder], tier, digest(tier))
    for note in notes:
        say(note)
    aims = targets_of(tier, base)
    theirs = [cell for each in others for cell in evaluate_entry(each, base, aims)]
    if not theirs:
        raise ValueError(f"{folder} has no entries of tier {tier}")
    rows = compare_measurements(found, theirs)
    print_table(
        Table.from_rows(
            "Two measurements",
            [
                {
                    "link": row.link, "cells": row.cells, "that reach the target": row.reached,
                    "Kendall's tau": row.tau, "of those that reach it": row.reached_tau,
                    "of steps": row.steps_tau,
                    "times as soon contain each other": 100 * row.contained,
                    "same word": 100 * row.same_word,
                    "step ratios of all contain each other": 100 * row.steps_contained,
                    "and of one distribution": 100 * row.repeated,
                }
                for row in rows
            ],
            dict.fromkeys(
                ("times as soon contain each other", "same word", "step ratios of all contain each other",
                 "and of one distribution"), "%"
            ),
        )
    )  # fmt: skip
    return 0


def _checked(found: Sequence[ComposedTime]) -> str:
    """What composing times is worth, by the trainings that were made in real time."""
    if not found:
        return ""
    each = captions.join_words(
        f"{format_brief(one.error_percent, 2)} % ({one.entry}, {one.task}, {one.workers} workers, {one.link}: "
        f"{format_brief(one.real_min)} minutes, {format_brief(one.composed_min)} composed)"
        for one in found
    )
    return f"Times are composed. Trainings in real time as a whole were off by {each}."


def _about(link: str) -> str:
    """What a link's file says of it."""
    return "The cluster's own link." if link == OWN else choices.describe_option("link", link)


def _found(found: Sequence[Cell], link: str) -> str:
    """What probes found of it, all launches together."""
    own = pd.DataFrame([cell for cell in found if cell.link == link])
    if not len(own) or not own["launches"].any():
        return "Not measured yet."
    if own["simulated"].any():
        return "Simulated: times of exchanges are a model's."
    if own["gbit_s"].isna().all():
        return ""
    rates = [format_brief(getattr(own["gbit_s"], which)()) for which in ("min", "max")]
    rate = rates[0] if rates[0] == rates[1] else " to ".join(rates)
    delays = own["delay_ms"].dropna()
    delay = f"; {format_brief(delays.median())} ms one way, found alone" if len(delays) else ""
    return f"Found while all workers send: {rate} Gbit/s a node{delay}."


def _claimed(each: EntryFile, folders: ResultFolders) -> Iterator[site.ClaimRow]:
    """The claims of its paper that are shipped with a verdict."""
    rows = _verdicts(folders.shipped / "verdicts.csv")
    for name in each.statement.claims:
        if (row := rows.get(name)) is not None:
            ours = row["ours"] and f"{format_brief(float(row['ours']))} {row['unit']}".strip()
            yield site.ClaimRow(row["claim"], row["paper"], ours, row["verdict"])


def _verdicts(path: Path) -> Mapping[str, Mapping[str, str]]:
    with path.open(newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}
