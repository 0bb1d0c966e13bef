"""Types with ranges: what they let through, and the sentence for what they do not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from sparsify import ranges

ALLOWED: list[tuple[Any, list[Any], list[Any], str]] = [
    (ranges.Density, [0.1, 1, np.float32(0.5)], [0, 1.01, math.nan, True, "0.1", [0.1], None], "(0, 1]"),
    (ranges.Scope, ["layer", 5, 0.1], ["block", 0, math.inf, None, ["layer"]], "one of global, layer"),
    (ranges.PositiveInt, [1, 10], [0, 1.5, -3, 2**31, 10**5000, False], "a whole number, 1 or more"),
    (ranges.NonNegativeFloat, [0, 1e30], [-0.1, math.inf, math.nan, 10**400], "a finite number, 0 or more"),
    (
        Sequence[ranges.PositiveFraction],
        [[], (0.1, 1), np.array([0.5])],
        [0.1, "a", [0.1, 0]],
        "a list [a,b]",
    ),
    (bool, [True, False], [0, 1, "maybe", None], "true or false"),
    (Literal["a", "b"] | None, ["a", None], ["c", 1, False], "one of a, b, or null"),
    (float, [0, -1.5, math.inf], [math.nan, "x"], "a number"),
    (Sequence[float], [[1.5, 2]], [[math.nan], [True]], "a list [a,b], each a number"),
    (tuple[ranges.NonNegativeInt, ...], [(), [3]], [(-1,), "3"], "a whole number, 0 or more"),
    (Annotated[str, ranges.Constraint(pattern="^a")], ["ab"], ["b", 1, None], "text"),
    (dict[Literal["a"], ranges.PositiveInt], [{}, {"a": 1}], [{"a": 0}, {"b": 1}, ["a"]], "of another kind"),
    (
        Annotated[int, "a meaning", ranges.Constraint(ge=1, le=3)],
        [1, 3],
        [0, 4],
        "a whole number from 1 to 3",
    ),
    (Any, [1, None, "a"], [], ""),
    (Path | None, [Path(), None], [], ""),  # for its own class to judge
]


@pytest.mark.parametrize(("allowed", "good", "bad", "sentence"), ALLOWED)
def test_a_value_is_let_through_or_refused_in_a_sentence(
    allowed: Any, good: list[Any], bad: list[Any], sentence: str
) -> None:
    for value in good:
        ranges.check_value("it", value, allowed)
    for value in bad:
        with pytest.raises(ValueError, match=r"^it=") as refusal:
            ranges.check_value("it", value, allowed)
        assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("topk", "topk"),
        ("a\x1b[31mred\nb", "'a\\x1b[31mred\\nb'"),
        (" topk", "' topk'"),
        ("\u202etxt", "'\\u202etxt'"),
        ("x" * 100_000, "x" * 57 + "..."),
        pytest.param(10**5000, "a number of 16610 bits", id="huge"),
        ([1, None, True], "[1,null,true]"),
    ],
)
def test_a_value_is_shown_short_and_without_control_characters(value: object, written: str) -> None:
    assert ranges.format_value(value) == written
