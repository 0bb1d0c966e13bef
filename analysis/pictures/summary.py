"""Plain sentences on what this machine's runs of a figure show, beside a paper's numbers for the same.

For whoever has just measured, before any verdict: verdicts tell what is comparable with the paper, these
sentences what was seen. Cells of a sweep (tasks, batches, links) are told one by one, the first few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from analysis.pictures.captions import has_simulated_times, join_with_and
from analysis.pictures.links import LINK_COLUMN, describe_link_as_found
from analysis.pictures.numbers import format_count, format_number, format_with_interval, format_with_unit
from analysis.pictures.style import method_id, method_style
from analysis.records.frames import Frames, rows_as_dicts, select_runs
from analysis.stats import (
    PERCENT,
    Estimate,
    IncomparableRunsError,
    final_difference,
    phase_statistic,
    step_time_ratio,
)

MAX_CELLS = 3
MAX_METHODS = 4
# What tells cells apart, with the words before a value.
CELL_COLUMNS = {"task.name": "", "task.batch_size": "batch ", LINK_COLUMN: ""}
TOP1 = "val_top1"
DENSE = "dense"


class PublishedResult(NamedTuple):
    """The numbers that a paper has of a method beside its baseline; None where it has none."""

    step_time_ratio: float | None = None  # over the baseline's
    selection_percent: float | None = None  # of its iteration
    points_below: float | None = None  # of top-1, at the end
    machine: str = ""  # '8 A100'


class MethodBaselinePair(NamedTuple):
    """The runs of a method, at one density where the cell has several, and those of its baseline."""

    method: str  # by `method_id`
    label: str
    keys: list[str]
    baseline_label: str
    baseline_keys: list[str]
    is_at_only_density: bool  # does the method have no other density in the cell?

    @property
    def baseline_iteration(self) -> str:
        """Words for an iteration of the baseline: 'a dense one'."""
        label = self.baseline_label
        return f"a {label} one" if label.startswith(DENSE) else f"one with {label}"


def summarize_runs_in_sentences(
    frames: Frames, published_by_method: Mapping[str, PublishedResult] = {}
) -> list[str]:
    """Return one sentence for each method beside the first, or dense, of each cell.

    The first sentence is on the method that the paper is about.

    Args:
        frames: of a figure's runs.
        published_by_method: by `method_id`, the same in the paper; the method that it is about comes first.
    """
    cells = [*_cells(frames)]
    sentences = [
        line
        for words, cell in cells[:MAX_CELLS]
        for line in _cell_sentences(words, cell, published_by_method)
    ]
    more = len(cells) - MAX_CELLS
    return [*sentences, f"... and {more} more; the tables have all"] if sentences and more > 0 else sentences


def _cells(frames: Frames) -> Iterator[tuple[dict[str, str], Frames]]:
    """Yield runs that differ in methods and seeds only, each with the words that tell it from other cells.

    The words are by column.
    """
    if not len(frames.runs):
        return
    varying = [
        name for name in CELL_COLUMNS if name in frames.runs and frames.runs[name].nunique(dropna=False) > 1
    ]
    if not varying:
        yield {}, frames
        return
    for values, rows in frames.runs.groupby(varying, sort=False, dropna=False):
        words = {
            name: describe_link_as_found(str(value), rows)
            if name == LINK_COLUMN
            else f"{CELL_COLUMNS[name]}{value}"
            for name, value in zip(varying, values, strict=True)
            if value == value
        }
        yield words, select_runs(frames, rows["key"])


def _method_pairs(cell: Frames, published: Mapping[str, PublishedResult]) -> Iterator[MethodBaselinePair]:
    """Yield each method but the baseline beside it, those that the paper has first, densities apart."""
    keys_by_density = dict[str, dict[Any, list[str]]]()
    for run in rows_as_dicts(cell.runs.sort_values("seed", kind="stable")):
        density = run.get("method.density")
        by_density = keys_by_density.setdefault(method_id(run), {})
        by_density.setdefault(density if density == density else None, []).append(str(run["key"]))
    methods = [*dict.fromkeys(map(method_id, rows_as_dicts(cell.runs)))]
    baseline = next((name for name in methods if name.startswith(DENSE)), methods[0])
    methods.remove(baseline)
    methods = [*filter(methods.__contains__, published), *(name for name in methods if name not in published)]
    baseline_keys = [key for keys in keys_by_density[baseline].values() for key in keys]
    for method in methods[:MAX_METHODS]:
        is_only = len(keys_by_density[method]) == 1
        for density, keys in keys_by_density[method].items():
            label = method_style(method).label + ("" if is_only else f" at density {format_number(density)}")
            yield MethodBaselinePair(
                method, label, keys, method_style(baseline).label, baseline_keys, is_only
            )


def _cell_sentences(
    words: Mapping[str, str], cell: Frames, published: Mapping[str, PublishedResult]
) -> Iterator[str]:
    for pair in _method_pairs(cell, published):
        published_result = PublishedResult()  # of several densities, none says which it is of
        if pair.is_at_only_density:
            published_result = published.get(pair.method, published_result)
        timing = _timing_sentence(cell, pair, published_result)
        sentence = timing or _training_sentence(cell, pair, published_result)
        if sentence:
            # Over which link one trains is nothing to where training ends.
            where = ", ".join(word for name, word in words.items() if timing or name != LINK_COLUMN)
            yield f"{where}: {sentence}" if where else sentence[:1].upper() + sentence[1:]


def _timing_sentence(cell: Frames, pair: MethodBaselinePair, published: PublishedResult) -> str:
    ratio = _step_time_ratio(cell, pair)
    if ratio is None:
        return ""
    simulated = ", in simulated time" if has_simulated_times(cell) else ""
    factor = format_with_interval(ratio, compared_with=[1])
    sentence = (
        f"an iteration with {pair.label} takes {factor} times as long as {pair.baseline_iteration}{simulated}"
    )
    numbers = [(published.step_time_ratio, "times")]
    share = _selection_share(cell, pair.keys)
    if share is not None:
        sentence += f"; {format_number(share.value, 2)} % of it is choosing the elements"
        numbers.append((published.selection_percent, "%"))
    samples = format_count(ratio.n, ratio.sample_kind)
    return f"{sentence} ({samples}).{_published_sentence(numbers, published.machine)}"


def _training_sentence(cell: Frames, pair: MethodBaselinePair, published: PublishedResult) -> str:
    if TOP1 not in cell.epochs or not cell.epochs[TOP1].notna().any():
        return ""
    for keys in (pair.keys, pair.baseline_keys):
        if cell.runs["seed"][cell.runs["key"].isin(keys)].duplicated().any():
            return ""  # trainings that differ in more than their seed, which no difference of two sides is of
    side = "below"
    try:
        gap = final_difference(cell, pair.baseline_keys, pair.keys, TOP1)
        if gap is not None and gap.value < 0:
            side = "above"
            gap = final_difference(cell, pair.keys, pair.baseline_keys, TOP1)
    except IncomparableRunsError:
        return ""
    if gap is None:
        return ""
    return (
        f"{pair.label} ends {format_with_interval(gap, compared_with=[0])} points of top-1 {side} "
        f"{pair.baseline_label} ({format_count(gap.n, gap.sample_kind)})."
        f"{_published_sentence([(published.points_below, 'points below')], published.machine)}"
    )


def _step_time_ratio(cell: Frames, pair: MethodBaselinePair) -> Estimate | None:
    """Return the ratio of step times; None also where trainings are no timings, or where protocols differ."""
    if "group" not in cell.runs or not cell.runs["group"].notna().all() or not len(cell.steps):
        return None
    with suppress(IncomparableRunsError):
        return step_time_ratio(cell, pair.keys, pair.baseline_keys)
    return None


def _selection_share(cell: Frames, keys: list[str]) -> Estimate | None:
    """Return the percent of an iteration that selecting takes; None where phases were not told apart."""
    if "select_s" not in cell.steps:
        return None
    with suppress(IncomparableRunsError):
        return phase_statistic(
            cell, keys, ("select", "step"), lambda select, step: 100 * select / step, PERCENT
        )
    return None


def _published_sentence(numbers: Sequence[tuple[float | None, str]], machine: str) -> str:
    """Return ' Published: 4.67 times and 77 % on 8 A100.' of numbers and their units; empty without any."""
    texts = [format_with_unit(number, unit) for number, unit in numbers if number is not None]
    return f" Published: {join_with_and(texts)}{f' on {machine}' if machine else ''}." if texts else ""
