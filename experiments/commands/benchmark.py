from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence

from analysis.benchmark import site
from analysis.benchmark.cells import BASELINE, Cell, decide_together, evaluate_entry
from analysis.benchmark.files import EntryFile
from analysis.benchmark.statement import enter_command
from analysis.benchmark.summaries import WordPlace, compare_words
from analysis.pictures.links import describe_link
from analysis.pictures.numbers import format_number
from analysis.tables import Table
from experiments.commands._messages import say
from experiments.commands._terminal import print_table
from experiments.config import choices
from experiments.config.folders import ROOT, ResultFolders
from experiments.figures.benchmark.entering import describe_missing, read_entries_by_todays_rules
from experiments.figures.benchmark.rules import OWN, floors_by_task, rules

GROUP = "results"
RULES = ROOT / "docs" / "benchmark.md"
TIER = "laptop"


def benchmark(*, profile: str = TIER) -> int:
    """Write the benchmark's pages from entries' files, to read in a browser: `make benchmark`.

    Writing the pages needs no torch.

    Args:
        profile: the tier; entries of two tiers are never in one table.
    """
    tier = rules().parse_tier(profile)
    folders = ResultFolders()
    entries, notes = read_whole_entries(folders, profile)
    base = find_baseline_entry(entries)
    if base is None:
        raise ValueError(
            f"no entry of tier {profile} can be shown: the baseline has none, with which all are compared; "
            f"{enter_command(f'{BASELINE} NAME', profile)} makes it, with that of NAME"
        )
    cells = evaluate_entries(entries, base, floors_by_task(profile), notes)
    with (folders.shipped / "verdicts.csv").open(newline="") as file:
        verdict_by_claim = {row["id"]: row for row in csv.DictReader(file)}
    content = site.BenchmarkPagesContent(
        profile,
        entries,
        cells,
        [_describe_link(cells, name) for name in tier.links],
        [site.TaskDescription(name, task.about) for name, task in tier.tasks.items()],
        sorted({cell.workers for cell in cells}),
        {entry.statement.name: [*_claim_rows(entry, verdict_by_claim)] for entry in entries},
        RULES.read_text(),
        notes,
    )
    print(site.write_site_replacing_folder(folders.results / "benchmark" / profile, content))
    if profile == TIER:
        rows = [row._asdict() for row in compare_words(cells, read_version_1_words(folders))]
        if rows:
            print_table(Table.from_rows("Words of version 1 that came out again", rows))
    return 0


def read_whole_entries(folders: ResultFolders, tier: str) -> tuple[list[EntryFile], list[str]]:
    """Return the entries of a tier that lack nothing, and a line on each file that can't be shown."""
    read, notes = read_entries_by_todays_rules(folders, tier)
    entries = list[EntryFile]()
    unfinished_names = list[str]()
    for entry in read:
        try:
            is_whole = not describe_missing(entry.statement)
        except (KeyError, TypeError) as error:
            notes.append(f"{entry.path.name} is damaged: {type(error).__name__}: {error}")
            continue
        if is_whole:
            entries.append(entry)
        else:
            unfinished_names.append(entry.statement.name)
    if unfinished_names:
        names = " ".join(unfinished_names)
        notes.append(
            f"Not measured to the end yet, and not shown: {names}. {enter_command(names, tier)} goes on, "
            "with the other entries that took turns with them"
        )
    return entries, notes


def find_baseline_entry(entries: Iterable[EntryFile]) -> EntryFile | None:
    """Return the baseline's entry; None where there is none."""
    return next((entry for entry in entries if entry.statement.name == BASELINE), None)


def evaluate_entries(
    entries: list[EntryFile], base: EntryFile, floors: Mapping[str, float], notes: list[str]
) -> list[Cell]:
    """Return the cells of all entries, tested together; take out and note an entry that is damaged."""
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


def read_version_1_words(folders: ResultFolders) -> dict[WordPlace, str]:
    """Return the words that version 2's rules gave to version 1's curves, exploratory."""
    with (folders.shipped / "benchmark-v1.csv").open(newline="") as file:
        return {
            (row["entry"], row["task"], int(row["workers"]), row["link"], int(row["level_percent"]) / 100):
            row["word"]
            for row in csv.DictReader(file)
        }  # fmt: skip


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
