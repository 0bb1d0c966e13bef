"""What this machine's runs of a figure show, in plain sentences, beside what a paper says of the same.

For whoever has just measured, before any verdict: verdicts tell what is comparable with the paper, these
sentences what was seen. Cells of a sweep (tasks, batches, links) are told one by one, the first few.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from analysis.pictures.captions import is_simulated
from analysis.pictures.numbers import format_brief, format_count, format_interval
from analysis.pictures.style import method_id, method_style
from analysis.records.frames import Frames, select_runs, to_dicts
from analysis.stats import (
    PERCENT,
    Estimate,
    MixedRunsError,
    final_difference,
    phase_statistic,
    step_time_ratio,
)

MAX_CELLS, MAX_METHODS = 3, 4
LINK = "cluster.link.name"
CELL_COLUMNS = {"task.name": "", "task.batch_size": "batch ", LINK: ""}  # column: words before its value
TOP1, DENSE = "val_top1", "dense"


class PublishedResult(NamedTuple):
    """The numbers that a paper has of a method beside its baseline; None where it has none."""

    ratio: float | None = None  # of an iteration's time over the baseline's
    select: float | None = None  # percent of its iteration
    behind: float | None = None  # points of top-1, at the end


NO_PUBLISHED_RESULT = PublishedResult()


class MethodPair(NamedTuple):
    """The runs of a method, at one density where the cell has several, and those of its baseline."""

    method: str  # by `method_id`
    label: str
    keys: list[str]
    base: str
    others: list[str]
    alone: bool  # whether this is the method's only density here


def summarize_runs(frames: Frames, theirs: Mapping[str, PublishedResult] = {}) -> list[str]:
    """Return one sentence for each method beside the first, or dense, of each cell.

    Args:
        frames: of a figure's runs.
        published: by `method_id`, the same in the paper.
    """
    if not len(frames.runs):
        return []
    cells = [*_cells(frames)]
    found = [line for words, cell in cells[:MAX_CELLS] for line in _cell_sentences(words, cell, theirs)]
    left = len(cells) - MAX_CELLS
    return [*found, *([f"... and {left} more; the tables have all"] if left > 0 and found else [])]


def describe_least_certain_ratio(frames: Frames) -> str:
    """Return the least certain ratio of step times: 'Top-k takes 1.15 of dense's time, give or take 2 %'.

    Empty where nothing took turns.
    """
    ratios = [
        (found.half_width, pair.label, pair.base, found)
        for _, cell in _cells(frames)
        for pair in _method_pairs(cell)
        if (found := _step_time_ratio(cell, pair)) is not None and found.low is not None
    ]
    if not ratios:
        return ""
    width, method, base, found = max(ratios)
    return (
        f"{method} takes {format_brief(found.value)} of {base}'s time, give or take "
        f"{format_brief(100 * width, 2)} %"
    )


def _cells(frames: Frames) -> Iterator[tuple[dict[str, str], Frames]]:
    """Yield runs that differ in methods and seeds only, each with the words that tell it from other cells.

    The words are by column.
    """
    if not len(frames.runs):
        return
    columns = [name for name in CELL_COLUMNS if name in frames.runs]
    told = [name for name in columns if frames.runs[name].nunique(dropna=False) > 1]
    if not told:
        yield {}, frames
        return
    for values, rows in frames.runs.groupby(told, sort=False, dropna=False):
        there = {name: value for name, value in zip(told, values, strict=True) if value == value}
        words = {name: f"{CELL_COLUMNS[name]}{value}" for name, value in there.items()}
        yield words, select_runs(frames, rows["key"])


def _method_pairs(cell: Frames) -> Iterator[MethodPair]:
    """Yield each method but the baseline beside it, densities apart."""
    found = dict[str, dict[Any, list[str]]]()
    for run in to_dicts(cell.runs.sort_values("seed", kind="stable")):
        density = run.get("method.density")
        by_density = found.setdefault(method_id(run), {})
        by_density.setdefault(density if density == density else None, []).append(str(run["key"]))
    order = [*dict.fromkeys(method_id(run) for run in to_dicts(cell.runs))]
    base = next((name for name in order if name.startswith(DENSE)), order[0])
    others = [key for keys in found[base].values() for key in keys]
    for method in [name for name in order if name != base][:MAX_METHODS]:
        alone = len(found[method]) == 1
        for density, keys in found[method].items():
            label = method_style(method).label + ("" if alone else f" at density {format_brief(density)}")
            yield MethodPair(method, label, keys, method_style(base).label, others, alone)


def _cell_sentences(
    words: Mapping[str, str], cell: Frames, theirs: Mapping[str, PublishedResult]
) -> Iterator[str]:
    for pair in _method_pairs(cell):
        published = (
            theirs.get(pair.method, NO_PUBLISHED_RESULT) if pair.alone else NO_PUBLISHED_RESULT
        )  # which density theirs had
        timed = _timing_sentence(cell, pair, published)
        if line := timed or _training_sentence(cell, pair, published):
            # Over which link one trains is nothing to where training ends.
            where = ", ".join(word for name, word in words.items() if timed or name != LINK)
            yield f"{where}: {line}" if where else line


def _timing_sentence(cell: Frames, pair: MethodPair, published: PublishedResult) -> str:
    ratio = _step_time_ratio(cell, pair)
    if ratio is None:
        return ""
    times = "simulated time" if is_simulated(cell) else "time"
    told = [
        f"an iteration with {pair.label} takes {_estimate_text(ratio)} of the {times} of "
        f"{pair.base}'s{_published_text(published.ratio)}"
    ]
    share = _selection_share(cell, pair.keys)
    if share is not None:
        told.append(
            f"selection is {format_brief(share.value, 2)} % of it{_published_text(published.select, ' %')}"
        )
    return f"{', and '.join(told)} ({format_count(ratio.n, ratio.sample_kind)})"


def _training_sentence(cell: Frames, pair: MethodPair, published: PublishedResult) -> str:
    if TOP1 not in cell.epochs or not cell.epochs[TOP1].notna().any():
        return ""
    if any(
        cell.runs["seed"][cell.runs["key"].isin(keys)].duplicated().any() for keys in (pair.keys, pair.others)
    ):
        return ""  # trainings that differ in more than their seed, which no difference of two sides is of
    side = "below"
    try:
        apart = final_difference(cell, pair.others, pair.keys, TOP1)
        if apart is not None and apart.value < 0:
            apart, side = final_difference(cell, pair.keys, pair.others, TOP1), "above"
    except MixedRunsError:
        return ""
    if apart is None:
        return ""
    return (
        f"{pair.label} ends {_estimate_text(apart)} points of top-1 {side} {pair.base}"
        f"{_published_text(published.behind, ' below')} ({format_count(apart.n, apart.sample_kind)})"
    )


def _step_time_ratio(cell: Frames, pair: MethodPair) -> Estimate | None:
    """Return the ratio of step times; None also where trainings are no timings, or where protocols differ."""
    if "group" not in cell.runs or not cell.runs["group"].notna().all() or not len(cell.steps):
        return None
    try:
        return step_time_ratio(cell, pair.keys, pair.others)
    except MixedRunsError:
        return None


def _selection_share(cell: Frames, keys: list[str]) -> Estimate | None:
    """Return the percent of an iteration that selecting takes; None where phases were not told apart."""
    if "select_s" not in cell.steps:
        return None
    try:
        return phase_statistic(
            cell, keys, ("select", "step"), lambda select, step: 100 * select / step, PERCENT
        )
    except MixedRunsError:
        return None


def _estimate_text(value: Estimate) -> str:
    return f"{format_brief(value.value)} {format_interval(value)}".strip()


def _published_text(number: float | None, unit: str = "") -> str:
    return "" if number is None else f" (paper: {format_brief(number)}{unit})"
