"""What is kept of frames is theirs alone, and goes with them."""

from __future__ import annotations

import gc

from analysis.records import frames as kept
from analysis.records.frames import Frames, empty, remembered, runs_frame

calls: list[tuple[int, int]] = []


@remembered
def counted(frames: Frames, add: int = 0) -> int:
    calls.append((len(frames.runs), add))
    return len(frames.runs) + add


def test_it_is_computed_once_for_the_same_frames_and_arguments() -> None:
    one, other = empty(), empty()._replace(runs=runs_frame([{"key": "a", "run_id": "a"}]))
    calls.clear()
    found = [counted(one), counted(one), counted(one, 2), counted(one, add=2), counted(other)]
    assert found == [0, 0, 2, 2, 1]
    assert calls == [(0, 0), (0, 2), (0, 2), (1, 0)]
    assert counted(one._replace(runs=other.runs)) == 1


def test_nothing_is_kept_of_frames_that_are_gone() -> None:
    gc.collect()
    before = len(kept._FOUND)
    for _ in range(50):
        frames = empty()
        assert counted(frames) == 0
    assert len(kept._FOUND) == before + 1
    del frames
    gc.collect()
    assert len(kept._FOUND) == before
