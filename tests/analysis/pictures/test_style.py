"""Looks: every method has one colour in all figures, and variants of a method can be told apart."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis.pictures import marks, style


def test_methods_without_a_look_get_a_stable_one() -> None:
    assert style.look("newmethod") == style.look("newmethod")
    colours = [look.colour for look in style.LOOKS.values()]
    assert len(set(colours)) == len(colours)
    assert style.look("newmethod").colour not in colours


def test_variants_of_a_method_have_ids_of_their_own() -> None:
    for name, field, value, found in (
        ("topk", "scope", "layer", "topk-layer"),
        ("topk", "scope", "global", "topk"),
        ("dense", "scope", float("nan"), "dense"),
        ("randomk", "feedback", "gradient", "randomk-feedback"),
        ("randomk", "feedback", "none", "randomk"),
    ):
        assert style.method_id({"method.name": name, f"method.{field}": value}) == found


def test_a_phase_without_a_look_is_drawn_unaccounted() -> None:
    axes = Figure().subplots()
    spans = pd.DataFrame({"phase": ["a new one"], "start_ms": [0.0], "took_ms": [3.0]})
    marks.lane(axes, 0.0, spans, axis_ms=10.0)
    assert [text.get_text() for text in axes.texts] == ["3"]
