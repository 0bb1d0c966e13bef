"""What pictures are drawn with."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.pictures import marks


def test_the_parts_of_a_stack_add_up_and_only_large_ones_show_their_number() -> None:
    axes = Figure().subplots()
    assert marks.stack(axes, 0.0, {"forward": 1.0, "wait": 2.5}, least=2.0) == 3.5
    assert [text.get_text() for text in axes.texts] == ["2.5"]


def test_a_phase_without_a_look_is_drawn_unaccounted() -> None:
    axes = Figure().subplots()
    spans = pd.DataFrame({"phase": ["a new one"], "start_ms": [0.0], "took_ms": [3.0]})
    marks.lane(axes, 0.0, spans, axis_ms=10.0)
    assert [text.get_text() for text in axes.texts] == ["3"]
