"""Frontiers, performance profiles and agreement of invented cells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.benchmark.summaries import (
    compare_words,
    count_false_words,
    describe_best,
    find_frontier,
    summarize_level,
    time_factors_by_entry,
)
from tests.analysis.benchmark.cells import cell


def test_the_frontier_names_who_is_lowest_when() -> None:
    early = replace(cell("early"), curve=[(1.0, 2.5), (30.0, 2.2)])
    late = replace(cell("late"), curve=[(15.0, 2.6), (60.0, 1.9)])
    parts = find_frontier([early, late])
    assert [part.entry for part in parts] == ["early", "late"]
    assert 30 < parts[1].from_s * 1_000 / 200 < 60, "it overtakes what has ended"


def test_profiles_are_times_over_the_quickest_and_infinite_without_the_level() -> None:
    cells = [cell("a"), cell("b", seconds=360.0), cell("a", workers=8, seconds=np.inf), cell("b", workers=8)]
    assert time_factors_by_entry(cells, 0.5) == {"a": [1.0, np.inf], "b": [3.0, 1.0]}


def test_summaries_count_words_and_put_the_surest_first() -> None:
    cells = [cell("a"), cell("a", workers=8, word="slower"), cell("b"), cell("b", workers=8)]
    summaries = summarize_level([*cells, cell("c", word="not reached")], 0.5)
    assert [(each.entry, each.faster, each.slower) for each in summaries] == [("b", 2, 0), ("a", 1, 1)]
    assert describe_best(cells).startswith("Most often faster than dense: b to the level of 50 % (2 of 2,")


def test_agreement_counts_words_that_both_have() -> None:
    cells = [cell("a"), cell("b"), cell("c"), cell("d")]
    words = {"a": "faster", "b": "slower (censored)", "c": "inconclusive"}
    before = {(*cell(entry).place, 0.5): word for entry, word in words.items()}
    (agreement,) = compare_words(cells, before)
    assert (agreement.words, agreement.same, agreement.opposite) == (3, 1, 1)


def test_decisions_on_the_repeated_baseline_are_counted_and_no_choice() -> None:
    cells = [cell("dense-again"), cell("dense-again", workers=8, word="inconclusive"), cell("topk")]
    assert [*count_false_words(cells)] == [1, 1, pytest.approx(0.1), 2]
    assert [summary.entry for summary in summarize_level(cells, 0.5)] == ["topk"]
