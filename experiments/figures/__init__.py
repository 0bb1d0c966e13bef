"""One file per figure or table, named <paper>_<item>.py: its runs, its drawing, its claims."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from sparsify.registry import did_you_mean

if TYPE_CHECKING:  # listing the items must not wait for pandas
    from analysis.claims import Verdict
    from analysis.frames import Frames


def items() -> dict[str, str]:
    """Item -> module, from the file names alone."""
    files = sorted(path.stem for path in Path(__file__).parent.glob("*_*.py") if path.stem != "__init__")
    return {stem.partition("_")[2].replace("_", "-"): f"{__name__}.{stem}" for stem in files}


def check(item: str) -> None:
    """Raises ValueError, listing what there is, where there is no such item."""
    known = list(items())
    if item not in known:
        raise ValueError(f"no item {item!r}{did_you_mean(item, known)}; there are: {', '.join(known)}")


def load(item: str) -> ModuleType:
    """An item's module: TITLE, runs(profile), draw(frames, profile), claims(), caption(frames, profile)."""
    check(item)
    return importlib.import_module(items()[item])


def judge(item: str, frames: Frames, profile: str) -> list[Verdict]:
    """A verdict on every claim of an item. `frames` holds the item's own runs and no others."""
    from analysis import claims

    return claims.judge(load(item).claims(), frames, claims.reduced(frames, profile))


def page(item: str, frames: Frames, profile: str, picture: str, verdicts: list[Verdict]) -> str:
    """The item as Markdown: picture, caption, verdicts, tables of numbers, the reasons of the tolerances."""
    from analysis import claims

    figure = load(item)
    parts = [f"# {item}: {figure.TITLE}\n"]
    if len(frames.runs):
        parts += [f"![{item}]({picture}.png)\n", f"{figure.caption(frames, profile)}\n"]
    parts += ["## Verdicts\n", claims.table((item, verdict) for verdict in verdicts)]
    if hasattr(figure, "table") and len(frames.runs):
        parts += ["## Numbers\n", figure.table(frames)]
    parts += ["## How each number was read, and when it counts as reproduced\n", claims.notes(verdicts)]
    return "\n".join(parts)
