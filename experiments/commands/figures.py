from __future__ import annotations

from experiments import figures as every
from experiments.bench._pages import SELECT_PAGE, STEP_PAGE
from experiments.commands._arguments import Items
from experiments.commands._drawing import load_readable_figures, redraw_all, print_figure
from experiments.commands._messages import say
from experiments.config.folders import ResultFolders

GROUP = "results"
BENCHED = {
    "select": SELECT_PAGE.redraw,
    "step": STEP_PAGE.redraw,
}  # drawn from a benchmark's records


def figures(words: Items) -> int:
    """Draw again from stored records; needs no torch (make figures).

    From this checkout's records where they are complete, else from those that the repository ships.

    Args:
        words: the figures to draw; all without words.
    """
    folders = ResultFolders()
    asked_figures = [every.load(every.find_item(word)) for word in words if word not in BENCHED]
    drawn, all_written = redraw_all(folders, asked_figures or ([] if words else load_readable_figures()))
    for figure in drawn:
        if asked_figures:
            print_figure(figure)
        else:
            print(f"{figure.picture} (from {figure.source})")
    named = [name for name in BENCHED if not words or name in words]
    benched = [picture for name in named for picture in BENCHED[name](folders, say)]
    for picture in benched:
        print(picture)
    if not drawn and not benched:
        say("no stored records suffice for any figure; make some with `make reproduce-fig4`")
        return 1
    return 0 if all_written else 1
