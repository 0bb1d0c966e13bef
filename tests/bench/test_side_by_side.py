"""Steps side by side: exact ones agree, slow ones are repeated less. No test asserts a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.bench import _gradients as gradients
from experiments.bench import _side_by_side as side_by_side
from experiments.bench import _steps as steps
from experiments.bench._case import Case, Timed, ratio, spread
from sparsify.types import Sparse

CPU = torch.device("cpu")


@pytest.mark.parametrize("distribution", [*gradients.SYNTHETIC, gradients.FIRST_TIED])
def test_exact_rows_agree_on_every_distribution(distribution: str) -> None:
    lines = {name: Timed(steps.ROWS[name]) for name in ("fused", "fallback", "numpy", "eager", "sort")}
    case = Case(30_011, 0.01, distribution)
    _, differ = side_by_side.measure(case, lines, set(), 3, 60.0, 2**12, Path(), CPU)
    assert differ == []
    for timed in lines.values():
        assert timed.why or timed.selected == [300] * 3


def test_a_row_that_selects_others_is_told() -> None:
    def first(setup: steps.Setup) -> steps.Made:
        chosen = torch.arange(setup.k)
        return steps.Made(lambda acc, grad: Sparse(chosen, acc.add_(grad)[chosen]))

    lines = {"eager": Timed(steps.ROWS["eager"]), "numpy": Timed(replace(steps.ROWS["numpy"], make=first))}
    _, differ = side_by_side.measure(Case(30_011, 0.01, "normal"), lines, set(), 1, 60.0, 2**12, Path(), CPU)
    assert [name for name, _ in differ] == ["numpy"]


def test_a_slow_row_has_fewer_repetitions_and_ratios_are_of_those_it_shares() -> None:
    lines = {name: Timed(steps.ROWS[name]) for name in ("copy", "sort")}
    seconds = 0.0  # so any row is slow
    side_by_side.measure(Case(1000, 0.01, "normal"), lines, set(), 9, seconds, 2**12, Path(), CPU)
    assert {len(timed.samples) for timed in lines.values()} == {side_by_side.LEAST}
    fast, slow = Timed(steps.ROWS["copy"]), Timed(steps.ROWS["sort"])
    fast.samples, slow.samples = {1: 1.0, 2: 2.0, 3: 4.0}, {2: 8.0, 3: 8.0}
    assert ratio(slow, fast) == {
        "median": 3.0, "low": 2.0, "high": 4.0, "n": 2, "spread": "min to max"
    }  # fmt: skip


def test_the_spread_is_of_percentiles_where_there_are_enough_samples() -> None:
    found = spread([float(i) for i in range(101)])
    assert (found["median"], found["low"], found["high"], found["spread"]) == (50, 5, 95, "5 to 95 %")
