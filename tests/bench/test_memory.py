"""Rows that do not fit into memory."""

from __future__ import annotations

import pytest
import torch

from experiments.bench import _memory as memory
from experiments.bench import _steps as steps
from experiments.bench._case import Case, Timed

CPU = torch.device("cpu")


def test_what_does_not_fit_into_memory_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(10_000_000, 0.001, "normal")
    lines = {name: Timed(row) for name, row in steps.ROWS.items()}
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0.5 * 2**30)
    assert memory.leave_out(case, lines, CPU, 0)
    left = {name for name, timed in lines.items() if timed.why}
    assert {"sort", "eager"} <= left
    assert "fused" not in left
    assert "GiB" in str(lines["sort"].why)
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0.1 * 2**30)
    assert not memory.leave_out(case, lines, CPU, 0)
    assert all(timed.why for timed in lines.values())
