"""Numbers are written in the same way in every picture and table."""

from __future__ import annotations

import math

from analysis.pictures import numbers
from analysis.stats import Estimate


def test_a_number_has_four_significant_digits_or_its_whole_part() -> None:
    for value, text in (
        (0.012343, "0.01234"), (1.5, "1.5"), (91.518, "91.52"), (275.04, "275"), (17387.49, "17,387"),
        (6762, "6,762"), (0, "0"), (-0.0, "0"), (-0.5, "-0.5"), (0.1 + 0.2, "0.3"), (1e-5, "0.00001"),
        (1.2343e-8, "1.234e-08"), (math.inf, "inf"),
    ):  # fmt: skip
        assert numbers.format_number(value) == text
    assert (numbers.format_brief(1561.4), numbers.format_brief(0.4143, 2)) == (
        "1,560",
        "0.41",
    )  # with little room


def test_an_interval_is_shown_where_there_is_one_and_a_step_that_is_not_reached_is_never() -> None:
    for value, text in (
        (None, "-"),
        (Estimate(math.nan), "-"),
        (Estimate(1.23456), "1.235"),
        (Estimate(1.234, 1.1, 1.4), "1.234 [1.1, 1.4]"),
    ):
        assert numbers.format_with_interval(value) == text
    assert numbers.format_with_unit(math.inf, "steps") == "never"
    assert numbers.format_with_unit(91.518, "%") == "91.52 %"
    assert numbers.format_with_unit(0.42, "") == "0.42"
