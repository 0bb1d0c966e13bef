from __future__ import annotations

from experiments import figures as every
from experiments.bench import _select_page
from experiments.commands._draw import redraw_all, show, sound
from experiments.commands._make import say
from experiments.commands._words import Items
from experiments.config.folders import Folders

GROUP = "results"


def figures(words: Items) -> int:
    """Draw again from stored records; needs no torch (make figures).

    From this checkout's records where they are complete, else from those that the repository ships.

    Args:
        words: the figures to draw; all without words.
    """
    folders = Folders()
    # That one is drawn from a benchmark's records, not from runs.
    items = [every.find(word) for word in words if word != "select"]
    drawn, all_written = redraw_all(folders, items or ([] if words else sound()))
    for figure in drawn:
        if items:
            show(figure)
        else:
            print(f"{figure.picture} (from {figure.source})")
    benched = _select_page.redraw(folders, say) if not words or "select" in words else []
    for picture in benched:
        print(picture)
    if not drawn and not benched:
        say("no stored records suffice for any figure; make some with `make reproduce-fig4`")
        return 1
    return 0 if all_written else 1
