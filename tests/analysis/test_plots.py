"""Pictures by kind."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis import plots
from analysis.pictures.style import Look
from analysis.stats import Value

OURS, THEIRS = Look("ours", "#000000", "o", ""), Look("theirs", "#0072B2", "s", "")


def legend(figure: plots.Figure) -> list[str]:
    return [text.get_text() for shown in figure.legends for text in shown.get_texts()]


def test_a_picture_has_its_panels_in_rows_and_each_label_once() -> None:
    panels = [plots.curves([plots.Curve(OURS, [1, 2], [3, 4])], sizes=(1, 2)) for _ in range(4)]
    figure = plots.picture(panels, 2.0, rows=2, ylabel=("above", "below"))
    assert [axes.get_ylabel() for axes in figure.axes] == ["above", "", "below", ""]
    assert legend(figure) == ["ours"]


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to draw: there is no run"):
        plots.picture([], 2.0)


def test_what_was_not_measured_has_no_entry_in_the_legend() -> None:
    lines = [plots.Curve(OURS, [1, 2], [Value(1.0), Value(2.0)]), plots.Curve(THEIRS, [], [])]
    assert legend(plots.picture([plots.curves(lines)], 2.0)) == ["ours"]


@pytest.mark.parametrize("entries", [2, 11])
def test_a_legend_is_as_wide_as_its_entries_and_never_wider_than_the_figure(entries: int) -> None:
    lines = [plots.Curve(OURS._replace(label=f"a method, H = {at}"), [1], [at]) for at in range(entries)]
    figure = plots.picture([plots.curves(lines)], 2.0)
    (shown,) = figure.legends
    assert len(shown.get_texts()) == entries
    assert shown.get_window_extent().width <= figure.bbox.width
    figure.draw_without_rendering()  # which puts the texts into their places
    rows = {round(text.get_window_extent().y0) for text in shown.get_texts()}
    assert len(rows) == (1 if entries == 2 else 3)


def test_a_table_is_drawn_as_its_curve_says() -> None:
    table = pd.DataFrame({"mean": [1.0, 2.0], "low": [0.5, 1.5], "high": [1.5, 2.5]})
    figure = plots.picture([plots.curves([plots.Curve(OURS, [0, 1], table, {"alpha": 0.5, "ms": 3})])], 2.0)
    (line,), (band,) = figure.axes[0].lines, figure.axes[0].collections
    assert (line.get_alpha(), line.get_markersize()) == (0.5, 3)
    assert band.get_alpha() == pytest.approx(0.09)


def test_a_curve_is_of_numbers_of_values_or_of_a_table_and_one_without_an_x_goes_across() -> None:
    table = pd.DataFrame({"mean": [1.0, 2.0], "low": [0.5, 1.5], "high": [1.5, 2.5]})
    lines: list[plots.Curve | plots.Band] = [
        plots.Curve(OURS, [0, 1], [1.0, 2.0], plots.DOTTED),
        plots.Curve(OURS, [0, 1], [Value(1.0, 0.5, 1.5), Value(2.0)]),
        plots.Curve(THEIRS, pd.Series([0, 1]), table),
        plots.Curve(THEIRS._replace(label="level"), None, Value(1.0)),
        plots.Band(OURS, [0, 1], [0, 0], [1, 1]),
    ]
    figure = plots.picture([plots.curves(lines, log=(1, 2), grid=None)], 2.0)
    (axes,) = figure.axes
    assert axes.get_yscale() == "log"
    assert len(axes.collections) == 2  # the band, and the interval of the table
    assert legend(figure) == ["ours", "theirs", "level"]


def test_bars_show_their_parts_and_texts_in_rows_or_places() -> None:
    bars = [
        plots.Bar("dense", {"forward": 1.0, "wait": 2.0}, "3 ms"),
        plots.Bar("Top-k, fused", {"wait": 1.0}),
    ]
    lying = plots.picture([plots.piles(bars)], 2.0).axes[0]
    assert [text.get_text() for text in lying.get_yticklabels()] == ["dense", "Top-k, fused"]
    assert "3 ms" in [text.get_text() for text in lying.texts]
    paired = [*bars, plots.Bar("dense", {"wait": 5.0}, "paper", place=0.2, faint=True)]
    standing = plots.picture([plots.stacks(paired, least=4.0)], 2.0).axes[0]
    assert [text.get_text() for text in standing.get_xticklabels()] == ["dense", "Top-k,\nfused"]
    assert [text.get_text() for text in standing.texts] == ["3 ms", "", "5", "paper"]


def test_groups_of_bars_carry_their_numbers() -> None:
    groups = {"Top-k": [(OURS, "ours", Value(1.5, 1.0, 2.0)), (OURS, "as published", Value(3.0))], "DGC": []}
    (axes,) = plots.picture([plots.ratio_bars(groups, level=1)], 2.0).axes
    assert [text.get_text() for text in axes.texts] == ["1.5", "3"]


def test_layers_heat_and_winners_are_drawn_on_their_axes() -> None:
    dots = plots.dots([plots.Curve(OURS, [0.5, 1, 2], [0, 1, 0])], rows=("a", "b"), factors=True)
    cells = np.array([[0, 1], [1, 0]])
    x = np.array([1.0, 10.0])
    panels = [
        plots.layered(plots.shade("x", 0.9, 1.1), plots.upright(1.0), dots),
        plots.heatmap(cells, 20.0, title="heat"),
        plots.areas(x, x, cells, [OURS, THEIRS], [plots.Curve(THEIRS, x, x)]),
    ]
    rows, heat, winners = plots.picture(panels, 2.0).axes
    assert rows.get_xscale() == "log"
    assert rows.get_ylim()[0] > rows.get_ylim()[1]  # the first is at the top
    assert len(heat.images) == 1
    assert (winners.get_xscale(), len(winners.lines)) == ("log", 1)
