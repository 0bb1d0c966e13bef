"""Looks: every method has one colour in all figures, and variants of a method can be told apart."""

from __future__ import annotations

from analysis.pictures import style


def test_methods_without_a_look_get_a_stable_one() -> None:
    assert style.method_style("newmethod") == style.method_style("newmethod")
    colours = [look.colour for look in style.METHOD_STYLES.values()]
    assert len(set(colours)) == len(colours)
    assert style.method_style("newmethod").colour not in colours


def test_variants_of_a_method_have_ids_of_their_own() -> None:
    for name, field, value, found in (
        ("topk", "scope", "layer", "topk-layer"),
        ("topk", "scope", "global", "topk"),
        ("dense", "scope", float("nan"), "dense"),
        ("randomk", "feedback", "gradient", "randomk-feedback"),
        ("randomk", "feedback", "none", "randomk"),
    ):
        assert style.method_id({"method.name": name, f"method.{field}": value}) == found
