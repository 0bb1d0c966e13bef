"""Rules by which a measured number is judged: a band of values, and where an estimate's interval lies."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from analysis.pictures.captions import join_with_and
from analysis.pictures.numbers import CHOSEN_DIGITS, format_number, format_with_unit
from analysis.stats import Estimate

Position = Literal["inside", "across a limit", "outside"]  # of an interval


class Band(NamedTuple):
    """The values for which a statement holds: from `low` to `high`."""

    low: float = -math.inf
    high: float = math.inf
    includes_limits: bool = True

    def contains(self, value: float) -> bool:
        """Return True where a value lies in the band."""
        if self.includes_limits:
            return self.low <= value <= self.high
        return self.low < value and (value < self.high or self.high == math.inf)

    def crossed_limits(self, estimate: Estimate) -> list[float]:
        """Return the limits of the band that the estimate's interval includes."""
        low, high = estimate.interval
        return [limit for limit in self[:2] if low <= limit <= high]

    def interval_position(self, estimate: Estimate) -> Position:
        """Return where the interval lies."""
        if all(map(self.contains, estimate.interval)):
            return "inside"
        return "across a limit" if self.crossed_limits(estimate) else "outside"

    def interval_position_text(self, estimate: Estimate, unit: str) -> str:
        """Return the reason of a verdict: 'the interval includes the limit 5 %'."""
        position = self.interval_position(estimate)
        if position == "across a limit":
            limits = [format_with_unit(limit, unit, CHOSEN_DIGITS) for limit in self.crossed_limits(estimate)]
            return f"the interval includes the limit {join_with_and(limits)}"
        return f"the interval lies {'within' if position == 'inside' else 'outside'} the band"

    def largest_p_value_of_limits(self, estimate: Estimate) -> float:
        """Return the larger p-value of two hypotheses: that this or that limit of the band is the truth."""
        return max(estimate.two_sided_p_value(limit) for limit in self[:2] if math.isfinite(limit))

    def range_sentence(self, unit: str) -> str:
        """Return the band as a sentence: 'Holds from 1 to 2 ms.'."""
        if self.high == math.inf:
            return f"Holds above {format_with_unit(self.low, unit, CHOSEN_DIGITS)}."
        if self.low == -math.inf:
            return f"Holds up to {format_with_unit(self.high, unit, CHOSEN_DIGITS)}."
        low = format_number(self.low, CHOSEN_DIGITS)
        return f"Holds from {low} to {format_with_unit(self.high, unit, CHOSEN_DIGITS)}."
