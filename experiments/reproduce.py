"""A figure's name in; its missing runs, its drawing and its verdicts out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from analysis import claims
from analysis import frames as tables
from analysis.frames import Frames
from analysis.records import Attempt, run_key, write_atomic
from analysis.style import save
from experiments import config as configs
from experiments import figures, sources
from experiments.launch import make
from experiments.planning import Folders, profile_of, provide

PROFILES = ("smoke", "laptop", "paper")


@dataclass(frozen=True)
class Drawn:
    """A figure on disk and what became of the paper's claims."""

    item: str
    profile: str
    picture: Path
    table: str  # Markdown
    source: str  # whose records


def plan(item: str, profile: str, overrides: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The resolved configs of a figure's runs."""
    extra = [word for word in overrides if not word.startswith("profile=")]
    return [configs.resolve([*run, *extra]) for run in figures.load(item).runs(profile)]


def reproduce(
    item: str, overrides: Sequence[str], folders: Folders, say: Callable[[str], None], force: bool = False
) -> Drawn:
    """Make what is missing, then draw."""
    profile = profile_of(overrides)
    planned = provide(plan(item, profile, overrides), say)
    missing = [one for one in planned if force or folders.store.valid(one.config) is None]
    say(f"{item} ({profile}): {len(planned)} runs, {len(missing)} missing")
    make(missing, folders.store, folders.scratch, force)
    return draw_local(item, profile, [one.config for one in planned], folders)


def draw_local(item: str, profile: str, wanted: Sequence[dict[str, Any]], folders: Folders) -> Drawn:
    """Draw from this checkout's own runs."""
    frames, notes = tables.empty(), list[str]()
    for config in wanted:
        if attempt := folders.store.valid(config):
            one, remarks = read(attempt)
            frames, notes = tables.combine(frames, one), [*notes, *remarks]
    return draw(item, profile, frames, folders.figures, "this machine's runs", notes)


@cache
def read(attempt: Attempt) -> tuple[Frames, list[str]]:
    """An attempt's tables. An attempt that is valid never changes, and figures share runs."""
    return tables.from_attempts([attempt])


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
    """Every figure that stored records suffice for: this checkout's where complete, else the shipped ones."""
    shipped = tables.read_parquet(folders.shipped)
    every = [redraw(item, profile, folders, shipped) for item in items for profile in PROFILES]
    return [one for one in every if one is not None]


def redraw(item: str, profile: str, folders: Folders, shipped: Frames) -> Drawn | None:
    """One figure from stored records; None where no source has all of its runs."""
    kept = set(shipped.runs["key"])
    wanted: list[dict[str, Any]] = []
    for words in figures.load(item).runs(profile):
        config = configs.resolve(words)
        digits = sources.substituted(config) or config
        if not (folders.store.valid(config) or folders.store.valid(digits) or run_key(config) in kept):
            return None  # composing the others of a large plan takes seconds
        wanted.append(config)
    for choice in (wanted, [sources.substituted(config) or config for config in wanted]):
        if all(folders.store.valid(config) for config in choice):
            return draw_local(item, profile, choice, folders)
    keys = [run_key(config) for config in wanted]
    if not set(keys) <= kept:
        return None
    frames = tables.restrict(shipped, keys)
    return draw(item, profile, frames, folders.figures, "the records shipped with the repository")
