"""Raw runs into tables: for this checkout, and for everyone who clones the repository."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

from analysis import frames as tables
from analysis.frames import Frames
from analysis.records import run_key
from experiments import figures
from experiments.reproduce import Folders, draw, plan

PRIVATE = ("host",)  # of the provenance: says nothing that another reader could use


def consolidate(folders: Folders) -> Iterator[str]:
    """All valid runs of this checkout into results/records."""
    frames, notes = tables.from_attempts(list(folders.store.newest_valid()))
    folders.records.mkdir(parents=True, exist_ok=True)
    tables.write_parquet(frames, folders.records)
    yield from notes
    yield f"{len(frames.runs)} runs, {len(frames.steps)} steps, {len(frames.epochs)} epochs in {folders.records}"


def ship(folders: Folders) -> Iterator[str]:
    """The runs of every figure that is complete here into results/shipped, beside those already there."""
    attempts, complete = {}, []
    for item in figures.items():
        for profile in ("laptop", "paper"):
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
