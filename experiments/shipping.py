"""Raw runs into tables: for this checkout, and for everyone who clones the repository."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

from analysis import claims
from analysis import frames as tables
from analysis.frames import Frames
from analysis.records import run_key, write_atomic
from experiments import figures
from experiments.planning import ROOT, Folders
from experiments.reproduce import draw, plan

SHIPPED_PROFILES = ("laptop", "paper")
DECIDED = ("reproduced", "partly", "not reproduced", "inconclusive")
README = ROOT / "README.md"
BEGIN = "<!-- verdicts: written by `python -m experiments collect --ship` -->"
END = "<!-- end of verdicts -->"
PRIVATE = ("host",)  # of the provenance: says nothing that another reader could use


def consolidate(folders: Folders) -> Iterator[str]:
    """All valid runs of this checkout into results/records."""
    frames, notes = tables.from_attempts(list(folders.store.newest_valid()))
    folders.records.mkdir(parents=True, exist_ok=True)
    tables.write_parquet(frames, folders.records)
    yield from notes
    counts = f"{len(frames.runs)} runs, {len(frames.steps)} steps, {len(frames.epochs)} epochs"
    yield f"{counts} in {folders.records}"


def ship(folders: Folders) -> Iterator[str]:
    """The runs of every figure that is complete here into results/shipped, beside those already there."""
    attempts, complete = {}, []
    for item in figures.items():
        for profile in SHIPPED_PROFILES:
            found = [folders.store.valid(config) for config in plan(item, profile)]
            if found and all(found):
                complete.append((item, profile, [run_key(config) for config in plan(item, profile)]))
                attempts.update({one.run_id: one for one in found if one})
    frames, notes = tables.from_attempts(list(attempts.values()))
    yield from notes
    merged = tables.combine(tables.read_parquet(folders.shipped), without_private(frames))
    folders.shipped.mkdir(parents=True, exist_ok=True)
    tables.write_parquet(merged, folders.shipped)
    merged = tables.read_parquet(folders.shipped)  # draw what a clone will draw from
    for item, profile, keys in complete:
        one = draw(
            item, profile, tables.restrict(merged, keys), folders.shipped / "figures", "the shipped records"
        )
        yield f"{item} ({profile}): {one.picture}"
    write_readme(folders)


def without_private(frames: Frames) -> Frames:
    runs = copy.copy(frames.runs)
    for name in PRIVATE:
        runs = runs.drop(columns=[column for column in runs.columns if column == f"provenance.{name}"])
    if "provenance_json" in runs.columns:
        runs["provenance_json"] = [
            json.dumps({k: v for k, v in json.loads(text).items() if k not in PRIVATE}, sort_keys=True)
            for text in runs["provenance_json"]
        ]
    return frames._replace(runs=runs)


def verdicts_for_readme(folders: Folders) -> str:
    """The claims that the shipped records decide, as the README's table."""
    shipped = tables.read_parquet(folders.shipped)
    rows = []
    for item in figures.items():
        for profile in SHIPPED_PROFILES:
            keys = [run_key(config) for config in plan(item, profile)]
            if set(keys) <= set(shipped.runs["key"]):
                verdicts = figures.judge(item, tables.restrict(shipped, keys), profile)
                rows += [(item, verdict) for verdict in verdicts if verdict.word in DECIDED]
    return claims.table(rows)


def write_readme(folders: Folders) -> None:
    """Put the table between the README's two markers."""
    text = README.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    write_atomic(README, f"{head}{BEGIN}\n{verdicts_for_readme(folders).strip()}\n{END}{tail}")
