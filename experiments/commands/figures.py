from __future__ import annotations

from experiments import figures as all_figures
from experiments.bench._pages import FUSED_PAGE, SELECT_PAGE, STEP_PAGE
from experiments.bench._peer_pages import PEERS_PAGE
from experiments.commands._arguments import Items
from experiments.commands._drawing import load_readable_figures, print_figure_results, redraw_recorded_figures
from experiments.commands._messages import say
from experiments.config.folders import ResultFolders

GROUP = "results"
# The figures that are drawn from a benchmark's records.
DRAW_BY_BENCHMARK = {
    page.benchmark: page.draw_every_device for page in (FUSED_PAGE, PEERS_PAGE, SELECT_PAGE, STEP_PAGE)
}


def figures(words: Items) -> int:
    """Draw figures again from stored records: `make figures`.

    The records are this checkout's where they are complete, else those that the repository ships. Drawing
    needs no torch.

    Args:
        words: the figures to draw; all without words.
    """
    folders = ResultFolders()
    items = [all_figures.find_item(word) for word in words if word not in DRAW_BY_BENCHMARK]
    chosen_figures = [all_figures.load(item) for item in items]
    drawn_figures, are_all_written = redraw_recorded_figures(
        folders, chosen_figures or ([] if words else load_readable_figures())
    )
    for figure in drawn_figures:
        if chosen_figures:
            print_figure_results(figure)
        else:
            print(f"{figure.picture} (from {figure.source})")
    benchmark_pictures = [
        picture
        for name, draw in DRAW_BY_BENCHMARK.items()
        if not words or name in words
        for picture in draw(folders, say)
    ]
    for picture in benchmark_pictures:
        print(picture)
    if not drawn_figures and not benchmark_pictures:
        say("no stored records suffice for any figure; make some with `make reproduce-fig4`")
        return 1
    return 0 if are_all_written else 1
