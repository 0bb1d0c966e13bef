"""Numbers are written in the same way in every picture and table."""

from __future__ import annotations

import math

from analysis.pictures import numbers
from analysis.stats import Estimate


def test_a_number_has_three_significant_digits_and_a_whole_one_all() -> None:
    for value, text in (
        (0.012343, "0.0123"), (1.5, "1.5"), (91.518, "91.5"), (275.04, "275"), (17387.49, "17,400"),
        (6762, "6,762"), (0, "0"), (-0.0, "0"), (-0.5, "-0.5"), (0.1 + 0.2, "0.3"), (1e-5, "0.00001"),
        (9.996, "10"), (-0.0004, "-0.0004"), (1.2343e-8, "1.23e-08"), (math.inf, "inf"),
    ):  # fmt: skip
        assert numbers.format_number(value) == text
    assert numbers.format_number(0.4143, 2) == "0.41"  # with little room
    assert numbers.format_number(4.9035, numbers.CHOSEN_DIGITS) == "4.904"  # the limit of a rule


def test_an_interval_says_how_many_digits_a_number_has() -> None:
    for value, text in (
        (None, "-"),
        (Estimate(math.nan), "-"),
        (Estimate(1.23456), "1.23"),
        (Estimate(5.376, 4.41, 6.341), "5.4 [4.4, 6.3]"),
        (Estimate(67.94, 63.8, 71.34), "68 [64, 71]"),
        (Estimate(23.81, 21.23, 26.7), "24 [21, 27]"),
        (Estimate(1.1, 1.09, 1.11), "1.10 [1.09, 1.11]"),
        (Estimate(0.6067, 0.2577, 0.9556), "0.61 [0.26, 0.96]"),
        (Estimate(-0.03167, -0.1083, 0.04501), "-0.03 [-0.11, 0.05]"),
        (Estimate(7.032, -8.259, 22.32), "7 [-8, 22]"),
        (Estimate(775.1, 759.3, 791.2), "775 [759, 791]"),
        (Estimate(1224.6, 1177.2, 1274.1), "1,220 [1,180, 1,270]"),
        (Estimate(5097.2, 5095.1, 5099.3), "5,097 [5,095, 5,099]"),  # else all three were alike
        (Estimate(1.2e-8, 1.1e-8, 1.3e-8), "1.2e-08"),
        (Estimate.exact(14.0, 3, "counts"), "14"),
    ):
        assert numbers.format_with_interval(value) == text
    assert numbers.format_with_interval(Estimate(5.376, 4.41, 6.341), "points") == "5.4 points [4.4, 6.3]"


def test_digits_tell_a_number_from_the_limit_that_decides() -> None:
    narrow = Estimate(0.72, 0.01169, 1.428)
    assert numbers.format_with_interval(narrow) == "0.7 [0.0, 1.4]"
    assert numbers.format_with_interval(narrow, compared_with=[0.0]) == "0.72 [0.01, 1.43]"
    assert (
        numbers.format_with_interval(narrow, compared_with=[0.01169]) == "0.7 [0.0, 1.4]"
    )  # it is the limit
    assert numbers.format_with_interval(Estimate(3.8932), compared_with=[3.8917]) == "3.893"
    assert numbers.format_with_interval(Estimate(3.8932), compared_with=[4.0, -math.inf]) == "3.89"


def test_a_step_that_is_not_reached_is_never() -> None:
    assert numbers.format_with_unit(math.inf, "steps") == "never"
    assert numbers.format_with_unit(91.518, "%") == "91.5 %"
    assert numbers.format_with_unit(0.42, "") == "0.42"
