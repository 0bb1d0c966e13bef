"""A figure's name in; its missing runs, its drawing and its verdicts out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis import claims
from analysis import frames as tables
from analysis.frames import Frames
from analysis.records import read_json, run_id, write_atomic, write_json
from analysis.style import save
from experiments import figures
from experiments.making import make_all
from experiments.planning import Folders, plan, profile_of, provide

PROFILES = ("smoke", "laptop", "paper")


@dataclass(frozen=True)
class Drawn:
    """A figure on disk and what became of the paper's claims."""

    item: str
    profile: str
    picture: Path
    table: str  # Markdown
    source: str  # whose records


def reproduce(
    item: str, overrides: Sequence[str], folders: Folders, say: Callable[[str], None], force: bool = False
) -> Drawn:
    """Make what is missing, then draw."""
    profile = profile_of(overrides)
    planned = provide(plan(item, profile, overrides), say)
    missing = [one for one in planned if force or folders.store.valid(one.config) is None]
    say(f"{item} ({profile}): {len(planned)} runs, {len(missing)} missing")
    make_all(missing, folders, f"{item}-{profile}", [item, *overrides], say, force)
    return draw_local(item, profile, [run_id(one.config) for one in planned], folders)


def draw_local(item: str, profile: str, runs: Sequence[str], folders: Folders) -> Drawn:
    """Draw from this checkout's own runs, and note which they are, so that `redraw` finds them."""
    attempts = [attempt for run in runs if (attempt := folders.store.newest_valid(run))]
    frames, notes = tables.together(attempts, folders.records)
    folders.index.mkdir(parents=True, exist_ok=True)
    write_json(folders.index / f"{item}-{profile}.json", {"runs": list(runs)})
    return draw(item, profile, frames, folders.figures, "this machine's runs", notes)


def draw(
    item: str, profile: str, frames: Frames, folder: Path, source: str, notes: Sequence[str] = ()
) -> Drawn:
    """Picture, claims and Markdown of one figure, from one set of frames."""
    name = f"{item}-{profile}"
    folder.mkdir(parents=True, exist_ok=True)
    picture = save(figures.load(item).draw(frames, profile), folder, name)
    verdicts = figures.judge(item, frames, profile)
    remarks = "".join(f"- {note}\n" for note in (f"Drawn from {source}.", *notes))
    page = figures.page(item, frames, profile, name, verdicts)
    write_atomic(folder / f"{name}.md", f"{page}\n{remarks}")
    return Drawn(item, profile, picture, claims.table((item, verdict) for verdict in verdicts), source)


def redraw_all(folders: Folders, items: Sequence[str]) -> list[Drawn]:
    """Every figure that was drawn before: from this checkout's runs where they are, else from the shipped
    ones.
    """
    shipped = tables.read_parquet(folders.shipped)
    every = [redraw(item, profile, folders, shipped) for item in items for profile in PROFILES]
    return [one for one in every if one is not None]


def redraw(item: str, profile: str, folders: Folders, shipped: Frames) -> Drawn | None:
    """One figure from stored records; None where no source has all of its runs."""
    own = read_json(folders.index / f"{item}-{profile}.json")
    if own and all(folders.store.newest_valid(run) for run in own["runs"]):
        return draw_local(item, profile, own["runs"], folders)
    return redraw_shipped(item, profile, folders, shipped, folders.figures)


def redraw_shipped(item: str, profile: str, folders: Folders, shipped: Frames, into: Path) -> Drawn | None:
    """One figure from the records that the repository carries; None where they do not suffice."""
    index = read_json(folders.shipped / "figures" / f"{item}-{profile}.json")
    if not index or not set(index["runs"]) <= set(shipped.runs["run_id"]):
        return None
    frames = runs_of(shipped, index["runs"])
    return draw(item, profile, frames, into, "the records shipped with the repository")


def runs_of(frames: Frames, run_ids: Collection[str]) -> Frames:
    return tables.restrict(frames, frames.runs["key"][frames.runs["run_id"].isin(run_ids)])
