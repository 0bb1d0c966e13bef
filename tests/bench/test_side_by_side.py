"""Steps side by side: exact ones agree, slow ones are repeated less, large ones left out. No test asserts a
time.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.bench import _gradients as gradients
from experiments.bench import _side_by_side as side_by_side
from experiments.bench import _timing
from experiments.bench._side_by_side import SelectCase, SideBySide, StepTimes, leave_out
from experiments.bench._steps import ROWS, Made, Setup
from sparsify.types import Sparse

CPU = torch.device("cpu")


@pytest.mark.parametrize("distribution", [*gradients.SYNTHETIC, gradients.FIRST_TIED])
def test_exact_rows_agree_on_every_distribution(distribution: str) -> None:
    lines = {name: StepTimes() for name in ("fused", "fallback", "numpy", "eager", "sort")}
    case = SelectCase(30_011, 0.01, distribution)
    _, differ = SideBySide(case, lines, set(), 2**12, Path(), CPU).measured(3, 60.0)
    assert differ == {}
    for timed in lines.values():
        assert timed.why or timed.selected == [300] * 3


def test_a_row_that_selects_others_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(setup: Setup) -> Made:
        chosen = torch.arange(setup.k)
        return Made(lambda acc, grad: Sparse(chosen, acc.add_(grad)[chosen]))

    monkeypatch.setitem(ROWS, "numpy", replace(ROWS["numpy"], make=first))
    lines = {"eager": StepTimes(), "numpy": StepTimes()}
    case = SelectCase(30_011, 0.01, "normal")
    _, differ = SideBySide(case, lines, set(), 2**12, Path(), CPU).measured(1, 60.0)
    assert set(differ) == {"numpy"}


def test_a_slow_row_has_fewer_repetitions() -> None:
    lines = {name: StepTimes() for name in ("copy", "sort")}
    seconds = 0.0  # so any row is slow
    case = SelectCase(1000, 0.01, "normal")
    SideBySide(case, lines, set(), 2**12, Path(), CPU).measured(9, seconds)
    assert {len(timed.samples) for timed in lines.values()} == {side_by_side.LEAST}


def test_what_does_not_fit_into_memory_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = SelectCase(10_000_000, 0.001, "normal")
    lines = {name: StepTimes() for name in ROWS}
    monkeypatch.setattr(_timing, "free_bytes", lambda device: 0.5 * 2**30)
    assert leave_out(case, lines, CPU, 0)
    left = {name for name, timed in lines.items() if timed.why}
    assert {"sort", "eager"} <= left
    assert "fused" not in left
    assert "GiB" in str(lines["sort"].why)
    monkeypatch.setattr(_timing, "free_bytes", lambda device: 0.1 * 2**30)
    assert not leave_out(case, lines, CPU, 0)
    assert all(timed.why for timed in lines.values())
