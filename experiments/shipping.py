"""Raw runs into tables: for this checkout, and for everyone who clones the repository."""

from __future__ import annotations

import json
from collections.abc import Iterator

from analysis import claims
from analysis import frames as tables
from analysis.frames import Frames
from analysis.records import read_json, run_id, write_atomic, write_json
from experiments import figures
from experiments.planning import ROOT, Folders
from experiments.reproduce import plan, redraw_shipped, runs_of

SHIPPED_PROFILES = ("laptop", "paper")
DECIDED = ("reproduced", "partly", "not reproduced", "inconclusive")
README = ROOT / "README.md"
BEGIN = "<!-- verdicts: written by `python -m experiments collect --ship` -->"
END = "<!-- end of verdicts -->"
PRIVATE = ("host",)  # of the provenance: says nothing that another reader could use


def consolidate(folders: Folders) -> Iterator[str]:
    """All valid runs of this checkout into results/records."""
    sound = []
    for attempt in folders.store.all_valid():
        if attempt.is_valid(verify=True):
            sound.append(attempt)
        else:
            yield f"left out {attempt.run_id}: a file's digest is not the one that its manifest states"
    frames, notes = tables.together(sound, folders.records)
    folders.records.mkdir(parents=True, exist_ok=True)
    tables.write_parquet(frames, folders.records)
    yield from notes
    counts = f"{len(frames.runs)} runs, {len(frames.steps)} steps, {len(frames.epochs)} epochs"
    yield f"{counts} in {folders.records}"


def ship(folders: Folders) -> Iterator[str]:
    """The runs of every figure that is complete here into results/shipped, and what no figure needs out of
    it.
    """
    indexes = folders.shipped / "figures"
    indexes.mkdir(parents=True, exist_ok=True)
    attempts = {}
    for item in figures.items():
        for profile in SHIPPED_PROFILES:
            configs = plan(item, profile)
            found = [folders.store.valid(config) for config in configs]
            if found and all(found):
                write_json(indexes / f"{item}-{profile}.json", {"runs": [run_id(c) for c in configs]})
                attempts.update({one.run_id: one for one in found if one})
    frames, notes = tables.together(attempts.values(), folders.records)
    yield from notes
    merged = tables.combine(tables.read_parquet(folders.shipped), thinned(without_private(frames)))
    needed = {run for path in indexes.glob("*.json") for run in (read_json(path) or {"runs": []})["runs"]}
    tables.write_parquet(runs_of(merged, needed), folders.shipped)
    shipped = tables.read_parquet(folders.shipped)  # draw what a clone will draw from
    for path in sorted(indexes.glob("*.json")):
        item, _, profile = path.stem.rpartition("-")
        one = redraw_shipped(item, profile, folders, shipped, indexes)
        yield f"{path.stem}: {one.picture if one else 'its runs are missing'}"
    write_readme(folders)


def thinned(frames: Frames) -> Frames:
    """Without the steps of trainings that are there for their curve: epochs say what figures draw, and 60
    trainings of 3,519 steps on 8 ranks would be 50 MB. They stay in the checkout that ran them.
    """
    runs = frames.runs
    is_curve = runs["train.validate"].eq("epoch") & runs["timing.mode"].ne("as_published")
    steps = frames.steps[~frames.steps["key"].isin(runs["key"][is_curve])].reset_index(drop=True)
    spans = frames.spans[~frames.spans["key"].isin(runs["key"][is_curve])].reset_index(drop=True)
    return frames._replace(steps=steps, spans=spans)


def without_private(frames: Frames) -> Frames:
    runs = frames.runs.drop(columns=[f"provenance.{name}" for name in PRIVATE], errors="ignore")
    runs["provenance_json"] = [
        json.dumps({k: v for k, v in json.loads(text).items() if k not in PRIVATE}, sort_keys=True)
        for text in runs["provenance_json"]
    ]
    return frames._replace(runs=runs)


def verdicts_for_readme(folders: Folders) -> str:
    """The claims that the shipped records decide, as the README's table."""
    shipped, rows = tables.read_parquet(folders.shipped), []
    for path in sorted((folders.shipped / "figures").glob("*.json")):
        item, _, profile = path.stem.rpartition("-")
        frames = runs_of(shipped, (read_json(path) or {"runs": []})["runs"])
        verdicts = figures.judge(item, frames, profile)
        rows += [(item, verdict) for verdict in verdicts if verdict.word in DECIDED]
    return claims.table(rows)


def write_readme(folders: Folders) -> None:
    """Put the table between the README's two markers."""
    text = README.read_text()
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    write_atomic(README, f"{head}{BEGIN}\n{verdicts_for_readme(folders).strip()}\n{END}{tail}")
