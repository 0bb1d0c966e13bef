"""Numbers as text, alike in pictures, tables, sentences and on the terminal, by one rule for their digits.

- A measured number has three significant digits: 0.0123, 67.9, 17,400. A whole number, mostly a count, keeps
  all of its digits.
- A number with an interval has the decimals that show the first digit of the interval's half-width, and two
  or three significant digits. Its limits have as many decimals: 5.4 [4.4, 6.3].
- Numbers that differ have as many digits as tell them apart: a value and its limits, and both beside the
  limit that a verdict rests on.
- A number that somebody chose (a setting, the limit of a rule, the tick of an axis) has four digits.

Files for programs (CSV, JSON) keep all digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # which brings pandas, that a line on the terminal need not wait for
    from analysis.stats import Estimate

MIN_DIGITS, SIGNIFICANT_DIGITS, MAX_DIGITS = 2, 3, 6  # of measured numbers; the last to tell two apart
CHOSEN_DIGITS = 4  # of numbers that somebody chose
MAX_DECIMALS = 6  # what is smaller has an exponent
SAME = 1e-9  # numbers that are nearer to each other do not differ
ABSENT = "-"


def format_number(value: float, digits: int = SIGNIFICANT_DIGITS) -> str:
    """Return so many significant digits, of a whole number all: 0.0123, 1.5, 17,400, 6,762; 1.23e-08."""
    if value == 0 or not math.isfinite(value):
        return f"{abs(value) if value == 0 else value:g}"
    if abs(value) < 10.0**-MAX_DECIMALS:
        return f"{value:.{digits}g}"
    if float(value).is_integer():
        return f"{value:,.0f}"
    text = _format_decimals(value, _decimals_for_digits(value, digits))
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_with_unit(value: float, unit: str, digits: int = SIGNIFICANT_DIGITS) -> str:
    """Return '91.5 %'; 'never' for a step that is not reached."""
    return "never" if math.isinf(value) else f"{format_number(value, digits)} {unit}".strip()


def format_with_interval(
    estimate: Estimate | None, unit: str = "", compared_with: Iterable[float] = ()
) -> str:
    """Return '5.4 points [4.4, 6.3]', or '-' where there is no number; an exact one has no interval.

    Args:
        compared_with: numbers from which the value and its limits must be told apart.
    """
    if estimate is None or math.isnan(estimate.value):
        return ABSENT
    value = estimate.value
    low, high = estimate.interval
    largest = max(map(abs, (low, value, high)))
    if not (0 < high - low < math.inf and 10.0**-MAX_DECIMALS < largest < math.inf):
        return format_with_unit(value, unit, _digits_apart_from(value, compared_with))
    decimals = _decimals_with_interval((low, value, high), compared_with)
    text, *limits = (_format_decimals(number, decimals) for number in (value, low, high))
    return f"{f'{text} {unit}'.strip()} [{', '.join(limits)}]"


def format_count(n: int, plural: str) -> str:
    """Return '5 launches', '1 run'."""
    single = plural.removesuffix("es") if plural.endswith("ches") else plural.removesuffix("s")
    return f"{n:,} {plural if n != 1 else single}"


def _digits_apart_from(value: float, others: Iterable[float]) -> int:
    """Return the digits of a number without an interval that tell it apart from others."""
    different = [other for other in others if abs(value - other) > SAME]
    digits = SIGNIFICANT_DIGITS
    while digits < MAX_DIGITS and format_number(value, digits) in (
        format_number(other, digits) for other in different
    ):
        digits += 1
    return digits


def _decimals_with_interval(numbers: tuple[float, float, float], others: Iterable[float]) -> int:
    """Return the decimals of a value and the limits of its interval, by the rule of this module."""
    low, _, high = numbers
    largest = max(map(abs, numbers))
    for_half_width = _decimals_for_digits((high - low) / 2, 1)
    fewest = max(0, _decimals_for_digits(largest, MIN_DIGITS))
    decimals = min(max(for_half_width, fewest), _decimals_for_digits(largest, SIGNIFICANT_DIGITS))
    pairs = [(a, b) for a, b in product(numbers, (*numbers, *others)) if abs(a - b) > SAME]
    most = min(MAX_DECIMALS, _decimals_for_digits(largest, MAX_DIGITS))
    while decimals < most and any(round(a, decimals) == round(b, decimals) for a, b in pairs):
        decimals += 1
    return decimals


def _decimals_for_digits(value: float, digits: int) -> int:
    """Return the decimals that so many significant digits take; below 0 for tens and hundreds."""
    return digits - 1 - math.floor(math.log10(abs(value)))


def _format_decimals(value: float, decimals: int) -> str:
    """Return a number rounded to so many decimals, a zero without a sign."""
    rounded = round(value, min(decimals, MAX_DECIMALS)) + 0.0
    return f"{rounded:,.{min(max(0, decimals), MAX_DECIMALS)}f}"
