"""Pictures by kind."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from matplotlib.text import Text

from analysis import plots
from analysis.pictures.style import MethodStyle
from analysis.stats import Estimate

OURS, THEIRS = MethodStyle("ours", "#000000", "o", ""), MethodStyle("theirs", "#0072B2", "s", "")


def words(texts: Iterable[Text]) -> list[str]:
    return [text.get_text() for text in texts]


def test_a_picture_has_its_panels_in_rows_and_each_label_once() -> None:
    lines = [plots.Curve(OURS, [1, 2], [3, 4]), plots.Curve(THEIRS, [], [])]  # of which one was not measured
    figure = plots.compose_figure(
        [plots.curves_panel(lines, doubling_x_ticks=(1, 2))] * 4, 2.0, num_rows=2, ylabel=("above", "below")
    )
    assert [axes.get_ylabel() for axes in figure.axes] == ["above", "", "below", ""]
    (legend,) = figure.legends
    assert words(legend.get_texts()) == ["ours"]
    with pytest.raises(ValueError, match="nothing to draw: there is no run"):
        plots.compose_figure([], 2.0)


def test_bars_show_their_parts_and_texts_in_rows_or_places() -> None:
    bars = [
        plots.StackedBar("dense", {"forward": 1.0, "wait": 2.0}, "3 ms"),
        plots.StackedBar("Top-k, fused", {"wait": 1.0}),
        plots.StackedBar("dense", {"wait": 5.0}, "paper", x_offset=0.2, is_published=True),
    ]
    groups = {
        "Top-k": [(OURS, "ours", Estimate(1.5, 1.0, 2.0)), (OURS, "as published", Estimate(3.0))],
        "DGC": [],
    }
    panels = [
        plots.horizontal_stacks_panel(bars[:2]),
        plots.stacked_bars_panel(bars, min_labelled_part=4.0),
        plots.grouped_bars_panel(groups, reference_y=1),
    ]
    lying, standing, ratios = plots.compose_figure(panels, 2.0).axes
    assert words(lying.get_yticklabels()) == ["dense", "Top-k, fused"]
    assert "3 ms" in words(lying.texts)
    assert words(standing.get_xticklabels()) == ["dense", "Top-k,\nfused"]
    assert words(standing.texts) == ["3 ms", "", "5", "paper"]
    assert words(ratios.texts) == ["1.5", "3"]
