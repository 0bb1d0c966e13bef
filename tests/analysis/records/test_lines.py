"""Readers of logs and lines that no log should hold: such a line is refused alone, and stops nobody."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.records.files import Damaged
from analysis.records.log import Disturbed, check_steps, read_lines, read_lines_as, whole_lines
from analysis.records.schema import LogLine
from tests.analysis.broken_lines import BROKEN, STEP

SLACK = 40  # frames that are left to a reader of lines that is called from the deepest place


def deep(frames: int, call: Callable[[], Any]) -> Any:
    """Call from below so many frames, as commands do."""
    return call() if frames <= 0 else deep(frames - 1, call)


def depth() -> int:
    frame, found = sys._getframe(), 0
    while frame.f_back is not None:
        frame, found = frame.f_back, found + 1
    return found


@pytest.mark.parametrize("is_deep", [False, True], ids=["", "from deep below"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_line_is_refused_alone(name: str, is_deep: bool, tmp_path: Path) -> None:
    path, broken = tmp_path / "rank0.jsonl", BROKEN[name]
    frames = sys.getrecursionlimit() - depth() - SLACK if is_deep else 0
    path.write_bytes(b"\n".join([STEP, broken, STEP.replace(b'"step":0', b'"step":1'), b""]))

    found, others = deep(frames, lambda: read_lines_as(path, LogLine))
    assert [line.step for line in found] == [0, 1]
    assert others == 1

    found, _ = deep(frames, lambda: read_lines(path))
    assert [found[0]["step"], found[-1]["step"]] == [0, 1]

    with pytest.raises(Damaged, match=r"in line 2") as refused:
        deep(frames, lambda: whole_lines(path.read_bytes(), LogLine, path))
    assert str(refused.value).isprintable()

    with pytest.raises(Disturbed, match="was removed, changed, or written by two"):
        deep(frames, lambda: check_steps(path, 3, [None]))
