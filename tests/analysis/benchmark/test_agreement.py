"""Agreement between two measurements of the same entries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from analysis.benchmark.agreement import compare_measurements, expected_interval_containment, kendall_tau
from analysis.benchmark.cells import Cell
from analysis.stats import Estimate, student_t_quantile
from experiments.commands.benchmark import make_agreement_table
from tests.analysis.benchmark.cells import cell

MISSED = replace(cell("c"), minutes=None, word="misses the target", speedup=Estimate(0.0, 0.0, 2.0, 5))


def test_kendalls_tau_is_1_of_one_order_and_less_with_every_exchange() -> None:
    for first, second, expected in (
        ([1, 2, 3], [10, 20, 30], 1),
        ([1, 2, 3], [30, 20, 10], -1),
        ([1, 2, 3, 4], [10, 30, 20, 40], 2 / 3),
        ([np.inf, 1], [np.inf, 1], 1),
        ([1, 1], [1, 1], 1),  # nothing to order, and the same
    ):
        assert kendall_tau([*zip(first, second, strict=True)]) == pytest.approx(expected)


def test_a_measurement_agrees_with_itself_and_a_missed_target_is_last_in_both_orders() -> None:
    own = [cell("a", minutes=Estimate(1.0, 0.9, 1.1)), cell("b", minutes=Estimate(2.0, 1.8, 2.2))]
    (found,) = compare_measurements(own, own)
    assert (
        found.num_cells,
        found.time_to_target_tau,
        found.speedup_containment,
        found.step_containment,
        found.same_word_share,
    ) == (2, *[1] * 4)
    (found,) = compare_measurements([*own, MISSED], [*own, cell("c", minutes=Estimate(9.0))])
    assert found.time_to_target_tau == 1
    assert make_agreement_table(own, own).frame["same word"].tolist() == [100]


def test_cells_are_paired_and_those_of_one_measurement_alone_are_left_out() -> None:
    first = [cell("a"), cell("b"), cell("a", link="other")]
    untimed = replace(cell("b"), step_ms=None, minutes=None)
    second = [cell("a", step_ratio=Estimate(3.0, 2.9, 3.1), word="slower"), cell("c"), untimed]
    (found,) = compare_measurements(first, second)
    assert found.num_cells == 1
    assert found.step_containment == 0, "neither interval has the other's estimate"
    assert found.speedup_containment == 1, "that of the times as soon, which has seeds in it, has it"
    assert found.same_word_share == 0


def test_what_misses_the_target_alike_does_not_pass_for_agreement_but_is_ordered_by_its_steps() -> None:
    quick, slow = Estimate(1.0), Estimate(2.0)

    def measured(a: Estimate, b: Estimate) -> list[Cell]:
        return [cell("a", minutes=a), cell("b", minutes=b)]

    (found,) = compare_measurements([*measured(quick, slow), MISSED], [*measured(slow, quick), MISSED])
    assert (found.num_cells, found.num_cells_at_target, found.reached_time_to_target_tau) == (3, 2, -1)
    assert found.time_to_target_tau == pytest.approx(1 / 3), "of the three pairs one is in the other order"
    assert (found.speedup_containment, found.same_word_share) == (1, 1)


def test_even_a_perfect_repetition_does_not_always_contain_the_other() -> None:
    # For two launches there is a closed form of one of the two intervals: (2/pi) arctan(t / sqrt(2)).
    assert 0.85 < expected_interval_containment(2) < 2 / np.pi * np.arctan(student_t_quantile(1) / np.sqrt(2))
    assert expected_interval_containment(5) == pytest.approx(0.81, abs=0.005)
    assert np.isnan(expected_interval_containment(1))
