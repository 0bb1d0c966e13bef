from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pandas as pd

from analysis.benchmark import site
from analysis.benchmark.cells import Cell, cells, targets
from analysis.benchmark.files import Entered, read_all
from analysis.pictures.numbers import brief
from experiments.commands._make import say
from experiments.config import choices
from experiments.config.folders import ROOT, Folders
from experiments.figures.benchmark.entering import baseline, folders_of_entries
from experiments.figures.benchmark.entries import BASELINE
from experiments.figures.benchmark.rules import rules

GROUP = "results"
RULES = ROOT / "docs" / "benchmark.md"
TIER = "laptop"


def benchmark(*, profile: str = TIER) -> int:
    """The benchmark's pages, to read in a browser: from entries' files; needs no torch (make benchmark).

    Args:
        profile: the tier; those of two tiers are never in one table.
    """
    tier, folders = rules().tier(profile), Folders()
    entered, notes = read_all(folders_of_entries(folders))
    base = baseline(folders, profile)
    entered = [each for each in entered if each.statement.tier == profile]
    if base is None:
        raise ValueError(
            f"no entry of tier {profile} can be shown: the baseline has none, with which all are compared; "
            f"`python -m experiments enter {BASELINE} profile={profile}` makes it"
        )
    for note in notes:
        say(note)
    aims, found = targets(base, rules().share), list[Cell]()
    for each in entered:
        if each.statement.version != rules().version:
            notes.append(f"{each.path.name} is of version {each.statement.version}: enter it again")
            continue
        found += cells(each, base, aims)
    content = site.Content(
        profile,
        rules().version,
        entered,
        found,
        [site.Told(name, choices.about("link", name), _found(found, name)) for name in tier.links],
        [site.TaskTold(name, task.about) for name, task in tier.tasks.items()],
        tier.workers,
        {each.statement.name: [*_claimed(each, folders)] for each in entered},
        "",
        RULES.read_text(),
        notes,
    )
    print(site.write(folders.results / "benchmark" / profile, content))
    return 0


def _found(found: Sequence[Cell], link: str) -> str:
    """What probes found of it, all launches together."""
    own = pd.DataFrame([cell for cell in found if cell.link == link])
    if not len(own) or own["gbit_s"].isna().all():
        return "Not measured yet."
    rates = [brief(getattr(own["gbit_s"], which)()) for which in ("min", "max")]
    rate = rates[0] if rates[0] == rates[1] else " to ".join(rates)
    delays = own["delay_ms"].dropna()
    delay = f" and {brief(delays.median())} ms one way" if len(delays) else ""
    return f"Found while all workers send: {rate} Gbit/s a node{delay}."


def _claimed(each: Entered, folders: Folders) -> Iterator[site.Claimed]:
    """The claims of its paper that are shipped with a verdict."""
    rows = _verdicts(folders.shipped / "verdicts.csv")
    for name in each.statement.claims:
        if (row := rows.get(name)) is not None:
            ours = row["ours"] and f"{brief(float(row['ours']))} {row['unit']}".strip()
            yield site.Claimed(row["claim"], row["paper"], ours, row["verdict"])


def _verdicts(path: Path) -> Mapping[str, Mapping[str, str]]:
    with path.open(newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}
