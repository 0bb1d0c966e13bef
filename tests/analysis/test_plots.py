"""Numbers in figures: three significant digits, with their interval where there is one."""

from __future__ import annotations

import math

import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis import plots
from analysis.stats import Value


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (12345, "12,345"), (0, "0")],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert plots.number(value) == text


def test_what_is_not_finite_is_named() -> None:
    assert plots.number(math.inf) == "inf"


def test_an_interval_is_shown_where_there_is_one() -> None:
    assert plots.with_interval(None) == "-"
    assert plots.with_interval(Value(1.234)) == "1.23"
    assert plots.with_interval(Value(float("nan"))) == plots.with_interval(None) == "-"
    assert plots.with_interval(Value(1.234, 1.1, 1.4)) == "1.23 [1.10, 1.40]"


def test_the_parts_of_a_stack_add_up_and_only_large_ones_show_their_number() -> None:
    axes = Figure().subplots()
    assert plots.stack(axes, 0.0, {"forward": 1.0, "wait": 2.5}, least=2.0) == 3.5
    assert [text.get_text() for text in axes.texts] == ["2.50"]


def test_a_phase_without_a_look_is_drawn_unaccounted() -> None:
    axes = Figure().subplots()
    spans = pd.DataFrame({"phase": ["a new one"], "start_ms": [0.0], "took_ms": [3.0]})
    plots.lane(axes, 0.0, spans, axis_ms=10.0)
    assert [text.get_text() for text in axes.texts] == ["3.00"]
