"""One file per figure or table, named <paper>_<item>.py: its runs, its drawing, its claims."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sparsify.ranges import unknown
from sparsify.registry import BrokenFile, imported

FOLDER = Path(__file__).parent
PROFILES = ("smoke", "laptop", "paper")
PUBLISHED = "published"  # stands in place of a profile where an item has no runs of ours
PARTS = ("TITLE", "runs", "draw", "claims", "caption")

if TYPE_CHECKING:  # listing the items must not wait for pandas
    from analysis.claims import Verdict
    from analysis.frames import Frames
    from analysis.tables import Table


def items() -> dict[str, str]:
    """Item -> module, from the file names alone; a file that starts with _ is shared by items.

    Raises:
        ValueError: two files for one item.
    """
    found: dict[str, str] = {}
    for stem in sorted(path.stem for path in FOLDER.glob("[!_]*_*.py")):
        item = stem.partition("_")[2].replace("_", "-")
        if item in found:
            both = f"{FOLDER / found[item].rpartition('.')[2]}.py and {FOLDER / stem}.py"
            raise ValueError(f"item {item!r} is in two files, {both}; rename one")
        found[item] = f"{__name__}.{stem}"
    return found


def check(item: str) -> None:
    """Raises ValueError, listing what there is, where there is no such item."""
    known = list(items())
    if item not in known:
        raise ValueError(unknown("item", item, known))


def load(item: str) -> ModuleType:
    """An item's module: TITLE, runs(profile), draw(frames, profile), claims(), caption(frames, profile).

    It may have table(frames) as well, and SCALE, the paper's scale (`claims.reduced`), without which no
    number of its runs is held to be comparable.

    Raises:
        BrokenFile: its file can't be imported, or lacks one of these.
    """
    check(item)
    module = imported(items()[item])
    if missing := [name for name in PARTS if not hasattr(module, name)]:
        raise BrokenFile(f"{module.__file__} has no {', '.join(missing)}, which every figure's file has")
    return module


def has_runs(item: str) -> bool:
    """Is it drawn from runs, or else from tables of published facts that the repository carries?"""
    return any(load(item).runs(profile) for profile in PROFILES)


def profiles(item: str) -> tuple[str, ...]:
    """The profiles in which it can be drawn."""
    return PROFILES if has_runs(item) else (PUBLISHED,)


def judge(item: str, frames: Frames) -> list[Verdict]:
    """A verdict on every claim of an item. `frames` holds the item's own runs and no others."""
    from analysis import claims

    figure = load(item)
    return claims.judge(figure.claims(), frames, claims.reduced(frames, getattr(figure, "SCALE", None)))


def tables(item: str, frames: Frames) -> list[Table]:
    """The numbers behind a picture; empty where its file has no `table`."""
    figure = load(item)
    found: Table | list[Table] = figure.table(frames) if hasattr(figure, "table") else []
    return found if isinstance(found, list) else [found]


def page(item: str, frames: Frames, profile: str, picture: str, verdicts: list[Verdict]) -> str:
    """The item as Markdown: picture, caption, verdicts, tables of numbers, the reasons of the tolerances."""
    from analysis import tables as written
    from analysis import verdicts as judged

    figure = load(item)
    is_drawn = len(frames.runs) > 0 or profile == PUBLISHED
    parts = [f"# {item}: {figure.TITLE}\n"]
    if is_drawn:
        parts += [f"![{item}]({picture}.png)\n", f"{figure.caption(frames, profile)}\n"]
    rows = [(item, verdict) for verdict in verdicts]
    parts += ["## Verdicts\n", judged.as_table(rows).markdown() if rows else f"{judged.NOTHING}\n"]
    if is_drawn and (numbers := tables(item, frames)):
        parts += ["## Numbers\n", written.markdown(numbers)]
    if verdicts:
        parts += ["## How each number was read, and when it counts as reproduced\n", judged.notes(verdicts)]
    return "\n".join(parts)
