from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from analysis.benchmark import site
from analysis.benchmark.cells import Cell, decide_together, evaluate_entry
from analysis.benchmark.files import EntryFile, read_newest_entries
from analysis.benchmark.summaries import compare_measurements
from analysis.pictures.links import describe_link
from analysis.pictures.numbers import format_number
from analysis.tables import Table
from experiments.commands._messages import say
from experiments.commands._terminal import print_table
from experiments.config import choices
from experiments.config.folders import ROOT, ResultFolders
from experiments.figures.benchmark.entering import find_baseline_entry, read_entries_by_todays_rules
from experiments.figures.benchmark.entries import BASELINE
from experiments.figures.benchmark.rules import OWN, floors_by_task, rules, rules_digest

GROUP = "results"
RULES = ROOT / "docs" / "benchmark.md"
TIER = "laptop"


def benchmark(*, profile: str = TIER, against: str | None = None) -> int:
    """Write the benchmark's pages from entries' files, to read in a browser: `make benchmark`.

    Writing the pages needs no torch.

    Args:
        profile: the tier; entries of two tiers are never in one table.
        against: a folder with files of another day's entries; then no pages are written, but how many words
            of both days are the same is shown.
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
    cells = evaluate_entries(entries, base, notes)
    if against is not None:
        other_entries, other_notes = read_newest_entries([Path(against)], profile, rules_digest(profile))
        other_cells = evaluate_entries(other_entries, base, other_notes)
        if not other_cells:
            raise ValueError(f"{against} has no entries of tier {profile}")
        rows = [row._asdict() for row in compare_measurements(cells, other_cells)]
        print_table(Table.from_rows("Two measurements", rows))
        return 0
    with (folders.shipped / "verdicts.csv").open(newline="") as file:
        verdict_by_claim = {row["id"]: row for row in csv.DictReader(file)}
    content = site.BenchmarkPagesContent(
        profile,
        rules().version,
        entries,
        cells,
        [_describe_link(cells, name) for name in tier.links],
        [site.TaskDescription(name, task.about) for name, task in tier.tasks.items()],
        tier.workers,
        {entry.statement.name: [*_claim_rows(entry, verdict_by_claim)] for entry in entries},
        RULES.read_text(),
        notes,
    )
    print(site.write_site_replacing_folder(folders.results / "benchmark" / profile, content))
    return 0


def evaluate_entries(entries: list[EntryFile], base: EntryFile, notes: list[str]) -> list[Cell]:
    """Return the cells of all entries, tested together; take out and note an entry that is damaged."""
    floors = floors_by_task(base.statement.tier)
    cells = list[Cell]()
    for entry in [*entries]:
        try:
            cells += evaluate_entry(entry, base, floors)
        except (KeyError, IndexError, TypeError, ValueError) as error:  # somebody's file may say anything
            entries.remove(entry)
            notes.append(f"{entry.path.name} is damaged: {type(error).__name__}: {error}")
    for note in notes:
        say(note)
    return decide_together(cells)


def _describe_link(cells: Sequence[Cell], link: str) -> site.LinkDescription:
    """Return the texts on a link, with the rates and delays that probes found in all launches."""
    timed = [cell for cell in cells if cell.link == link and cell.launches]
    rates = [cell.gbit_s for cell in timed if cell.gbit_s is not None]
    delays = sorted(cell.delay_ms for cell in timed if cell.delay_ms is not None)
    found = (
        " to ".join(dict.fromkeys(format_number(rate, 2) for rate in (min(rates), max(rates))))
        if rates
        else ""
    )
    probed = f"Found while all workers send: {found} Gbit/s a node" if rates else ""
    if delays:
        probed += f"; {format_number(delays[len(delays) // 2], 2)} ms one way, found alone"
    probed += "." if probed else ""
    if not timed:
        probed = "Not measured yet."
    elif any(cell.simulated for cell in timed):
        probed = "Simulated: times of exchanges are a model's."
    about = "" if link == OWN else choices.describe_option("link", link)
    title = describe_link(link)
    return site.LinkDescription(link, title, f", {found} Gbit/s found" if rates else "", about, probed)


def _claim_rows(
    entry: EntryFile, verdict_by_claim: Mapping[str, Mapping[str, str]]
) -> Iterator[site.EntryClaimRow]:
    """Yield the claims of an entry's paper that are shipped with a verdict."""
    for claim in entry.statement.claims:
        row = verdict_by_claim.get(claim)
        if row is not None:
            ours = row["ours"] and f"{format_number(float(row['ours']))} {row['unit']}".strip()
            yield site.EntryClaimRow(row["claim"], row["paper"], ours, row["verdict"])
