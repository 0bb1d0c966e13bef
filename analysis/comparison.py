"""One quantity of many runs over one setting, by another: a table with intervals, a picture, a caption.

The unit is the run; of each point the runs differ in their seed and in nothing else.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from analysis import plots
from analysis.pictures import captions, style
from analysis.records import columns
from analysis.records.columns import IMPLIED_SETTINGS, TITLES
from analysis.records.configs import differing_leaves, flatten, format_setting, short_name
from analysis.records.frames import Frames
from analysis.records.steps import ENOUGH_LAUNCHES, used_precisions
from analysis.stats import ALIKE, ANY, OF_COLUMN, POSITIVE, SHARE, Bounds, Mixed, Value, over_units
from analysis.tables import Table

# A unit, and larger or smaller ones: the largest that makes every value at least 1, else the smallest.
SCALES = {
    "s": {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3},
    "B": {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0},
}
MORE_ALIKE = ("steps_total",)  # of runs that are compared by what they learned
LEARNED = ("val_", "test_", "train_")


class Point(NamedTuple):
    """The runs that have the same `by` and `x`."""

    by: str
    x: Any  # None: they have no such setting
    value: Value
    samples: list[float]
    against: Value | None  # ratio to the reference, or difference of shares


@dataclass(frozen=True)
class Comparison:
    """`y`, a column of `Frames.runs`, over the leaf `x` of configurations, one line per value of `by`.

    Against `ref`, a value of `by`, ratios are formed, of percentages differences: paired by seed.
    """

    x: str
    y: str
    by: str = "method.name"
    ref: str | None = None

    def points(self, frames: Frames) -> list[Point]:
        """Points to compare, in the order of `by` and `x`.

        Raises:
            ValueError: an unknown column or leaf, or no run that has it.
            Mixed: runs of one point differ in more than their seed.
        """
        runs = self._measured(frames.runs)
        groups = dict(_groups(runs, self._leaf(runs, "by"), self._leaf(runs, "x")))
        for group in groups.values():
            self._check(group)
        if self.ref is not None and self.ref not in {by for by, _ in groups}:
            there = ", ".join(sorted({by for by, _ in groups}))
            raise ValueError(f"no run with {self.by}={self.ref} among these; there are: {there}")
        points = []
        for (by, x), group in groups.items():
            samples = group.set_index("seed")[self.y].sort_index()
            reference = self._reference(groups, by, x)
            value = over_units(samples.to_numpy(), self._bounds, value=float(samples.to_numpy().mean()))
            against = None if reference is None else self._against(samples, reference)
            points.append(Point(by, x, value, samples.to_list(), against))
        return points

    def table(self, frames: Frames) -> Table:
        """A row per point: the mean over its runs with its 95 % interval, and how many they are."""
        points = self.points(frames)
        unit, factor = self._unit(points)
        label = self._label
        rows: dict[str, list[Any]] = {
            short_name(self.by): [point.by for point in points],
            short_name(self.x): [None if point.x is None else format_setting(point.x) for point in points],
            label: [point.value.times(factor) for point in points],
            "runs": [len(point.samples) for point in points],
        }
        units = {label: unit} if unit else {}
        if self.ref is not None:
            is_share = self._bounds == SHARE
            name = f"{'minus' if is_share else 'ratio to'} {self.ref}"
            rows[name] = [point.against for point in points]
            units |= {name: "points"} if is_share else {}
        return Table(self.title, pd.DataFrame(rows, dtype=object), units, self._note(frames, points))

    @property
    def title(self) -> str:
        """Headline of the table and the picture."""
        return f"{self._label} over {short_name(self.x)}, by {short_name(self.by)}".capitalize()

    def picture(self, frames: Frames) -> plots.Figure:
        """A line per value of `by` over `x`; what has no `x` is a line across."""
        points = self.points(frames)
        unit, factor = self._unit(points)
        places = _places([point.x for point in points if point.x is not None])
        with plots.canvas(style.two_columns(2.9)) as (figure, axes):
            for by in dict.fromkeys(point.by for point in points):
                look, of_line = style.look(by), [point for point in points if point.by == by]
                if placed := {places[point.x]: point for point in of_line if point.x is not None}:
                    values = [point.value.times(factor) for point in placed.values()]
                    plots.points(axes, list(placed), values, look)
                for at, point in placed.items():
                    plots.seeds(axes, at, [factor * sample for sample in point.samples], look)
                for point in (point for point in of_line if point.x is None):
                    plots.across(axes, point.value.times(factor), look)
            plots.over(axes, places, short_name(self.x))
            axes.set_ylabel(self._label + (f" ({unit})" if unit else ""))
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), title=short_name(self.by))
        return figure

    def caption(self, frames: Frames) -> str:
        """Account of what was compared, of the runs, and of the machines that made them."""
        points = self.points(frames)
        counts = sorted({len(point.samples) for point in points})
        runs = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        bars = "bars are 95 % intervals of the mean (Student's)" if counts[-1] >= ENOUGH_LAUNCHES else (
            f"no intervals: from {ENOUGH_LAUNCHES} seeds on there are some"
        )  # fmt: skip
        return (
            f"{self.title}. Small marks are single runs, {runs} per point, with a seed each; {bars}. "
            f"{self._note(frames, points)} {captions.setting(frames)}"
        ).replace("  ", " ")

    @property
    def _label(self) -> str:
        """The name of `y` for people."""
        return TITLES[self.y].label if self.y in TITLES else self.y

    @property
    def _bounds(self) -> Bounds:
        if columns.unit_of_column(self.y) == "%":
            return SHARE
        return OF_COLUMN.get(self.y, POSITIVE if columns.unit_of_column(self.y) else ANY)

    def _measured(self, runs: pd.DataFrame) -> pd.DataFrame:
        """The runs that have `y`; of what was learned also those that diverged, which have no number."""
        if self.y in runs and not runs[self.y].notna().any():
            raise ValueError(f"none of these {len(runs)} runs has measured {self.y}")
        numbers = [str(name) for name in runs.select_dtypes("number")]
        if self.y not in numbers:
            raise ValueError(_unknown(f"no column y={self.y} with numbers", self.y, [*TITLES, *numbers]))
        known = runs[self.y].notna()
        is_learned = self.y.startswith(LEARNED) and "diverged" in runs
        found: pd.DataFrame = runs[known | runs["diverged"].notna()] if is_learned else runs[known]
        return found

    def _leaf(self, runs: pd.DataFrame, axis: str) -> pd.Series[Any]:
        """The value of the leaf `x` or `by` in each run's configuration; None where it has none."""
        name = getattr(self, axis)
        rows = [{**IMPLIED_SETTINGS, **flatten(json.loads(text))} for text in runs["config_json"]]
        if not any(name in row for row in rows):
            known = list(dict.fromkeys(leaf for row in rows for leaf in row))
            raise ValueError(_unknown(f"no setting {axis}={name} in these runs", name, known))
        return pd.Series([row.get(name) for row in rows], runs.index, dtype=object)

    def _check(self, group: pd.DataFrame) -> None:
        """
        Raises:
            Mixed: these runs are no repetitions of one measurement.
        """
        checked = group.assign(precision=used_precisions(group))
        alike = (*ALIKE, *(MORE_ALIKE if self.y.startswith(LEARNED) else ()))
        for column in alike:
            if len(found := _words(checked, column)) > 1:
                raise Mixed(_mixed(column, found))
        configs = [json.loads(text) for text in group["config_json"]]
        for leaf in differing_leaves(configs):
            if leaf not in (self.x, self.by, "seed"):
                raise Mixed(
                    _mixed(leaf, sorted({format_setting(flatten(config).get(leaf)) for config in configs}))
                )
        if group["seed"].duplicated().any():
            raise Mixed("these runs can't share an interval: some have one configuration and one seed")

    def _reference(
        self, groups: dict[tuple[str, Any], pd.DataFrame], by: str, x: Any
    ) -> pd.Series[Any] | None:
        """`y` by seed of what a point is compared with: the reference at its `x`, else where it has none."""
        if self.ref is None or by == self.ref:
            return None
        found = groups.get((self.ref, x), groups.get((self.ref, None)))
        return None if found is None else found.set_index("seed")[self.y]

    def _against(self, samples: pd.Series[Any], reference: pd.Series[Any]) -> Value | None:
        both = pd.concat(
            [samples, reference], axis="columns", join="inner", keys=["here", "there"]
        ).sort_index()
        if not len(both):
            return None
        if self._bounds == SHARE:
            return over_units((both["here"] - both["there"]).to_numpy(), (-100.0, 100.0))
        return over_units((both["here"] / both["there"]).to_numpy(), POSITIVE)

    def _unit(self, points: Sequence[Point]) -> tuple[str, float]:
        """The unit to show, and what values are multiplied by."""
        unit = columns.unit_of_column(self.y)
        least = float(np.nanmin([abs(point.value.value) for point in points]))
        for larger, size in SCALES.get(unit, {}).items():
            if least >= size:
                return larger, 1 / size
        *_, (smallest, size) = SCALES.get(unit, {unit: 1.0}).items()
        return smallest, 1 / size

    def _note(self, frames: Frames, points: Sequence[Point]) -> str:
        """Note of what is simulated, and of what else the points differ in."""
        runs = self._measured(frames.runs)
        runs = runs.assign(precision=used_precisions(runs))
        notes = []
        if self.y in ("step_s", "samples_per_s") and runs["simulated"].any():
            notes.append("Times of virtual workers are simulated: communication follows the model of a link.")
        found = {name: _words(runs, name) for name in ALIKE if name not in (self.x, self.by)}
        if differing := [f"{name} ({', '.join(words)})" for name, words in found.items() if len(words) > 1]:
            notes.append(f"The points differ in {' and '.join(differing)}, too.")
        if diverged := sum(np.isnan(point.samples).sum() for point in points):
            notes.append(f"{diverged} of {len(runs)} runs diverged: what they are among has no mean.")
        if any(point.value.low is None for point in points):
            notes.append(f"Fewer than {ENOUGH_LAUNCHES} runs give no interval.")
        return " ".join(notes)


def _words(runs: pd.DataFrame, column: str) -> list[str]:
    """Distinct values of a column, shortened."""
    return sorted({str(value)[:12] for value in runs[column].dropna()}) if column in runs else []


def _groups(
    runs: pd.DataFrame, by: pd.Series[Any], x: pd.Series[Any]
) -> Iterator[tuple[tuple[str, Any], pd.DataFrame]]:
    """Runs of the same (`by`, `x`), those without an `x` first."""
    places = sorted({(format_setting(line), value) for line, value in zip(by, x, strict=True)}, key=_order)
    for line, value in places:
        same = [format_setting(a) == line and b == value for a, b in zip(by, x, strict=True)]
        yield (line, value), runs[np.array(same)]


def _order(place: tuple[str, Any]) -> tuple[Any, ...]:
    line, x = place
    is_number = isinstance(x, int | float)
    return line, x is not None, (0, float(x)) if is_number else (1, str(x))


def _places(values: Sequence[Any]) -> dict[Any, float]:
    """Place of each value on the x axis: numbers where they are, words one after the other."""
    distinct = sorted(dict.fromkeys(values), key=lambda value: _order(("", value)))
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in distinct):
        return {value: float(value) for value in distinct}
    return {value: float(place) for place, value in enumerate(distinct)}


def _mixed(name: str, found: Sequence[str]) -> str:
    return (
        f"these runs can't share an interval: they differ in {name} ({', '.join(found)}); add {name}="
        f"{found[0]} to the words, or take it as x or by"
    )


def _unknown(sentence: str, word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, 3, 0.5)
    there = ", ".join(dict.fromkeys(known))
    return f"{sentence}" + (f"; did you mean {' or '.join(close)}?" if close else "") + f" There are: {there}"
