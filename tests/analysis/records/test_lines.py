"""Readers of logs and lines that no log should hold: such a line is refused alone, and stops nobody."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis.records.files import DamagedFileError
from analysis.records.log import (
    InterferenceError,
    check_log_has_all_steps,
    decode_finished_log,
    read_json_lines,
)
from analysis.records.schema import LogLine
from tests.analysis.broken_lines import BROKEN, STEP

SLACK = 40  # frames that are left to a reader of lines that is called from the deepest place


def call_below(frames: int, call: Callable[..., Any], *args: Any) -> Any:
    """Call from below so many frames, as commands do."""
    return call(*args) if frames <= 0 else call_below(frames - 1, call, *args)


@pytest.mark.parametrize("is_deep", [False, True], ids=["", "from deep below"])
def test_a_broken_line_is_refused_alone(is_deep: bool, tmp_path: Path) -> None:
    frames = sys.getrecursionlimit() - len(inspect.stack(0)) - SLACK if is_deep else 0
    path = tmp_path / "rank0.jsonl"
    for name, broken in BROKEN.items():
        print(name)  # which of them, where one fails
        path.write_bytes(b"\n".join([STEP, broken, STEP.replace(b'"step":0', b'"step":1'), b""]))
        raw = path.read_bytes()

        found, others = call_below(frames, read_json_lines, path, LogLine)
        assert [line.step for line in found] == [0, 1]
        assert others == 1

        found, _ = call_below(frames, read_json_lines, path)
        assert [found[0]["step"], found[-1]["step"]] == [0, 1]

        with pytest.raises(DamagedFileError, match=r"in line 2") as refused:
            call_below(frames, decode_finished_log, raw, LogLine, path)
        assert str(refused.value).isprintable()

        with pytest.raises(InterferenceError, match="was removed, changed, or written by two"):
            call_below(frames, check_log_has_all_steps, path, 3, [None])
