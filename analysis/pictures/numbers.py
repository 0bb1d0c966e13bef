"""Numbers as text, alike in pictures, tables, sentences and on the terminal."""

from __future__ import annotations

import math

from analysis.stats import Estimate

SIGNIFICANT_DIGITS = 4  # digits; whole numbers keep all of theirs
MAX_DECIMALS = 6  # what is smaller has an exponent
ABSENT = "-"


def format_number(value: float) -> str:
    """Return four significant digits, or the whole part: 0.01234, 1.5, 91.52, 275, 17,387; 1.234e-08."""
    if value == 0 or not math.isfinite(value):
        return f"{abs(value) if value == 0 else value:g}"
    decimals = max(0, SIGNIFICANT_DIGITS - 1 - math.floor(math.log10(abs(value))))
    if abs(value) < 10.0**-MAX_DECIMALS:
        return f"{value:.{SIGNIFICANT_DIGITS}g}"
    text = f"{value:,.{min(decimals, MAX_DECIMALS)}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def format_brief(value: float, digits: int = 3) -> str:
    """Return a number with fewer digits, for a picture with little room."""
    return format_number(float(f"{value:.{digits}g}"))


def format_with_unit(value: float, unit: str) -> str:
    """Return '91.52 %'; 'never' for a step that is not reached."""
    return "never" if math.isinf(value) else f"{format_number(value)} {unit}".strip()


def format_interval(value: Estimate) -> str:
    """Return '[1.1, 1.4]'; empty where there is no interval."""
    if value.low is None or value.high is None:
        return ""
    return f"[{format_number(value.low)}, {format_number(value.high)}]"


def format_with_interval(value: Estimate | None) -> str:
    """Return '1.23 [1.1, 1.4]', or '-' where there is no number."""
    if value is None or math.isnan(value.value):
        return ABSENT
    return f"{format_number(value.value)} {format_interval(value)}".strip()


def format_count(n: int, plural: str) -> str:
    """Return '5 launches', '1 run'."""
    single = plural.removesuffix("es") if plural.endswith("ches") else plural.removesuffix("s")
    return f"{n:,} {plural if n != 1 else single}"
