"""Comparisons of many runs: a quantity over one setting, by another, as a table, a picture and a caption.

The unit is the run; the runs of a point differ in their seed and in nothing else.
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
from analysis.records.columns import IMPLIED_SETTINGS, OUTCOME_LABELS
from analysis.records.configs import differing_leaves, flatten, format_setting, short_leaf_name
from analysis.records.frames import Frames
from analysis.records.steps import ENOUGH_LAUNCHES
from analysis.stats import (
    BOUNDS_BY_COLUMN,
    COLUMNS_THAT_AGREE,
    PERCENT,
    POSITIVE,
    UNBOUNDED,
    Bounds,
    Estimate,
    IncomparableRunsError,
    differing_values_by_column,
    estimate_mean,
)
from analysis.tables import Table

# A unit, and larger or smaller ones: the largest that makes every value at least 1, else the smallest.
SIZE_BY_UNIT = {
    "s": {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3},
    "B": {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0},
}
TRAINING_PREFIXES = ("val_", "test_", "train_")


class ComparisonPoint(NamedTuple):
    """The runs that have the same `by` and `x`."""

    by: str
    x: Any  # None: they have no such setting
    value: Estimate
    samples: list[float]
    relative_to_ref: Estimate | None  # ratio to the reference, or difference of shares


@dataclass(frozen=True)
class Comparison:
    """A column `y` of `Frames.runs` over the leaf `x` of configurations, one line per value of `by`.

    Against `ref`, a value of `by`, ratios are formed, of percentages differences: paired by seed.
    """

    x: str
    y: str
    by: str = "method.name"
    ref: str | None = None

    def points(self, frames: Frames) -> list[ComparisonPoint]:
        """Return the points to compare, in the order of `by` and `x`.

        Raises:
            ValueError: an unknown column or leaf, or no run that has it.
            IncomparableRunsError: runs of one point differ in more than their seed.
        """
        runs = self._measured(frames.runs)
        groups = dict(_group_runs(runs, self._leaf(runs, "by"), self._leaf(runs, "x")))
        for group in groups.values():
            self._check_repetitions(group)
        lines = sorted({by for by, _ in groups})
        if self.ref is not None and self.ref not in lines:
            raise ValueError(f"no run with {self.by}={self.ref} among these; there are: {', '.join(lines)}")
        points = []
        for (by, x), group in groups.items():
            samples = group.set_index("seed")[self.y].sort_index()
            numbers = samples.to_numpy()
            value = estimate_mean(numbers, self._bounds, value=float(numbers.mean()))
            relative_to_ref = None
            if self.ref is not None and by != self.ref:
                # The reference at the same `x`, else the one that has none.
                reference = groups.get((self.ref, x), groups.get((self.ref, None)))
                if reference is not None:
                    relative_to_ref = self._compare(samples, reference.set_index("seed")[self.y])
            points.append(ComparisonPoint(by, x, value, samples.to_list(), relative_to_ref))
        return points

    def table(self, frames: Frames) -> Table:
        """Return a row per point: the mean over its runs with its 95 % interval, and how many they are."""
        points = self.points(frames)
        unit, factor = self._unit(points)
        label = self._label
        rows: dict[str, list[Any]] = {
            short_leaf_name(self.by): [point.by for point in points],
            short_leaf_name(self.x): [
                None if point.x is None else format_setting(point.x) for point in points
            ],
            label: [point.value.scale_by(factor) for point in points],
            "runs": [len(point.samples) for point in points],
        }
        units = {label: unit} if unit else {}
        if self.ref is not None:
            is_share = self._bounds == PERCENT
            name = f"{'minus' if is_share else 'ratio to'} {self.ref}"
            rows[name] = [point.relative_to_ref for point in points]
            units |= {name: "points"} if is_share else {}
        return Table(self.title, pd.DataFrame(rows, dtype=object), units, self._note(frames, points))

    @property
    def title(self) -> str:
        """Headline of the table and the picture."""
        return f"{self._label} over {short_leaf_name(self.x)}, by {short_leaf_name(self.by)}".capitalize()

    def picture(self, frames: Frames) -> plots.Figure:
        """Return a figure with a line per value of `by` over `x`; what has no `x` is a line across."""
        points = self.points(frames)
        unit, factor = self._unit(points)
        positions = _x_positions([point.x for point in points if point.x is not None])
        with plots.new_figure(style.two_column_rc_settings(2.9)) as (figure, axes):
            for by in dict.fromkeys(point.by for point in points):
                look = style.method_style(by)
                line = [point for point in points if point.by == by]
                placed = {positions[point.x]: point for point in line if point.x is not None}
                if placed:
                    values = [point.value.scale_by(factor) for point in placed.values()]
                    plots.draw_points_with_intervals(axes, list(placed), values, look)
                for position, point in placed.items():
                    plots.draw_samples(axes, position, [factor * sample for sample in point.samples], look)
                for point in line:
                    if point.x is None:
                        plots.draw_horizontal_line_with_band(axes, point.value.scale_by(factor), look)
            plots.set_up_x_axis_with_ticks(axes, positions, short_leaf_name(self.x))
            axes.set_ylabel(self._label + (f" ({unit})" if unit else ""))
            axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), title=short_leaf_name(self.by))
        return figure

    def caption(self, frames: Frames) -> str:
        """Return an account of what was compared, of the runs, and of the machines that made them."""
        points = self.points(frames)
        counts = sorted({len(point.samples) for point in points})
        runs = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        bars = f"no intervals: from {ENOUGH_LAUNCHES} seeds on there are some"
        if counts[-1] >= ENOUGH_LAUNCHES:
            bars = "bars are 95 % intervals of the mean (Student's)"
        return (
            f"{self.title}. Small marks are single runs, {runs} per point, with a seed each; {bars}. "
            f"{self._note(frames, points)} {captions.describe_setting_with_remarks(frames)}"
        ).replace("  ", " ")

    @property
    def _label(self) -> str:
        """The name of `y` for people."""
        return OUTCOME_LABELS[self.y].label if self.y in OUTCOME_LABELS else self.y

    @property
    def _bounds(self) -> Bounds:
        unit = columns.unit_of_run_column(self.y)
        if unit == "%":
            return PERCENT
        return BOUNDS_BY_COLUMN.get(self.y, POSITIVE if unit else UNBOUNDED)

    def _measured(self, runs: pd.DataFrame) -> pd.DataFrame:
        """Return the runs that have `y`; of what was learned also diverged runs, which have no number."""
        if not len(runs):
            raise ValueError(plots.NOTHING_TO_DRAW)
        if self.y in runs and not runs[self.y].notna().any():
            raise ValueError(f"none of these {len(runs)} runs has measured {self.y}")
        numbers = [str(name) for name in runs.select_dtypes("number")]
        if self.y not in numbers:
            raise ValueError(
                _unknown_message(f"no column y={self.y} with numbers", self.y, [*OUTCOME_LABELS, *numbers])
            )
        is_measured = runs[self.y].notna()
        if self.y.startswith(TRAINING_PREFIXES) and "diverged" in runs:
            is_measured |= runs["diverged"].notna()
        measured_runs: pd.DataFrame = runs[is_measured]
        return measured_runs

    def _leaf(self, runs: pd.DataFrame, axis: str) -> pd.Series[Any]:
        """Return the value of the leaf `x` or `by` in each run's configuration; None where it has none."""
        name = getattr(self, axis)
        rows = [{**IMPLIED_SETTINGS, **flatten(json.loads(text))} for text in runs["config_json"]]
        if not any(name in row for row in rows):
            known = list(dict.fromkeys(leaf for row in rows for leaf in row))
            raise ValueError(_unknown_message(f"no setting {axis}={name} in these runs", name, known))
        return pd.Series([row.get(name) for row in rows], runs.index, dtype=object)

    def _check_repetitions(self, group: pd.DataFrame) -> None:
        """Refuse runs that are no repetitions of one measurement.

        Raises:
            IncomparableRunsError: they are none.
        """
        more = ("steps_total",) if self.y.startswith(TRAINING_PREFIXES) else ()
        values_by_difference = differing_values_by_column(group, (*COLUMNS_THAT_AGREE, *more))
        configs = [json.loads(text) for text in group["config_json"]]
        for leaf in differing_leaves(configs):
            if leaf not in (self.x, self.by, "seed"):
                settings = {format_setting(flatten(config).get(leaf)) for config in configs}
                values_by_difference.setdefault(leaf, sorted(settings))
        for name, values in values_by_difference.items():
            raise IncomparableRunsError(
                f"these runs can't share an interval: they differ in {name} ({', '.join(values)}); add "
                f"{name}={values[0]} to the words, or take it as x or by"
            )
        if group["seed"].duplicated().any():
            raise IncomparableRunsError(
                "these runs can't share an interval: some have one configuration and one seed"
            )

    def _compare(self, samples: pd.Series[Any], reference: pd.Series[Any]) -> Estimate | None:
        """Return the ratio to the reference, of shares the difference; paired by seed."""
        paired_samples = pd.concat([samples, reference], axis="columns", join="inner", keys=["ours", "base"])
        paired_samples = paired_samples.sort_index()
        if not len(paired_samples):
            return None
        if self._bounds == PERCENT:
            return estimate_mean(
                (paired_samples["ours"] - paired_samples["base"]).to_numpy(), (-100.0, 100.0)
            )
        return estimate_mean((paired_samples["ours"] / paired_samples["base"]).to_numpy(), POSITIVE)

    def _unit(self, points: Sequence[ComparisonPoint]) -> tuple[str, float]:
        """Return the unit to show, and what values are multiplied by."""
        unit = columns.unit_of_run_column(self.y)
        smallest = float(np.nanmin([abs(point.value.value) for point in points]))
        sizes = SIZE_BY_UNIT.get(unit, {unit: 1.0})
        name = next((name for name, size in sizes.items() if smallest >= size), [*sizes][-1])
        return name, 1 / sizes[name]

    def _note(self, frames: Frames, points: Sequence[ComparisonPoint]) -> str:
        """Return a note on what is simulated, and on what else the points differ in."""
        runs = self._measured(frames.runs)
        notes = []
        if self.y in ("step_s", "samples_per_s") and runs["simulated"].any():
            notes.append("Times of virtual workers are simulated: communication follows the model of a link.")
        columns_in_common = [name for name in COLUMNS_THAT_AGREE if name not in (self.x, self.by)]
        values_by_difference = differing_values_by_column(runs, columns_in_common)
        if values_by_difference:
            texts = [f"{name} ({', '.join(values)})" for name, values in values_by_difference.items()]
            notes.append(f"The points differ in {' and '.join(texts)}, too.")
        diverged = sum(np.isnan(point.samples).sum() for point in points)
        if diverged:
            notes.append(f"{diverged} of {len(runs)} runs diverged: what they are among has no mean.")
        if any(point.value.low is None for point in points):
            notes.append(f"Fewer than {ENOUGH_LAUNCHES} runs give no interval.")
        return " ".join(notes)


def _group_runs(
    runs: pd.DataFrame, by: pd.Series[Any], x: pd.Series[Any]
) -> Iterator[tuple[tuple[str, Any], pd.DataFrame]]:
    """Yield the runs of each (`by`, `x`), those without an `x` first."""
    places = [(format_setting(line), value) for line, value in zip(by, x, strict=True)]
    for place in sorted(set(places), key=_sort_key):
        yield place, runs[np.array([run_place == place for run_place in places])]


def _sort_key(place: tuple[str, Any]) -> tuple[Any, ...]:
    line, x = place
    is_number = isinstance(x, int | float)
    return line, x is not None, (0, float(x)) if is_number else (1, str(x))


def _x_positions(values: Sequence[Any]) -> dict[Any, float]:
    """Return the place of each value on the x axis: numbers where they are, words one after the other."""
    distinct = sorted(dict.fromkeys(values), key=lambda value: _sort_key(("", value)))
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in distinct):
        return {value: float(value) for value in distinct}
    return {value: float(place) for place, value in enumerate(distinct)}


def _unknown_message(sentence: str, word: str, known_words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known_words, 3, 0.5)
    suggestion = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{sentence}{suggestion} There are: {', '.join(dict.fromkeys(known_words))}"
