"""How alike two measurements of the same entries are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.benchmark.agreement import agreements, repeated, tau
from analysis.benchmark.cells import Cell
from analysis.stats import Value, student
from tests.analysis.benchmark.cells import cell


def test_kendalls_tau_is_1_of_one_order_and_less_with_every_exchange() -> None:
    assert tau([(1, 10), (2, 20), (3, 30)]) == 1
    assert tau([(1, 30), (2, 20), (3, 10)]) == -1
    assert tau([(1, 10), (2, 30), (3, 20), (4, 40)]) == pytest.approx(2 / 3)
    assert tau([(float("inf"), float("inf")), (1, 1)]) == 1
    assert tau([(1, 1), (1, 1)]) == 1, "nothing to order, and the same"


def test_a_measurement_agrees_with_itself() -> None:
    own = [cell(entry=name, minutes=Value(at, 0.9 * at, 1.1 * at)) for name, at in (("a", 1.0), ("b", 2.0))]
    (found,) = agreements(own, own)
    assert (found.cells, found.tau, found.contained, found.steps_contained, found.same_word) == (2, *[1] * 4)


def test_cells_are_paired_and_those_of_one_measurement_alone_are_left_out() -> None:
    first = [cell(entry="a"), cell(entry="b"), cell(entry="a", link="other")]
    second = [
        cell(entry="a", times=Value(3.0, 2.9, 3.1), word="slower"), cell(entry="c"),
        replace(cell(entry="b"), step_ms=None, minutes=None),
    ]  # fmt: skip
    (found,) = agreements(first, second)
    assert found.cells == 1
    assert found.steps_contained == 0, "neither interval has the other's estimate"
    assert found.contained == 1, "that of the times as soon, which has seeds in it, has it"
    assert found.same_word == 0


def test_a_missed_target_is_last_in_both_orders() -> None:
    def cells(last: Cell) -> list[Cell]:
        return [cell(entry="a", minutes=Value(1.0)), cell(entry="b", minutes=Value(2.0)), last]

    missed = replace(cell(entry="c"), minutes=None, word="misses the target")
    (found,) = agreements(cells(missed), cells(cell(entry="c", minutes=Value(9.0))))
    assert found.tau == 1


def test_what_misses_the_target_alike_does_not_pass_for_agreement() -> None:
    """Its times as soon are 0 in both, and its word is the same."""
    missed = replace(cell(entry="c"), minutes=None, word="misses the target", sooner=Value(0.0, 0.0, 2.0, 5))
    first = [cell(entry="a", minutes=Value(1.0)), cell(entry="b", minutes=Value(2.0)), missed]
    second = [cell(entry="a", minutes=Value(2.0)), cell(entry="b", minutes=Value(1.0)), missed]
    second[:2] = [replace(each, word="slower", sooner=Value(0.5, 0.4, 0.6, 5)) for each in second[:2]]
    (found,) = agreements(first, second)
    assert (found.cells, found.reached, found.reached_tau) == (3, 2, -1)
    assert found.tau == pytest.approx(1 / 3), "of the three pairs one is in the other order"
    assert (found.contained, found.same_word) == (0, 0)


def test_what_misses_the_target_alike_is_still_ordered_by_its_steps() -> None:
    def cells(first: float, second: float) -> list[Cell]:
        missed = replace(cell(), minutes=None, word="misses the target")
        steps = {"a": first, "b": second}
        return [replace(missed, entry=name, step_ms=Value(ms)) for name, ms in steps.items()]

    (found,) = agreements(cells(1.0, 2.0), cells(2.0, 1.0))
    assert (found.tau, found.steps_tau) == (1, -1)


def test_even_a_perfect_repetition_does_not_always_contain_the_other() -> None:
    # For two launches there is a closed form of one of the two intervals: (2/pi) arctan(t / sqrt(2)).
    assert 0.85 < repeated(2) < 2 / np.pi * np.arctan(student(1) / np.sqrt(2))
    assert repeated(5) == pytest.approx(0.81, abs=0.005)
    assert np.isnan(repeated(1))
