from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import verdicts
from analysis.claims import UNDECIDED
from analysis.evidence import REDUCED, RULES_COLUMN
from analysis.pictures import captions
from analysis.records import collection, parquet
from analysis.records.configs import run_id
from analysis.records.files import read_struct, remove_unfinished, write_atomic, write_json
from analysis.records.frame_cache import load_newest_cached
from analysis.records.frames import Frames, empty_frames, largest_tensor_by_run, merge_frames, select_runs
from analysis.records.public import strip_private_facts
from analysis.records.schema import ALL, RunIndex
from analysis.records.steps import add_outcomes
from analysis.report.content import MARK_BY_WORD
from experiments import figures
from experiments.commands._drawing import (
    draw_in_parallel,
    find_shipped_records,
    load_readable_figures,
    select_run_ids,
)
from experiments.commands._findings import load_findings
from experiments.commands._messages import iterate_with_progress
from experiments.config.folders import ROOT, ResultFolders
from experiments.figures.figure import Figure
from experiments.figures.runs import additional_configs, required_configs
from experiments.launch.local import usable_cores

GROUP = "results"
SHIPPED_PROFILES = ("laptop", "paper")
VERDICTS, VERDICTS_PAGE = "verdicts.csv", "verdicts.md"
# The README's part that the shipped records write: some verdicts, and how many there are of each word.
README = ROOT / "README.md"
BEGIN = "<!-- verdicts: written by `python -m experiments collect --ship` -->"
END = "<!-- end of verdicts -->"
WIDTH = 120  # of a line of the README


def collect(*, ship: bool = False) -> int:
    """All valid runs into tables: runs, steps, epochs, spans (results/records/*.parquet).

    Args:
        ship: also the complete figures' runs into results/shipped, which the repository carries; and draw
            those figures again.
    """
    folders = ResultFolders()
    for line in consolidate(folders):
        print(line)
    if ship:
        for line in shipping(folders):
            print(line)
    return 0


def consolidate(folders: ResultFolders) -> Iterator[str]:
    """All valid runs of this checkout into results/records."""
    if left := remove_unfinished(folders.results):
        yield f"removed {left} files and folders that a process had not finished when it was killed"
    told = partial(iterate_with_progress, noun="parts of the runs")
    counts, notes = collection.collect(folders.store, folders.records, usable_cores(), told)
    yield from notes
    yield f"{', '.join(f'{count} {name}' for name, count in counts.items())} in {folders.records}"


def shipping(folders: ResultFolders) -> Iterator[str]:
    """The runs of every figure that is complete, here or together with what is shipped already, into
    results/shipped; and what no figure needs out of it.
    """
    indexes = folders.shipped / "figures"
    indexes.mkdir(parents=True, exist_ok=True)
    before = parquet.read_parquet(folders.shipped)
    old = set(before.runs["run_id"])
    complete = dict(complete_figures(folders, old))
    here = set(folders.store.run_ids())
    wanted = dict.fromkeys(run for runs in complete.values() for run in runs if run in here)
    frames, notes = load_newest_cached(folders.store, wanted, folders.records, verify=True)
    yield from notes
    if not complete:
        yield "nothing is added: no figure has all its runs here (`reproduce ITEM profile=laptop` makes them)"
    for name, runs in complete.items():
        if set(runs) <= {*frames.runs["run_id"], *old}:
            write_json(indexes / f"{name}.json", {"runs": runs})
    merged = strip_private_facts(add_outcomes(merge_frames(before, thinned(as_known(before, frames)))))
    needed = {run for path in indexes.glob("*.json") for run in read_index(path)}
    parquet.write_parquet(select_run_ids(merged, needed), folders.shipped)
    shipped = parquet.read_parquet(folders.shipped)  # draw what a clone will draw from
    drawn_from_runs = (path.stem.rpartition("-") for path in sorted(indexes.glob("*.json")))
    pictures = [
        (figures.load(figures.item_of_prefix(prefix)), profile) for prefix, _, profile in drawn_from_runs
    ]
    pictures += [(figure, figures.PUBLISHED) for figure in published_figures()]
    found = (find_shipped_records(*picture, folders, shipped) for picture in pictures)
    for (figure, profile), drawn in zip(pictures, draw_in_parallel(pictures, found, indexes), strict=True):
        if isinstance(drawn, OSError):
            raise drawn
        yield f"{figure.stem(profile)}: {drawn.picture if drawn else 'its runs are missing'}"
    rows = shipped_verdicts(folders)
    write_atomic(folders.shipped / VERDICTS, verdicts.verdicts_csv(rows))
    write_atomic(folders.shipped / VERDICTS_PAGE, verdicts_page(rows))
    head, _, rest = README.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    write_atomic(README, f"{head}{BEGIN}\n{readme_verdicts(rows)}{END}{tail}")


def as_known(before: Frames, new: Frames) -> Frames:
    """`new`, in which what is no timing keeps only the rules that it was shipped with before: the same seeds
    give the same curve again, so whoever made it again knew how it ends.
    """
    if RULES_COLUMN not in before.runs or RULES_COLUMN not in new.runs:
        return new
    first = before.runs.set_index("key")[RULES_COLUMN]
    groups = new.runs["group"] if "group" in new.runs else [None] * len(new.runs)
    rules = [
        _common(first[key], text) if key in first.index and pd.isna(group) else text
        for key, text, group in zip(new.runs["key"], new.runs[RULES_COLUMN], groups, strict=True)
    ]
    return new._replace(runs=new.runs.assign(**{RULES_COLUMN: pd.Series(rules, new.runs.index)}))


def _common(first: Any, again: Any) -> str | None:
    """The rules, as JSON, that both have."""
    if not isinstance(first, str) or not isinstance(again, str):
        return None
    known = json.loads(first)
    found = {claim: rule for claim, rule in json.loads(again).items() if known.get(claim) == rule}
    return json.dumps(found, sort_keys=True)


def complete_figures(folders: ResultFolders, shipped: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Runs of figures, by the names of their files, of which some are here and the others are shipped:
    trainings of many hours are made and shipped batch by batch, on whatever machine.
    """
    if not folders.store.run_ids():  # composing what all figures need takes its time
        return
    for figure in load_readable_figures():
        shared = set[frozenset[str]]()  # some figures have the same runs in every profile
        for profile in SHIPPED_PROFILES:
            needed, more = (
                [run_id(config) for config in of(figure, profile)]
                for of in (required_configs, additional_configs)
            )
            if frozenset(needed) in shared:
                continue
            shared.add(frozenset(needed))
            here = {run for run in (*needed, *more) if folders.store.find_newest_valid(run)}
            if here and here.union(shipped).issuperset(needed):
                runs = [*needed, *(run for run in more if run in here or run in shipped)]
                yield figure.stem(profile), list(dict.fromkeys(runs))


def published_figures() -> list[Figure]:
    """Return the figures that have no runs: the tables that they are drawn from are shipped."""
    return [figure for figure in load_readable_figures() if not figure.has_runs]


def read_index(path: Path) -> list[str]:
    """The runs of a figure that was shipped.

    Raises:
        DamagedFileError: the file does not say.
    """
    index = read_struct(path, RunIndex)
    return index.runs if index else []


def thinned(frames: Frames) -> Frames:
    """Frames without the steps of trainings that are there for their curve.

    Epochs say what figures draw, and 60 trainings of 3,519 steps on 8 ranks would be 50 MB. Without the looks
    that no figure draws, which would be as much. They stay in the checkout that ran them.
    """
    runs = frames.runs
    if not len(runs):
        return frames
    is_curve = runs["train.validate"].eq("epoch") & runs["timing.mode"].ne("as_published")
    timed = select_runs(frames, runs["key"][~is_curve])
    return frames._replace(steps=timed.steps, spans=timed.spans, looks=drawn(frames.looks))


def drawn(looks: pd.DataFrame) -> pd.DataFrame:
    """Looks of each run at the whole model and at its largest tensor; of the others the last histograms."""
    if not len(looks):
        return looks
    largest = looks["key"].map(largest_tensor_by_run(looks))
    tensor = looks["of"].str.split("/").str[0]  # regions of it are "tensor/elements"
    last = looks["step"].eq(looks.groupby("key")["step"].transform("max"))
    kept = tensor.eq(ALL) | tensor.eq(largest) | looks["what"].eq("size")
    chosen: pd.DataFrame = looks[kept | (looks["what"].eq("histogram") & last)]
    chosen = chosen.reset_index(drop=True)
    return chosen


def shipped_verdicts(folders: ResultFolders) -> list[verdicts.ItemVerdict]:
    """The verdict on every claim of every figure that is shipped, from the shipped records."""
    shipped, rows = parquet.read_parquet(folders.shipped), list[verdicts.ItemVerdict]()
    for path in sorted((folders.shipped / "figures").glob("*.json")):
        figure = figures.load(figures.item_of_prefix(path.stem.rpartition("-")[0]))
        rows += [(figure.name, verdict) for verdict in figure.judge(select_run_ids(shipped, read_index(path)))]
    for figure in published_figures():
        rows += [(figure.name, verdict) for verdict in figure.judge(empty_frames())]
    return rows


def verdicts_page(rows: Sequence[verdicts.ItemVerdict]) -> str:
    """The page of verdicts: how often each word was reached; the claims that are judged; the others."""
    judged, others = (
        [(item, verdict) for item, verdict in rows if (verdict.word in UNDECIDED) == undecided]
        for undecided in (False, True)
    )
    all_judged = verdicts.verdicts_table(judged, together=True)
    return (
        "# What became of the papers' claims\n\n"
        "On the records that this repository ships; claims of one cause are counted once. Each item's page, "
        "in [figures](figures), says machine, data and how each number was read; "
        f"[{VERDICTS}]({VERDICTS}) has the same as data. *All together*: the word that is left when all are "
        "tested at once (Holm's correction), where that is another.\n\n"
        f"{verdicts.counts_table(rows).to_markdown()}\n## Judged\n\n{all_judged.to_markdown()}\n"
        f"### Their scales\n\n{verdicts.scales_table(judged).to_markdown()}\n"
        f"## Not comparable, or not run\n\n{verdicts.verdicts_table(others).to_markdown()}\n"
        f"### The scales of these\n\n{verdicts.scales_table(others).to_markdown()}"
    )


def readme_verdicts(rows: Sequence[verdicts.ItemVerdict]) -> str:
    """The chosen claims as a Markdown table, as far as they are shipped, each with the word that remains when
    all are tested together; and a sentence that counts all.
    """
    words = verdicts.holm_adjusted_words(rows)
    found = {verdict.claim.id: (word, verdict) for word, (_, verdict) in zip(words, rows, strict=True)}
    lines = ["| verdict | claim | published | here |", "|---|---|---|---|"]
    for one in [claim for finding in load_findings() for claim in finding.claims]:
        if one.claim in found:
            word, verdict = found[one.claim]
            where = f" ({REDUCED})" if verdict.scale.startswith(REDUCED) else ""
            cells = (
                f"{MARK_BY_WORD[word][0]} {word}{where}",
                f"[{one.short}](results/shipped/figures/{one.page}.md)",
                verdicts.published_text(verdict.claim),
                verdicts.measured_text(verdict),
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + f"\n\n{counted(rows)}\n"


def counted(rows: Sequence[verdicts.ItemVerdict]) -> str:
    """How often each word remains when all are tested together, as a sentence."""
    words = verdicts.holm_adjusted_words(rows)
    found = verdicts.count_words(
        (item, replace(verdict, word=word)) for word, (item, verdict) in zip(words, rows, strict=True)
    )
    told = captions.join_words([f"{number} {word}" for word, number in found.items()])
    sentence = f"All {sum(found.values())} claims, tested together, each cause counted once: {told}."
    return textwrap.fill(sentence, WIDTH)
