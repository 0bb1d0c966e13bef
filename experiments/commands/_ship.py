"""Raw runs into tables: for this checkout, and for everyone who clones the repository."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pandas as pd

from analysis import parquet, verdicts
from analysis.claims import UNDECIDED
from analysis.files import read_as, write_atomic, write_json
from analysis.frames import Frames, combine, empty
from analysis.looks import ALL, largest_tensors
from analysis.outcomes import with_outcomes
from analysis.public import public
from analysis.records import run_id
from analysis.schemas import Index
from experiments import figures
from experiments.commands._draw import draw_each, runs_of, sound, stored_shipped
from experiments.commands._readme import write_readme
from experiments.config.folders import Folders
from experiments.config.plan import configs_of, more_configs_of
from experiments.launch.local import cores

SHIPPED_PROFILES = ("laptop", "paper")
VERDICTS, VERDICTS_PAGE = "verdicts.csv", "verdicts.md"


def consolidate(folders: Folders) -> Iterator[str]:
    """All valid runs of this checkout into results/records."""
    counts, notes = parquet.collect(folders.store, folders.records, cores())
    yield from notes
    yield f"{', '.join(f'{count} {name}' for name, count in counts.items())} in {folders.records}"


def ship(folders: Folders) -> Iterator[str]:
    """The runs of every figure that is complete, here or together with what is shipped already, into
    results/shipped; and what no figure needs out of it.
    """
    indexes = folders.shipped / "figures"
    indexes.mkdir(parents=True, exist_ok=True)
    before = parquet.read_parquet(folders.shipped)
    old = set(before.runs["run_id"])
    complete = dict(complete_figures(folders, old))
    here = set(folders.store.runs())
    wanted = dict.fromkeys(run for runs in complete.values() for run in runs if run in here)
    frames, notes = parquet.newest_frames(folders.store, wanted, folders.records, verify=True)
    yield from notes
    if not complete:
        yield "nothing is added: no figure has all its runs here (`reproduce ITEM profile=laptop` makes them)"
    for name, runs in complete.items():
        if set(runs) <= {*frames.runs["run_id"], *old}:
            write_json(indexes / f"{name}.json", {"runs": runs})
    merged = public(with_outcomes(combine(before, thinned(frames))))
    needed = {run for path in indexes.glob("*.json") for run in index_of(path)}
    parquet.write_parquet(runs_of(merged, needed), folders.shipped)
    shipped = parquet.read_parquet(folders.shipped)  # draw what a clone will draw from
    drawn_from_runs = (path.stem.rpartition("-") for path in sorted(indexes.glob("*.json")))
    names = [(figures.of_file(name), profile) for name, _, profile in drawn_from_runs]
    names += [(item, figures.PUBLISHED) for item in published_items()]
    found = (stored_shipped(*name, folders, shipped) for name in names)
    for (item, profile), drawn in zip(names, draw_each(names, found, indexes), strict=True):
        if isinstance(drawn, OSError):
            raise drawn
        yield f"{figures.stem(item, profile)}: {drawn.picture if drawn else 'its runs are missing'}"
    rows = shipped_verdicts(folders)
    write_atomic(folders.shipped / VERDICTS, verdicts.as_csv(rows))
    write_atomic(folders.shipped / VERDICTS_PAGE, verdicts_page(rows))
    write_readme(rows)


def complete_figures(folders: Folders, shipped: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """By the names of their files, the runs of figures of which some are here and the others are shipped:
    trainings of many hours are made and shipped batch by batch, on whatever machine.
    """
    if not folders.store.runs():  # composing what all figures need takes its time
        return
    for item in sound():
        for profile in SHIPPED_PROFILES:
            needed, more = (
                [run_id(config) for config in of(item, profile)] for of in (configs_of, more_configs_of)
            )
            here = {run for run in (*needed, *more) if folders.store.newest_valid(run)}
            if here and here.union(shipped).issuperset(needed):
                runs = [*needed, *(run for run in more if run in here or run in shipped)]
                yield figures.stem(item, profile), list(dict.fromkeys(runs))


def published_items() -> list[str]:
    """The items that have no runs: what they are drawn from is shipped."""
    return [item for item in sound() if not figures.has_runs(item)]


def index_of(path: Path) -> list[str]:
    """The runs of a figure that was shipped.

    Raises:
        Damaged: the file does not say.
    """
    index = read_as(path, Index)
    return index.runs if index else []


def thinned(frames: Frames) -> Frames:
    """Without the steps of trainings that are there for their curve: epochs say what figures draw, and 60
    trainings of 3,519 steps on 8 ranks would be 50 MB. Without the looks that no figure draws, which would be
    as much. They stay in the checkout that ran them.
    """
    runs = frames.runs
    if not len(runs):
        return frames
    is_curve = runs["train.validate"].eq("epoch") & runs["timing.mode"].ne("as_published")
    steps = frames.steps[~frames.steps["key"].isin(runs["key"][is_curve])].reset_index(drop=True)
    spans = frames.spans[~frames.spans["key"].isin(runs["key"][is_curve])].reset_index(drop=True)
    return frames._replace(steps=steps, spans=spans, looks=drawn(frames.looks))


def drawn(looks: pd.DataFrame) -> pd.DataFrame:
    """Of each run those at the whole model and at its largest tensor; of the others the last histograms."""
    if not len(looks):
        return looks
    largest = looks["key"].map(largest_tensors(looks))
    tensor = looks["of"].str.split("/").str[0]  # regions of it are "tensor/elements"
    last = looks["step"].eq(looks.groupby("key")["step"].transform("max"))
    kept = tensor.eq(ALL) | tensor.eq(largest) | looks["what"].eq("size")
    chosen: pd.DataFrame = looks[kept | (looks["what"].eq("histogram") & last)]
    chosen = chosen.reset_index(drop=True)
    return chosen


def shipped_verdicts(folders: Folders) -> list[verdicts.Row]:
    """The verdict on every claim of every figure that is shipped, from the shipped records."""
    shipped, rows = parquet.read_parquet(folders.shipped), list[verdicts.Row]()
    for path in sorted((folders.shipped / "figures").glob("*.json")):
        item = figures.of_file(path.stem.rpartition("-")[0])
        rows += [(item, verdict) for verdict in figures.judge(item, runs_of(shipped, index_of(path)))]
    for item in published_items():
        rows += [(item, verdict) for verdict in figures.judge(item, empty())]
    return rows


def verdicts_page(rows: Sequence[verdicts.Row]) -> str:
    """How often each word was reached; the claims that the shipped records judge; the others."""
    judged, others = (
        [(item, verdict) for item, verdict in rows if (verdict.word in UNDECIDED) == undecided]
        for undecided in (False, True)
    )
    return (
        "# What became of the papers' claims\n\n"
        "On the records that this repository ships; claims of one cause are counted once. Each item's page, "
        "in [figures](figures), says machine, data and how each number was read; "
        f"[{VERDICTS}]({VERDICTS}) has the same as data.\n\n"
        f"{verdicts.counts_table(rows).markdown()}\n## Judged\n\n{verdicts.as_table(judged).markdown()}\n"
        f"## Not comparable, or not run\n\n{verdicts.as_table(others).markdown()}"
    )
