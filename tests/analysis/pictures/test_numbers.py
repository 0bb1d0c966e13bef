"""One way to write a number, wherever it stands."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from analysis.pictures import numbers
from analysis.stats import Value
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.012343, "0.01234"), (1.5, "1.5"), (91.518, "91.52"), (275.04, "275"), (17387.49, "17,387"),
        (6762, "6,762"), (0, "0"), (-0.0, "0"), (-0.5, "-0.5"), (0.1 + 0.2, "0.3"), (1e-5, "0.00001"),
        (1.2343e-8, "1.234e-08"), (math.inf, "inf"),
    ],
)  # fmt: skip
def test_a_number_has_four_significant_digits_or_its_whole_part(value: float, text: str) -> None:
    assert numbers.number(value) == text


def test_a_picture_with_little_room_has_fewer_digits() -> None:
    assert (numbers.brief(1561.4), numbers.brief(0.4143, 2)) == ("1,560", "0.41")


def test_an_interval_is_shown_where_there_is_one() -> None:
    assert numbers.with_interval(None) == "-"
    assert numbers.with_interval(Value(1.23456)) == "1.235"
    assert numbers.with_interval(Value(float("nan"))) == numbers.with_interval(None) == "-"
    assert numbers.with_interval(Value(1.234, 1.1, 1.4)) == "1.234 [1.1, 1.4]"


def test_a_step_that_is_not_reached_is_never() -> None:
    assert numbers.with_unit(math.inf, "steps") == "never"
    assert numbers.with_unit(91.518, "%") == "91.52 %"
    assert numbers.with_unit(0.42, "") == "0.42"


@pytest.mark.parametrize("folder", ["analysis", "experiments/figures"])
def test_nothing_that_is_shown_has_digits_of_its_own(folder: str) -> None:
    """A format in an f-string would be a second way to write a number."""
    other = re.compile(r":[+,]?(\.\d+)?[fge]\}")
    allowed = {"numbers.py", "tables.py", "verdicts.py"}  # the first is the one way, the others write CSV
    for path in sorted((ROOT / folder).glob("*.py")):
        found = [] if path.name in allowed else other.findall(Path(path).read_text())
        assert not found, path
