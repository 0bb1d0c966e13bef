"""Targets of benchmarks: bounds on their results, and the one place that judges whether a bound is met."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from analysis.bands import Band
from analysis.pictures.numbers import format_with_interval
from analysis.stats import Estimate


class BenchmarkTarget(Struct, frozen=True, forbid_unknown_fields=True):
    """A bound on one number of a benchmark's result."""

    path: tuple[str | int, ...]  # keys and indices that lead to the number
    bound: float
    is_lower_bound: bool = False

    def find_number(self, result: Mapping[str, Any]) -> Estimate | None:
        """Return the number with its interval; None where the result lacks it."""
        number: Any = result
        for key in self.path:
            try:
                number = number[key]
            except (LookupError, TypeError):
                return None
        return number if number is None else to_estimate(number)

    def is_met_by_median(self, estimate: Estimate) -> bool:
        """Tell whether the median meets the bound or equals it; the interval decides nothing."""
        band = Band(low=self.bound) if self.is_lower_bound else Band(high=self.bound)
        return band.contains(estimate.value)

    def verdict_sentence(self, result: Mapping[str, Any]) -> str:
        """Return a sentence on the bound, the number and whether it is met."""
        name = " ".join(map(str, self.path))
        sentence = f"{name}: at {'least' if self.is_lower_bound else 'most'} {self.bound:g} wanted"
        value = self.find_number(result)
        if value is None:
            return f"{sentence}, not measured"
        number = format_with_interval(value, compared_with=[self.bound])
        samples = "" if value.low is None else f", n = {value.n}"
        word = "met" if self.is_met_by_median(value) else "MISSED"
        return f"{sentence}, {number}{samples} measured: {word}"


def to_estimate(number: Mapping[str, Any] | float) -> Estimate:
    """Return a spread as a benchmark records it, or a single number, as a value with its interval."""
    if isinstance(number, Mapping):
        return Estimate(number["median"], number.get("low"), number.get("high"), number.get("n", 1))
    return Estimate(number)
